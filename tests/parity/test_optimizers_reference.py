"""Our optimizers against transformers' Adafactor and against nanoT5's AdamWScale rule written out plainly."""

import math
import os
import subprocess
import sys

import pytest
import torch

from lm_experiments_tools.optimizers import Adafactor, AdamWScale
from tests.helpers import ROOT

STEPS = 50
SHAPES = [(32, 16), (16, 48), (24,), (1,), (), (3, 8, 12), (64, 1)]


def parameters(dtype=torch.float32, seed=0):
    """Matrices, vectors, a scalar and a stack of matrices, of scales from 1e-5 (below the floor) to 3."""
    generator = torch.Generator().manual_seed(seed)
    scales = [1.0, 0.05, 1e-5, 3.0, 0.2, 1.0, 0.5]
    drawn = [torch.randn(shape, generator=generator) * scale for shape, scale in zip(SHAPES, scales, strict=True)]
    return [torch.nn.Parameter(value.to(dtype)) for value in drawn]


def set_gradients(*models, step):
    """The same gradients for all: of growing, then shrinking size; the second parameter has none every third step."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index in range(len(models[0])):
        grad = torch.randn(models[0][index].shape, generator=generator) * 10.0 ** math.sin(step)
        for model in models:
            absent = index == 1 and step % 3 == 0
            model[index].grad = None if absent else grad.to(model[index].dtype)


def assert_close(ours, theirs, tolerance):
    for mine, other in zip(ours, theirs, strict=True):
        scale = other.detach().abs().max().item() + 1e-3
        assert (mine.detach().double() - other.detach().double()).abs().max().item() <= tolerance * scale


ADAFACTOR_OPTIONS = [
    {"lr": 1e-2, "relative_step": False, "scale_parameter": False},
    {"lr": 1e-2, "relative_step": False, "scale_parameter": True, "weight_decay": 0.1},
    {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1, "beta1": 0.9},
    {"lr": None, "relative_step": True, "scale_parameter": True},
    {"lr": None, "relative_step": True, "scale_parameter": True, "warmup_init": True, "beta1": 0.5},
    {"lr": 1e-2, "relative_step": False, "eps": (1e-8, 1e-2), "clip_threshold": 0.5, "decay_rate": -0.6},
]


@pytest.mark.parametrize("options", ADAFACTOR_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_equals_transformers_over_50_steps(options, dtype):
    optimization = pytest.importorskip("transformers.optimization")
    ours, theirs, start = parameters(dtype), parameters(dtype), parameters(dtype)
    mine, reference = Adafactor(ours, **options), optimization.Adafactor(theirs, **options)
    for step in range(STEPS):
        set_gradients(ours, theirs, step=step)
        mine.step()
        reference.step()
    # a bf16 parameter near a rounding boundary may fall the other way, after which it is one unit (2 ** -8) apart
    assert_close(ours, theirs, tolerance=2e-6 if dtype == torch.float32 else 2**-7)
    moved = [not torch.equal(a, b) for a, b in zip(ours, start, strict=True)]
    assert all(moved) or (any(moved) and dtype == torch.bfloat16)  # warmup_init's first steps are below bf16's unit
    assert all(value.dtype == torch.float32 for state in mine.state.values() for value in state.values())


def reference_adamw_scale_step(values, grads, moments, *, lr, betas, eps, weight_decay):
    """nanoT5's rule, one parameter at a time; `moments` holds (m, v, number of updates) per parameter."""
    for index, (value, grad) in enumerate(zip(values, grads, strict=True)):
        if grad is None:
            continue
        m, v, count = moments[index]
        count += 1
        m = betas[0] * m + (1 - betas[0]) * grad
        v = betas[1] * v + (1 - betas[1]) * grad**2
        moments[index] = (m, v, count)
        rms = (value**2).mean().sqrt().item()
        size = lr * max(1e-3, rms) * math.sqrt(1 - betas[1] ** count) / (1 - betas[0] ** count)
        values[index] = (value - size * m / (v.sqrt() + eps)) * (1 - lr * weight_decay)


ADAMW_SCALE_OPTIONS = [
    {"lr": 2e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0},
    {"lr": 2e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.3},
    {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.1},  # a large eps shows where it is added
]


