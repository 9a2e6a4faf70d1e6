"""A disk that fails at any call of a save: the checkpoint before it stays whole, and the run ends in a sentence.

`make damage` has every fault at every call, of saves that training waits for and of those in the background.
"""

from __future__ import annotations

import shutil

import pytest

from lm_experiments_tools.checkpoint.finding import find_newest_valid
from lm_experiments_tools.checkpoint.manifest import verify
from lm_experiments_tools.checkpoint.saving import Saver
from lm_experiments_tools.checkpoint.writer import CheckpointWriteError, CheckpointWriter
from lm_experiments_tools.errors import RunError
from tests.helpers.checkpoint_toys import flip, write
from tests.helpers.faulty_disk import FAULTS, FaultyDisk
from tests.helpers.saved_runs import end_of_run, train
from tests.helpers.toys import TinyLabeller


def go_on(run, iters, **args):
    return train(run, model=TinyLabeller(), iters=iters, save_interval=2, keep_checkpoints=1, **args)


def tidy(run):
    """One whole checkpoint, which is removed when the next one is there."""
    go_on(run, 4)


def untidy(run):
    """What the next save has to replace (a damaged step 6), move aside (a later step) and clear away (of a kill)."""
    go_on(run, 4)
    kept = run / "checkpoints" / "step_000004"
    for name in ("step_000006", "step_000012", ".tmp-step_000008", ".old-step_000002"):
        shutil.copytree(kept, kept.with_name(name))
        flip("model.safetensors", 0.5)(kept.with_name(name))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs to step 4, by name, and the end of one that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs")
    for before in (tidy, untidy):
        before(folder / before.__name__)
    go_on(folder / "whole", 8)
    return folder, end_of_run(folder / "whole")


@pytest.fixture(scope="module")
def counts():
    """Faults by what was asked and how the run ended."""
    found: dict[str, list[int]] = {}
    yield found
    if found:
        print("\n| save | fault | calls | went on | ended in a sentence | whole, and continued bit for bit |")
        print("|---|---|---|---|---|---|")
        rows = ((asked, went_on, ended) for asked, (went_on, ended) in found.items())
        print(*(f"| {a} | {w + e} | {w} | {e} | {w + e} |" for a, w, e in rows), sep="\n")


def save_step_6(run, fault, at, in_background, lasting):
    """Continue to step 6 on a disk that fails while that is saved: the disk, and the sentence in which it ended."""
    disk, finish, begin = (
        FaultyDisk(run / "checkpoints", fault, at, lasting=lasting),
        Saver._finish_writing,
        CheckpointWriter.begin,
    )

    def beginning(writer, step):
        disk.active = True
        return begin(writer, step)

    def finished(saver):
        try:
            finish(saver)
        finally:
            disk.active = False

    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        patch.setattr(CheckpointWriter, "begin", beginning)
        patch.setattr(Saver, "_finish_writing", finished)
        try:
            go_on(run, 6, save_in_background=in_background)
        except RunError as error:
            return disk, str(error)
        finally:
            disk.active = False
    return disk, None


def check(runs, tmp_path, before, fault, at, in_background, lasting=False):
    """One fault: the sentence in which the run ended, None if it went on; False where there is no such call."""
    folder, whole = runs
    run = shutil.copytree(folder / before, tmp_path / f"{at}", symlinks=True)
    disk, ended = save_step_6(run, fault, at, in_background, lasting)
    if len(disk.calls) < at:
        shutil.rmtree(run)
        return False
    where = f"call {at}: {disk.calls[at - 1]}"
    if ended is not None:
        assert "\n" not in ended and len(ended) > 40, (where, ended)
    newest = find_newest_valid(run / "checkpoints")
    assert newest is not None and newest.name in ("step_000004", "step_000006"), where
    if ended is None:
        assert newest.name == "step_000006", where
    go_on(run, 8)
    assert end_of_run(run) == whole, where
    left = [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("superseded-")]
    assert left == ["step_000008"], (where, left)
    shutil.rmtree(run)
    return ended


def every_call(runs, tmp_path, counts, before, fault, in_background, lasting=False, first=1, by=1):
    went_on = ended = 0
    at = first
    while (end := check(runs, tmp_path, before, fault, at, in_background, lasting)) is not False:
        went_on, ended, at = went_on + (end is None), ended + (end is not None), at + by
    assert at > 90
    how = "in the background" if in_background else "waited for"
    counts[f"{before}, {how} | {fault}{' from there on' if lasting else ''}"] = (went_on, ended)
    return went_on, ended


@pytest.mark.parametrize(
    "first, fault",
    [
        pytest.param(first, fault, marks=[] if first > 2 else [pytest.mark.slow])
        for first, fault in enumerate(FAULTS, start=1)
    ],
)
def test_a_fault_at_some_calls_of_a_save_loses_nothing(runs, tmp_path, counts, first, fault):
    every_call(runs, tmp_path, counts, "tidy", fault, first % 2 == 0, first=first, by=31)


@pytest.mark.parametrize("fault, earlier", [("EIO", 2), pytest.param("short write", 1, marks=pytest.mark.slow)])
def test_a_fault_at_any_call_of_a_writer_leaves_the_checkpoint_before(tmp_path, fault, earlier, caplog):
    """Of an earlier step, or of the same one, which is replaced; without a run, so that each call is affordable."""
    for at in range(1, 200):
        root = tmp_path / str(at)
        kept, disk = write(root, earlier, keep=1), FaultyDisk(root, fault, at)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            disk.active, saved = True, False
            try:
                write(root, 2, keep=1)
                saved = True
            except CheckpointWriteError as error:
                assert "earlier checkpoints are untouched" in str(error), disk.calls[-1]
            except OSError:  # of a call after the commit
                saved = True
            finally:
                disk.active = False
        caplog.clear()
        newest = find_newest_valid(root)
        assert not caplog.messages and not list(root.glob(".tmp-step_*")), disk.calls[-1]
        if saved or earlier == 2:
            assert newest.name.endswith("step_000002"), disk.calls[-1]
        else:
            verify(kept)
        shutil.rmtree(root)
        if len(disk.calls) < at:
            break
    assert 40 < at < 199


@pytest.mark.slow
@pytest.mark.parametrize("before, in_background", [("tidy", False), ("untidy", True)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_call_of_a_save_loses_nothing(runs, tmp_path, counts, fault, before, in_background):
    every_call(runs, tmp_path, counts, before, fault, in_background)


@pytest.mark.slow
def test_a_disk_that_takes_nothing_from_any_call_on_loses_nothing(runs, tmp_path, counts):
    every_call(runs, tmp_path, counts, "tidy", "ENOSPC", True, lasting=True)
