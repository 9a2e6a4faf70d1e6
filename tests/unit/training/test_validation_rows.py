"""Each row of an evaluation counts once, however many workers' samplers repeat it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.training.validation import counted
from tests.helpers.loops import make_loop
from tests.helpers.thread_workers import Workers

CASES = list(itertools.product([1, 5, 9, 12], [1, 2, 4], [1, 2, 3]))  # rows, workers, batch size


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"number": torch.tensor(index)}


def backend_of(rank, workers):
    backend = LocalBackend()
    backend.rank, backend.world_size = rank, workers
    return backend


def rows_counted(loaders):
    """Numbers of the rows that count, of all workers; and how many were read."""
    found, read = [], 0
    for rank, loader in enumerate(loaders):
        for batch, num_counted in counted(loader, backend_of(rank, len(loaders))):
            read += len(batch["number"])
            found += batch["number"][: num_counted(len(batch["number"]))].tolist()
    return sorted(found), read


@pytest.mark.parametrize("form", ["batch_size", "batch_sampler", "single rows"])
def test_rows_that_a_distributed_sampler_adds_do_not_count(form):
    filled = 0
    for count, workers, size in CASES:
        data, loaders = Numbers(count), []
        for rank in range(workers):
            sampler = DistributedSampler(data, num_replicas=workers, rank=rank, shuffle=count % 2 == 0)
            options = {
                "batch_size": {"batch_size": size, "sampler": sampler},
                "batch_sampler": {"batch_sampler": BatchSampler(sampler, size, drop_last=False)},
                "single rows": {"batch_size": None, "sampler": sampler, "collate_fn": of_one_row},
            }
            loaders.append(DataLoader(data, **options[form]))
        rows, read = rows_counted(loaders)
        assert rows == list(range(count)), (count, workers, size)
        filled += read - count
    assert filled > 0


def of_one_row(row):
    return {name: value[None] for name, value in row.items()}


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("even_batches", [False, True])
def test_rows_that_accelerate_adds_do_not_count(split_batches, even_batches):
    data_loader = pytest.importorskip("accelerate.data_loader")
    filled = 0
    for count, workers, size in CASES:
        whole = DataLoader(Numbers(count), batch_size=size * workers if split_batches else size)
        loaders = [
            data_loader.prepare_data_loader(
                whole, num_processes=workers, process_index=rank, put_on_device=False, split_batches=split_batches,
                even_batches=even_batches,
            )
            for rank in range(workers)
        ]  # fmt: skip
        for _ in range(2):  # again, as one is validated often
            rows, read = rows_counted(loaders)
            assert rows == list(range(count)), (count, workers, size)
        filled += read - count
    assert (filled > 0) == even_batches


class Parity(torch.nn.Module):
    """Scores a number by its remainders."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, number, labels=None):
        logits = torch.stack([number % 3, number % 2], -1) * self.weight
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def labelled(rows):
    numbers = torch.stack([row["number"] for row in rows])
    return {"number": numbers, "labels": numbers % 4 // 2}


def loop_of(backend):
    return make_loop(
        Parity(), None, None, backend=backend, batch_size=2,
        keep_for_metrics_fn=lambda batch, outputs: {"right": outputs["logits"].argmax(-1) == batch["labels"]},
        metrics_fn=lambda kept: {"accuracy": kept["right"].double().mean(), "rows": len(kept["right"])},
    )  # fmt: skip


def validated(backend, loader):
    """Loss, accuracy and numbers of rows as a loop validates them."""
    return loop_of(backend).validate(loader)


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("prepared", ["DistributedSampler", "Accelerate"])
def test_metrics_of_two_workers_are_those_of_one(count, prepared):
    data = Numbers(count)
    whole = DataLoader(data, batch_size=2, collate_fn=labelled)
    expected = validated(LocalBackend(), whole)
    assert expected["rows"] == count

    def work(backend):
        if prepared == "Accelerate":
            data_loader = pytest.importorskip("accelerate.data_loader")
            part = data_loader.prepare_data_loader(
                whole, num_processes=2, process_index=backend.rank, put_on_device=False, rng_types=()
            )
        else:
            sampler = DistributedSampler(data, num_replicas=2, rank=backend.rank, shuffle=False)
            part = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=labelled)
        return validated(backend, part)

    for values in Workers(2).run(work):
        assert values == pytest.approx(expected, rel=1e-6)


def test_rows_that_each_worker_reads_count_once_and_the_log_says_so_once(caplog):
    whole = DataLoader(Numbers(9), batch_size=2, collate_fn=labelled)
    expected = validated(LocalBackend(), whole)

    def work(backend):
        loop = loop_of(backend)
        return [loop.validate(DataLoader(Numbers(9), batch_size=2, collate_fn=labelled)) for _ in range(2)]

    with caplog.at_level("INFO"):
        for results in Workers(2).run(work):
            assert results == [pytest.approx(expected, rel=1e-6)] * 2
    assert caplog.text.count("each of the 2 workers reads all valid data, of which the rows of rank 0 count") == 1


def test_rows_of_a_loader_that_names_its_workers_all_count():
    class Part:
        def __init__(self, backend):
            self.rank, self.world_size = backend.rank, backend.world_size

        def __iter__(self):
            numbers = torch.arange(9)[self.rank :: self.world_size]
            return ({"number": part, "labels": part % 4 // 2} for part in numbers.split(2))

    expected = validated(LocalBackend(), DataLoader(Numbers(9), batch_size=2, collate_fn=labelled))
    for values in Workers(2).run(lambda backend: validated(backend, Part(backend))):
        assert values == pytest.approx(expected, rel=1e-6)
