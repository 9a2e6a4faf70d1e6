"""Whatever becomes of one worker, the job ends within --stall_timeout + 10 s, and the same command continues it.

`pytest -m slow tests/distributed/test_hangs.py -s` prints a line for each case. Those of several machines are in
tests/cluster/test_two_machines.py.
"""

import time

import pytest

from tests.distributed.hang_worker import AT, STALL
from tests.distributed.launch import CPU, ROOT, run, start, torchrun

pytestmark = pytest.mark.distributed

WORKER = ROOT / "tests" / "distributed" / "hang_worker.py"
MOMENTS = ("start", "training", "evaluation", "saving")
CASES = [
    # Before the first step, torch's process groups wait a day for a suspended worker.
    *(("stop", moment) for moment in MOMENTS[1:]),
    *(("kill", moment) for moment in MOMENTS),
    *(("raise", moment) for moment in MOMENTS),
    ("exit", "training"), ("nan", "training"), ("uneven", "training"),
]  # fmt: skip
# Forked for every day, each by its real launcher in the slow ones.
DAILY = [("raise", "training", "horovod", False), ("kill", "training", "ddp", False)]
SLOW = [
    *((*case, backend, True) for case in CASES for backend in ("horovod", "ddp")),
    *((kind, "training", "fsdp", True) for kind in ("stop", "kill")),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Hash of the weights of a run in which nothing goes wrong; that of all launchers."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start("ddp", WORKER, "train", "training", folder)
    return (folder / "digest").read_text()


@pytest.mark.parametrize(
    "kind, moment, backend, real", [*DAILY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_job_with_trouble_on_one_rank_ends_in_time_and_goes_on(kind, moment, backend, real, undisturbed, tmp_path):
    output = start(backend, WORKER, kind, moment, tmp_path, real=real, fails=True, timeout=120)
    seconds = time.time() - float((tmp_path / "since").read_text())
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    said = [
        line for line in "\n".join([output, *logs]).splitlines() if "rank 0 step " in line or "rank 1 step " in line
    ]
    print(f"\n{backend:10} {kind:6} {moment:10} {seconds:5.1f} s: {said[-1:]}")
    assert seconds < (STALL + 10 if real else 60)  # the daily ones run beside other tests
    if moment != "start":
        assert any(f"step {step}" in line for line in said for step in (AT - 1, AT, AT + 1)), output[-3000:]
    if (kind, moment) == ("raise", "training"):
        error = f"rank 1 step {AT}: ZeroDivisionError: a deliberate failure"
        assert error in output and logs[1].splitlines()[-1].endswith(error)
    if (kind, moment) in (("kill", "training"), ("stop", "training")):
        assert f"error: rank 0 step {AT}: another worker is lost" in logs[0].splitlines()[-1], logs[0]
    start(backend, WORKER, "train", moment, tmp_path)
    assert (tmp_path / "digest").read_text() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_workers_wait_for_a_late_start_and_a_slow_disk_longer_than_the_limit(backend, undisturbed, tmp_path):
    start(backend, WORKER, "late", "start", tmp_path)
    assert (tmp_path / "since").exists()
    assert (tmp_path / "digest").read_text() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_torchrun_restarts_workers_that_die(kind, undisturbed, tmp_path):
    job = run([*torchrun(), "--max-restarts", "1"], WORKER, kind, "training", tmp_path, **CPU)
    assert job.returncode == 0 and "resumed from" in job.output, job.output[-3000:]
    assert (tmp_path / "digest").read_text() == undisturbed
