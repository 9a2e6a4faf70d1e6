"""Resumed equals uninterrupted, bit for bit, at every step of a run with dropout, accumulation and three epochs.

Of the eight steps one within an epoch, an epoch's last and one of another epoch are for every day, the others slow.
"""

import json

import pytest

from tests.distributed.launch import ROOT, forked, horovodrun, missing, shim, slow, torchrun

WORKER = ROOT / "tests" / "distributed" / "resume_worker.py"
STEPS = 9

BACKENDS = {
    "horovod": (horovodrun, ("horovod",), "backend horovod, 2 worker"),
    "ddp": (torchrun, ("accelerate",), "DistributedDataParallel"),
    "fsdp": (lambda: shim("fsdp"), ("accelerate",), "FSDP"),
    "zero2": (lambda: shim("zero2"), ("accelerate", "deepspeed"), "DeepSpeedEngine"),
    "zero3": (lambda: shim("zero3"), ("accelerate", "deepspeed"), "DeepSpeedEngine"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("steps", [(1, 3, 8), pytest.param((2, 4, 5, 6, 7), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", slow(BACKENDS, "horovod", "fsdp", "zero2", "zero3"))
def test_resumed_is_uninterrupted_bit_for_bit_at_every_step(name, steps, tmp_path):
    launcher, packages, described = BACKENDS[name]
    if reason := missing(*packages):
        pytest.skip(reason)
    extra = {"ACCELERATE_USE_CPU": "true"} if name == "ddp" else {}
    job = forked(launcher(), WORKER, tmp_path / "results.json", tmp_path / "runs", *steps, timeout=300, **extra)
    assert job.returncode == 0, job.output[-4000:]
    results = json.loads((tmp_path / "results.json").read_text())
    whole = results["whole"]
    assert described in whole["description"]
    assert len(whole["norms"]) == STEPS and len(set(whole["norms"])) == STEPS
    assert results.keys() == {"whole", *map(str, steps)}
    for step in steps:
        resumed = results[str(step)]
        assert resumed["norms"] == whole["norms"][step:], step
        assert resumed["weights"] == whole["weights"], step
        assert resumed["loss"] == whole["loss"], step
        assert resumed["consumed"] == whole["consumed"] == STEPS * 8
