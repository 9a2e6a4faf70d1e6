"""A resumed run reads what an uninterrupted one would have read, whatever its loader draws its order from."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from lm_experiments_tools.checkpoint.train_state import TrainState
from lm_experiments_tools.checkpoint.tree import load_tree, save_tree
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training import batches
from lm_experiments_tools.training.generators import random_state
from tests.helpers.loops import At, make_loop
from tests.helpers.toys import RaggedPairs, SeekableBatches, tiny_t5, weights_of

ROWS, STEPS = 13, 10  # of 4 rows: two and a half epochs


class DrawnOrder:
    """A sampler of one's own: an order from `draw`, and a place in it that a fresh one lacks."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return ROWS

    def __iter__(self):
        for _ in range(ROWS):
            yield int(self.draw(ROWS))


class EpochOrder:
    """A sampler that counts its epochs itself."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        yield from np.random.default_rng(self.epoch).permutation(ROWS).tolist()
        self.epoch += 1

    def __len__(self):
        return ROWS


class NoisyCollate:
    """Replaces tokens at random, by a generator made when it is first needed, as transformers' collators do."""

    generator = None

    def __call__(self, rows):
        if self.generator is None:
            self.generator = np.random.default_rng(3)
        batch = default_collate(rows)
        batch["input_ids"][:, 0] = torch.from_numpy(self.generator.integers(1, 60, len(rows)))
        return batch


class Stateful:
    """A loader with the interface of torchdata's StatefulDataLoader, which no replay could put back in its place."""

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


def generator():
    return torch.Generator().manual_seed(3)


def prepared(data, seedable=True):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(data, batch_size=4, shuffle=True))


def in_batches(draw):
    return lambda data: DataLoader(data, batch_sampler=BatchSampler(DrawnOrder(draw()), 4, drop_last=False))


def draw_from_the_module(count):
    return ORDER.integers(count)


def from_the_module():
    global ORDER
    ORDER = np.random.default_rng(3)
    return draw_from_the_module


def from_a_closure():
    rng = random.Random(3)
    return lambda count: [rng.randrange(count) for _ in range(1)][0]


class Slotted:
    __slots__ = ("rng",)

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __call__(self, count):
        return self.rng.integers(count)


class OneOfMany:
    def __init__(self):
        self.rngs = [random.Random(seed) for seed in range(100)]

    def __call__(self, count):
        return self.rngs[70].randrange(count)


def of_a_class():
    class Draw:
        rng = random.Random(3)

        def __call__(self, count):
            return self.rng.randrange(count)

    return Draw()


def of_a_default():
    def draw(count, rng=np.random.default_rng(3)):  # noqa: B008
        return rng.integers(count)

    return draw


LOADERS = {
    "a generator": lambda data: DataLoader(data, batch_size=4, shuffle=True, generator=generator()),
    "a sampler's": lambda data: DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=generator())),
    "with replacement": lambda data: DataLoader(
        data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=70, generator=generator())
    ),
    "numpy's": in_batches(lambda: np.random.default_rng(3).integers),
    "numpy's old": in_batches(lambda: np.random.RandomState(3).randint),
    "Python's": in_batches(lambda: random.Random(3).randrange),
    "a module's": in_batches(from_the_module),
    "a closure's": in_batches(from_a_closure),
    "in __slots__": in_batches(Slotted),
    "in a long list": in_batches(OneOfMany),
    "a class's": in_batches(of_a_class),
    "a default's": in_batches(of_a_default),
    "its own epochs": lambda data: DataLoader(data, batch_size=4, sampler=EpochOrder()),
    "a collate function's": lambda data: DataLoader(data, batch_size=4, shuffle=True, collate_fn=NoisyCollate()),
    "persistent workers": lambda data: DataLoader(
        data, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "prepared": prepared,
    "prepared, not seedable": lambda data: prepared(data, seedable=False),
    "its own state": Stateful,
}


def run(path, make_loader, iters, transform=None, callbacks=()):
    """The first column of all batches that a run saw, and its last weights."""
    seen = []

    def note(batch):
        seen.append(batch["input_ids"][:, :3].tolist())
        return transform(batch) if transform else batch

    torch.manual_seed(7)
    model = tiny_t5(dropout=0.3)
    options = {"batch_transform_fn": note, "callbacks": callbacks, "log_interval": 50}
    make_loop(model, loader=make_loader(RaggedPairs(ROWS)), iters=iters, model_path=path, **options).train()
    return seen, weights_of(model)


