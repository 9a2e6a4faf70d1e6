"""The finders on two workers: the same global batch as on one, and one micro-batch that both can hold."""

import json

import pytest

from tests.distributed.launch import ROOT, slow, start

WORKER = ROOT / "tests" / "distributed" / "finders_worker.py"

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The range test of one process, 24 rows an update."""
    folder = tmp_path_factory.mktemp("alone")
    start("alone", WORKER, folder)
    return json.loads((folder / "find_lr.json").read_text())


@pytest.mark.parametrize("kind", slow(["horovod", "ddp"], "ddp"))
def test_two_workers_agree_and_none_hangs(kind, alone, tmp_path):
    output = start(kind, WORKER, tmp_path, FULL_AT="12,5")
    found = json.loads((tmp_path / "find_lr.json").read_text())
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)  # far beyond the edge rounding grows
    assert found["edge"] == alone["edge"]
    found = json.loads((tmp_path / "find_micro_batch.json").read_text())
    assert found["largest_that_fits"] == 4  # the largest divisor of 12 that rank 1 can hold
    assert found["fits"]["6"] is False and found["fits"]["4"] is True
    assert found["batch_size"] * found["gradient_accumulation_steps"] == 12 and found["batch_size"] <= 4
    assert "do not fit (1 of 2 worker(s) out of memory)" in output


@pytest.mark.slow
def test_nobody_waits_where_one_worker_holds_no_row(tmp_path):
    output = start("ddp", WORKER, tmp_path, FULL_AT="12,0", fails=True)
    assert "error: --find_micro_batch: not even micro-batches of one row fit" in output
