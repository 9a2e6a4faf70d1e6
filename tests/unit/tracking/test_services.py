"""Runs in trackio and wandb, beside metrics.jsonl; examples in TensorBoard's text tab."""

import importlib.machinery
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking import services
from lm_experiments_tools.tracking.examples import show_examples
from lm_experiments_tools.tracking.run_directory import claim_run
from lm_experiments_tools.tracking.tracker import Tracker
from tests.helpers import ROOT

# a run that is killed after step 3, and goes on from step 2
RUN = """
import sys
from lm_experiments_tools.config.training import TrainerArgs
from lm_experiments_tools.tracking.run_directory import claim_run
from lm_experiments_tools.tracking.tracker import Tracker

args = TrainerArgs(iters=5, lr_scheduler=None, model_path="runs/one", log_to=(sys.argv[1],))
claim_run(args, 1)
for start, stop in ((-1, 3), (2, 5)):
    with Tracker(args.model_path, rank=0, start_step=start) as tracker:
        for step in range(max(start, 0) + 1, stop + 1):
            numbers = {"param_groups": [{"lr": 0.1 / step}, {"lr": 0.2}], "memory_mib": 7.5}
            tracker.log("train", step, 8 * step, 800 * step, {"loss": 1 / step}, extra=numbers)
            tracker.log("valid", step, 8 * step, 800 * step, {"loss": float("nan") if step == 4 else 2 / step})
"""
NOT_OURS = {"split", "metrics", "time", "lr_param_groups"}


def run_with(service: str, folder: Path) -> list[dict]:
    """Track a run in a process of its own; every record it ever wrote, in order."""
    pytest.importorskip(service, reason=f"{service} is not installed: pip install {service}")
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline"}
    path = [str(ROOT), *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = subprocess.run(
        [sys.executable, "-c", RUN, service], cwd=folder, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert "gets no more" not in done.stderr
    lines = (folder / "runs/one/metrics.jsonl").read_text().splitlines()
    superseded = (folder / "runs/one/metrics.superseded.jsonl").read_text().splitlines()
    return [json.loads(line) for line in [*lines[:4], *superseded, *lines[4:]]]


def agree(found: list[dict], records: list[dict]) -> None:
    """Names of metrics end in their split; null is NaN; everything else is as in metrics.jsonl, to the last digit."""
    assert len(found) == len(records)
    for numbers, record in zip(found, records, strict=True):
        expected = {
            f"{name}/{record['split']}" if name in record["metrics"] else name: math.nan if value is None else value
            for name, value in record.items()
            if name not in NOT_OURS
        }
        groups = record.get("lr_param_groups", [])
        expected |= {f"lr_param_groups/{place}": lr for place, lr in enumerate(groups)}
        assert numbers == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_trackios_database_holds_what_metrics_jsonl_holds_and_one_run(tmp_path):
    records = run_with("trackio", tmp_path)
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    assert len({row[:2] for row in rows}) == 1
    found = [{"step": step, **json.loads(metrics)} for _, _, step, metrics in rows]
    agree([{k: math.nan if v == "NaN" else v for k, v in numbers.items()} for numbers in found], records)


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


def test_tensorboard_shows_the_texts_of_examples_as_they_are(tmp_path):
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    odd = "a|b <extra_id_0> *c* _d_ [e](f) `g` 1 < 2 & 3 \\ #h ~~i~~"
    examples = [
        {"id": "q1", "source": odd, "prediction": None, "references": [odd, "two"]},
        {"id": 2, "source": "line\nline", "prediction": 0.5, "references": []},
    ]
    with Tracker(tmp_path, rank=0) as tracker:
        show_examples("valid", examples, tracker, 7)
    tracker.text("examples/valid", "after the end", 8)
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (event,) = accumulator.Tensors("examples/valid/text_summary")
    assert event.step == 7
    shown = plugin_util.markdown_to_safe_html(event.tensor_proto.string_val[0])
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", shown, flags=re.DOTALL)
    literal = odd.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert cells == [
        *("id", "source", "prediction", "references"),
        *("q1", literal, "None", f"{literal}<br>two"),
        *("2", "line line", "0.5", ""),
    ]  # fmt: skip


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
