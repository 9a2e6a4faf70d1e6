"""Whatever becomes of one worker, the job ends within --stall_timeout, says where, and the same command goes on.

`pytest -m slow tests/distributed/test_hangs.py -s` prints a line for each case. Those of several machines are in
tests/cluster/test_two_machines.py.
"""

import time

import pytest

from tests.distributed.hang_worker import AT, STALL
from tests.distributed.launch import ROOT, horovodrun, missing, run, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WORKER = ROOT / "tests" / "distributed" / "hang_worker.py"
CPU = {"ACCELERATE_USE_CPU": "true"}
LAUNCHERS = {"horovodrun": (horovodrun, "horovod", {}), "torchrun": (torchrun, "accelerate", CPU)}
MOMENTS = ("start", "training", "evaluation", "saving")
CASES = [
    *(("stop", moment) for moment in MOMENTS),
    *(("kill", moment) for moment in MOMENTS),
    *(("raise", moment) for moment in MOMENTS),
    ("exit", "training"), ("nan", "training"), ("uneven", "training"),
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Hash of the weights of a run in which nothing goes wrong; that of all launchers."""
    folder = tmp_path_factory.mktemp("undisturbed")
    launch, _, extra = LAUNCHERS["torchrun"]
    job = run(launch(), WORKER, "train", "training", folder, **extra)
    assert job.returncode == 0, job.output[-3000:]
    return (folder / "digest").read_text()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_a_job_with_trouble_on_one_rank_ends_in_time_and_goes_on(kind, moment, launcher, undisturbed, tmp_path):
    launch, package, extra = LAUNCHERS[launcher]
    if reason := missing(package):
        pytest.skip(reason)
    job = run(launch(), WORKER, kind, moment, tmp_path, timeout=120, **extra)
    seconds = time.time() - float((tmp_path / "since").read_text())
    logs = "\n".join((tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1))
    named = ("rank 1", "rank      : 1 ", "Process 1 exit")  # by a worker, or where none has begun by the launcher
    said = [line for line in (job.output + logs).splitlines() if any(name in line for name in named)]
    print(f"\n{launcher:10} {kind:6} {moment:10} {seconds:5.1f} s, code {job.returncode}: {said[-1:]}")
    assert job.returncode not in (0, None), job.output[-3000:]
    assert seconds < STALL + 5
    assert said, job.output[-3000:]
    if moment != "start":
        assert any(f"step {step}" in line for line in said for step in (AT - 1, AT, AT + 1)), said
    job = run(launch(), WORKER, "train", moment, tmp_path, **extra)
    assert job.returncode == 0, job.output[-3000:]
    assert (tmp_path / "digest").read_text() == undisturbed
