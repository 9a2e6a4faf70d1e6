"""StableAdamW against torch-optimi, where it is installed, and against algorithm 2 of arXiv 2304.13013 in float64."""

import pytest
import torch
from torch import Tensor

from lm_experiments_tools.optimizers import StableAdamW

OPTIONS = [
    {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.0},
]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (11,), ())]


def set_gradients(values, step: int) -> None:
    """Gradients of size 1, and in between one that is clipped."""
    generator = torch.Generator().manual_seed(step)
    for value in values:
        value.grad = torch.randn(value.shape, generator=generator) * (100 if step % 10 == 5 else 1)


def published_step(value: Tensor, grad: Tensor, state: dict, lr, betas, eps, weight_decay) -> None:
    state["t"] = t = state.get("t", 0) + 1
    beta1, beta2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in betas)
    v = state["v"] = beta1 * state.get("v", 0.0) + (1 - beta1) * grad
    u = state["u"] = beta2 * state.get("u", 0.0) + (1 - beta2) * grad**2
    rate = lr / max(1.0, (grad**2 / u.clamp(min=eps**2)).mean().sqrt().item())
    value.copy_(value - rate * weight_decay * value - rate * v / (u.sqrt() + eps))


@pytest.mark.parametrize("options", OPTIONS)
def test_stable_adamw_is_the_published_algorithm(options):
    ours = parameters()
    values, states = [p.detach().double() for p in ours], [{}, {}, {}]
    optimizer = StableAdamW(ours, **options)
    for step in range(30):
        set_gradients(ours, step)
        for value, p, state in zip(values, ours, states, strict=True):
            published_step(value, p.grad.double(), state, **options)
        optimizer.step()
    for p, value in zip(ours, values, strict=True):
        assert torch.allclose(p.double(), value, rtol=0, atol=2e-6)
