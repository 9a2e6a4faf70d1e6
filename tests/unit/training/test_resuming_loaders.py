"""A resumed run reads what an uninterrupted one would have read: loaders with a state, and plain ones by skipping."""

from __future__ import annotations

import os
import random
import signal
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, default_collate

from lm_experiments_tools.checkpoint.train_state import TrainState
from lm_experiments_tools.checkpoint.tree import load_tree, save_tree
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training import batches
from lm_experiments_tools.training.generators import seed_all
from tests.helpers.loops import At, make_loop
from tests.helpers.toys import RaggedPairs, SeekableBatches, tiny_t5, weights_of

ROWS, STEPS = 13, 10  # of 4 rows: two and a half epochs


class NoisyRows(RaggedPairs):
    """Replaces a token at random, by the global generator of the process or of the loader's worker."""

    def __getitem__(self, number):
        row = super().__getitem__(number)
        return {**row, "input_ids": torch.where(torch.rand(row["input_ids"].shape) < 0.3, 1, row["input_ids"])}


def noisy_collate(rows):
    batch = default_collate(rows)
    batch["input_ids"][:, 0] = torch.from_numpy(np.random.randint(1, 60, len(rows)))
    return batch


class Stateful:
    """A loader with the interface of torchdata's StatefulDataLoader, which holds its order in its state."""

    def __init__(self, data):
        self.data, self.rng, self.used, self.order, self.loaded = data, random.Random(5), 0, [], False

    def state_dict(self):
        return {"used": self.used, "order": list(self.order), "rng": list(self.rng.getstate()[1])}

    def load_state_dict(self, state):
        self.used, self.order, self.loaded = state["used"], list(state["order"]), True
        self.rng.setstate((3, tuple(state["rng"]), None))

    def __iter__(self):
        if not self.loaded:
            self.used, self.order = 0, self.rng.sample(range(ROWS), ROWS)
        self.loaded = False
        while self.used < ROWS:
            rows, self.used = self.order[self.used : self.used + 4], self.used + 4
            yield self.data.batch(rows)


class FastForward:
    """torchdata's StatefulDataLoader over a sampler without state: it draws the order again, and skips in it."""

    def __init__(self, data):
        self.loader, self.used, self.skip = DataLoader(data, batch_size=4, shuffle=True), 0, 0

    def state_dict(self):
        return {"used": self.used}

    def load_state_dict(self, state):
        self.skip = state["used"]

    def __iter__(self):
        batches, self.used, self.skip = iter(self.loader), self.skip, 0
        for _ in range(self.used):
            next(batches)
        return self._rest(batches)

    def _rest(self, batches):
        for batch in batches:
            self.used += 1
            yield batch


def generator():
    return torch.Generator().manual_seed(3)


def prepared(data, seedable=True):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(data, batch_size=4, shuffle=True))


def of_a_worker(data):
    sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=3)
    return DataLoader(data, batch_size=4, sampler=sampler)


LOADERS = {
    "the global generator": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "a generator": lambda data: DataLoader(data, batch_size=4, shuffle=True, generator=generator()),
    "a sampler's": lambda data: DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=generator())),
    "a batch sampler's": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data, generator=generator()), 4, drop_last=False)
    ),
    "with replacement": lambda data: DataLoader(
        data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=70, generator=generator())
    ),
    "the epoch": of_a_worker,
    "noisy rows": lambda data: DataLoader(NoisyRows(ROWS), batch_size=4, shuffle=True),
    "a noisy collate function": lambda data: DataLoader(data, batch_size=4, shuffle=True, collate_fn=noisy_collate),
    "noisy rows of workers": lambda data: DataLoader(NoisyRows(ROWS), batch_size=4, shuffle=True, num_workers=2),
    "persistent workers": lambda data: DataLoader(
        data, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "prepared": prepared,
    "prepared, not seedable": lambda data: prepared(data, seedable=False),
    "its own state": Stateful,
    "its own position": FastForward,
}


def run(path, make_loader, iters, transform=None, callbacks=(), wrap=lambda function: function):
    """The first column of all batches that a run saw, and its last weights."""
    seen = []

    def note(batch):
        seen.append(batch["input_ids"][:, :3].tolist())
        return transform(batch) if transform else batch

    torch.manual_seed(7)
    model = tiny_t5(dropout=0.3)
    options = {"batch_transform_fn": wrap(note), "callbacks": callbacks, "log_interval": 50}
    make_loop(model, loader=make_loader(RaggedPairs(ROWS)), iters=iters, model_path=path, **options).train()
    return seen, weights_of(model)


def read(path, make_loader, stops):
    """The first columns of the batches of a stream that is saved, and made anew, after each number in `stops`."""
    seen = []
    for stop in stops:
        seed_all(7)
        stream = batches.BatchStream(make_loader(RaggedPairs(ROWS)))
        if seen:
            state = load_tree(path / "state")
            stream.seek(TrainState(), state["stream"])
            stream.restore_random_state(state["random"])
        for batch, _ in stream:
            seen.append(batch["input_ids"][:, :3].tolist())
            torch.rand(3)  # as dropout
            if len(seen) == stop:
                break
        save_tree(path / "state", {"stream": stream.state_dict(), "random": stream.random_state()})
    return seen


@pytest.mark.parametrize("name", LOADERS)
def test_a_restart_reads_on_where_the_run_stopped(tmp_path, name):
    whole = read(tmp_path, LOADERS[name], [STEPS])
    assert read(tmp_path, LOADERS[name], [3, 6, 8, STEPS]) == whole  # within, and at the end of, an epoch


def noisy(batch):
    return {**batch, "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.1, 1, batch["input_ids"])}


@pytest.mark.parametrize(
    ("name", "at"),  # the batch in whose step the run stops is the last of an epoch, the first of one, another
    [
        ("the global generator", 2), ("a generator", 4), ("its own state", 4), ("seek and a partial function", 3),
    ],
)  # fmt: skip
def test_a_step_whose_batch_was_read_is_finished_after_a_signal(tmp_path, name, at):
    """A loader with `seek` draws nothing, but the function that changes its batches does."""
    make_loader = LOADERS.get(name, lambda data: SeekableBatches(data, 4))
    wrap = partial if "partial" in name else lambda function: function
    whole, weights = run(tmp_path / "whole", make_loader, 8, noisy, wrap=wrap)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "parts", make_loader, 8, noisy, [At(at, lambda _: os.kill(os.getpid(), signal.SIGTERM))], wrap)
    assert stop.value.code == 143
    checkpoints = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert checkpoints == [f"step_{at + 1:06d}"]
    seen, continued = run(tmp_path / "parts", make_loader, 8, noisy, wrap=wrap)
    assert seen == whole[at + 1 :]
    assert all(torch.equal(weights[n], continued[n]) for n in weights)


def test_a_loaders_state_that_no_checkpoint_can_hold_is_named_at_the_first_save(tmp_path):
    class Odd(Stateful):
        def state_dict(self):
            return {**super().state_dict(), "lock": object()}

    with pytest.raises(
        UserError, match=r"\['stream'\]\['loader'\]\['lock'\] is a builtins.object, which a checkpoint"
    ):
        run(tmp_path, Odd, 2)


def test_a_loader_that_gives_none_is_refused():
    """`collate_fn` returns None for a bad batch: the rest of the epoch must not be lost in silence."""
    stream = iter(batches.BatchStream([{"input_ids": torch.ones(2, 3)}, None, {"input_ids": torch.ones(2, 3)}]))
    next(stream)
    with pytest.raises(UserError, match="gave None in place of a batch in epoch 0"):
        next(stream)
