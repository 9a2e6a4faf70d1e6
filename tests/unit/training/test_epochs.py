"""Each epoch has an order of its own, whoever holds what draws it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from tests.helpers.loops import make_loop
from tests.helpers.toys import RaggedPairs, TinyLabeller


class Noting(TinyLabeller):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, input_ids, labels):
        self.seen.append(input_ids.sum(1).tolist())
        return super().forward(input_ids, labels)


class LengthBatches(BatchSampler):
    """Batches in an order of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batches = list(super().__iter__())
        return iter([batches[(i + self.epoch) % len(batches)] for i in range(len(batches))])


class Shifted(Dataset):
    """Rows that begin elsewhere in each epoch."""

    epoch = 0

    def __init__(self):
        self.rows = RaggedPairs(8)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.rows[(index + 3 * self.epoch) % 8]


class Streamed(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (RaggedPairs(8)[int(i)] for i in torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)))


def loaders():
    data = RaggedPairs(8)

    def sampler():
        return DistributedSampler(data, 1, 0, seed=5)

    yield "sampler", DataLoader(data, 4, sampler=sampler())
    yield "sampler of batches", DataLoader(data, batch_sampler=BatchSampler(sampler(), 4, drop_last=False))
    yield "batch sampler", DataLoader(data, batch_sampler=LengthBatches(range(8), 4, drop_last=False))
    yield "dataset", DataLoader(Shifted(), 4)
    yield "part of a dataset", DataLoader(Subset(Shifted(), range(8)), 4)
    yield "stream", DataLoader(Streamed(), 4)


def trained_on(loader, **options):
    model = Noting()
    loop = make_loop(model, torch.optim.SGD, loader, batch_size=4, **options)
    del model.seen[:]
    loop.train()
    return model.seen[-options["iters"] :] if "model_path" not in options else model.seen


@pytest.mark.parametrize("name, loader", loaders(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_order_is_that_of_set_epoch(name, loader):
    found = trained_on(loader, iters=6)
    inner = loader.batch_sampler
    parts = [loader.sampler, inner, getattr(inner, "sampler", None), loader.dataset]
    parts.append(getattr(loader.dataset, "dataset", None))
    expected = []
    for epoch in range(3):
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        expected += [batch["input_ids"].sum(1).tolist() for batch in loader]
    assert found == expected and expected[:2] != expected[2:4] != expected[4:]


def test_a_resumed_run_goes_on_in_the_order_of_its_epoch(tmp_path):
    def loader():
        data = RaggedPairs(8)
        return DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0))

    whole = trained_on(loader(), iters=6)
    first = trained_on(loader(), iters=3, save_interval=3, model_path=tmp_path / "run")
    rest = trained_on(loader(), iters=6, model_path=tmp_path / "run")
    assert [*first[-3:], *rest[-3:]] == whole
