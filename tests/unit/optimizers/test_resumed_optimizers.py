"""Each optimizer of torch resumes to the bits of an uninterrupted run, whatever the shape of its state."""

import inspect

import pytest
import torch

from lm_experiments_tools.errors import UserError
from tests.helpers.loops import make_loop
from tests.helpers.toys import TinyLabeller, weights_of

OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    # LBFGS steps by a closure, SparseAdam takes sparse gradients alone
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("LBFGS", "SparseAdam")
}
del OPTIMIZERS["Optimizer"]


def train(optimizer_cls, iters, folder, width=16, **args):
    model = TinyLabeller(width)
    # Muon takes matrices alone
    parameters = [p for p in model.parameters() if p.dim() == 2 or optimizer_cls.__name__ != "Muon"]
    make_loop(model, optimizer_cls(parameters, lr=1e-2), iters=iters, model_path=folder, **args).train()
    return weights_of(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_makes_the_updates_of_the_uninterrupted_one(name, tmp_path):
    whole = train(OPTIMIZERS[name], 6, tmp_path / "whole")
    train(OPTIMIZERS[name], 3, tmp_path / "parts")
    resumed = train(OPTIMIZERS[name], 6, tmp_path / "parts")
    assert all(torch.equal(whole[weight], resumed[weight]) for weight in whole)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_the_state_of_a_parameter_of_another_shape_is_refused(name, tmp_path):
    train(OPTIMIZERS[name], 1, tmp_path / "narrow", width=8)
    flags = {"init_checkpoint": str(tmp_path / "narrow" / "last"), "allow_partial_checkpoint": True}
    with pytest.raises(UserError, match=r"embedding.weight has shape \(64, 8\) there and \(64, 16\) here"):
        train(OPTIMIZERS[name], 1, tmp_path / "wide", **flags)
