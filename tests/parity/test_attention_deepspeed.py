"""Layouts against DeepSpeed 0.19.6, the last release with `sparsity_config.py`, which is never kept here.

    pip download --no-deps --no-binary :all: deepspeed==0.19.6 && tar xzf deepspeed-0.19.6.tar.gz
    DEEPSPEED_SPARSITY_CONFIG=deepspeed-0.19.6/deepspeed/ops/sparse_attention/sparsity_config.py \
      python -m pytest tests/parity/test_attention_deepspeed.py

`python -m tests.parity.test_attention_deepspeed FILE` writes the stored layouts that the unit tests compare with.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lm_experiments_tools.attention.layouts import SPARSITY_CONFIGS
from tests.helpers import ROOT

GOLDEN = ROOT / "tests" / "golden" / "attention_layouts.json"
SHA256 = "8384ca6738911c851e412cdfd63eaa43b6d1f9a16b8dec33e93c34cf92f738fa"
TRIALS = 1500


def load(path: Path) -> ModuleType:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"{path} is not that of DeepSpeed 0.19.6"
    spec = importlib.util.spec_from_file_location("deepspeed_sparsity_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def deepspeed() -> ModuleType:
    if (path := os.environ.get("DEEPSPEED_SPARSITY_CONFIG")) is None:
        pytest.skip("DEEPSPEED_SPARSITY_CONFIG does not name DeepSpeed's file")
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


def draw_settings(name: str, r: random.Random) -> dict[str, Any]:
    """Random arguments of a class, sound and unsound ones."""
    settings: dict[str, Any] = {"block": r.choice([1, 2, 16])}
    windows = {"num_sliding_window_blocks": r.randint(0, 6)}
    starts = [r.randint(-6, 12) for _ in range(r.randint(0, 3))]
    indices = {"global_block_indices": starts}
    if r.random() < 0.5:
        indices["global_block_end_indices"] = [start + r.randint(1, 4) for start in starts]
    width = r.randint(1, 3)
    settings |= {
        "DenseSparsityConfig": {},
        "FixedSparsityConfig": {
            "num_local_blocks": width * r.randint(1, 4),
            "num_global_blocks": width,
            "num_different_global_patterns": r.randint(1, 3),
        },
        "VariableSparsityConfig": {
            **indices,
            "num_random_blocks": r.randint(0, 3),
            "local_window_blocks": [r.randint(1, 5) for _ in range(r.randint(1, 4))],
        },
        "BigBirdSparsityConfig": {
            **windows, "num_random_blocks": r.randint(0, 3), "num_global_blocks": r.randint(0, 3),
        },
        "BSLongformerSparsityConfig": {**windows, **indices},
        "LocalSlidingWindowSparsityConfig": windows,
    }[name]  # fmt: skip
    if name != "LocalSlidingWindowSparsityConfig":
        settings["different_layout_per_head"] = r.random() < 0.5
    if name != "DenseSparsityConfig":
        settings["attention"] = r.choice(["bidirectional", "unidirectional"])
    if name in ("FixedSparsityConfig", "VariableSparsityConfig"):
        settings["horizontal_global_attention"] = r.random() < 0.3
    return settings


def test_every_layout_is_deepspeeds(deepspeed):
    """compat="deepspeed" is its layout bit for bit; without it, a layout without random blocks is, leaks cut off."""
    r = random.Random(0)
    seen = Counter()
    for _ in range(TRIALS):
        name = r.choice(list(SPARSITY_CONFIGS))
        settings, num_heads, num_blocks = draw_settings(name, r), r.randint(1, 4), r.randint(1, 14)
        seed, layer, length = r.randint(0, 99), r.randint(0, 2), num_blocks * settings["block"]
        case = name, num_heads, settings, num_blocks, seed, layer
        ours = SPARSITY_CONFIGS[name]
        try:
            expected = theirs(deepspeed, name, num_heads, settings, seed, layer, length)
        except (ValueError, NotImplementedError, IndexError):
            continue
        layout = ours(num_heads, **settings, seed=seed, layer_idx=layer, compat="deepspeed").make_layout(length)
        assert layout.dtype == expected.dtype and torch.equal(layout, expected), case
        seen[name] += 1
        config = ours(num_heads, **settings)
        if not config.uses_random_blocks and num_blocks >= settings.get("num_global_blocks", 0):
            if config.attention == "unidirectional":
                expected = expected.tril()
            assert torch.equal(config.make_layout(length), expected), case
    assert min(seen.values()) > TRIALS // 30 and len(seen) == 6, seen


def golden_cases() -> list[dict[str, Any]]:
    r = random.Random(1)
    cases = []
    for name in SPARSITY_CONFIGS:
        cases += [
            {"name": name, "num_heads": h, "settings": {"block": 16}, "seed": 0, "layer": 0, "length": 16 * n}
            for h, n in ((1, 8), (4, 64))
        ]
        for _ in range(10):
            settings = draw_settings(name, r)
            cases.append({
                "name": name, "num_heads": r.randint(1, 4), "settings": settings, "seed": r.randint(0, 99),
                "layer": r.randint(0, 2), "length": settings["block"] * r.randint(6, 40),
            })  # fmt: skip
    return cases


def as_rows(head: Tensor) -> list[str]:
    return ["".join("#" if block else "." for block in row) for row in head.tolist()]


def digest(layout: Tensor) -> str:
    return hashlib.sha256(layout.to(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def golden(module: ModuleType) -> list[dict[str, Any]]:
    """DeepSpeed's layouts: rows of the small ones, hashes of all; settings that it refuses are left out."""
    stored = []
    for case in golden_cases():
        try:
            layout = theirs(
                module, case["name"], case["num_heads"], case["settings"], case["seed"], case["layer"], case["length"]
            )
        except (ValueError, NotImplementedError, IndexError):
            continue
        rows = {"head_0": as_rows(layout[0])} if layout.shape[1] <= 8 else {}
        stored.append({**case, "blocks": layout.sum().item(), "sha256": digest(layout), **rows})
    return stored


def test_stored_layouts_are_deepspeeds(deepspeed):
    assert json.loads(GOLDEN.read_text()) == golden(deepspeed)


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(case) for case in golden(load(Path(sys.argv[1]))))
    GOLDEN.write_text(f"[\n{lines}\n]\n")
