"""A signal while a run trains, and while it ends by an error."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from lm_experiments_tools.config import exits
from lm_experiments_tools.config.cli import run_main
from lm_experiments_tools.errors import LostWorkerError, RunError
from lm_experiments_tools.training import signals
from lm_experiments_tools.training.signals import StopSignals
from tests.helpers import loops
from tests.helpers.loops import At
from tests.helpers.toys import RaggedPairs, tiny_t5, weights_of


def make_loop(hook, valid=None, **args):
    callbacks = [hook] if hook else []
    return loops.make_loop(tiny_t5(dropout=0.3), valid=valid, iters=6, log_interval=2, callbacks=callbacks, **args)


class Interrupted:
    """Ctrl-C while Python runs a destructor, out of which no exception comes."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_while_a_run_starts_stops_it_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(exits, "_interrupts", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    loops = []

    def main():
        Interrupted()
        loops.append(make_loop(None, model_path=str(tmp_path)))
        loops[0].train()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # libraries in this process may have set another
    try:
        with pytest.raises(SystemExit) as stop:
            run_main(main)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (stop.value.code, loops[0].state.step) == (130, 0)


def test_the_death_of_the_launcher_counts_as_sigterm_once(monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launcher = os.getppid()
    with StopSignals() as signals:
        assert sum(signals.pending) == 0
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert signals.pending == signals.pending == [1, 0, 0, 0, 0, 0]
    assert f"the launcher of this worker (process {launcher}) ended without a signal" in caplog.text


@pytest.mark.parametrize("name, code", [  # 128 + the number of the signal, as shells report it
    ("TERM", 143), ("INT", 130), ("USR1", 138), ("USR2", 140), ("HUP", 129), ("XCPU", 152),
])  # fmt: skip
def test_a_signal_saves_and_exits_with_its_code(tmp_path, name, code):
    number = getattr(signal, f"SIG{name}")
    before = signal.signal(number, signal.SIG_DFL if name != "INT" else signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stop:
            make_loop(At(2, lambda _: os.kill(os.getpid(), number)), model_path=str(tmp_path)).train()
    finally:
        signal.signal(number, before)
    assert stop.value.code == code and (tmp_path / "last").resolve().name == "step_000002"


def test_after_a_signal_the_rest_is_as_if_nothing_had_been(tmp_path):
    def run(path, hook=None):
        torch.manual_seed(7)
        loop = make_loop(hook, DataLoader(RaggedPairs(4), batch_size=4), model_path=str(path), valid_interval=2)
        loop.train()
        return weights_of(loop.backend.unwrap()), loop

    with pytest.raises(SystemExit):
        run(tmp_path / "killed", At(3, lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    continued, loop = run(tmp_path / "killed")
    whole, whole_loop = run(tmp_path / "whole")
    assert all(torch.equal(whole[n], continued[n]) for n in whole)
    assert loop.state.metrics == whole_loop.state.metrics

    def read(path):
        lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        return [(line["split"], line["step"], line.get("loss")) for line in lines]

    assert read(tmp_path / "killed") == read(tmp_path / "whole")


def test_signals_that_the_user_handles_or_nohup_ignores_are_left_alone():
    found = []
    handlers = {signal.SIGUSR1: lambda *_: found.append("theirs"), signal.SIGHUP: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with StopSignals() as signals:
            for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            assert sum(signals.pending) == 1 and found == ["theirs"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_launcher_s_signal_while_a_lost_worker_is_reported_is_not_this_one_s_end(monkeypatch):
    """horovodrun sends it to all once one is gone; by default it would end this worker before its last words."""

    def signalled(error):
        os.kill(os.getpid(), signal.SIGTERM)
        return LostWorkerError("a worker is lost")

    monkeypatch.setattr(signals, "lost_worker", signalled)
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append("by the signal"))
    try:
        with pytest.raises(RunError, match="a worker is lost"):
            make_loop(At(3, lambda loop: {}["connection"])).train()
        os.kill(os.getpid(), signal.SIGTERM)  # before the program has printed the error
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not ended


def test_workers_agree_on_the_first_signal_that_any_of_them_received():
    stop = StopSignals()
    nothing, xcpu, term = [0] * 6, [0, 0, 0, 0, 0, 2], [3, 0, 0, 0, 0, 2]
    stop.agree(nothing)
    assert stop.agreed == 0
    stop.agree(xcpu)
    stop.agree(term)  # later than the first
    assert stop.agreed == signal.SIGXCPU
