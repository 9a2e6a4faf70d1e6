"""Dataset and loaders: every token once an epoch, one order for any number of workers, exact resume."""

import threading
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lm_experiments_tools.data.dataset import Dataset, SampleDataset
from lm_experiments_tools.data.loader import TrainLoader, ValidLoader
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.span_corruption import SpanCorruption
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.errors import UserError

SENTINELS = np.arange(9_999, 9_899, -1)


def source(tokens, name="x"):
    return SimpleNamespace(tokens=np.asarray(tokens, np.uint16), fingerprint=name)


def dataset(num_tokens=1000, input_length=32, tokens=None, target_length=None, seed=0):
    """Every token is its own id, 10, 11, ..., so that a token can be recognised wherever it turns up."""
    tokens = source(np.arange(10, 10 + num_tokens)) if tokens is None else tokens
    objective = SpanCorruption.create(TokenIds(10_000, sentinel_ids=SENTINELS), input_length, target_length)
    return Dataset(TokenRows(tokens, objective, seed))


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def take(loader, count):
    return [next(loader) for _ in range(count)]


def test_noise_of_a_row_is_fresh_in_each_epoch():
    data = dataset(9000, input_length=128)
    epochs = [data.batch(np.arange(len(data)) + epoch * len(data))["input_ids"] >= 9_900 for epoch in range(3)]
    patterns = [{row.tobytes() for row in epoch} for epoch in epochs]  # where the sentinels stand
    assert sum(map(len, patterns)) == 3 * len(data)
    assert len(set.union(*patterns)) == 3 * len(data)


def test_target_length_is_a_limit():
    exact = dataset(5000, 512).members[0].objective
    assert (exact.row_length, exact.target_length) == (568, 114)
    assert dataset(5000, 512, target_length=192).members[0].objective.target_length == 114
    with pytest.raises(UserError, match=r"--target_seq_len 113 would cut the targets"):
        dataset(5000, 512, target_length=113)


