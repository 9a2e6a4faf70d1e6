"""Whatever becomes of one worker, the job ends within --stall_timeout, says where, and the same command goes on.

`pytest -m slow tests/distributed/test_hangs.py -s` prints a line for each case. Those of several machines are in
tests/cluster/test_two_machines.py.
"""

import platform
import time

import pytest

from tests.distributed.hang_worker import AT, STALL
from tests.distributed.launch import ROOT, start

pytestmark = pytest.mark.distributed

WORKER = ROOT / "tests" / "distributed" / "hang_worker.py"
MOMENTS = ("start", "training", "evaluation", "saving")
CASES = [
    *(("stop", moment) for moment in MOMENTS),
    *(("kill", moment) for moment in MOMENTS),
    *(("raise", moment) for moment in MOMENTS),
    ("exit", "training"), ("nan", "training"), ("uneven", "training"),
]  # fmt: skip
# Forked for every day, each by its real launcher in the slow ones.
DAILY = [("raise", "training", "horovod", False), ("kill", "training", "ddp", False)]
SLOW = [(*case, backend, True) for case in CASES for backend in ("horovod", "ddp")]


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
    named = ("rank 1", "rank      : 1 ", "Process 1 exit")  # by a worker, or where none has begun by the launcher
    said = [line for line in "\n".join([output, *logs]).splitlines() if any(name in line for name in named)]
    print(f"\n{backend:10} {kind:6} {moment:10} {seconds:5.1f} s: {said[-1:]}")
    assert seconds < (STALL + 5 if real else 60)  # the daily ones run beside other tests
    assert said, output[-3000:]
    if moment != "start":
        assert any(f"step {step}" in line for line in said for step in (AT - 1, AT, AT + 1)), said
    if (kind, moment) == ("raise", "training"):
        error = f"rank 1 step {AT}: ZeroDivisionError: a deliberate failure"
        assert error in output and logs[1].splitlines()[-1].endswith(error)
    if (kind, moment) in (("kill", "training"), ("stop", "training")):
        where = "stopped by a signal)" if kind == "stop" else f"on {platform.node()})"
        last = logs[0].splitlines()[-1]
        assert f"error: rank 0 step {AT}: lost rank 1 (process " in last and where in last, last
    start(backend, WORKER, "train", moment, tmp_path)
    assert (tmp_path / "digest").read_text() == undisturbed