def read(path, make_loader, stops):
    """The first columns of the batches of a stream that is saved, and made anew, after each number in `stops`."""
    seen = []
    for stop in stops:
        torch.manual_seed(7)
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
def test_a_restart_reads_on_whatever_the_loader_draws_its_order_from(tmp_path, name):
    whole = read(tmp_path, LOADERS[name], [STEPS])
    assert read(tmp_path, LOADERS[name], [3, 6, 8, STEPS]) == whole  # within, and at the end of, an epoch


@pytest.mark.parametrize(
    ("name", "at"),  # the batch to be put back is the last of an epoch, the first of one, another
    [
        ("a generator", 2), ("a generator", 3), ("a generator", 4), ("a collate function's", 3), ("prepared", 2),
        ("its own state", 4),
    ],
)  # fmt: skip
def test_a_signal_stops_before_the_forward_pass_and_its_batch_is_read_again(tmp_path, name, at):
    def noisy(batch):
        return {**batch, "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.1, 1, batch["input_ids"])}

    passes = []

    def kill(loop):
        os.kill(os.getpid(), signal.SIGTERM)
        loop.backend.model.register_forward_pre_hook(lambda *_: passes.append(1))

    whole, weights = run(tmp_path / "whole", LOADERS[name], 8, noisy)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "parts", LOADERS[name], 8, noisy, [At(at, kill)])
    assert stop.value.code == 143 and passes == []
    checkpoints = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert checkpoints == [f"step_{at:06d}"]
    seen, continued = run(tmp_path / "parts", LOADERS[name], 8, noisy)
    assert seen == whole[at:]
    assert all(torch.equal(weights[n], continued[n]) for n in weights)


def test_a_loader_that_draws_from_the_system_is_refused_by_name(tmp_path):
    loader = in_batches(lambda: random.SystemRandom().randrange)(RaggedPairs(ROWS))
    with pytest.raises(UserError, match=r"batch_sampler\.sampler\.draw\.__self__, a random\.SystemRandom"):
        run(tmp_path, lambda data: loader, 2)


def test_workers_that_keep_a_datasets_generator_over_epochs_are_refused(tmp_path):
    class Noisy(RaggedPairs):
        rng = None

    data = Noisy(ROWS)
    data.rng = np.random.default_rng(3)
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    with pytest.raises(UserError, match=r"copies of dataset\.rng"):
        run(tmp_path, lambda data: loader, 2)


def test_a_loaders_state_that_no_checkpoint_can_hold_is_named_at_the_first_save(tmp_path):
    class Odd(Stateful):
        def state_dict(self):
            return {**super().state_dict(), "lock": object()}

    with pytest.raises(
        UserError, match=r"\['stream'\]\['loader'\]\['lock'\] is a builtins.object, which a checkpoint"
    ):
        run(tmp_path, Odd, 2)


@pytest.mark.parametrize(
    ("loader", "transform", "captures"), [("seeks", None, 0), ("seeks", dict, 5), ("a generator", None, 5)]
)
def test_random_states_are_captured_at_each_batch_only_where_fetching_it_may_draw(
    monkeypatch, loader, transform, captures
):
    made = []
    monkeypatch.setattr(batches, "random_state", lambda: made.append(1) or random_state())
    data = RaggedPairs(20)
    loader = SeekableBatches(data, 4) if loader == "seeks" else LOADERS[loader](data)
    make_loop(loader=loader, iters=5, log_interval=50, batch_transform_fn=transform).train()
    assert len(made) == captures + (not hasattr(loader, "seek"))  # and at the epoch's start


def test_a_loader_that_gives_none_is_refused():
    """`collate_fn` returns None for a bad batch: the rest of the epoch must not be lost in silence."""
    stream = iter(batches.BatchStream([{"input_ids": torch.ones(2, 3)}, None, {"input_ids": torch.ones(2, 3)}]))
    next(stream)
    with pytest.raises(UserError, match="gave None in place of a batch in epoch 0"):
        next(stream)