@pytest.mark.parametrize("world_size", [2, 4])
def test_global_batches_are_the_same_for_any_number_of_workers(world_size):
    one = take(TrainLoader(dataset(), 8), 15)  # more than three epochs of 30
    ranks = [TrainLoader(dataset(), 8 // world_size, rank, world_size) for rank in range(world_size)]
    for expected in one:
        parts = [next(loader) for loader in ranks]
        for name, values in expected.items():
            # row k of rank r is global row k * world_size + r
            joined = torch.stack([part[name] for part in parts], dim=1).flatten(0, 1)
            assert torch.equal(joined, values)


@pytest.mark.parametrize("prefetch", [False, True])
def test_seek_equals_consuming(prefetch):
    batches = take(TrainLoader(dataset(), 6, 1, 2, prefetch=False), 12)
    loader = TrainLoader(dataset(), 6, 1, 2, prefetch=prefetch)
    for step in (5, 0, 11, 3, 4, 4):
        loader.seek(12 * step)
        assert loader.consumed_samples == 12 * step
        assert same(next(loader), batches[step])
        assert loader.consumed_samples == 12 * (step + 1)


def test_a_loader_goes_on_after_close():
    plain, closed = TrainLoader(dataset(), 5, prefetch=False), TrainLoader(dataset(), 5)
    assert all(same(*pair) for pair in zip(take(plain, 3), take(closed, 3), strict=True))
    closed.close()
    assert same(next(plain), next(closed))


def test_closing_ends_what_the_thread_waits_for():
    class Waiting(SampleDataset):
        fingerprint, samples_per_epoch, closed = "waiting", 100, threading.Event()

        def batch(self, samples):
            assert samples[0] == 0 or self.closed.wait(60.0)
            return {"labels": np.zeros((len(samples), 2), np.int64)}

        def close(self):
            self.closed.set()

    loader = TrainLoader(Waiting(), 4)
    next(loader)
    loader.close()
    assert loader._last.done() and Waiting.closed.is_set()


class Slow(SampleDataset):
    """Counts the batches that are made at the same time."""

    fingerprint, samples_per_epoch, now, most = "slow", 100, 0, 0

    def batch(self, samples):
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.05)
        self.now -= 1
        return {"labels": np.tile(samples[:, None], 2)}


def test_batches_are_never_made_at_the_same_time_however_often_a_loader_is_moved():
    loader, other = TrainLoader(Slow(), 4), TrainLoader(Slow(), 4)
    next(loader)
    loader.seek(20)
    loader.seek(40)
    assert next(loader)["labels"][0, 0] == 40 and loader.dataset.most == 1
    next(other)
    other.seek(8)
    other.close()
    assert other.dataset.now == 0, "nothing is made after the end"


def test_a_dropped_loader_leaves_neither_its_data_nor_a_thread():
    before, loader = {*threading.enumerate()}, TrainLoader(Slow(), 4)
    next(loader)
    data = weakref.ref(loader.dataset)
    del loader
    deadline = time.monotonic() + 20.0
    while (data() is not None or {*threading.enumerate()} - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert data() is None and {*threading.enumerate()} <= before


def test_an_exit_in_the_data_is_an_error_in_the_first_batch_too():
    class Exits(Slow):
        def batch(self, samples):
            raise SystemExit(0)

    with pytest.raises(RuntimeError, match="the data raised SystemExit: 0"):
        next(TrainLoader(Exits(), 4))


def test_an_error_in_the_background_reaches_the_caller():
    """An id too far in to be seen at the start."""
    tokens = np.full((1 << 20) + 100, 20)
    tokens[-100:] = 10_000
    loader = TrainLoader(dataset(tokens=source(tokens)), 1000)
    with pytest.raises(UserError, match="id 10000"):
        take(loader, 40)


@pytest.mark.parametrize(
    ("world_size", "rows", "num_samples"),
    [(1, 7, None), (2, 4, None), (3, 7, None), (4, 30, None), (3, 4, 13), (4, 8, 1), (2, 4, 10_000)],
)
def test_validation_reads_each_sample_once_on_any_number_of_workers(world_size, rows, num_samples):
    data = dataset()
    loaders = [ValidLoader(data, rows, rank, world_size, num_samples) for rank in range(world_size)]
    batches = [list(loader) for loader in loaders]
    assert {len(part) for part in batches} == {len(loader) for loader in loaders} == {len(batches[0])}
    seen = Counter()
    for batch in (batch for part in batches for batch in part):
        assert batch["input_ids"].shape[1] == 32 and batch["attention_mask"].any(dim=1).all()
        real = (batch["labels"] != -100).any(dim=1)
        assert real.all() or (len(real) == 1 and not real.any())  # filler is never mixed with samples
        seen.update(map(tuple, torch.cat([batch["input_ids"], batch["labels"]], dim=1)[real].tolist()))
    chosen = data.batch(np.arange(min(num_samples or 30, 30)))
    expected = Counter(map(tuple, np.concatenate([chosen["input_ids"], chosen["labels"]], axis=1).tolist()))
    assert seen == expected and set(seen.values()) == {1}


def test_the_next_validation_batch_is_made_while_one_is_used():
    data, made, asked = dataset(), [], threading.Event()
    batch = data.batch

    def noted(samples: np.ndarray) -> dict:
        made.append(samples.tolist())
        if len(made) == 2:
            asked.set()
        return batch(samples)

    data.batch = noted
    batches = iter(ValidLoader(data, 2))
    next(batches)
    assert asked.wait(10.0)
    batches.close()
    assert made == [[0, 1], [2, 3]]


def test_validation_noise_is_the_same_at_every_pass():
    loader = ValidLoader(dataset(), 8, 1, 2)
    assert all(same(*pair) for pair in zip(list(loader), list(loader), strict=True))


@pytest.mark.parametrize("error", [SystemExit(0), BaseException("a panic of Rust")])
def test_a_dataset_that_ends_its_thread_ends_the_run(error):
    """A SystemExit of the data is no end of the run with exit code 0, and no wait for a batch that never comes."""

    class Ending(SampleDataset):
        fingerprint, samples_per_epoch = "ending", 100

        def batch(self, samples):
            if samples[0] > 0:
                raise error
            return {"labels": np.zeros((len(samples), 2), np.int64)}

    loader = TrainLoader(Ending(), 4)
    next(loader)
    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        loader._following.result(timeout=20)
    assert caught.value.__cause__ is error
    with pytest.raises(RuntimeError, match="the data raised"):
        next(iter(ValidLoader(Ending(), 4, rank=1, world_size=2)))
