"""A job that gets a signal or finds its disk full ends soon, with a non-zero code and what it could save.

test_hangs.py is about workers that fail, stop or are killed.
"""

import contextlib
import re
import signal
import subprocess
import time

import psutil
import pytest

from lm_experiments_tools.checkpoint.manifest import verify
from tests.distributed.launch import CPU, ROOT, environment, horovodrun, shipped, skip_without, slow, start, torchrun

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
@pytest.mark.parametrize(
    "launcher, sign, everyone",
    [
        (torchrun(), signal.SIGKILL, False),
        (torchrun(), signal.SIGUSR1, True),
        (horovodrun(), signal.SIGUSR1, True),
        (shipped("ddp"), signal.SIGUSR2, True),
    ],
    ids=["torchrun-KILL", "torchrun-USR1", "horovodrun-USR1", "accelerate-USR2"],
)
def test_workers_save_and_stop_after_a_signal_of_a_batch_system_or_the_end_of_their_launcher(
    launcher, sign, everyone, tmp_path
):
    """Slurm's --signal reaches all processes of a step, and ends launchers that do not expect it.

    Orphans would train on, unseen, and write to the directory in which the run is started again.
    """
    skip_without("horovod" if "horovodrun" in launcher else "accelerate")
    log = tmp_path / "output.txt"
    with log.open("w") as output:
        command = [*launcher, str(WORKER), "train_long", "training", str(tmp_path)]
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment(**CPU), stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + 90
    processes = []
    try:
        while not (tmp_path / "last").exists():
            assert time.monotonic() < deadline and job.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        processes = psutil.Process(job.pid).children(recursive=True)
        for process in [psutil.Process(job.pid), *(processes if everyone else ())]:
            process.send_signal(sign)
        assert job.wait(timeout=60) != 0
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive, "orphans train on"
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.kill()
    # Only rank 0 logs, and it may learn of the dead launcher from rank 1. Horovodrun dies with what it has not yet
    # passed on.
    noted = rf"launcher of this worker \(process {job.pid}\) ended without a signal|(SIGTERM|{sign.name}): saving"
    logged = log.read_text() + (tmp_path / "logs" / "rank0.log").read_text()
    assert re.search(noted, logged), logged[-3000:]
    verify((tmp_path / "last").resolve())


@pytest.mark.parametrize("kind", slow(["horovod", "ddp"], "ddp"))
def test_a_full_disk_on_rank_0_is_an_error_on_every_rank_not_a_hang(kind, tmp_path):
    output = start(kind, WORKER, "full_disk", "saving", tmp_path, fails=True, timeout=SECONDS)
    assert "No space left on device" in output
    assert not list((tmp_path / "checkpoints").glob("step_*"))
