"""srun forms one job of its tasks or refuses; the files of examples/clusters/ save, are requeued and resume."""

from __future__ import annotations

import time

import pytest

from lm_experiments_tools.checkpoint.manifest import verify
from tests.cluster.test_two_machines import weights
from tests.distributed.launch import environment, skip_without
from tests.helpers.cluster_examples import copy_example
from tests.helpers.runs import losses, words

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SCRIPT = "run_t5_pretraining.py"
CPU = {"ACCELERATE_USE_CPU": "true"}


@pytest.mark.parametrize("tasks", [("-N1", "-n2"), ("-N2", "-n2")], ids=["one_machine", "two_machines"])
def test_srun_forms_one_job_of_its_tasks(tasks, cluster, flags, run_dir):
    flags |= {"iters": 20, "save_interval": None}
    ended = cluster.run("srun", *tasks, "python", SCRIPT, *words(**flags))
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "backend accelerate, 2 worker(s)" in ended.stdout
    assert [step for step, _ in losses(run_dir)] == [10, 20], "two runs would have written each its lines"
    assert sorted(log.name for log in run_dir.glob("logs/*")) == ["rank0.log", "rank1.log"]


def test_a_torchrun_a_task_is_refused_unless_they_are_told_to_meet(cluster, flags, run_dir):
    flags |= {"iters": 20, "save_interval": None}
    start = ("srun", "-N2", "-n2", "--kill-on-bad-exit=1", "torchrun", "--nproc_per_node", 1)
    ended = cluster.run(*start, "--standalone", SCRIPT, *words(**flags), **CPU)
    assert ended.returncode != 0 and "srun started 2 tasks (SLURM_STEP_NUM_TASKS)" in ended.stdout
    assert not (run_dir / "checkpoints").exists()
    where = ("--nnodes", 2, "--rdzv_backend", "c10d", "--rdzv_endpoint", "lmta:29500", "--rdzv_id", "job")
    ended = cluster.run(*start, *where, SCRIPT, *words(**flags), **CPU)
    assert ended.returncode == 0 and "2 worker(s)" in ended.stdout, ended.stdout[-4000:]


def test_a_file_that_one_machine_lacks_ends_the_job(cluster, machines, flags, data):
    machines[1].takes_alone(data)
    ended = cluster.run("srun", "-N2", "-n2", "--kill-on-bad-exit=1", "python", SCRIPT, *words(**flags))
    assert ended.returncode != 0 and f"error: on lmtb: '{data / 'tiny.json'}' is neither" in ended.stdout, (
        ended.stdout[-4000:]
    )


# Options of sbatch for these machines without GPUs, in place of those in the files.
OPTIONS = ("--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1")


def submit(cluster, file, log, *options, **flags):
    """Submit a file of examples/clusters/; the number of its job."""
    command = ("sbatch", "--parsable", *OPTIONS, f"--output={log}", *options, file, SCRIPT, *words(**flags))
    submitted = cluster.run(*command, **CPU)
    assert submitted.returncode == 0 and submitted.stdout.strip().isdigit(), submitted.stdout
    return submitted.stdout.strip()


def queue(cluster):
    """States of the jobs that have not ended."""
    return cluster.run("squeue", "-h", "-o", "%T").stdout.split()


def wait_for(condition, what, log):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {log.read_text() if log.exists() else 'no output'}"
        time.sleep(0.3)


def saved_and_requeued(cluster, number, run_dir, log):
    """The checkpoint that a job has saved after SIGTERM, once the job is back in the queue."""
    wait_for(lambda: queue(cluster) == ["PENDING"], "the job was not requeued", log)
    assert "2 worker(s)" in log.read_text() and "SIGTERM: saving a checkpoint and stopping" in log.read_text()
    saved = (run_dir / "last").resolve()
    verify(saved)
    later = "StartTime=now+3"  # a start in the second of the requeue is revoked, which would take two minutes
    cluster.run("scontrol", "update", f"JobId={number}", later)
    return saved


def test_a_job_saves_before_its_time_limit_and_is_requeued(cluster, flags, run_dir, tmp_path):
    log, limit = tmp_path / "job.txt", ("--time=2", "--signal=TERM@30")
    number = submit(cluster, "examples/clusters/slurm_torchrun.sbatch", log, *limit, **flags)
    wait_for(lambda: (run_dir / "last").exists(), "no checkpoint", log)
    saved = saved_and_requeued(cluster, number, run_dir, log)
    wait_for(lambda: f"resumed from {saved}" in log.read_text(), "the job did not resume", log)
    cluster.run("scancel", number)
    wait_for(lambda: not queue(cluster), "a cancelled job was requeued", log)


def test_a_requeued_job_ends_with_the_weights_of_an_undisturbed_one(cluster, flags, run_dir, tmp_path):
    """The run gets SIGTERM, and while it waits in the queue its end is moved close in the file of its flags."""
    log, config = tmp_path / "job.txt", tmp_path / "run.yaml"
    iters = flags.pop("iters")
    config.write_text(f"iters: {iters}\n")
    number = submit(cluster, "examples/clusters/slurm.sbatch", log, config=config, **flags)
    wait_for(lambda: (run_dir / "last").exists(), "no checkpoint", log)
    assert cluster.run("scancel", "--signal=TERM", f"{number}.0").returncode == 0
    saved = saved_and_requeued(cluster, number, run_dir, log)
    iters = int(saved.name.partition("_")[2]) + 50
    config.write_text(f"iters: {iters}\n")
    wait_for(lambda: not queue(cluster), "the job did not end", log)
    assert f"resumed from {saved}" in log.read_text() and losses(run_dir)[-1][0] == iters
    whole = tmp_path / "whole"
    undisturbed = flags | {"model_path": whole, "save_interval": None, "iters": iters}
    ended = cluster.run("srun", "-N2", "-n2", "python", SCRIPT, *words(**undisturbed))
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert weights(run_dir) == weights(whole)


def test_horovodrun_trains_and_saves_at_sigterm_under_slurm(cluster, flags, run_dir, tmp_path):
    """SIGTERM goes to the batch script, as before the time limit; the job submitted again resumes."""
    skip_without("horovod")
    log, file = tmp_path / "job.txt", copy_example("horovodrun.sbatch", tmp_path, WORKERS="1")
    path = f"{cluster.first.folder}:{environment()['PATH']}"  # where the ssh of these machines is
    number = submit(cluster, file, log, f"--export=ALL,PATH={path}", **flags)
    wait_for(lambda: (run_dir / "last").exists(), "no checkpoint", log)
    assert cluster.run("scancel", "--batch", "--signal=TERM", number).returncode == 0
    wait_for(lambda: not queue(cluster), "the job did not end", log)
    assert "backend horovod, 2 worker(s)" in log.read_text(), log.read_text()
    saved = (run_dir / "last").resolve()
    verify(saved)
    step = int(saved.name.partition("_")[2])
    flags |= {"iters": step + 10, "save_interval": None}
    submit(cluster, file, log, f"--export=ALL,PATH={path}", **flags)
    wait_for(lambda: not queue(cluster), "the job did not end", log)
    assert f"resumed from {saved}" in log.read_text() and losses(run_dir)[-1][0] == step + 10
