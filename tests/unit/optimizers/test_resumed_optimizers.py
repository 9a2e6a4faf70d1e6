"""Each optimizer of torch resumes to the bits of an uninterrupted run, whatever the shape of its state."""

import inspect

import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.checkpoint.tree import load_tree, save_tree
from lm_experiments_tools.errors import UserError
from tests.helpers.loops import make_loop
from tests.helpers.toys import RaggedPairs, TinyLabeller, weights_of

OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    # LBFGS steps by a closure, SparseAdam takes sparse gradients alone
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("LBFGS", "SparseAdam")
}
del OPTIMIZERS["Optimizer"]


def backend_of(optimizer_cls):
    model, backend = TinyLabeller(), LocalBackend(device=torch.device("cpu"))
    # Muon takes matrices alone
    parameters = [p for p in model.parameters() if p.dim() == 2 or optimizer_cls.__name__ != "Muon"]
    backend.setup(model, optimizer_cls(parameters, lr=1e-2))
    return backend


def update(backend, numbers):
    for number in numbers:
        batch = RaggedPairs(24).batch(range(4 * number, 4 * number + 4))
        backend.backward(backend.model(batch["input_ids"], batch["labels"])["loss"])
        backend.clip_and_step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_makes_the_updates_of_the_uninterrupted_one(name, tmp_path):
    whole, resumed = backend_of(OPTIMIZERS[name]), backend_of(OPTIMIZERS[name])
    update(whole, range(3))
    save_tree(tmp_path / "optimizer", whole.state.optimizer_state())
    resumed.state.load_model_state(weights_of(whole.model))
    resumed.state.load_optimizer_state(load_tree(tmp_path / "optimizer"))
    for backend in (whole, resumed):
        update(backend, range(3, 6))
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


def test_the_state_of_a_parameter_of_another_shape_is_refused(tmp_path):
    make_loop(TinyLabeller(8), torch.optim.AdamW, iters=1, model_path=tmp_path).train()
    flags = {"init_checkpoint": str(tmp_path / "last"), "allow_partial_checkpoint": True}
    with pytest.raises(UserError, match=r"embedding\.weight: 64x8 in the file, 64x16 in the model"):
        make_loop(TinyLabeller(16), torch.optim.AdamW, iters=1, **flags)
