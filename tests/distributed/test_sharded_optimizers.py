"""Adafactor, AdamWScale and Muon look at whole matrices: on FSDP2's shards they step as on the unsharded model."""

import copy

import pytest
import torch
from torch import nn

from tests.distributed.launch import start

pytestmark = pytest.mark.distributed

CASES = [
    ("AdamWScale", {"lr": 0.05, "weight_decay": 0.1}),
    ("Adafactor", {}),
    ("Adafactor", {"lr": 0.05, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1}),
    ("Adafactor", {"lr": 0.05, "relative_step": False, "scale_parameter": False}),
    ("Muon", {"lr": 0.05, "weight_decay": 0.1}),
    ("StableAdamW", {"lr": 0.05, "weight_decay": 0.1}),
    ("Muon", {"lr": 0.05, "weight_decay": 0.1, "others": "AdamW"}),
]
COLLECTIVES = {"AdamWScale": 1, "Adafactor": 2, "Muon": 1, "StableAdamW": 1}  # however many parameters


class Toy(nn.Module):
    """Matrices that two workers share unevenly (5 rows), or of which one worker has nothing (1 row)."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1)

    def forward(self, inputs):
        return self.last(self.norm(torch.relu(self.first(inputs))))


def groups_of(model):
    hidden, *others = model.parameters()
    return [{"params": [hidden], "is_hidden": True}, {"params": others}]


def step(model, optimizer, number):
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def check_skipped(model, optimizer):
    """A step that the device says to skip leaves this worker's slices and state as they are, bit for bit."""
    from torch.utils._pytree import tree_leaves

    from lm_experiments_tools.optimizers import adafactor, adamw_scale, state

    def held():
        leaves = tree_leaves([list(model.parameters()), optimizer.state_dict()["state"]])
        return [state.local(leaf).detach().clone() for leaf in leaves]

    before, on_host = held(), state.on_host
    for parameter in model.parameters():
        parameter.grad.mul_(float("nan"))
    try:
        for module in (adafactor, adamw_scale, state):
            module.on_host = lambda tensor: False  # as on a GPU
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
    finally:
        for module in (adafactor, adamw_scale, state):
            module.on_host = on_host
    assert all(torch.equal(*pair) for pair in zip(before, held(), strict=True)), type(optimizer)


def worker():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    import lm_experiments_tools.optimizers as optimizers

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def shard_like(parameter, value):
        if not value.dim():
            return value
        placements = parameter.placements if value.shape == parameter.shape else None  # None: a replica
        return distribute_tensor(value, mesh, placements)

    for name, options in CASES:
        torch.manual_seed(0)
        plain = Toy()
        sharded, resumed = copy.deepcopy(plain), copy.deepcopy(plain)
        fully_shard(sharded, mesh=mesh)
        fully_shard(resumed, mesh=mesh)
        build = getattr(optimizers, name)
        ours, reference = build(groups_of(sharded), **options), build(groups_of(plain), **options)
        other = build(groups_of(resumed), **options)
        for number in range(8):
            step(sharded, ours, number)
            step(plain, reference, number)
            if number == 4:  # through whole tensors, as a checkpoint holds them
                tree = other.state_dict()
                for index, parameter in enumerate(resumed.parameters()):
                    for key, value in tree["state"][index].items():
                        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                        tree["state"][index][key] = shard_like(parameter, whole)
                other = build(groups_of(resumed), **options)
                other.load_state_dict(tree)
            step(resumed, other, number)
        triples = list(zip(plain.parameters(), sharded.parameters(), resumed.parameters(), strict=True))
        for whole, shard, again in triples:
            assert (shard.full_tensor() - whole).abs().max() < 1e-6, (name, options)
            assert torch.equal(shard.full_tensor(), again.full_tensor()), (name, options)
            assert shard.to_local().shape[0] != whole.shape[0] or whole.shape[0] == 1
        if name == "Adafactor":
            sizes = [sum(float(g["scaled_lr"]) for g in o.param_groups) for o in (ours, reference)]
            assert abs(sizes[0] - sizes[1]) < 1e-7
        counter = CommDebugMode()
        with counter:
            ours.step()
        scales_others = name == "Muon" and "others" not in options  # by AdamWScale
        expected = COLLECTIVES[name] + scales_others
        assert counter.get_total_counts() == expected, (name, options, counter.get_comm_counts())
        check_skipped(sharded, ours)
    if dist.get_rank() == 0:
        print("all equal")
    dist.destroy_process_group()


def test_sharded_step_equals_unsharded_in_few_collectives_and_resumes_bit_for_bit():
    assert "all equal" in start("ddp", __file__)


if __name__ == "__main__":
    worker()
