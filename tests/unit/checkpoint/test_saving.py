"""Checkpoints that are written while training goes on: what they hold, when they count, and what waits for them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading

import pytest

from lm_experiments_tools.checkpoint import saving, tree, writer
from lm_experiments_tools.checkpoint.manifest import read_manifest, verify
from lm_experiments_tools.errors import RunError
from tests.helpers.loops import At
from tests.helpers.saved_runs import contents, steps, train
from tests.helpers.toys import TinyLabeller


@pytest.fixture
def held_writes(monkeypatch):
    """Writing in the background waits for this event; it is set in the end, so that no test hangs."""
    event, original = threading.Event(), tree.WorkersFiles.write

    def write(self):
        assert threading.current_thread() is not threading.main_thread()
        assert event.wait(30)
        original(self)

    monkeypatch.setattr(tree.WorkersFiles, "write", write)
    yield event
    event.set()


@pytest.fixture
def saved(monkeypatch):
    """Steps of the checkpoints that were begun."""
    found, original = [], saving.Saver.save
    monkeypatch.setattr(
        saving.Saver, "save", lambda self, state, *a, **k: (found.append(state.step), original(self, state, *a, **k))
    )
    return found


def test_training_goes_on_while_a_checkpoint_of_its_own_step_is_written(tmp_path, held_writes):
    seen = []

    def look(loop):
        seen.extend(steps(tmp_path / "held"))
        held_writes.set()

    train(tmp_path / "held", [At(3, look)])  # a step and an update after the save of step 2 began
    assert seen == [] and steps(tmp_path / "held") == [2, 4, 6]
    train(tmp_path / "waited", save_in_background=False)
    assert contents(tmp_path / "held") == contents(tmp_path / "waited")
    for entry in (tmp_path / "held" / "checkpoints").iterdir():
        verify(entry)


def test_without_the_flag_training_waits_for_the_files(tmp_path):
    seen = []
    train(tmp_path, [At(2, lambda loop: seen.extend(steps(tmp_path)))], save_in_background=False)
    assert seen == [2]


def test_a_second_checkpoint_waits_for_the_first(tmp_path, held_writes, monkeypatch):
    complete = []
    original = saving.CheckpointWriter.begin
    monkeypatch.setattr(
        saving.CheckpointWriter,
        "begin",
        lambda self, step: (complete.append(steps(tmp_path)), original(self, step))[1],
    )
    train(tmp_path, [At(1, lambda loop: threading.Timer(0.3, held_writes.set).start())], save_interval=1, iters=3)
    assert complete == [[], [1], [1, 2]] and steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    "save_interval, valid_interval, best", [(2, 4, False), (3, 3, True), (6, 4, True), (6, 1, True)]
)
def test_the_last_step_is_saved_once_with_all_that_ends_a_run(tmp_path, saved, save_interval, valid_interval, best):
    settings = {"save_best": best, "log_interval": 4, "valid_interval": valid_interval}
    loop = train(tmp_path, save_interval=save_interval, **settings)
    assert saved.count(6) == 1 and len(saved) == len(set(saved)), saved
    assert loop.state.last_validated_step == 6
    last = (tmp_path / "last").resolve()
    assert read_manifest(last)["step"] == 6
    if best:
        assert (tmp_path / "best").resolve().name == f"step_{loop.state.best_step:06d}"
    count = len(saved)
    train(tmp_path, save_interval=save_interval, **settings)
    assert len(saved) == count, "a finished run has nothing to save"


def test_a_full_disk_in_the_background_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    original, ended = tree.save_file, []

    def full(tensors, file, metadata=None):
        if "step_000004" in str(file) and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        original(tensors, file, metadata=metadata)

    monkeypatch.setattr(tree, "save_file", full)
    wait = At(4, lambda loop: ended.append(loop.saver._writing.exception()))
    sentence = (
        "the checkpoint of step 4 was not written to .*: No space left on device .*earlier checkpoints are untouched"
    )
    with pytest.raises(RunError, match=sentence) as failure:
        train(tmp_path, [wait], iters=1000, save_interval=2)
    assert failure.value.step == 4, "the step that learns of it makes no update"
    assert steps(tmp_path) == [2] and (tmp_path / "last").resolve().name == "step_000002"
    verify((tmp_path / "last").resolve())
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_older_checkpoints_and_links_stay_until_the_new_one_is_complete(tmp_path, held_writes):
    held_writes.set()
    train(tmp_path, iters=4, keep_checkpoints=1)
    held_writes.clear()
    seen = []

    def look(loop):
        seen.append((steps(tmp_path), (tmp_path / "last").resolve().name))
        held_writes.set()

    train(tmp_path, [At(7, look)], iters=8, keep_checkpoints=1)
    assert seen == [([4], "step_000004")]
    assert steps(tmp_path) == [8] and (tmp_path / "last").resolve().name == "step_000008"


@pytest.mark.parametrize("how", ["exception", "signal"])
def test_whatever_ends_training_waits_for_the_checkpoint_in_hand(tmp_path, held_writes, how):
    def end(loop):
        threading.Timer(0.3, held_writes.set).start()
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError if how == "exception" else SystemExit):
        train(tmp_path, [At(3, end)])
    assert steps(tmp_path) == ([2] if how == "exception" else [2, 3])
    verify((tmp_path / "last").resolve())


def end_of(folder):
    """sha256 of the files of the last checkpoint, after a run there has gone on to step 7."""
    train(folder, model=TinyLabeller(), iters=7, keep_checkpoints=1)
    assert (folder / "last").resolve().name == "step_000007"
    return contents(folder)["step_000007"]


MOVES = "rename", "replace", "unlink", "rmdir"


def test_a_kill_at_any_moment_of_writing_leaves_a_run_that_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Copies of the run directory before each change of it by the writing thread: what a SIGKILL there would leave."""
    run, copies = tmp_path / "run", []

    def copied_before(module, name):
        original = getattr(module, name)

        def wrapped(*args, **options):
            if threading.current_thread() is not threading.main_thread():
                copies.append(tmp_path / f"before_{name}_{len(copies)}")
                shutil.copytree(run, copies[-1], symlinks=True)
            return original(*args, **options)

        monkeypatch.setattr(module, name, wrapped)

    whole = end_of(tmp_path / "whole")
    train(run, model=TinyLabeller(), iters=3, keep_checkpoints=1)
    for module, name in ((tree, "save_file"), (writer, "write_atomic"), *((os, name) for name in MOVES)):
        copied_before(module, name)
    train(run, model=TinyLabeller(), iters=4, keep_checkpoints=1)
    monkeypatch.undo()
    names = {path.name.rsplit("_", 1)[0] for path in copies}
    assert names == {f"before_{name}" for name in ("save_file", "write_atomic", *MOVES)}
    for path in copies:
        assert steps(path), path
        assert end_of(path) == whole, path
