"""srun forms one job of its tasks or refuses, and a job that is requeued saves first and goes on then."""

from __future__ import annotations

import time

import pytest

from lm_experiments_tools.checkpoint.manifest import verify
from tests.distributed.launch import missing
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


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_requeued_job_saves_and_goes_on(launcher, cluster, flags, run_dir, tmp_path):
    """The job files of docs/clusters.md: SIGTERM to the tasks, which end by 143 when they have saved."""
    log = tmp_path / "job.txt"
    flags["iters"] = 10**6
    job = ("--slurm", "--nodes", 2, "--launcher", launcher, "--sbatch", f"output={log}", "--", SCRIPT, *words(**flags))
    submitted = cluster.run("python", "-m", "lm_experiments_tools.tools.main", "launch", *job)
    number = submitted.stdout.split()[-1]
    assert submitted.returncode == 0 and number.isdigit(), submitted.stdout

    def wait_for(condition, what):
        deadline = time.monotonic() + 150
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {log.read_text() if log.exists() else 'no output'}"
            time.sleep(0.3)

    def queue():
        return cluster.run("squeue", "-h", "-o", "%T").stdout

    wait_for(lambda: (run_dir / "last").exists(), "no checkpoint")
    assert cluster.run("scancel", "--signal=TERM", f"{number}.0").returncode == 0
    wait_for(lambda: "PENDING" in queue(), "it was not requeued")
    assert "2 worker(s)" in log.read_text() and "SIGTERM: saving a checkpoint and stopping" in log.read_text()
    saved = (run_dir / "last").resolve()
    verify(saved)
    later = "StartTime=now+3"  # a start in the requeue's own second is revoked with the job; two minutes otherwise
    cluster.run("scontrol", "update", f"JobId={number}", later)
    wait_for(lambda: f"resumed from {saved}" in log.read_text(), "it did not go on")
    cluster.run("scancel", number)
    wait_for(lambda: not queue(), "a job that its user has ended came back")


def test_a_mistake_is_refused_before_the_queue(cluster, flags, tmp_path):
    command = ("python", "-m", "lm_experiments_tools.tools.main", "launch", "--slurm")
    asked = cluster.run(*command, "--", SCRIPT, *words(**flags, lrr=1))
    assert asked.returncode == 2 and "unknown flag --lrr: did you mean --lr?" in asked.stdout
    asked = cluster.run(*command, "--partition", "none", "--", SCRIPT, *words(**flags))
    assert asked.returncode == 2 and "error: sbatch refused the job: " in asked.stdout, asked.stdout
    assert "invalid partition" in asked.stdout and not cluster.run("squeue", "-h").stdout


def test_an_array_of_jobs_tokenizes_to_the_bytes_of_one_run(cluster, long_text, data, tmp_path):
    if reason := missing("datatrove"):
        pytest.skip(reason)
    text = {"input": long_text, "vocab": data / "vocab.model", "output": tmp_path / "parts"}
    how = {"on": "slurm", "shards": 3, "partition": "p", "time": "10:00"}
    started = cluster.run("python", "-m", "lm_experiments_tools.tools.main", "tokenize", *words(**text | how))
    assert started.returncode == 0 and "submitted 3 parts and their merge" in started.stdout, started.stdout
    deadline = time.monotonic() + 200
    while cluster.run("squeue", "-h").stdout:
        assert time.monotonic() < deadline, cluster.run("squeue").stdout
        time.sleep(0.5)
    logs = "".join(log.read_text() for log in sorted(tmp_path.glob("parts.parts/**/slurm_logs/*.out")))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"parts{suffix}").exists(), logs[-6000:]
        assert (tmp_path / f"parts{suffix}").read_bytes() == (data / f"long{suffix}").read_bytes()
    assert len(list(tmp_path.glob("parts-0000?-of-00003.idx"))) == 3
