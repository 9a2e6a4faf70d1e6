"""Sums of gradients as integers against Python's exact sum of floats, in any order and grouping."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lm_experiments_tools.backends.backend import Backend, LocalBackend
from lm_experiments_tools.backends.exact_sum import ExactSum
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from tests.helpers.thread_workers import Workers

SHAPES = [(7, 5), (300,), (), (3, 2, 4), (0, 3)]


def micro_batches(number: int, scale: float = 1.0) -> list[list[torch.Tensor]]:
    """Gradients of every size down to a millionth, so that floating-point sums depend on their order."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.rand(shape, generator=generator).mul(-14).exp()
        return torch.randn(shape, generator=generator) * size * scale

    return [[draw(shape) for shape in SHAPES] for _ in range(number)]


def workers(number: int, addends: int) -> list[ExactSum]:
    def make(backend: Backend) -> ExactSum:
        return ExactSum([nn.Parameter(torch.zeros(shape)) for shape in SHAPES], addends, backend)

    return Workers(number).run(make)


def summed(parts: list[ExactSum], gradients: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor | None], bool]:
    """The gradients that all workers end with, which are the same, and if the step is to be repeated."""

    def work(backend: Backend) -> tuple[list[torch.Tensor | None], bool]:
        part = parts[backend.rank]
        for micro_batch in gradients[backend.rank :: len(parts)]:
            for parameter, gradient in zip(part.parameters, micro_batch, strict=True):
                parameter.grad = gradient.clone()
            part.add()
        part.finish()
        return [parameter.grad for parameter in part.parameters], part.must_repeat()

    (first, repeat), *others = Workers(len(parts)).run(work)
    for got, again in others:
        assert again == repeat
        assert repeat or all(
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(first, got, strict=True)
        )
    return first, repeat


def exact(gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Python's exact sums of floats, rounded once."""
    sums = []
    for column in (torch.stack(column) for column in zip(*gradients, strict=True)):
        values = [math.fsum(values) for values in column.view(len(column), -1).double().T.tolist()]
        sums.append(torch.tensor(values, dtype=torch.float32).view(column.shape[1:]))
    return sums


@pytest.mark.parametrize("order", ["as they come", "backwards"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_any_order_and_any_grouping_gives_the_exact_sum(number, order):
    gradients = micro_batches(12)
    expected = exact(gradients)
    got, _ = summed(workers(number, 12), gradients if order == "as they come" else gradients[::-1])
    for sum_, want in zip(got, expected, strict=True):
        assert torch.equal(sum_, want)
    floats = sum(micro_batch[1] for micro_batch in gradients)
    backwards = sum(micro_batch[1] for micro_batch in gradients[::-1])
    assert not torch.equal(floats, backwards), "the case is no test: floats agree as well"


def test_what_leaves_its_grid_is_computed_once_more():
    parts, gradients = workers(2, 4), micro_batches(4)
    gradients[3] = [gradient * 1e6 for gradient in gradients[3]]  # of the second worker alone
    assert summed(parts, gradients) == ([None] * len(SHAPES), True)
    got, repeat = summed(parts, gradients)
    assert not repeat
    for sum_, want in zip(got, exact(gradients), strict=True):
        assert torch.allclose(sum_, want, rtol=2e-7, atol=0)


def test_grids_follow_the_gradients_down():
    part = workers(1, 4)
    for scale in (1.0, 1e-4, 1e-8, 1e-12, 1e-12):
        gradients = micro_batches(4, scale)
        got, _ = summed(part, gradients)
    for sum_, want in zip(got, exact(gradients), strict=True):
        assert torch.allclose(sum_, want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_anywhere_is_nan_and_no_reason_to_repeat(value):
    parts, gradients = workers(2, 2), micro_batches(2)
    gradients[1][0][0, 0] = value
    got, repeat = summed(parts, gradients)
    assert got[0].isnan().all() and not repeat
    assert torch.equal(got[1], exact(gradients)[1])


def test_the_largest_numbers_of_fp32_have_a_grid():
    parts, largest = workers(2, 2), torch.finfo(torch.float32).max
    gradients = [[torch.zeros(shape) for shape in SHAPES] for _ in range(2)]
    gradients[1][0][0, 0] = largest
    assert summed(parts, gradients)[1]
    got, repeat = summed(parts, gradients)
    assert not repeat, "a step that is repeated without end"
    assert got[0][0, 0] == largest


def test_more_micro_batches_than_there_is_room_for_are_refused():
    """Four gradients of 60 in a sum for one would be -16, without a word."""
    [part] = workers(1, addends=2)
    for _ in range(2):
        for parameter in part.parameters:
            parameter.grad = torch.full_like(parameter, 60.0)
        part.add()
    with pytest.raises(UserError, match=r"sums 2 micro-batches a step .*: make the loader with batch_size="):
        part.add()


def test_running_means_are_refused_where_the_number_of_workers_may_change():
    """Of training alone: the same model may be evaluated, and be trained by workers of one number."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for how, optimizer in [("fixed", torch.optim.SGD(model.parameters())), ("elastic", None)]:
        backend = LocalBackend()
        backend.reproduce(TrainerArgs(reproducible=how))
        backend.setup(model, optimizer)
    with pytest.raises(UserError, match="does not work with 1, which keeps running means"):
        backend.setup(model, torch.optim.SGD(model.parameters()))


def test_an_unused_parameter_has_no_gradient():
    [part] = workers(1, 2)
    part.parameters[1].grad = torch.ones(300)
    part.add()
    part.finish()
    assert [parameter.grad is None for parameter in part.parameters] == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("state", "flags", "words"),
    [
        ({}, {"fp16": True}, "--fp16"),
        ({}, {"fp16_allreduce": True, "backend": "horovod"}, "rounds them"),
        ({"state": SimpleNamespace(is_sharded=True)}, {}, "--reproducible fixed"),
        ({"world_size": 5}, {}, "--virtual_ranks 12 is not a multiple of the 5 workers"),
    ],
)
def test_what_cannot_be_exact_is_refused(state, flags, words):
    backend = LocalBackend()
    vars(backend).update(state)
    with pytest.raises(UserError, match=words):
        backend.reproduce(TrainerArgs(reproducible="elastic", **flags))


def test_grids_of_other_parameters_are_not_taken_over():
    backend = LocalBackend(device=torch.device("cpu"))
    backend.reproduce(TrainerArgs(reproducible="fixed"))
    model = nn.Linear(2, 2)
    backend.setup(model, torch.optim.SGD(model.parameters()))
    state, before = backend.state.optimizer_state(), list(backend.reduction.exponents)
    for exponents in ([9], []):
        backend.state.load_optimizer_state({**state, "exponents": exponents})
        assert backend.reduction.exponents == before
    backend.state.load_optimizer_state({**state, "exponents": [9, 8]})
    assert backend.reduction.exponents == [9, 8]
