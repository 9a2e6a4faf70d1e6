"""A resume: who reads what of a checkpoint, and how often."""

from __future__ import annotations

import threading

import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.checkpoint import manifest, tree
from lm_experiments_tools.modules.inspection import saved_state
from lm_experiments_tools.optimizers import build_optimizer
from tests.helpers import loops
from tests.helpers.thread_workers import Workers
from tests.helpers.toys import TinyLabeller


def make_loop(path, backend, optimizer, scale=1.0, **args):
    model = TinyLabeller()
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    made = build_optimizer(model, name=optimizer, lr=1e-2, weight_decay=0.0)
    return loops.make_loop(model, made, backend=backend, model_path=path, **args)


@pytest.fixture
def reads(monkeypatch):
    """[(thread, name of a safetensors file)] that were read, and names of files that were hashed."""
    read, hashed = [], []
    load_file, sha256_of = tree.load_file, manifest.sha256_of

    def loaded(file):
        read.append((threading.current_thread().name[-1], file.name))
        return load_file(file)

    def summed(path):
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(tree, "load_file", loaded)
    monkeypatch.setattr(manifest, "sha256_of", summed)
    return read, hashed


@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_a_resume_reads_weights_and_optimizer_once_and_hashes_each_file_once(tmp_path, reads, optimizer):
    run = tmp_path / "run"
    trained = make_loop(run, LocalBackend(), optimizer, iters=2)
    trained.train()
    read, hashed = reads
    read.clear()
    hashed.clear()
    loops = Workers(2).run(lambda one: make_loop(run, one, optimizer, scale=1.0 + one.rank, iters=2))
    names = ["model.safetensors", "optimizer.safetensors", "trainer_state.safetensors"]
    assert sorted(name for _, name in read) == names and len({thread for thread, _ in read}) == 1
    listed = manifest.read_manifest((run / "last").resolve())["files"]
    assert sorted(hashed) == sorted(listed)
    for loop in loops:
        for name, value in saved_state(trained.backend.unwrap()).items():
            assert torch.equal(saved_state(loop.backend.unwrap())[name], value), name
        states = [one.backend.optimizer.state_dict() for one in (loop, trained)]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)


def test_the_state_of_a_resumed_optimizer_outlives_its_checkpoint(tmp_path):
    """It is a copy, not a view of a file that pruning removes and another save overwrites."""
    trained = make_loop(tmp_path, LocalBackend(), "AdamW", iters=2)
    trained.train()
    loop = make_loop(tmp_path, LocalBackend(), "AdamW", iters=3)
    file = (tmp_path / "last").resolve() / "optimizer.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    states = [one.backend.optimizer.state_dict()["state"] for one in (loop, trained)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
