"""Machines, Slurm and a small run for tests of several machines; `make test-cluster` runs these, as root."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, lacking, two_machines
from tests.cluster.slurm import PROGRAMS, Slurm, slurm
from tests.helpers.runs import TINY, words
from tests.helpers.token_toys import make_texts, write_jsonl
from tests.helpers.vocabulary_toys import train_vocabulary


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    if reason := lacking("ip", "ssh", "ssh-keygen", "sshd", "nsenter", "unshare"):
        pytest.skip(reason)
    with two_machines(tmp_path) as both:
        yield both


@pytest.fixture
def cluster(machines: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Slurm]:
    if reason := lacking(*PROGRAMS):
        pytest.skip(reason)
    with slurm(machines, tmp_path / "slurm") as ready:
        yield ready


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokens, their vocabulary and a tiny model's configuration."""
    from lm_experiments_tools.tools.main import main

    folder, texts = tmp_path_factory.mktemp("data"), make_texts(400)
    write_jsonl(folder / "text.jsonl", texts)
    train_vocabulary(folder / "vocab.model", [line for text in texts for line in text.splitlines()], 120)
    flags = {"input": folder / "text.jsonl", "vocab": folder / "vocab.model", "output": folder / "tokens"}
    assert main(["tokenize", *words(**flags)]) == 0
    (folder / "tiny.json").write_text(json.dumps(TINY | {"dropout_rate": 0.0}))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory, which a machine can have for itself."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def flags(data: Path, run_dir: Path) -> dict[str, object]:
    """Of run_t5_pretraining.py: a run that goes on until something happens."""
    return {
        "data_path": data / "tokens", "vocab": data / "vocab.model", "model_cfg": data / "tiny.json",
        "input_seq_len": 32, "target_seq_len": 16, "batch_size": 4, "lr": 1e-3, "model_path": run_dir,
        "log_interval": 10, "save_interval": 20, "iters": 1_000_000, "speed": "off",  # compiling may take a minute
    }  # fmt: skip
