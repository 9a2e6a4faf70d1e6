"""Jobs whose workers die, and whose hosts change, end by themselves with the weights of the undisturbed run.

`ELASTIC_EVENTS=50 pytest -m slow tests/distributed/test_elastic_jobs.py` for more events in one run than four.
"""

import os

import pytest

from tests.distributed.launch import ROOT, missing, run, torchrun
from tests.distributed.restarting_worker import NAMES

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(0)]

WORKER = ROOT / "tests" / "distributed" / "restarting_worker.py"
NUMBER = int(os.environ.get("ELASTIC_EVENTS", "4"))
CPU = {"ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    if reason := missing("accelerate"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("undisturbed")
    job = run(torchrun(), WORKER, NUMBER, folder, **CPU)
    assert job.returncode == 0, job.output[-3000:]
    return (folder / "digest").read_text()


def check(job, folder, undisturbed):
    assert job.returncode == 0, job.output[-3000:]
    assert len(list((folder / "events").iterdir())) == NUMBER
    assert (folder / "digest").read_text() == undisturbed
    assert job.output.count("resumed from") >= NUMBER


def test_torchrun_restarts_workers_that_die(undisturbed, tmp_path):
    launcher = [*torchrun(), "--max-restarts", str(NUMBER)]
    job = run(launcher, WORKER, NUMBER, tmp_path, timeout=90 * NUMBER, EVENTS="1", **CPU)
    check(job, tmp_path, undisturbed)


def test_an_elastic_horovod_job_goes_on_when_workers_die_and_hosts_change(undisturbed, tmp_path):
    """Two workers on two of five hosts; one that has lost its worker is not used for longer than a restart takes."""
    if reason := missing("horovod"):
        pytest.skip(reason)
    hosts, script = tmp_path / "hosts", tmp_path / "discover.sh"
    hosts.write_text("".join(f"{name}:1\n" for name in NAMES))
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    launcher = [
        "horovodrun", "--gloo", "-np", "2", "--min-np", "2", "--max-np", "2", "--network-interfaces", "lo",
        "--host-discovery-script", str(script), "--blacklist-cooldown-range", "10", "20", "python",
    ]  # fmt: skip
    extra = {"EVENTS": "1", "HOSTS": str(hosts), "HOME": str(tmp_path)}
    job = run(launcher, WORKER, NUMBER, tmp_path, timeout=90 * NUMBER, **extra)
    check(job, tmp_path, undisturbed)
