"""Sentences of a job on several machines name the one that they are about."""

from __future__ import annotations

import os
import platform

import pytest

from lm_experiments_tools.backends import cluster, collective
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config import launchers
from lm_experiments_tools.errors import RunError, UserError

TWO_MACHINES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}


class OfTwo(LocalBackend):
    """Rank 0 of a job whose other worker, on the machine lmtb, says `other`."""

    world_size = 2

    def __init__(self, other=None):
        super().__init__()
        self.other = other

    def gather(self, value):
        return [value, ("lmtb", self.other)]


def refuse():
    raise UserError("there is no such file")


def test_an_error_of_one_machine_names_it_on_all():
    with pytest.raises(UserError, match=f"^on {platform.node()}: there is no such file$") as error:
        collective.on_all(OfTwo(), refuse)
    assert error.value.agreed
    with pytest.raises(RunError, match=r"^on lmtb: the disk is full$"):
        collective.on_all(OfTwo((False, "the disk is full")), lambda: None)


def test_an_error_of_all_machines_names_none():
    with pytest.raises(UserError, match=r"^there is no such file$"):
        collective.on_all(OfTwo((True, "there is no such file")), refuse)
    with pytest.raises(UserError, match=r"^there is no such file$"):
        collective.on_all(LocalBackend(), refuse)


@pytest.mark.parametrize(
    "variables",
    [
        TWO_MACHINES,
        {"HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
    ],
)
def test_launchers_tell_that_there_are_several_machines(variables):
    assert launchers.on_several_machines(variables)
    one = {name: "2" for name in variables} | {"SLURM_STEP_NUM_NODES": "1"}
    assert not launchers.on_several_machines(one)


def test_a_refusal_before_the_workers_have_met_is_kept_until_all_can_be_told(monkeypatch):
    assert cluster.attempt(lambda: 3)() == 3
    for name in os.environ.keys() & {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}:
        monkeypatch.delenv(name)
    with pytest.raises(UserError):
        cluster.attempt(refuse)  # on one machine at once
    for name, value in TWO_MACHINES.items():
        monkeypatch.setenv(name, value)
    kept = cluster.attempt(refuse)
    with pytest.raises(UserError, match="no such file"):
        kept()
