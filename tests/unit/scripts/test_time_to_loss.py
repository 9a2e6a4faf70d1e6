"""benchmarks/time_to_loss.py: its runs are commands that work, its search ends inside, it needs the corpus."""

import os
import subprocess
import sys

import pytest

from benchmarks import time_to_loss
from lm_experiments_tools.config.cli import parse
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.training.schedules import get_schedule
from tests.helpers import ROOT


@pytest.mark.parametrize("recipe", time_to_loss.RECIPES, ids=lambda recipe: recipe.name)
def test_a_run_is_a_command_whose_schedule_peaks_at_the_rate_of_the_table(recipe, tmp_path):
    flags = time_to_loss.Search(tmp_path, 200)._flags(recipe, 2e-2, 1)
    args, _ = parse(T5PretrainingArgs, flags)
    assert args.iters == 200 and args.rows_per_worker() == time_to_loss.BATCH
    settings = {"num_warmup_steps": args.num_warmup_steps, "base_lr": args.lr, "min_lr_ratio": args.lr_min_ratio}
    schedule = get_schedule(args.lr_scheduler, num_training_steps=200, **settings)
    assert max(args.lr * schedule(step) for step in range(200)) == pytest.approx(2e-2)


def test_search_goes_beyond_an_edge_and_stops_inside_or_at_five_rates():
    inside = time_to_loss.searched((1.0, 2.0, 4.0), lambda rate: abs(rate - 2.0))
    assert sorted(inside) == [1.0, 2.0, 4.0]
    below = time_to_loss.searched((1.0, 2.0, 4.0), lambda rate: abs(rate - 0.5))
    assert sorted(below) == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert sorted(time_to_loss.searched((1.0, 2.0, 4.0), lambda rate: -rate)) == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert sorted(time_to_loss.searched((2.0,), lambda rate: rate)) == [2.0]


def test_steps_to_a_loss_lie_on_the_line_between_two_validations():
    curve = {"40": 6.0, "80": 5.0, "120": 4.5}
    assert time_to_loss.steps_to(5.25, curve) == 70 and time_to_loss.steps_to(4.5, curve) == 120
    assert time_to_loss.steps_to(4.0, curve) is None


def test_without_the_corpus_it_says_what_is_missing(tmp_path):
    environment = os.environ | {"PRETRAINING_DATA": str(tmp_path)}
    command = [sys.executable, str(ROOT / "benchmarks" / "time_to_loss.py"), "--output", str(tmp_path / "out.md")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Skipped: there is no") and not (tmp_path / "out.md").exists()
