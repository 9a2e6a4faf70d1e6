"""Arguments of programs written for t5-experiments: their names, their defaults, and what becomes of them."""

import argparse
import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import lm_experiments_tools
from lm_experiments_tools import TrainerAccelerate, TrainerAccelerateArgs, TrainerArgs
from lm_experiments_tools.ancestor import notice as notices
from lm_experiments_tools.ancestor.arguments import settings_of
from lm_experiments_tools.config import training as today
from lm_experiments_tools.errors import UserError
from tests.helpers.toys import RaggedPairs, TinyLabeller

# Of t5-experiments 0.9.1's TrainerArgs, read off its --help.
DEFAULTS = {
    "model_path": None, "log_interval": None, "valid_interval": None, "save_interval": None, "save_best": False,
    "use_generate_on_valid": False, "init_checkpoint": None, "skip_used_data": False, "reset_lr": False,
    "reset_iteration": False, "reset_optimizer": False, "lr": None, "batch_size": 1, "iters": 1,
    "gradient_accumulation_steps": 1, "fp16": False, "fp16_allreduce": False, "apex_opt_lvl": None,
    "min_loss_scale": None, "max_loss_scale": 2**24, "clip_grad_norm": None, "clip_grad_value": None,
    "early_stopping_patience": None, "lr_scheduler": None, "num_warmup_steps": None, "num_training_steps": None,
    "use_lr_drop": False, "lr_drop_factor": 0.1, "lr_drop_patience": 10, "lr_drop_threshold": 1e-4,
    "lr_drop_threshold_mode": "rel", "lr_drop_cooldown": 0, "lr_drop_min_lr": 0.0, "lr_drop_eps": 1e-8,
    "optimize_metric": "loss", "optimize_mode": "min",
}  # fmt: skip


@pytest.fixture(autouse=True)
def not_yet_warned(monkeypatch):
    monkeypatch.setattr(notices, "_said", [])


def parser(kind):
    return pytest.importorskip("transformers").HfArgumentParser(kind)


def test_a_parser_has_the_ancestors_names_and_defaults_and_room_for_the_programs_own():
    own = parser(TrainerArgs)
    for flag in ("seed", "validate_only", "working_dir", "resume", "backend"):
        own.add_argument(f"--{flag}", default=None)
    parsed = vars(own.parse_args([]))
    assert {name: parsed[name] for name in DEFAULTS} == DEFAULTS
    assert parsed.keys() - DEFAULTS.keys() == {"seed", "validate_only", "working_dir", "resume", "backend"}
    accelerate = vars(parser(TrainerAccelerateArgs).parse_args([]))
    formats = {"fp16", "fp16_allreduce", "apex_opt_lvl", "min_loss_scale", "max_loss_scale"}
    assert accelerate == {name: value for name, value in DEFAULTS.items() if name not in formats}
    (as_dataclass,) = parser(TrainerArgs).parse_args_into_dataclasses(["--lr", "0.5"])
    assert dataclasses.asdict(as_dataclass) == {**DEFAULTS, "lr": 0.5} and isinstance(as_dataclass, TrainerArgs)


def test_called_with_settings_of_today_the_name_makes_those():
    made = TrainerArgs(batch_size=8, iters=1000, seed=3)
    assert type(made) is today.TrainerArgs and isinstance(made, TrainerArgs) and made.log_interval == 10
    with pytest.raises(UserError, match="--batch_size is 0"):
        TrainerArgs(batch_size=0)
    assert not isinstance(SimpleNamespace(), TrainerArgs)


def test_a_rate_that_a_program_keeps_for_its_optimizer_makes_settings_of_today(tmp_path):
    """As without it, the second start goes on with the first one's checkpoint, and no file is renamed."""
    accelerate, steps = pytest.importorskip("accelerate"), []
    for iters in (2, 4):
        args = TrainerArgs(lr=1e-2, batch_size=4, iters=iters, model_path=str(tmp_path / "run"), seed=3)
        assert isinstance(args, today.TrainerArgs) and args.lr == 1e-2 and args.keep_checkpoints == 3
        model = TinyLabeller()
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        loader = DataLoader(RaggedPairs(8), 4)
        trainer = TrainerAccelerate(args, accelerate.Accelerator(cpu=True), model, optimizer, loader)
        steps.append(trainer.n_iter)
        trainer.train()
    assert steps == [0, 2]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    with pytest.raises(UserError, match=r"lr 0\.01, but the optimizer was made with 0\.5"):
        other = torch.optim.SGD(model.parameters(), lr=0.5)
        TrainerAccelerate(args, accelerate.Accelerator(cpu=True), model, other, loader)


def test_settings_of_a_namespace_mean_what_they_meant():
    args = argparse.Namespace(
        **{**DEFAULTS, "iters": 30, "early_stopping_patience": 4, "model_path": "run", "save_best": True, "seed": 5}
    )
    settings = settings_of(args)
    assert settings.early_stopping_patience == 5  # stops when more than 4 have passed
    assert settings.log_interval == 30 and settings.effective_valid_interval() == 30  # None: at the end
    assert settings.allow_partial_checkpoint and settings.save_best and settings.batch_size == 1
    assert settings_of(argparse.Namespace(**DEFAULTS)).early_stopping_patience == -1
    assert settings_of(SimpleNamespace(iters=3)).iters == 3  # a program's own, without the rest
    assert settings_of(args, "bf16").bf16 and not settings_of(args, "no").fp16


def test_the_ancestors_names_are_where_its_programs_look(tmp_path, monkeypatch):
    import torch

    from lm_experiments_tools import HVD_INSTALLED, trainer, trainer_accelerate, utils
    from lm_experiments_tools.data import MixtureDataset

    assert trainer.TrainerArgs is TrainerArgs and trainer_accelerate.TrainerAccelerateArgs is TrainerAccelerateArgs
    assert trainer.Trainer is lm_experiments_tools.Trainer and isinstance(HVD_INSTALLED, bool)
    assert utils.get_optimizer("Adafactor") is lm_experiments_tools.Adafactor
    assert utils.rank_0(lambda: utils.get_distributed_rank())() == 0
    assert utils.get_fn_param_names(lambda a, *b, c=1, **d: None) == ["a", "c"]
    monkeypatch.chdir(tmp_path)
    assert utils.get_git_diff() == utils.get_git_hash_commit() == ""
    args = argparse.Namespace(model_path=str(tmp_path / "run"), iters=1)
    log = logging.getLogger("of the program")
    utils.prepare_run(args, log)
    assert {"config.json", "git.diff"} < {path.name for path in (tmp_path / "run").iterdir()}
    log.handlers.clear()
    if not torch.cuda.is_available():
        torch.cuda.set_device(0)  # with which they begin
    mixture = MixtureDataset([list("ab"), list("wxyz")], [2.0, 1.0])
    assert sorted(mixture[i] for i in range(len(mixture))) == sorted("aabbwxyz")
