"""Layouts against DeepSpeed 0.19.6, the last release with `sparsity_config.py`, which is never kept here.

    pip download --no-deps --no-binary :all: deepspeed==0.19.6 && tar xzf deepspeed-0.19.6.tar.gz
    DEEPSPEED_SPARSITY_CONFIG=deepspeed-0.19.6/deepspeed/ops/sparse_attention/sparsity_config.py \
      python -m pytest tests/parity/test_attention_deepspeed.py

`python -m tests.parity.test_attention_deepspeed FILE` writes the layouts of the stored cases anew, for the unit tests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import ROOT

GOLDEN = ROOT / "tests" / "golden" / "attention_layouts.json"
SHA256 = "8384ca6738911c851e412cdfd63eaa43b6d1f9a16b8dec33e93c34cf92f738fa"


def load(path: Path) -> ModuleType:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"{path} is not that of DeepSpeed 0.19.6"
    spec = importlib.util.spec_from_file_location("deepspeed_sparsity_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def deepspeed() -> ModuleType:
    if (path := os.environ.get("DEEPSPEED_SPARSITY_CONFIG")) is None:
        pytest.skip("current DeepSpeed has no sparsity_config.py: DEEPSPEED_SPARSITY_CONFIG names that of 0.19.6")
    return load(Path(path))


def theirs(
    module: ModuleType, name: str, num_heads: int, settings: dict, seed: int, layer: int, length: int
) -> Tensor:
    """The layout DeepSpeed makes for the layer after those before it, the generator seeded once."""
    random.seed(seed)
    config = getattr(module, name)(num_heads, **settings)
    for _ in range(layer + 1):
        layout = config.make_layout(length)
    return layout


def as_rows(head: Tensor) -> list[str]:
    return ["".join("#" if block else "." for block in row) for row in head.tolist()]


def digest(layout: Tensor) -> str:
    return hashlib.sha256(layout.to(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def golden(module: ModuleType) -> list[dict[str, Any]]:
    """The stored cases with DeepSpeed's layouts: rows of the small ones, hashes of all."""
    made = []
    for case in json.loads(GOLDEN.read_text()):
        layout = theirs(module, *(case[name] for name in ("name", "num_heads", "settings", "seed", "layer", "length")))
        rows = {"head_0": as_rows(layout[0])} if layout.shape[1] <= 8 else {}
        made.append({**case, "blocks": layout.sum().item(), "sha256": digest(layout), **rows})
    return made


def test_stored_layouts_are_deepspeeds(deepspeed):
    assert json.loads(GOLDEN.read_text()) == golden(deepspeed)


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(case) for case in golden(load(Path(sys.argv[1]))))
    GOLDEN.write_text(f"[\n{lines}\n]\n")
