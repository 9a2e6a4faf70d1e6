"""Names of transformers' Trainer, whole numbers as 1e5, and lists that are given twice."""

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from lm_experiments_tools.config import cli
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.training.schedules import LearningRate
from tests.helpers.runs import words

T5 = {"data_path": "text", "model_cfg": "t5-small"}


def test_names_of_transformers_are_taken_on_the_command_line_and_in_files(tmp_path):
    args, origins = cli.parse(T5PretrainingArgs, words(**T5, learning_rate=1e-3, max_steps="1e5", output_dir="run"))
    assert (args.lr, args.iters, args.model_path) == (1e-3, 100_000, "run") and origins["lr"] == "command line"
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-3\nnum_train_epochs: 2\nfrom_pretrained: x\ndata_path: y\n")
    args, origins = cli.parse(FinetuningArgs, ["--config", str(tmp_path / "run.yaml")])
    assert (args.lr, args.epochs) == (1e-3, 2.0) and origins["lr"].endswith("line 1")
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-3\nlr: 1e-3\n")
    with pytest.raises(UserError, match="lr is set a second time"):
        cli.parse(T5PretrainingArgs, ["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(("text", "value"), [("1e5", 100_000), ("2.5E3", 2500), ("300", 300)])
def test_whole_numbers_may_be_written_in_powers_of_ten(text, value):
    args, _ = cli.parse(T5PretrainingArgs, words(**T5, lr=1, iters=text))
    assert args.iters == value and type(args.iters) is int


@pytest.mark.parametrize("text", ["1.5", "1e-1", "1.25e1", "1e", "e"])
def test_other_numbers_are_not_whole(text):
    with pytest.raises(UserError, match=f"--iters takes a whole number, not '{text}'"):
        cli.parse(T5PretrainingArgs, words(**T5, lr=1, iters=text))


def test_a_list_that_is_given_twice_is_refused_and_files_may_be():
    line = words(**T5, lr=1)
    with pytest.raises(UserError, match="--data_path is given twice: write all of its values after one"):
        cli.parse(T5PretrainingArgs, [*line, "--data_path", "other"])
    args, _ = cli.parse(T5PretrainingArgs, words(**{**T5, "data_path": ("a", "b")}, lr=1))
    assert args.data_path == ("a", "b")


def test_warmup_ratio_gives_the_rates_of_transformers():
    args = TrainerArgs(iters=33, lr_scheduler="linear", warmup_ratio=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    ours = LearningRate(args, optimizer).schedule
    theirs = get_linear_schedule_with_warmup(optimizer, 4, 33).lr_lambdas[0]  # ceil(3.3)
    assert [ours(step) for step in range(33)] == [theirs(step) for step in range(33)]
    with pytest.raises(UserError, match="--num_warmup_steps and --warmup_ratio exclude each other"):
        TrainerArgs(lr_scheduler="linear", warmup_ratio=0.1, num_warmup_steps=3)
    with pytest.raises(UserError, match="--warmup_ratio needs an --lr_scheduler"):
        TrainerArgs(warmup_ratio=0.1)
