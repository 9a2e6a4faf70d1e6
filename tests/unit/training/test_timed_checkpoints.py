"""Checkpoints by the clock, without `--save_interval`: what a killed run loses, and that workers agree on the step."""

from __future__ import annotations

import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from lm_experiments_tools.training import trainer
from tests.distributed.launch import forked
from tests.helpers.loops import make_loop
from tests.helpers.thread_workers import Workers
from tests.helpers.toys import tiny_t5, weights_of

# One second passes at each step, and steps 1 to 8 are made with dropout.
KILLED = """
import os, signal, sys
from tests.helpers.loops import At
from tests.unit.training.test_timed_checkpoints import run
kill = At(8, lambda loop: os.kill(os.getpid(), signal.SIGKILL))
run(sys.argv[1], [kill])
"""
SECONDS, STEPS = 3, 12


def step_clock(loop_of):
    """A module `time` whose clock shows the steps that the loop has made."""
    return SimpleNamespace(
        perf_counter=trainer.time.perf_counter, monotonic=lambda: loop_of["loop"].state.step if loop_of else 0
    )


def run(path, callbacks=(), **options):
    """Train with a clock of one second a step, and return the loop."""
    loop_of, seconds = {}, (trainer.time, trainer.SAVE_SECONDS)
    trainer.time, trainer.SAVE_SECONDS = step_clock(loop_of), SECONDS
    options = {"iters": STEPS, "log_interval": 5, "keep_checkpoints": None, "save_in_background": False, **options}
    try:
        loop = loop_of["loop"] = make_loop(tiny_t5(dropout=0.3), model_path=path, callbacks=callbacks, **options)
        loop._last_save = loop.state.step
        loop.train()
    finally:
        trainer.time, trainer.SAVE_SECONDS = seconds
    return loop


def saved(path):
    return sorted(int(folder.name[5:]) for folder in (path / "checkpoints").glob("step_*"))


def test_a_killed_run_loses_no_more_than_the_clock_allows_and_resumes_to_the_same_bits(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    killed = forked([sys.executable], tmp_path / "killed.py", tmp_path / "killed")
    assert killed.returncode == -signal.SIGKILL, killed.output[-2000:]
    # The step during which the time is up is still made.
    assert 8 - saved(tmp_path / "killed")[-1] <= SECONDS + 1
    resumed, whole = run(tmp_path / "killed"), run(tmp_path / "whole", save_interval=STEPS)
    assert saved(tmp_path / "whole") == [STEPS]
    for name, weights in weights_of(whole.backend.unwrap()).items():
        assert weights.equal(weights_of(resumed.backend.unwrap())[name]), name


@pytest.mark.parametrize("interval, expected", [(None, [4, 8, 12]), (5, [5, 10, 12])])
def test_an_explicit_interval_is_in_steps_alone(tmp_path, interval, expected):
    run(tmp_path, save_interval=interval)
    assert saved(tmp_path) == expected


def test_the_number_of_steps_counts_where_it_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_STEPS", 2)
    run(tmp_path, iters=5)
    assert saved(tmp_path) == [2, 4, 5]


def test_rank_0_decides_for_workers_whose_clocks_differ(tmp_path, monkeypatch):
    """The other worker's clock is a day ahead at each look, and would have it save at every step."""
    steps = {"rank_0": 0, "rank_1": 0}

    def monotonic():
        name = threading.current_thread().name
        steps[name] += {"rank_0": 1, "rank_1": 86400}[name]
        return steps[name]

    monkeypatch.setattr(trainer, "SAVE_SECONDS", 4)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=trainer.time.perf_counter, monotonic=monotonic))

    def work(backend):
        begun = []
        loop = make_loop(backend=backend, model_path=tmp_path, iters=9, save_in_background=False)
        save = loop.saver.save
        loop.saver.save = lambda state, *args, **options: (begun.append(state.step), save(state, *args, **options))
        with loop.saver.alongside():
            for batch, seconds in loop.stream:
                info = loop.train_step(batch, seconds)
                for callback in loop._due(info.step):
                    callback.on_step_end(loop, info)
                if loop.is_over():
                    return begun

    first, second = Workers(2).run(work)
    assert first == second and len(first) == 2
