"""The learning-rate range test: the edge of divergence of a quadratic, and a run that does not notice it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.training import ExperimentArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.recipes.lr_finder import find_lr, read_range_test
from lm_experiments_tools.training.trainer import TrainingLoop
from run_t5_pretraining import main
from tests.helpers.runs import TINY, losses, tiny_run, words


class Bowl(nn.Module):
    """Loss curvature / 2 * |w|^2 for any row, which SGD lowers at rates below 2 / curvature and no others."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.curvature, self.weight = curvature, nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.curvature / 2 * self.weight.square().sum() + 0 * rows.float().mean()}


def range_test(model, optimizer=torch.optim.SGD, low=1e-3, high=100.0, updates=100, folder=None, **settings):
    args = ExperimentArgs(
        model_cfg="none", find_lr=updates, find_lr_min=low, find_lr_max=high, batch_size=2, **settings
    ).while_finding()[0]
    batches = [{"rows": torch.arange(2 * i, 2 * i + 2)} for i in range(300)]
    backend = LocalBackend(device=torch.device("cpu"))
    return find_lr(TrainingLoop(args, backend, model, optimizer(model.parameters(), lr=args.lr), batches), folder)


@pytest.mark.parametrize("curvature", [0.5, 2.0, 30.0])
def test_the_edge_for_sgd_is_two_over_the_curvature(curvature, tmp_path):
    test = range_test(Bowl(curvature), folder=tmp_path / "run")
    growth = (100.0 / 1e-3) ** (1 / 99)
    assert growth**-3 < test.edge / (2 / curvature) < growth**2
    assert test.steepest < 1 / curvature  # from there on, less and less is left to fall
    assert test.rates[-1] < 100.0  # it stops far above the lowest loss
    found = json.loads((tmp_path / "run" / "find_lr.json").read_text())
    assert found["edge"] == test.edge and found["losses"] == test.losses


def test_each_loss_is_that_after_the_update_at_its_rate():
    test = range_test(Bowl(2.0), low=0.01, high=0.1, updates=20)
    weight = np.array([1.0, -2.0, 0.5])
    expected = [float(np.square(weight := weight * (1 - 2 * rate)).sum()) for rate in test.rates]
    np.testing.assert_allclose(test.losses, expected, rtol=1e-5)
    assert test.edge is None


def test_a_schedule_and_drops_are_left_out():
    plain = range_test(Bowl(2.0), low=0.01, high=0.1, updates=20)
    scheduled = range_test(
        Bowl(2.0), low=0.01, high=0.1, updates=20, lr_scheduler="linear", num_warmup_steps=10, iters=15
    )
    assert scheduled.losses == plain.losses


def test_groups_keep_their_ratios():
    model, seen = Bowl(2.0), []

    def two_groups(parameters, lr):
        groups = [{"params": list(parameters)}, {"params": [nn.Parameter(torch.zeros(1))], "lr": lr / 10}]
        optimizer = torch.optim.SGD(groups, lr=lr)
        optimizer.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer

    test = range_test(model, two_groups, low=0.01, high=0.1, updates=20)
    assert [first for first, _ in seen[:20]] == pytest.approx(test.rates)
    assert all(second == pytest.approx(first / 10) for first, second in seen)


def test_a_loss_that_never_falls_has_no_steepest_descent():
    rates = np.geomspace(1e-6, 1, 50).tolist()
    test = read_range_test(rates, [2.0 + i for i in range(50)])
    assert test.steepest is None and test.edge == rates[0]
    noise = np.random.default_rng(0).normal(0.69, 0.02, 50)
    assert read_range_test(rates, noise.tolist()).steepest is None
    falling = noise - 0.3 / (1 + np.exp(-3 * np.log(np.divide(rates, 1e-3))))  # steepest at 1e-3
    assert 3e-4 < read_range_test(rates, falling.tolist()).steepest < 3e-3


def test_a_model_that_is_not_finite_at_once_is_refused():
    class Broken(Bowl):
        def forward(self, rows):
            return {"loss": super().forward(rows)["loss"] * torch.nan}

    with pytest.raises(UserError, match=r"not finite from --find_lr_min 0\.001 on"):
        range_test(Broken(1.0))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"find_lr": 5}, "--find_lr is 5: it must be at least 20"),
        ({"lr": 1.0, "find_lr_min": 1e-4}, "--find_lr_min needs --find_lr"),
        ({"find_lr": 50, "find_lr_min": 1.0}, "--find_lr_min 1 is not below --find_lr_max 1"),
        ({"find_lr": 50, "profile": 2, "model_path": "a"}, "--find_lr and --profile exclude each other"),
        ({"find_lr": 50, "resume": "runs/a/last"}, "--find_lr starts a new run"),
        ({"find_lr": 50, "validate_only": True}, "--find_lr .*--validate_only"),
        ({"find_lr": 50, "relative_step": True, "optimizer": "Adafactor"}, "--relative_step computes its own"),
        ({}, "--lr is missing"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_meant_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        ExperimentArgs(model_cfg="none", **settings)


def test_a_run_after_the_range_test_has_the_bits_of_one_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = tiny_run(tmp_path, TINY, target_seq_len=16, iters=4, backend="local")
    main(words(**flags, model_path="plain"))
    main(words(**{**flags, "lr": None}, model_path="found", find_lr=20))
    assert [path.name for path in Path("found").iterdir()] == ["find_lr.json"]
    main(words(**flags, model_path="found"))
    assert losses("found") == losses("plain")
    weights = [next(Path(run, "last").resolve().glob("*.safetensors")).read_bytes() for run in ("plain", "found")]
    assert weights[0] == weights[1]
    main(
        words(**{**flags, "lr": None}, model_path="found", find_lr=20)
    )  # beside a run that has ended, which stays as it is
    assert next(Path("found", "last").resolve().glob("*.safetensors")).read_bytes() == weights[0]
