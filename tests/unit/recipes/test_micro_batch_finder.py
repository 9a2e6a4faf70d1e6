"""The largest micro-batch that fits and the fastest one, where torch's own allocator refuses the others."""

import json
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.training import ExperimentArgs
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.planning.fit import is_out_of_memory
from lm_experiments_tools.recipes import micro_batch_finder as finder
from lm_experiments_tools.recipes.micro_batch_finder import find_micro_batch
from lm_experiments_tools.training.trainer import TrainingLoop


class Hungry(nn.Module):
    """Asks for more memory than there is from `most` + 1 rows on; its clock says `seconds(rows)` for a pass."""

    def __init__(self, most, seconds=lambda rows: 1.0):
        super().__init__()
        self.most, self.seconds, self.weight, self.seen = most, seconds, nn.Parameter(torch.ones(3)), set()
        self.clock = 0.0

    def forward(self, input_ids):
        self.seen.add(len(input_ids))
        self.clock += self.seconds(len(input_ids))
        if len(input_ids) > self.most:
            torch.empty(2**60, dtype=torch.uint8)
        return {"loss": self.weight.square().sum() + 0 * input_ids.float().mean()}


def found(monkeypatch, model, rows=24, batch_size=4, folder=None, optimizer=torch.optim.SGD):
    args = ExperimentArgs(
        model_cfg="none", lr=0.1, batch_size=batch_size, gradient_accumulation_steps=rows // batch_size
    )
    batches = [{"input_ids": torch.arange(5 * rows).view(rows, 5)} for _ in range(4)]
    monkeypatch.setattr(finder, "time", SimpleNamespace(perf_counter=lambda: model.clock))
    backend = LocalBackend(device=torch.device("cpu"))
    trainer = TrainingLoop(args, backend, model, optimizer(model.parameters(), lr=0.1), batches)
    return find_micro_batch(trainer, folder)


@pytest.mark.parametrize(
    ("most", "batch_size"), [(1, 1), (1, 24), (2, 6), (5, 1), (7, 6), (7, 24), (11, 1), (24, 24), (100, 6)]
)
def test_the_largest_divisor_that_the_allocator_grants_is_found(most, batch_size, tmp_path, monkeypatch):
    model = Hungry(most)  # as long for any number: the largest is the fastest
    best = found(monkeypatch, model, batch_size=batch_size, folder=tmp_path)
    largest = max(size for size in (1, 2, 3, 4, 6, 8, 12, 24) if size <= most)
    written = json.loads((tmp_path / "find_micro_batch.json").read_text())
    assert written["largest_that_fits"] == largest
    assert all(held == (int(size) <= most) for size, held in written["fits"].items())
    assert best == written["batch_size"] == largest
    assert written["batch_size"] * written["gradient_accumulation_steps"] == 24


def test_the_fastest_that_fits_is_proposed_and_not_the_largest(tmp_path, monkeypatch):
    best = found(monkeypatch, Hungry(12, lambda rows: 1 + max(0, rows - 2) ** 2), folder=tmp_path)
    written = json.loads((tmp_path / "find_micro_batch.json").read_text())
    assert written["largest_that_fits"] == 12 and best == written["batch_size"] == 2
    assert written["tokens_per_second"] == pytest.approx(
        {str(size): 24 * 5 / (24 // size * (1 + max(0, size - 2) ** 2)) for size in (1, 2, 3, 4, 6, 8, 12)}
    )


def test_bisection_tries_few_sizes(monkeypatch):
    model = Hungry(70)
    found(monkeypatch, model, rows=720, batch_size=1)  # 30 divisors
    assert len(model.seen) <= 12


def test_not_even_one_row(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not even micro-batches of one row fit"):
        found(monkeypatch, Hungry(0), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_optimizer_without_room_says_so(monkeypatch):
    class Greedy(torch.optim.SGD):
        def step(self, closure=None):
            torch.empty(2**60, dtype=torch.uint8)

    with pytest.raises(RunError, match=r"out of memory in an update.*DefaultCPUAllocator"):
        found(monkeypatch, Hungry(24), optimizer=Greedy)


def test_other_errors_stay_what_they_are(monkeypatch):
    class Wrong(Hungry):
        def forward(self, input_ids):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        found(monkeypatch, Wrong(1))
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_cpu_refuses_what_it_does_not_have_instead_of_being_killed(monkeypatch, tmp_path):
    """Each row takes 256 MiB of addresses, which Linux grants until far more are touched than there are."""
    process = psutil.Process().memory_info().rss
    monkeypatch.setattr(finder, "memory_of", lambda device: (process + 0.9 * 2**30) / finder.USABLE)

    class Wide(Hungry):
        def forward(self, input_ids):
            held = torch.empty(len(input_ids) * 2**28, dtype=torch.uint8)
            return {"loss": super().forward(input_ids)["loss"] + 0 * held[:1].float().sum()}

    found(monkeypatch, Wide(100), rows=8, folder=tmp_path)
    assert json.loads((tmp_path / "find_micro_batch.json").read_text())["largest_that_fits"] == 2


def test_sharded_weights_are_refused_in_a_sentence():
    class Sharded(LocalBackend):
        shards_model, wrapping = True, "FSDP2"

    model = Hungry(4)
    args = ExperimentArgs(model_cfg="none", lr=0.1)
    trainer = TrainingLoop(args, Sharded(), model, torch.optim.SGD(model.parameters(), lr=0.1), [])
    with pytest.raises(UserError, match="--find_micro_batch does not work with FSDP2"):
        find_micro_batch(trainer, None)
