"""Tasks of srun, mpirun and their like form one job, or are refused; a shell within an allocation is one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lm_experiments_tools.backends import cluster, detect_backend, get_backend
from lm_experiments_tools.backends.launch import wanted_processes
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from tests.distributed.launch import environment, forked, slow

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("worker.py")
ALLOCATION = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
STEP = {
    **ALLOCATION, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
ONE_NODE = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def backend_of(monkeypatch, variables: dict[str, str], **args: str) -> object:
    """`get_backend` in the environment of a launcher alone."""
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return get_backend(TrainerArgs(**args))


@pytest.mark.parametrize("launcher", slow(["srun", "mpiexec"], "mpiexec"))
def test_two_tasks_train_as_one_job(tmp_path, launcher):
    variables = {"srun": {**STEP, **ONE_NODE, "SLURM_JOB_ID": str(os.getpid())}, "mpiexec": MPICH}[launcher]
    job = forked([launcher, "-n", "2"], WORKER, tmp_path, "-", "talked", **variables)
    assert job.returncode == 0, job.output[-2000:]
    for rank in range(2):
        talked = json.loads((tmp_path / f"talked_{rank}.json").read_text())
        assert (talked["name"], talked["world_size"], talked["rank"]) == ("accelerate", 2, rank)
        assert [other["rank"] for other in talked["gather"]] == [0, 1]


def test_a_shell_within_an_allocation_is_one_process(monkeypatch):
    """A batch script, salloc, and the step in which Slurm runs salloc's shell."""
    special = {**STEP, "SLURM_STEP_ID": "4294967290"}
    one_task = {**STEP, "SLURM_STEP_NUM_TASKS": "1"}
    for variables in (ALLOCATION, special, one_task, {"PMI_SIZE": "1", "PMI_RANK": "0"}):
        assert cluster.started_tasks(variables) is None
        assert detect_backend(variables) == "local"
    assert backend_of(monkeypatch, ALLOCATION).name == "local"


def test_a_step_gives_torch_what_it_reads():
    variables = dict(STEP, SLURM_PROCID="1", SLURM_NODEID="1")
    assert detect_backend(variables) == "accelerate"
    cluster.form_job(cluster.started_tasks(variables), variables)
    wanted = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n1"}
    assert wanted.items() <= variables.items()
    assert 15000 <= int(variables["MASTER_PORT"]) < 30000
    other_step = cluster.started_tasks({**STEP, "SLURM_STEP_ID": "4"})
    assert str(other_step.port) != variables["MASTER_PORT"], "two steps of a job may run at once"
    own = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    cluster.form_job(cluster.started_tasks(own), own)
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_tasks_of_a_node():
    uneven = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    counts = [cluster.started_tasks({**uneven, "SLURM_NODEID": str(node)}).local_count for node in range(4)]
    assert counts == [2, 2, 2, 1]


def test_mpi_within_slurm_is_mpi():
    """Daemons of mpirun are tasks of srun, whose variables their children see."""
    tasks = cluster.started_tasks({**STEP, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8"})
    assert (tasks.count, tasks.rank, tasks.address) == (8, 1, None)
    same = cluster.started_tasks({**STEP, **MPICH, "SLURM_PROCID": "1"})  # srun --mpi=pmi2
    assert (same.launcher, same.address) == ("srun", "n1")


@pytest.mark.parametrize(
    "variables, args, words",
    [
        (MPICH, {}, r"mpiexec .* started 2 tasks \(PMI_SIZE\).*the address of the first task.*MASTER_ADDR"),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "1"},
            {},
            "a task's number on its machine",
        ),
        ({**STEP, "SLURM_PTY_PORT": "41234"}, {}, "srun --pty started 2 tasks.*leave --pty out"),
        (OPEN_MPI, {"backend": "local"}, "--backend local was asked for"),
        ({**STEP, "WORLD_SIZE": "2"}, {"backend": "local"}, "--backend local was asked for"),
    ],
)
def test_tasks_that_cannot_form_a_job_are_refused(monkeypatch, variables, args, words):
    with pytest.raises(UserError, match=words):
        backend_of(monkeypatch, variables, **args)


def test_a_group_smaller_than_the_step_is_refused(monkeypatch):
    """`srun -n2 torchrun` without --nnodes: two groups of one that would each train alone."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert wanted_processes({**STEP, **alone}) == (2, "SLURM_STEP_NUM_TASKS")
    with pytest.raises(UserError, match=r"srun started 2 tasks .* torchrun --nnodes N"):
        backend_of(monkeypatch, {**STEP, **alone})


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[007,9],m1", "gpu007"),
        ("a,b", "a"),
        ("r[2-3]n[04-5]", "r2n04"),
        ("", None),
    ],
)
def test_first_host_of_a_list(nodes, first):
    assert cluster.first_host(nodes) == first
