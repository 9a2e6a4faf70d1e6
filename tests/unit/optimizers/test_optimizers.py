"""Optimizers by name, what they refuse, their groups, what they store."""

import json

import pytest
import torch
from torch import nn

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.optimizers import (
    Adafactor,
    AdamWScale,
    build_optimizer,
    get_optimizer,
    muon,
    parameter_groups,
)


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(6, 4)
        self.proj = nn.Linear(4, 4)
        self.layer_norm = nn.LayerNorm(4)
        self.relative_attention_bias = nn.Embedding(8, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def set_gradients(self, seed=1):
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator)
        return self


def test_own_names_come_first_and_torchs_stay_reachable():
    assert get_optimizer("Adafactor") is Adafactor
    assert get_optimizer("AdamWScale") is AdamWScale
    assert get_optimizer("AdamW") is torch.optim.AdamW
    assert get_optimizer("torch.optim:Adafactor") is torch.optim.Adafactor
    assert get_optimizer("transformers.optimization:Adafactor").__module__ == "transformers.optimization"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adamw", "did you mean AdamW"),
        ("LBFGS", "re-evaluates the loss"),
        ("torch.nn:Linear", "not a subclass of torch.optim"),
    ],
)
def test_unknown_or_unusable_optimizer_is_one_sentence(name, message):
    with pytest.raises(UserError, match=message):
        get_optimizer(name)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "NAdam", "Adagrad", "Rprop", "AdamWScale", "Adafactor"])
def test_every_kind_of_optimizer_moves_the_trainable_parameters_only(name):
    model = Toy().set_gradients()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    build_optimizer(model, name=name, lr=0.1, weight_decay=0.0).step()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) == key.startswith("frozen"), key


def test_groups_decay_matrices_and_spare_vectors_and_biases():
    model = Toy()
    groups = parameter_groups(model.named_parameters(), 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [id(p) for p in groups[0]["params"]] == [id(model.embedding.weight), id(model.proj.weight)]
    assert len(groups[1]["params"]) == 4  # proj.bias, layer_norm.weight and bias, relative_attention_bias
    only_matrices = parameter_groups([("weight", nn.Parameter(torch.zeros(2, 2)))], 0.1)
    assert len(only_matrices) == 1
    with pytest.raises(UserError, match="no trainable parameter"):
        parameter_groups([("frozen", torch.zeros(2))], 0.1)


@pytest.mark.parametrize("name", ["AdamW", "AdamWScale", "Adafactor", "SGD"])
def test_weight_decay_reaches_matrices_only_and_zero_means_none(name):
    """With zero gradients nothing but decay moves; torch's AdamW would decay by 0.01 of its own accord."""
    for weight_decay in (0.0, 0.5):
        model = Toy()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        build_optimizer(model, name=name, lr=0.1, weight_decay=weight_decay).step()
        for key, value in model.state_dict().items():
            decayed = weight_decay > 0 and key in ("embedding.weight", "proj.weight")
            expected = before[key] * 0.95 if decayed else before[key]
            assert torch.allclose(value, expected), key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "AdamW", "scale_parameter": True}, "--scale_parameter has no effect with --optimizer AdamW"),
        ({"name": "Rprop", "weight_decay": 0.1}, "--weight_decay has no effect with --optimizer Rprop"),
        ({"name": "Adafactor", "relative_step": True}, "settings: lr=0.1 has no effect with relative_step"),
        ({"name": "Adafactor", "lr": -1.0}, "Adafactor refuses its settings: lr=-1.0 must not be negative"),
        ({"name": "AdamW", "extra": {"beta": (0.9, 0.9)}}, "no option 'beta'; did you mean 'betas'"),
    ],
)
def test_option_without_effect_or_sense_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        build_optimizer(Toy(), **{"lr": 0.1, "weight_decay": 0.0, **options})


def test_torch_optimizer_is_fused_unless_told_otherwise():
    assert build_optimizer(Toy(), name="AdamW", lr=0.1, weight_decay=0.0).param_groups[0]["fused"]
    plain = build_optimizer(Toy(), name="AdamW", lr=0.1, weight_decay=0.0, extra={"fused": False})
    assert not plain.param_groups[0]["fused"]


def test_scaled_lr_is_the_mean_step_size_of_the_group():
    model = Toy().set_gradients()
    scales = [max(1e-3, w.detach().square().mean().sqrt().item()) for w in (model.embedding.weight, model.proj.weight)]
    optimizer = build_optimizer(model, name="Adafactor", lr=0.1, weight_decay=0.0, scale_parameter=True)
    optimizer.step()
    assert float(optimizer.param_groups[0]["scaled_lr"]) == pytest.approx(0.1 * sum(scales) / 2, rel=1e-6)
    relative = build_optimizer(model, name="Adafactor", lr=None, weight_decay=0.0, relative_step=True)
    relative.step()
    assert relative.param_groups[0]["scaled_lr"] == pytest.approx(1e-2)


