"""Resumed equals uninterrupted, bit for bit, at every step of a run with dropout, accumulation and three epochs.

Of the eight steps one within an epoch, an epoch's last and one of another epoch are for every day, the others slow.
"""

import json

import pytest

from tests.distributed.launch import KINDS, ROOT, slow, start

WORKER = ROOT / "tests" / "distributed" / "resume_worker.py"
STEPS = 9
SLOW = ("horovod", "fsdp", "zero2", "zero3")


@pytest.mark.distributed
@pytest.mark.parametrize("steps", [(1, 3, 8), pytest.param((2, 4, 5, 6, 7), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kind", slow(["ddp", *SLOW], *SLOW))
def test_resumed_is_uninterrupted_bit_for_bit_at_every_step(kind, steps, tmp_path):
    start(kind, WORKER, tmp_path / "results.json", tmp_path / "runs", *steps, timeout=300)
    results = json.loads((tmp_path / "results.json").read_text())
    whole = results["whole"]
    assert KINDS[kind].described in whole["description"]
    assert len(whole["norms"]) == STEPS and len(set(whole["norms"])) == STEPS
    assert results.keys() == {"whole", *map(str, steps)}
    for step in steps:
        resumed = results[str(step)]
        assert resumed["norms"] == whole["norms"][step:], step
        assert resumed["weights"] == whole["weights"], step
        assert resumed["loss"] == whole["loss"], step
        assert resumed["consumed"] == whole["consumed"] == STEPS * 8