@pytest.mark.parametrize("options", ADAMW_SCALE_OPTIONS)
def test_adamw_scale_equals_nanot5_over_50_steps(options):
    ours = parameters()
    optimizer = AdamWScale(ours, **options)
    values = [p.detach().clone() for p in parameters()]
    moments = [(torch.zeros_like(value), torch.zeros_like(value), 0) for value in values]
    for step in range(STEPS):
        set_gradients(ours, step=step)
        optimizer.step()
        reference_adamw_scale_step(values, [p.grad for p in ours], moments, **options)
    assert_close(ours, values, tolerance=1e-6)


TOGETHER = """
import math, sys
import torch
from lm_experiments_tools.optimizers.adamw_kernel import adamw_scale_
from tests.parity.test_optimizers_reference import ADAMW_SCALE_OPTIONS, parameters, reference_adamw_scale_step
from tests.parity.test_optimizers_reference import assert_close, set_gradients

for given in ADAMW_SCALE_OPTIONS:
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, **given}
    ours, values = parameters(), [p.detach().clone() for p in parameters()]
    moments = [(torch.zeros_like(value), torch.zeros_like(value), 0) for value in values]
    state = [(torch.zeros_like(value), torch.zeros_like(value)) for value in values]
    for step in (1, 2, 3):
        set_gradients(ours, step=4)  # each has one
        tensors = [(p.data, p.grad, *moments) for p, moments in zip(ours, state)]
        scales = [p.detach().square().mean().sqrt() for p in ours]
        settings = {**options, "eps": options["eps"] / math.sqrt(1 - options["betas"][1] ** step), "least": 1e-3}
        for found_inf in (torch.ones(()), torch.zeros(())):  # the first is skipped
            adamw_scale_(tensors, scales, **settings, step=step, found_inf=found_inf)
        reference_adamw_scale_step(values, [p.grad for p in ours], moments, **given)
    assert_close(ours, values, tolerance=1e-6)
"""


CLIPPED = """
import torch
from lm_experiments_tools.optimizers.adamw_kernel import adamw_scale_
from tests.parity.test_optimizers_reference import parameters, set_gradients

ours = parameters()
set_gradients(ours, step=4)
norm = torch.nn.utils.get_total_norm([p.grad for p in ours])
settings = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1, "least": 1e-3, "step": 1}
found = []
for factor in (None, torch.clamp(0.5 / (norm + 1e-6), max=1.0)):
    if factor is None:
        torch.nn.utils.clip_grads_with_norm_(ours, 0.5, norm)
    else:
        assert factor < 0.5
        set_gradients(ours, step=4)
    gradients = [p.grad for p in ours]
    tensors = [(p.detach().clone(), g, torch.zeros_like(p), torch.zeros_like(p)) for p, g in zip(ours, gradients)]
    scales = [p.detach().square().mean().sqrt() for p in ours]
    adamw_scale_(tensors, scales, **settings, found_inf=torch.zeros(()), grad_factor=factor)
    found.append([x for weights, _, *moments in tensors for x in (weights, *moments)])
assert all(map(torch.equal, *found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [TOGETHER, CLIPPED], ids=["steps", "clipped as it reads gradients: equal bits"])
def test_the_kernel_for_all_parameters_makes_the_same_steps_in_the_interpreter(program):
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", ADAMW_SCALE_OPTIONS)
def test_adamw_scale_on_cuda_equals_cpu(options):
    host = parameters()
    device = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
    optimizers = AdamWScale(host, **options), AdamWScale(device, **options)
    for step in range(STEPS):
        set_gradients(host, step=step)
        for p, q in zip(host, device, strict=True):
            q.grad = None if p.grad is None else p.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    assert_close([p.detach().cpu() for p in device], host, tolerance=1e-6)


def test_bf16_adamw_scale_follows_the_fp32_one():
    """State and arithmetic are fp32, so one step from equal moments differs only by the rounding of the parameter."""
    low, exact = (
        parameters(torch.bfloat16),
        [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)],
    )
    optimizers = AdamWScale(low, lr=2e-2), AdamWScale(exact, lr=2e-2)
    for step in range(STEPS):
        set_gradients(low, exact, step=step)
        for p, q in zip(low, exact, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
            q.data.copy_(p.data)
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(p, q.to(torch.bfloat16)) for p, q in zip(low, exact, strict=True))
