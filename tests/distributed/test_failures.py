"""A job that gets a signal or finds its disk full ends soon, with a non-zero code and what it could save.

test_hangs.py is about workers that fail, stop or are killed.
"""

import contextlib
import os
import re
import signal
import subprocess
import time

import psutil
import pytest

from lm_experiments_tools.checkpoint.manifest import verify
from tests.distributed.launch import CPU, ROOT, environment, horovodrun, run, skip_without, slow, start, torchrun

WORKER = ROOT / "tests" / "distributed" / "hang_worker.py"
SECONDS = 90  # start-up takes most of it; a dead peer is noticed within seconds

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", slow(["horovod", "ddp"], "horovod"))
def test_sigterm_on_one_rank_saves_on_all_and_stops_all(kind, tmp_path):
    output = start(kind, WORKER, "sigterm", "training", tmp_path, fails=True, timeout=SECONDS)
    assert "SIGTERM: saving a checkpoint and stopping" in output
    newest = (tmp_path / "last").resolve()
    verify(newest)
    assert newest.name in ("step_000005", "step_000006")  # the step at whose start all workers learned of it


@pytest.mark.slow
def test_steps_of_half_horovodruns_grace_period_are_saved_before_it_kills(tmp_path):
    """It kills 5 s after its SIGTERM; the step in hand has 2.6 s, and another one would be too many.

    Horovodrun's exit code is not checked: on a busy machine it was 0 once.
    """
    skip_without("horovod")
    job = run(horovodrun(), WORKER, "sigterm_to_launcher", "training", tmp_path, timeout=SECONDS)
    assert job.returncode is not None, "the job hung:\n" + job.output[-3000:]
    newest = (tmp_path / "last").resolve()
    verify(newest)
    assert newest.name == "step_000003"


@pytest.mark.slow
def test_workers_of_a_killed_torchrun_save_and_stop(tmp_path):
    """Orphans would train on, unseen, and write to the directory in which the run is started again."""
    skip_without("accelerate")
    log = tmp_path / "output.txt"
    with log.open("w") as output:
        command = [*torchrun(), str(WORKER), "train_long", "training", str(tmp_path)]
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=environment(**CPU), stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + 90
    try:
        while not (tmp_path / "last").exists():
            assert time.monotonic() < deadline and launcher.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        workers = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive, "orphans train on"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    # Only rank 0 logs, and it may learn of the dead launcher from rank 1.
    noted = rf"launcher of this worker \(process {launcher.pid}\) ended without a signal|SIGTERM: saving"
    assert re.search(noted, log.read_text())
    verify((tmp_path / "last").resolve())


@pytest.mark.parametrize("kind", slow(["horovod", "ddp"], "ddp"))
def test_a_full_disk_on_rank_0_is_an_error_on_every_rank_not_a_hang(kind, tmp_path):
    output = start(kind, WORKER, "full_disk", "saving", tmp_path, fails=True, timeout=SECONDS)
    assert "No space left on device" in output
    assert not list((tmp_path / "checkpoints").glob("step_*"))
