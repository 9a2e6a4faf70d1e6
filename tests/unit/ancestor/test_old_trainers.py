"""Trainers of programs written for t5-experiments: each start begins anew, and settings of its forks work."""

import inspect
import pydoc
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from lm_experiments_tools.ancestor.arguments import TrainerArgs
from lm_experiments_tools.ancestor.trainer import Trainer, _set_aside
from lm_experiments_tools.training.trainer import TrainingLoop
from tests.helpers.toys import RaggedPairs, TinyLabeller


def test_an_earlier_start_is_kept_aside_and_may_be_begun_from(tmp_path):
    run = tmp_path / "run"
    for step in (2, 4):
        (run / "checkpoints" / f"step_00000{step}").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}")
    (run / "last").symlink_to("checkpoints/step_000004")
    assert _set_aside(run, str(run / "last")) == str(run / "checkpoints.1" / "step_000004")
    assert {path.name for path in run.iterdir()} == {".lock", "checkpoints.1", "metrics.1.jsonl"}
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    elsewhere = str(tmp_path / "model_6.pth")
    assert _set_aside(run, elsewhere) == elsewhere and (run / "checkpoints.2" / "step_000002").is_dir()
    assert _set_aside(run, None) is None


def test_help_names_every_argument():
    loop = inspect.signature(TrainingLoop.__init__).parameters.values()
    names = {parameter.name for parameter in loop if parameter.kind is parameter.POSITIONAL_OR_KEYWORD}
    shown = pydoc.render_doc(Trainer, renderer=pydoc.plaintext).partition("Method resolution order")[0]
    assert all(f"{name}" in shown for name in names - {"self", "backend"})
    shown = pydoc.render_doc(TrainerArgs, renderer=pydoc.plaintext).partition("Method resolution order")[0]
    assert all(f" {field.name}: " in shown for field in fields(TrainerArgs)) and "(default" not in shown


def trainer_of(valid, stop_metric_condition=None, **settings):
    accelerate = pytest.importorskip("accelerate")
    from lm_experiments_tools import TrainerAccelerate

    args = SimpleNamespace(**{"iters": 6, "batch_size": 2, "log_interval": 1, "optimize_metric": "loss", **settings})
    model = TinyLabeller()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainerAccelerate(
        args, accelerate.Accelerator(cpu=True), model, optimizer, DataLoader(RaggedPairs(8), 2), valid,
        stop_metric_condition=stop_metric_condition,
    )  # fmt: skip


def test_training_ends_where_the_best_metric_meets_the_stop_condition():
    seen = []

    def third(best):
        seen.append(best)
        return len(set(seen)) == 3

    trainer = trainer_of(DataLoader(RaggedPairs(4), 2), third)
    trainer.train()
    assert trainer.n_iter == trainer.state.best_step < 6 and trainer.state.best_metric == min(seen)
