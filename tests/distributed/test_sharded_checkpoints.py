"""Checkpoints of FSDP2 and ZeRO, which each worker writes a part of, are those of any other backend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lm_experiments_tools.checkpoint.manifest import verify
from tests.distributed.launch import ROOT, slow, start

pytestmark = pytest.mark.distributed

WORKER = ROOT / "tests" / "distributed" / "checkpoint_worker.py"
SHARDED = ("fsdp", "zero1", "zero2", "zero3")
KINDS = ("alone", "ddp", *SHARDED)


class Jobs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, kind: str) -> Path:
        """A folder with the run of four steps, made once, and with its weights."""
        folder = self.folder / kind
        if not folder.exists():
            folder.mkdir()
            start(kind, WORKER, folder, folder / "run")
        return folder

    def continued(self, kind: str, other: str) -> dict[str, torch.Tensor]:
        """Weights after two more steps under `other`."""
        folder = self.folder / f"{kind}_{other}"
        if not folder.exists():
            shutil.copytree(self.run(kind) / "run", folder / "run", symlinks=True)
            for settings in (folder / "run").glob("config*.json"):  # names the number of workers
                settings.unlink()
            start(other, WORKER, folder, folder / "run", "--resume")
            assert (folder / "begins").read_text() == "4"
        return load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("kind", slow(SHARDED, "zero1", "zero2", "zero3"))
def test_each_worker_writes_a_part_that_from_pretrained_reads(jobs, kind):
    from transformers import T5ForConditionalGeneration

    folder = jobs.run(kind)
    last = (folder / "run" / "last").resolve()
    verify(last)
    sizes = [(last / f"model-0000{number}-of-00002.safetensors").stat().st_size for number in (1, 2)]
    assert max(sizes) < 1.5 * min(sizes) and not (last / "model.safetensors").exists()
    assert len(list(last.glob("optimizer-*-of-00002.safetensors"))) == 2
    index = json.loads((last / "model.safetensors.index.json").read_text())
    held = [load_file(last / name) for name in sorted(set(index["weight_map"].values()))]
    assert sum(map(len, held)) == len(index["weight_map"]), "a weight is written twice"
    model, trained = (
        T5ForConditionalGeneration.from_pretrained(last).state_dict(),
        load_file(folder / "weights.safetensors"),
    )
    strided = load_file(last / index["weight_map"]["strided"])["strided"]
    assert torch.equal(strided, torch.arange(12.0).view(3, 4).t()), "buffers are rank 0's"
    assert all(torch.equal(model[name], value) for name, value in trained.items() if name != "strided")


@pytest.mark.slow
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_continues_every_others_checkpoint(jobs, kind, other, record_property):
    """The bound is that of sums in another order over six steps."""
    expected, found = jobs.continued("alone", "alone"), jobs.continued(kind, other)
    difference = max((found[name].double() - expected[name].double()).abs().max().item() for name in expected)
    record_property("difference", difference)
    print(f"{kind} -> {other}: {difference:.1e}")
    assert found.keys() == expected.keys() and difference < 5e-6


@pytest.mark.slow  # test_failures.py fills the disk of rank 0 every day
@pytest.mark.parametrize("kind", ["fsdp", "zero2"])
def test_a_worker_that_cannot_write_fails_the_save_on_all(tmp_path, kind):
    start(kind, WORKER, tmp_path, tmp_path / "run", "--fails", fails=True)
    for rank in (0, 1):
        message = (tmp_path / f"error_{rank}").read_text()
        assert "the checkpoint of step 4 was not written" in message and "No space left on device" in message
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]


@pytest.mark.slow  # test_saving.py kills at any moment of a save, and the test above has a part that is not written
@pytest.mark.parametrize("kind", ["fsdp", "zero3"])
def test_a_worker_killed_while_it_writes_leaves_the_checkpoint_before(jobs, tmp_path, kind):
    """Rank 0 has written its part by then or not; the next start removes it and reaches the undisturbed weights."""
    run = tmp_path / "run"
    start(kind, WORKER, tmp_path, run, "--dies", fails=True)
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_000002"]
    start(kind, WORKER, tmp_path, run)
    assert (tmp_path / "begins").read_text() == "2"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    expected, found = (load_file(folder / "weights.safetensors") for folder in (jobs.run(kind), tmp_path))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
