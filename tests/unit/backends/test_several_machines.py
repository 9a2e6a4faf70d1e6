"""Sentences of a job on several machines name the one that they are about."""

from __future__ import annotations

import os
import platform
import re
import sys

import pytest

from lm_experiments_tools.backends import cluster, collective, process_groups
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config import cli, launchers
from lm_experiments_tools.errors import RunError, UserError

TWO_MACHINES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
LOST = RuntimeError("gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation")


class OfTwo(LocalBackend):
    """Rank 0 of a job whose other worker, on the machine lmtb, says `other`."""

    world_size = 2

    def __init__(self, other=None, missing=None):
        super().__init__()
        self.other, self.answer = other, missing

    def gather(self, value):
        return [value, ("lmtb", self.other)]

    def missing(self):
        if self.answer == "unreachable":
            raise ConnectionError
        return self.answer


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


def test_a_refusal_that_nobody_else_heard_of_names_its_machine(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name, value in TWO_MACHINES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli.run_main(refuse)
    assert capsys.readouterr().err == f"error: on {platform.node()}: there is no such file\n"


@pytest.mark.parametrize(
    "answer, words",
    [
        ([1], r"^lost rank 1 on lmtb, or the connection there: no answer \(gloo.*Timed out"),
        ([], "^all workers answer, but one came too late"),
        ("unreachable", r"^lost lmta, the machine of rank 0, or the connection to it \("),
        (None, "^lost a worker on lmt[ab] or lmtb, or the connection to it"),  # Horovod has no roll call
    ],
)
def test_a_lost_machine_is_named_by_who_does_not_answer(answer, words):
    others = [("lmta", 1), ("lmtb", 1)]
    sentence = process_groups.lost_peer(LOST, others, OfTwo(missing=answer))
    assert sentence is not None and re.search(words, sentence), sentence


def test_an_error_of_a_worker_s_own_is_no_lost_peer():
    others = [("lmta", 1), ("lmtb", 1)]
    assert process_groups.lost_peer(ValueError("connection"), others, OfTwo(missing=[1])) is None
    assert process_groups.lost_peer(RuntimeError("size mismatch"), others, OfTwo(missing=[1])) is None
