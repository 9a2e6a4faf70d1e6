"""Jobs whose workers die, whose hosts change and whose number of workers changes end by themselves with the weights of
the undisturbed run.

`ELASTIC_EVENTS=50 pytest -m slow tests/distributed/test_elastic_jobs.py` for more events in one run than four.
"""

import os

import pytest

from tests.distributed import elastic_jobs
from tests.distributed.elastic_jobs import CPU, WORKER, event, final, horovod_job, samples, write_plan
from tests.distributed.launch import run, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(0)]

NUMBER = int(os.environ.get("ELASTIC_EVENTS", "4"))
GAP = 2  # steps between two events
STEPS = GAP * (NUMBER + 1)
# Of this machine, which Horovod takes for five: it must never need the one that has just lost its worker.
HOSTS = [f"{name}:1" for name in ("localhost", "127.0.0.1", "127.1", "127.0.1", "LOCALHOST")]
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


def test_an_elastic_horovod_job_goes_on_when_workers_die_and_hosts_change(undisturbed, tmp_path):
    """Two workers on two of five hosts; one that has lost its worker is not used for longer than a restart takes."""
    kinds = [(GAP * n, "hosts" if n % 4 == 3 else KINDS[n % 3], n) for n in range(1, NUMBER + 1)]
    plan = [event(*each, hosts=HOSTS, take_own=each[1] == "hosts") for each in kinds]
    options = "-np 2 --min-np 2 --max-np 2 --blacklist-cooldown-range 10 20"
    job = horovod_job(tmp_path, plan, STEPS, options, discover=" ".join(HOSTS), timeout=90 * NUMBER)
    check(job, tmp_path, undisturbed)


WIDTHS = (3, 1, 2)  # workers after each event of a run that begins with two
RESIZED = 3 * (len(WIDTHS) + 1)  # steps


def resized_job(folder, *flags, widths=WIDTHS):
    """One of localhost, of 127.0.0.1 as many as it is given: first while the workers load, then each third step."""
    plan = [
        event(3 * n, "hosts", hosts=["localhost:1", *([f"127.0.0.1:{width - 1}"] if width > 1 else [])])
        for n, width in enumerate(widths)
    ]
    hosts = "localhost:1 127.0.0.1:1"
    return horovod_job(folder, plan, RESIZED, "-np 2 --min-np 1 --max-np 3", *flags, discover=hosts)


def sizes(folder):
    """Numbers of workers in the order in which they came; those that hear of others while they load make no step."""
    found = [int(size) for size in (folder / "starts").read_text().split()]
    return [size for i, size in enumerate(found) if i == 0 or found[i - 1] != size]


def test_an_elastic_horovod_job_computes_the_same_bits_with_other_numbers_of_workers(tmp_path):
    flag = "reproducible=elastic"
    job = resized_job(tmp_path, flag)
    assert job.returncode == 0, job.output[-3000:]
    assert sizes(tmp_path) == [2, *WIDTHS]
    (tmp_path / "whole").mkdir()
    assert elastic_jobs.digest(tmp_path) == elastic_jobs.undisturbed(tmp_path / "whole", RESIZED, flag)


def test_without_reproducible_another_number_of_workers_reads_on_where_the_others_stopped(tmp_path):
    job = resized_job(tmp_path)
    assert job.returncode == 0, job.output[-3000:]
    assert sizes(tmp_path) == [2, *WIDTHS]
    rows = sum(4 * line["size"] for line in final(tmp_path).values())
    assert len(final(tmp_path)) == RESIZED and samples(tmp_path) == list(range(rows))


def test_a_fixed_run_ends_with_a_sentence_when_its_number_of_workers_changes(tmp_path):
    job = resized_job(tmp_path, "reproducible=fixed", widths=(3,))
    assert job.returncode not in (0, None), job.output[-3000:]
    assert "fixed of 2 worker(s), and this start is fixed of 3" in job.output
    assert (tmp_path / "starts").read_text().split() == ["2", "3"]


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
