"""The loss scale after a skipped step."""

import pytest
import torch
from torch import nn

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.backends.precision import LossScaledFp16


@pytest.mark.parametrize("gradient", [3e19, float("inf")])
def test_a_step_whose_norm_overflows_halves_the_loss_scale_as_one_with_an_infinite_gradient(gradient):
    """The square of 3e19 is infinite in fp32, so the norm is where the gradient is not."""
    model = nn.Linear(1, 1)
    backend = LocalBackend(LossScaledFp16(), torch.device("cpu"))
    backend.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scaler, before = backend.precision.scaler, [p.detach().clone() for p in model.parameters()]
    scale = float(scaler.scale(torch.ones(1)))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient * scale)
    scaler.unscale_(backend.optimizer)
    assert backend.clip_and_step().result()[1] is False
    assert scaler.get_scale() == scale / 2
    assert all(map(torch.equal, model.parameters(), before))
