"""A skipped update names the parameters with a non-finite gradient; `--debug_non_finite` the first module."""

import logging

import pytest
import torch
from torch import nn

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.training.non_finite import report_skipped
from tests.helpers.thread_workers import Workers
from tests.helpers.toys import VOCABULARY_SIZE, RaggedPairs, SeekableBatches, weights_of
from tests.unit.training.test_running_ahead import make_loop


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


class Planted(nn.Module):
    """A linear layer that gives something infinite while it is armed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)
        self.kind, self.is_armed = kind, False
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes += 1
        x = self.drop(self.inner(x))
        if self.is_armed and self.kind == "output":
            return x + torch.inf
        return InfiniteGradient.apply(x) if self.is_armed and self.kind == "gradient" else x


class Stack(nn.Module):
    """An embedding, three layers of which the second is armed by the token 0, and a head."""

    def __init__(self, kind: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY_SIZE, 16), nn.Linear(16, VOCABULARY_SIZE)
        self.layers = nn.ModuleList([nn.Linear(16, 16), Planted(kind), nn.Linear(16, 16)])

    def forward(self, input_ids, labels):
        self.layers[1].is_armed = bool((input_ids == 0).any())
        x = self.embedding(input_ids).mean(1)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)[:, None].expand(-1, labels.shape[1], -1)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Armed(SeekableBatches):
    """Batches of which the third has the token 0 in its second micro-batch."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 2:
                batch["input_ids"][2, 0] = 0
            yield batch


def loop_of(kind: str, backend: LocalBackend | None = None, **args):
    loader = Armed(RaggedPairs(24), 4)
    return make_loop({"iters": 6, "log_interval": 6, **args}, Stack(kind), loader=loader, backend=backend)


def cpu() -> LocalBackend:
    return LocalBackend(device=torch.device("cpu"))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_parameters_with_a_non_finite_gradient_are_named(is_ahead, caplog):
    loop = loop_of("gradient", None if is_ahead else cpu())
    loop.train()
    names = "embedding.weight, layers.0.weight, layers.0.bias, layers.1.inner.weight, layers.1.inner.bias"
    expected = f"step 3: parameters whose gradient norm is not finite: {names}"
    assert [message for message in caplog.messages if "not finite" in message] == [expected]
    assert loop.state.skipped_updates == 1


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_gradient_that_overflows_in_the_sum_is_named_alone(is_ahead, caplog):
    loop = make_loop({"iters": 3, "log_interval": 3}, Stack(), backend=None if is_ahead else cpu())
    calls = []

    def overflow(last: bool) -> None:
        calls.extend([loop] * last)
        if last and len(calls) == 2:
            loop.backend.unwrap().head.weight.grad[0, 0] = torch.inf

    loop.backend.reduction.after_backward = overflow
    loop.train()
    assert "step 2: parameters whose gradient norm is not finite: head.weight" in caplog.messages
    assert loop.state.skipped_updates == 1


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("output", "step 3, rank 0: first not finite: layers.1 (Planted): its output, float32 [2, 16], 0 nan and 32 "
         "inf of 32, largest finite magnitude none"),
        ("gradient", "step 3: the output of every module is finite; the loss, a backward pass or a sum was not"),
    ],
)  # fmt: skip
def test_the_first_module_is_named_if_outputs_are_checked(kind, expected, is_ahead, caplog):
    loop = loop_of(kind, None if is_ahead else cpu(), debug_non_finite=True)
    with caplog.at_level(logging.INFO):
        loop.train()
    assert caplog.messages.count(expected) == 1
    assert loop.state.skipped_updates == 1
    assert not any(module._forward_hooks for module in loop.backend.unwrap().modules()), "hooks stay after training"


def test_a_run_whose_outputs_are_checked_has_the_bits_of_one_without():
    found = []
    for debug in (False, True):
        loop = loop_of("output", cpu(), debug_non_finite=debug)
        loop.train()
        found.append({**weights_of(loop.backend.unwrap()), "random": torch.get_rng_state()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_of_two_workers_the_one_that_found_it_is_named_once(caplog):
    def report(backend):
        report_skipped(2, [], backend, "wo (Linear)" if backend.rank == 1 else None, is_watched=True)

    Workers(2).run(report)
    assert caplog.messages == ["step 2, rank 1: first not finite: wo (Linear)"]
