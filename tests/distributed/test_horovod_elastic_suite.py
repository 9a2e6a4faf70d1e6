"""The eight scenarios of Horovod's own elastic tests (test/integration/elastic_common.py at 2626dc8) with our loop.

Horovod looks at ranks, sizes, hosts and exit codes, and skips four of the eight for torch. Here all eight run under a
real horovodrun, and what it never looks at is compared too: a job that ends has the weights, optimizer and metrics of
a run to which nothing happened; one that cannot go on ends by itself with a sentence, leaves no process behind, and
what it has saved goes on to the same bits.
"""

import time

import psutil
import pytest

from tests.distributed import elastic_jobs
from tests.distributed.elastic_jobs import event, final, horovod_job, noted

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(0)]

STEPS = 9
FLAG = "reproducible=elastic"
TWO_HOSTS = "localhost:2 127.0.0.1:2"
FOUR = "-np 4 --min-np 2 --max-np 4"
FAILED = "Horovod detected that one or more processes exited with non-zero status"
HOW = pytest.mark.parametrize("how", ["raise", "kill"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return elastic_jobs.undisturbed(tmp_path_factory.mktemp("whole"), STEPS, FLAG)


def start(folder, plan, options, discover=TWO_HOSTS, **extra):
    return horovod_job(folder, plan, STEPS, options, FLAG, discover=discover, timeout=300, **extra)


def phases(folder):
    """Rank 0's notes in one line for each start: number of the start, workers, host, its process' first rank."""
    found = {line["start"]: (line["size"], line["host"], line["first_rank"]) for line in noted(folder)}
    return [(number, *rest) for number, rest in sorted(found.items())]


def left_behind(folder):
    """Processes of a job that are still there five seconds after its launcher has ended."""
    for _ in range(50):
        found = [p.info for p in psutil.process_iter(["pid", "cmdline"]) if str(folder) in (p.info["cmdline"] or [])]
        if not found:
            break
        time.sleep(0.1)
    return found


def check_ended(job, folder, whole):
    assert job.returncode == 0, job.output[-4000:]
    assert sorted(final(folder)) == list(range(1, STEPS + 1))
    assert elastic_jobs.digest(folder) == whole
    assert not left_behind(folder)


def check_given_up(job, folder, whole, *sentences):
    assert job.returncode not in (0, None), job.output[-4000:]
    for sentence in sentences:
        assert sentence in job.output, job.output[-4000:]
    assert not (folder / "digest").exists() and not left_behind(folder)
    (folder / "plan.json").unlink()
    assert elastic_jobs.undisturbed(folder, STEPS, FLAG) == whole


def start_with_changes(folder, slots, limit):
    """The first host is joined by another, then taken away; the driver may change the workers `limit` times."""
    first, second = f"localhost:{slots}", f"127.0.0.1:{slots}"
    plan = [event(3, "hosts", hosts=[first, second]), event(6, "hosts", hosts=[second])]
    return start(folder, plan, f"-np {slots} --min-np {slots} --max-np {2 * slots} --reset-limit {limit}", first)


@pytest.mark.parametrize("slots", [2, 1])
def test_hosts_added_and_removed(slots, whole, tmp_path):
    job = start_with_changes(tmp_path, slots, 2)
    assert phases(tmp_path) == [
        (1, slots, "localhost", 0), (2, 2 * slots, "localhost", 0), (3, slots, "127.0.0.1", slots),
    ]  # fmt: skip
    check_ended(job, tmp_path, whole)


def check_other_half_goes_on(job, folder, whole):
    """Rank 0 is lost: its host, which has rank 1 too, is not used any more; rank 2 becomes the first of two."""
    (one, four, host, first), (two, left, other, began) = phases(folder)
    assert (one, four, first) == (1, 4, 0) and (two, left, began) == (2, 2, 2) and host != other
    check_ended(job, folder, whole)


@HOW
def test_single_rank_failure(how, whole, tmp_path):
    check_other_half_goes_on(start(tmp_path, [event(3, how)], FOUR), tmp_path, whole)


@HOW
def test_fault_tolerance_without_scaling(how, whole, tmp_path):
    """The same with hosts that are named once and for all, in place of a script that finds them."""
    options = f"-np 4 --min-np 2 -H {TWO_HOSTS.replace(' ', ',')}"
    check_other_half_goes_on(start(tmp_path, [event(3, how)], options, discover=""), tmp_path, whole)


def test_all_ranks_failure(whole, tmp_path):
    job = start(tmp_path, [event(3, "raise", 0, 1, 2, 3)], FOUR)
    check_given_up(job, tmp_path, whole, FAILED, "ZeroDivisionError: a deliberate failure")


def test_all_hosts_blacklisted(whole, tmp_path):
    """A worker of each host fails, so that none is left, though half of the workers are."""
    job = start(tmp_path, [event(3, "raise", 0, 2)], FOUR)
    check_given_up(job, tmp_path, whole, FAILED, "ZeroDivisionError: a deliberate failure")


def test_min_hosts_timeout(whole, tmp_path):
    """Four workers are wanted and two places are left: the job waits for others as long as it was told, and ends."""
    options = "-np 4 --min-np 4 --max-np 4 --elastic-timeout 10"
    job = start(tmp_path, [event(3, "raise")], options)
    assert [size for _, size, *_ in phases(tmp_path)] == [4]
    check_given_up(job, tmp_path, whole, FAILED, "Timed out waiting for")


def test_reset_limit(whole, tmp_path):
    """Two changes of the hosts, one too many; that a limit of two is none is in the first test."""
    job = start_with_changes(tmp_path, 2, 1)
    assert [size for _, size, *_ in phases(tmp_path)] == [2, 4]
    check_given_up(job, tmp_path, whole, "number of resets during elastic job exceeded limit: 1")


def test_resurrecting_blacklisted_hosts_exponential_backoff(tmp_path):
    """A host that has lost a worker twice is kept out for longer the second time, and is taken back both times."""
    steps, seconds = 40, 3
    plan = [event(3, "raise", 3, size=4), event(4, "raise", 3, size=4)]
    options = f"{FOUR} --blacklist-cooldown-range {seconds} 60"
    extra = {"discover": TWO_HOSTS, "timeout": 300, "PACE": "0.5"}
    job = horovod_job(tmp_path, plan, steps, options, FLAG, **extra)
    assert len(list((tmp_path / "events").iterdir())) == 2, "the second one needs four workers: the host is back"
    assert {size for _, size, *_ in phases(tmp_path)} == {2, 4} and final(tmp_path)[steps]["size"] == 4
    failed = [float((tmp_path / "events" / f"{number}.0").read_text().split()[0]) for number in (0, 1)]
    whole_again = [line["time"] for line in noted(tmp_path) if line["size"] == 4]
    out = [min(time for time in whole_again if time > begin + 1) - begin for begin in failed]
    assert out[0] >= 2 * seconds and out[1] >= 4 * seconds, out  # the driver adds up to `seconds`, we the start
    assert job.returncode == 0 and not left_behind(tmp_path), job.output[-4000:]
    (tmp_path / "whole").mkdir()
    assert elastic_jobs.digest(tmp_path) == elastic_jobs.undisturbed(tmp_path / "whole", steps, FLAG)
