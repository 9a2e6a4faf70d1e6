"""A skipped update is traced to the first module with a value that is not finite, and training goes on as it would."""

import logging

import pytest
import torch
from torch import nn

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.training import non_finite
from lm_experiments_tools.training.trainer import TrainingDiverged
from tests.helpers.toys import VOCABULARY_SIZE, RaggedPairs, SeekableBatches, tiny_t5, weights_of
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


def loop_of(kind: str, **options):
    loader = Armed(RaggedPairs(24), 4)
    return make_loop({"iters": 6, "log_interval": 6}, Stack(kind), loader=loader, **options)


def cpu() -> LocalBackend:
    return LocalBackend(device=torch.device("cpu"))


def traced(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == non_finite.__name__]


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("output", "layers.1 (Planted): its output, float32 [2, 16], 0 nan and 32 inf of 32, largest finite magnitude "
         "none"),
        ("gradient", "layers.1.drop (Dropout): the gradient of its output, float32 [2, 16], "),
    ],
)  # fmt: skip
def test_the_planted_module_is_named(kind, expected, is_ahead, caplog):
    loop = loop_of(kind, backend=None if is_ahead else cpu())
    with caplog.at_level(logging.INFO):
        loop.train()
    (line,) = traced(caplog)
    assert line.startswith("step 3, rank 0: first not finite: ") and expected in line
    assert loop.state.skipped_updates == 1


def test_a_module_that_turns_a_finite_gradient_into_an_infinite_one_is_named():
    class Leaf(nn.Module):
        def forward(self, x):
            return InfiniteGradient.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Leaf(), nn.Linear(4, 4))
    trace = non_finite._Trace(model)
    with trace.hooked():
        loss = model(torch.ones(2, 4)).square().sum()
        torch.autograd.grad(loss, list(model.parameters()))
    assert trace.found.startswith("1 (Leaf): the gradient of its input, float32 [2, 4], ")


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_run_that_was_traced_has_the_bits_of_one_that_was_not(is_ahead, monkeypatch):
    found = []
    for traces in (0, 3):
        monkeypatch.setattr(non_finite, "MOST_TRACES", traces)
        loop = loop_of("gradient", backend=None if is_ahead else cpu())
        loop.train()
        assert loop.state.skipped_updates == 1
        found.append({**weights_of(loop.backend.unwrap()), "random": torch.get_rng_state()})
        torch.manual_seed(5)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_infinite_weights_of_a_t5_are_named_before_the_run_gives_up(caplog):
    model = tiny_t5()
    with torch.no_grad():
        model.encoder.block[1].layer[1].DenseReluDense.wi.weight[3, 5] = torch.inf
    loop = make_loop({"iters": 6, "log_interval": 6, "max_skipped_updates": 5}, model)
    with caplog.at_level(logging.INFO), pytest.raises(TrainingDiverged):
        loop.train()
    lines = traced(caplog)
    assert len(lines) == non_finite.MOST_TRACES
    assert "encoder.block.1.layer.1.DenseReluDense.wi (Linear): its weights (weight), float32 [32, 16], " in lines[0]
    assert "0 nan and 1 inf of 512, largest finite magnitude 0." in lines[0]


def test_a_gradient_that_no_module_made_is_of_the_sum(caplog):
    loop = make_loop({"iters": 3, "log_interval": 3}, Stack(), backend=cpu())
    reduce, calls = loop.backend._reduce_gradients, []

    def overflow() -> None:
        reduce()
        calls.append(loop)
        if len(calls) == 2:
            loop.backend.unwrap().head.weight.grad[0, 0] = torch.inf

    loop.backend._reduce_gradients = overflow
    with caplog.at_level(logging.INFO):
        loop.train()
    assert "all is finite in every micro-batch of every worker" in caplog.text and loop.state.skipped_updates == 1


@pytest.mark.parametrize("how", ["off", "fixed"])
def test_what_is_run_again_draws_the_noise_of_the_step_also_where_that_is_keyed(how, caplog):
    class Drawing(Planted):
        def __init__(self):
            super().__init__("output")
            self.drawn = []

        def forward(self, x):
            self.drawn.append(torch.rand(3).tolist())
            return super().forward(x)

    model = Stack()
    model.layers[1] = Drawing()
    args = {"iters": 4, "log_interval": 4, "reproducible": how}
    backend = cpu()
    backend.reproduce(TrainerArgs(gradient_accumulation_steps=2, **args))
    loop = make_loop(args, model, backend=backend, loader=Armed(RaggedPairs(24), 4))
    with caplog.at_level(logging.INFO):
        loop.train()
    drawn = model.layers[1].drawn
    assert len(traced(caplog)) == 1 and drawn[6:8] == drawn[4:6] and len({tuple(d) for d in drawn}) == len(drawn) - 2
