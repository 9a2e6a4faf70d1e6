"""ssh_hosts.sh, horovodrun.sh and trainjob.yaml of examples/clusters/ form one job on two machines, and end it."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
import yaml

from lm_experiments_tools.checkpoint.manifest import verify
from tests.cluster.machines import INTERFACE, ended
from tests.cluster.test_two_machines import CPU, SCRIPT, training
from tests.distributed.launch import skip_without
from tests.helpers import ROOT
from tests.helpers.cluster_examples import copy_example
from tests.helpers.runs import losses, words

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def start(machines, name, folder, hosts=("lmta", "lmtb"), workers=1, **flags):
    """Run a script of examples/clusters/ on the first machine, edited for `workers` on each host."""
    if name == "horovodrun.sh":
        listed, workers = ",".join(f"{host}:{workers}" for host in hosts), workers * len(hosts)
    else:
        listed = f"({' '.join(hosts)})"
    script = copy_example(name, folder, HOSTS=listed, WORKERS=str(workers), INTERFACE=INTERFACE)
    return machines[0].start("bash", script, SCRIPT, *words(**flags))


def left_on(machines):
    """Command lines of the script that still run there."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if SCRIPT in " ".join(line) and str(machines[0].folder) in " ".join(line)]


@pytest.mark.parametrize(("name", "workers"), [("ssh_hosts.sh", 2), ("horovodrun.sh", 1)])
def test_a_script_trains_on_both_machines(name, workers, machines, flags, run_dir, tmp_path):
    skip_without("horovod" if name == "horovodrun.sh" else "accelerate")
    flags |= {"iters": 20, "save_interval": None, "batch_size": 6 // workers}
    code, output = ended(start(machines, name, tmp_path, workers=workers, **flags), 180)
    assert code == 0 and f"{2 * workers} worker(s)" in output, output[-4000:]
    assert [step for step, _ in losses(run_dir)] == [10, 20]
    assert name == "horovodrun.sh" or "[lmta] " in output
    assert len(list(run_dir.glob("logs/rank*.log"))) == 2 * workers


@pytest.mark.parametrize(("name", "expected"), [("ssh_hosts.sh", 143), ("horovodrun.sh", 1)])
def test_a_job_that_gets_sigterm_saves_and_resumes(name, expected, machines, flags, run_dir, tmp_path):
    skip_without("horovod" if name == "horovodrun.sh" else "accelerate")
    job = start(machines, name, tmp_path, **flags)
    training([job], run_dir)
    psutil.Process(job.pid).send_signal(signal.SIGTERM)
    code, output = ended(job, 90)
    assert code == expected, output[-4000:]
    assert not left_on(machines)
    saved = (run_dir / "last").resolve()
    verify(saved)
    assert name == "horovodrun.sh" or "SIGTERM: saving a checkpoint and stopping" in output
    step = int(saved.name.partition("_")[2])
    flags |= {"iters": step + 10, "save_interval": None}
    code, output = ended(start(machines, name, tmp_path, **flags), 180)
    assert code == 0 and f"resumed from {saved}" in output, output[-4000:]


def test_a_job_saves_when_its_script_is_killed(machines, flags, run_dir, tmp_path):
    """As when the machine it was started from is gone."""
    job = start(machines, "ssh_hosts.sh", tmp_path, **flags)
    training([job], run_dir)
    job.kill()
    deadline = time.monotonic() + 90
    while left_on(machines):
        assert time.monotonic() < deadline, left_on(machines)
        time.sleep(0.5)
    assert "SIGTERM: saving a checkpoint and stopping" in (run_dir / "logs" / "rank0.log").read_text()
    verify((run_dir / "last").resolve())


def test_the_command_of_the_train_job_trains_with_the_variables_of_its_runtime(machines, flags, run_dir):
    """The variables of Kubeflow Trainer's torch runtime: pkg/runtime/framework/plugins/torch/torch.go of v2.3.0."""
    flags |= {"iters": 20, "save_interval": None, "model_path": run_dir.name}
    (run_dir.parent / "run.yaml").write_text(yaml.safe_dump({name: _plain(value) for name, value in flags.items()}))
    trainer = yaml.safe_load((ROOT / "examples/clusters/trainjob.yaml").read_text())["spec"]["trainer"]
    variables = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": 1}
    variables |= {"PET_MASTER_ADDR": "lmta", "PET_MASTER_PORT": 29400}
    variables = {name: str(value) for name, value in variables.items()} | CPU
    command = [word.replace("/shared/lm", str(run_dir.parent)) for word in trainer["command"]]
    jobs = [m.start(*command, **variables, PET_NODE_RANK=str(rank)) for rank, m in enumerate(machines)]
    ends = [ended(job, 180) for job in jobs]
    assert [code for code, _ in ends] == [0, 0] and "2 worker(s)" in ends[0][1], ends[0][1][-4000:]
    assert [step for step, _ in losses(run_dir)] == [10, 20]


def _plain(value):
    return value if isinstance(value, (int, float)) or value is None else str(value)
