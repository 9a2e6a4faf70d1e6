"""Jobs whose workers die, or whose number of workers changes, end with the weights of the undisturbed run.

`ELASTIC_EVENTS=50 pytest -m slow tests/distributed/test_elastic_jobs.py` for more events in one run than four.
"""

import os

import pytest

from tests.distributed import elastic_jobs
from tests.distributed.elastic_jobs import WORKER, event, write_plan
from tests.distributed.launch import CPU, run, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(0)]

NUMBER = int(os.environ.get("ELASTIC_EVENTS", "4"))
GAP = 2  # steps between two events
STEPS = GAP * (NUMBER + 1)
KINDS = ("kill", "raise", "leave")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return elastic_jobs.undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


def check(job, folder, undisturbed):
    assert job.returncode == 0, job.output[-3000:]
    assert len(list((folder / "events").iterdir())) == NUMBER
    assert elastic_jobs.digest(folder) == undisturbed
    assert job.output.count("resumed from") >= NUMBER


def test_torchrun_restarts_workers_that_die(undisturbed, tmp_path):
    write_plan(tmp_path, [event(GAP * n, KINDS[n % 3], n) for n in range(1, NUMBER + 1)])
    job = run([*torchrun(), "--max-restarts", str(NUMBER)], WORKER, STEPS, tmp_path, timeout=90 * NUMBER, **CPU)
    check(job, tmp_path, undisturbed)


def sizes(folder):
    """Numbers of workers in the order in which they came; those that hear of others while they load make no step."""
    found = [int(size) for size in (folder / "starts").read_text().split()]
    return [size for i, size in enumerate(found) if i == 0 or found[i - 1] != size]


def test_torchrun_computes_the_same_bits_when_machines_come_and_go(tmp_path):
    """One launcher of a worker each; the second one is killed, the third one told to end."""
    flag, steps = "reproducible=elastic", 60
    (tmp_path / "whole").mkdir()
    whole = elastic_jobs.undisturbed(tmp_path / "whole", steps, flag)
    with elastic_jobs.Agents(tmp_path, steps, flag, PACE="0.5") as agents:
        first = agents.add()
        agents.wait_for(1)
        second = agents.add()
        agents.wait_for(2)
        third = agents.add()
        agents.wait_for(3)
        second.kill()
        agents.wait_for(2)
        third.terminate()
        agents.wait_for(1)
        assert first.wait(120) == 0, agents.output()
    assert sizes(tmp_path) == [1, 2, 3, 2, 1]
    assert elastic_jobs.digest(tmp_path) == whole
