"""`lmtools launch --hosts` on two machines: one job, which ends on all of them when it fails on one or is told to."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
import yaml

from lm_experiments_tools.checkpoint.manifest import verify
from lm_experiments_tools.tools.main import main
from tests.cluster.machines import INTERFACE, ended
from tests.cluster.test_two_machines import CPU, SCRIPT, training, worker_on
from tests.distributed.launch import environment, missing
from tests.helpers.runs import losses, words

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def launch(machines, *options, **flags):
    """`lmtools launch` on the first machine, as a user of an environment that is no default there."""
    names = [f"{name}={value}" for name, value in CPU.items()] + [f"PYTHONPATH={environment()['PYTHONPATH']}"]
    start = ("python", "-m", "lm_experiments_tools.tools.main", "launch", "--interface", INTERFACE, "--env", *names)
    return machines[0].start(*start, *options, "--", SCRIPT, *words(**flags))


def left_on(machines):
    """Command lines of the script that still run there."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if SCRIPT in " ".join(line) and str(machines[0].folder) in " ".join(line)]


@pytest.mark.parametrize(
    ("launcher", "hosts", "workers"),
    [("torchrun", "lmta:2,lmtb:1", 3), ("accelerate", "lmta:1,lmtb:1", 2), ("horovodrun", "lmta:1,lmtb:1", 2)],
)
def test_each_launcher_trains_on_both_machines(launcher, hosts, workers, machines, flags, run_dir):
    if reason := missing("horovod" if launcher == "horovodrun" else "accelerate"):
        pytest.skip(reason)
    flags |= {"iters": 20, "save_interval": None, "batch_size": 12 // workers}
    code, output = ended(launch(machines, "--hosts", hosts, "--launcher", launcher, **flags), 180)
    assert code == 0 and f"{workers} worker(s)" in output, output[-4000:]
    assert [step for step, _ in losses(run_dir)] == [10, 20]
    assert launcher == "horovodrun" or "[lmta] " in output
    assert len(list(run_dir.glob("logs/rank*.log"))) == workers


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun"])
def test_a_job_that_is_told_to_end_saves_and_goes_on(launcher, machines, flags, run_dir):
    if reason := missing("horovod" if launcher == "horovodrun" else "accelerate"):
        pytest.skip(reason)
    options = ("--hosts", "lmta:1,lmtb:1", "--launcher", launcher)
    job = launch(machines, *options, **flags)
    training([job], run_dir)
    psutil.Process(job.pid).send_signal(signal.SIGTERM)
    code, output = ended(job, 90)
    assert code == 143 and "SIGTERM: ending the job on lmta" in output, output[-4000:]
    assert not left_on(machines)
    saved = (run_dir / "last").resolve()
    verify(saved)
    assert launcher == "horovodrun" or "SIGTERM: saving a checkpoint and stopping" in output
    step = int(saved.name.partition("_")[2])
    code, output = ended(launch(machines, *options, **flags | {"iters": step + 10, "save_interval": None}), 180)
    assert code == 0 and f"resumed from {saved}" in output, output[-4000:]


def test_a_job_that_fails_on_one_machine_ends_on_all(machines, flags, run_dir):
    job = launch(machines, "--hosts", "lmta:1,lmtb:1", **flags)
    training([job], run_dir)
    worker_on(machines[1]).kill()
    start = time.monotonic()
    code, output = ended(job, 90)
    assert code == 1 and "ended with exit code 1" in output, output[-4000:]
    assert not left_on(machines)
    print(f"{time.monotonic() - start:.1f} s")


def test_a_machine_that_is_not_there_ends_the_job(machines, flags, run_dir):
    code, output = ended(launch(machines, "--hosts", "lmta:1,lmtc:1", **flags), 90)
    assert code == 255 and "lmtc ended with exit code 255: ending the job on lmta" in output, output[-4000:]
    assert not left_on(machines) and not (run_dir / "checkpoints").exists()


def test_the_command_of_a_train_job_trains_with_what_its_runtime_tells(machines, flags, run_dir, capsys, monkeypatch):
    """The variables of Kubeflow Trainer's torch runtime: pkg/runtime/framework/plugins/torch/torch.go of v2.3.0."""
    flags |= {"iters": 20, "save_interval": None, "model_path": run_dir.name}
    monkeypatch.chdir(run_dir.parent)
    assert main(["launch", "--kubeflow", "--nodes", "2", "--print", "--", "pretrain-t5", *words(**flags)]) == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["spec"]["trainer"]
    told = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
    told |= {"PET_MASTER_ADDR": "lmta", "PET_MASTER_PORT": 29400}
    told |= {pair["name"]: pair["value"] for pair in trainer["env"]}
    told = {name: str(value) for name, value in told.items()}
    command = [word.replace("$$", "$") for word in trainer["command"]]  # as Kubernetes does
    jobs = [m.start(*command, **told, PET_NODE_RANK=str(rank)) for rank, m in enumerate(machines)]
    ends = [ended(job, 180) for job in jobs]
    assert [code for code, _ in ends] == [0, 0] and "2 worker(s)" in ends[0][1], ends[0][1][-4000:]
    assert [step for step, _ in losses(run_dir)] == [10, 20]
