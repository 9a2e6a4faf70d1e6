"""Runs in trackio and wandb, beside metrics.jsonl."""

import importlib.machinery
import importlib.util
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking import services
from lm_experiments_tools.tracking.run_directory import claim_run
from lm_experiments_tools.tracking.tracker import Tracker


class Failing:
    """A service that has been closed by the second record."""

    made = 0

    def __init__(self, *_):
        Failing.made += 1
        self.logged = 0

    def log(self, numbers, step):
        self.logged += 1
        if self.logged > 1:
            raise RuntimeError("the server is gone.\nand more")

    def close(self):
        raise AssertionError("it is left alone")


@pytest.fixture
def failing(monkeypatch):
    def opened(*settings):
        service = Failing(*settings)
        return service.log, service.close

    monkeypatch.setattr(services, "_opened", opened)
    monkeypatch.setattr(Failing, "made", 0)
    spec = importlib.machinery.ModuleSpec("trackio", None, origin="trackio.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def track(folder: Path, rank: int = 0, **changed) -> None:
    claim_run(TrainerArgs(iters=4, model_path=str(folder), **changed), 1)
    with Tracker(folder, rank=rank, start_step=-1) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log("train", step, step, step, {"loss": 1.0})


def test_a_failing_service_is_said_once_and_the_run_goes_on(tmp_path, failing, caplog):
    track(tmp_path, log_to=("tensorboard", "trackio"))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["trackio gets no more of this run (RuntimeError: the server is gone); metrics.jsonl has all of it"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_only_rank_0_writes_and_tensorboard_may_be_left_out(tmp_path, failing):
    track(tmp_path / "one", rank=1, log_to=("trackio",))
    assert Failing.made == 0
    track(tmp_path / "one", log_to=("trackio", "trackio"))
    assert Failing.made == 1 and not list((tmp_path / "one").glob("events*"))
    track(tmp_path / "two")
    assert Failing.made == 1 and len(list((tmp_path / "two").glob("events*"))) == 1


@pytest.mark.parametrize("folder_of_its_name", [False, True])
def test_a_missing_service_is_a_sentence_before_the_run(tmp_path, monkeypatch, folder_of_its_name):
    spec = importlib.machinery.ModuleSpec("wandb", None) if folder_of_its_name else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=r"^--log_to wandb: wandb is not installed: pip install wandb"):
        claim_run(TrainerArgs(iters=4, model_path=str(tmp_path), log_to=("wandb",)), 1)


def test_a_run_without_a_directory_has_nowhere_to_log_to():
    with pytest.raises(UserError, match="--log_to needs --model_path"):
        TrainerArgs(iters=4, log_to=("wandb",)).check_used()


def test_a_run_keeps_its_id_and_another_at_the_same_path_gets_its_own(tmp_path, monkeypatch):
    """Against what wandb is told: a removed run's path is used again, as one is on two machines."""
    made, defined = [], []

    def init(**settings):
        made.append(settings["id"])
        log = SimpleNamespace(log=lambda numbers: None, finish=lambda: None)
        return SimpleNamespace(**vars(log), define_metric=lambda name, step_metric: defined.append(step_metric))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    spec = importlib.machinery.ModuleSpec("wandb", None, origin="wandb.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    args = TrainerArgs(iters=4, model_path=str(tmp_path / "run"), log_to=("wandb",))
    for _ in range(2):
        (tmp_path / "run").mkdir()
        services.choose_services(args, tmp_path / "run")
        for _ in range(2):
            services.Services(tmp_path / "run").close()
        shutil.rmtree(tmp_path / "run")
    assert made[0] == made[1] != made[2] == made[3] and set(defined) == {"step"}