@pytest.mark.parametrize("name", ["AdamWScale", "Adafactor", "AdamW"])
def test_state_dict_is_tensors_and_json(name):
    model = Toy().set_gradients()
    optimizer = build_optimizer(model, name=name, lr=0.1, weight_decay=0.1, **_scaled(name))
    optimizer.step()
    state = optimizer.state_dict()
    assert all(isinstance(value, torch.Tensor) for entry in state["state"].values() for value in entry.values())
    groups = json.loads(json.dumps(state["param_groups"]))
    fresh = build_optimizer(Toy(), name=name, lr=0.1, weight_decay=0.1, **_scaled(name))
    fresh.load_state_dict({"state": state["state"], "param_groups": groups})
    for key, entry in fresh.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][key][name]) for name, value in entry.items())


def _scaled(name):
    return {"scale_parameter": True} if name == "Adafactor" else {}


class Stack(nn.Module):
    """An embedding, two numbered layers and a head, with the same first weights each time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(2))
        self.lm_head = nn.Linear(6, 11)

    def step(self, number, *optimizers):
        ids = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(number))
        x = self.shared(ids)
        for layer in self.layers:
            x = x + layer(x)
        self.zero_grad()
        nn.functional.cross_entropy(self.lm_head(x), ids.roll(1)).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("others", ["AdamWScale", "AdamW"])
@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}])
def test_muon_is_torchs_on_hidden_matrices_and_the_other_optimizer_on_the_rest_bit_for_bit(
    others, options, monkeypatch
):
    monkeypatch.setattr(muon, "has_bf16", lambda device: True)  # torch's computes in bf16 on any hardware
    monkeypatch.setattr(muon, "_TOGETHER", 1)  # products of several matrices at once round differently
    ours, theirs = Stack(), Stack()
    settings = {"name": "Muon", "lr": 0.02, "weight_decay": 0.1, "extra": {"others": others, **options}}
    optimizer = build_optimizer(ours, **settings)
    hidden = [p for name, p in theirs.named_parameters() if name.startswith("layers.") and p.ndim == 2]
    matrices = [theirs.shared.weight, theirs.lm_head.weight]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    rest = torch.optim.AdamW(groups, 0.02, eps=1e-6, fused=True) if others == "AdamW" else AdamWScale(groups, 0.02)
    torchs = torch.optim.Muon(hidden, 0.02, weight_decay=0.1, **options)
    for number in range(10):
        ours.step(number, optimizer)
        theirs.step(number, torchs, rest)
        if number == 5:  # what a checkpoint holds continues
            resumed = build_optimizer(
                ours, name="Muon", lr=0.02, weight_decay=0.1, extra={"others": others, **options}
            )
            resumed.load_state_dict(optimizer.state_dict())
            optimizer = resumed
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert [group["is_hidden"] for group in optimizer.param_groups] == [True, False, False]


@pytest.mark.parametrize(("is_in_hardware", "tolerance"), [(True, 0.08), (False, 1e-5)])
@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96), (3, 96, 32), (3, 32, 96), (3, 32, 48)])
def test_muon_changes_singular_values_as_its_polynomial_does_and_is_in_bf16_only_in_hardware(
    shape, is_in_hardware, tolerance, monkeypatch
):
    """Against the polynomial of the singular values in float64; singular vectors stay."""
    monkeypatch.setattr(muon, "has_bf16", lambda device: is_in_hardware)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values /= values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    found = muon.orthogonalized(matrix)
    assert found.dtype == (torch.bfloat16 if is_in_hardware else torch.float32)
    error = torch.linalg.matrix_norm(found.double() - left * values[..., None, :] @ right, 2).max()
    assert error < tolerance and ((values > 0.68) & (values < 1.21)).all()


def test_muon_scales_the_rate_of_the_others_and_refuses_what_it_cannot_update():
    optimizer = build_optimizer(Stack(), name="Muon", lr=0.02, weight_decay=0.0, extra={"others_lr_scale": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.01, 0.01]
    with pytest.raises(UserError, match="numbered layers"):
        build_optimizer(nn.Linear(3, 3), name="Muon", lr=0.02, weight_decay=0.0)
    with pytest.raises(UserError, match="others="):
        build_optimizer(Stack(), name="Muon", lr=0.02, weight_decay=0.0, extra={"others": "adamw"})
