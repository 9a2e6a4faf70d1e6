"""Runs without `--model_path`: the folder that a script makes, and what it says of it."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest
import yaml

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.main import main as lmtools
from lm_experiments_tools.training import run_folder
from run_t5_pretraining import main
from tests.helpers.runs import T5_RUN, refused, words, write_toys
from tests.helpers.thread_workers import Workers
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

DATED = "runs/t5-2026-11-28-181500"


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with text and a model's configuration, as the current one, at one moment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMTOOLS_RUNS")
    monkeypatch.setattr(run_folder, "time", SimpleNamespace(strftime=lambda form: "2026-11-28-181500"))
    write_toys(tmp_path)
    numbered_words_vocabulary(tmp_path)
    return tmp_path


def start(**changed):
    main(words(**{**T5_RUN, "vocab": "vocab.model", **changed}))


def test_a_run_is_saved_in_a_folder_that_its_first_and_last_lines_name(work, caplog):
    caplog.set_level("INFO")
    start(working_dir=str(work))
    said = [record.message for record in caplog.records]
    assert said[0] == said[-1] == f"run directory: {DATED}"
    assert (work / DATED / "last").resolve().name == "step_000002"
    # Another run in the same second.
    start()
    assert (work / f"{DATED}-2" / "last").exists()


def test_the_recorded_settings_continue_the_run(work, caplog):
    start()
    assert yaml.safe_load((work / DATED / "config.yaml").read_text())["model_path"] == DATED
    caplog.set_level("INFO")
    start(model_path=DATED, iters=3)
    assert "resumed from" in caplog.text and not (work / f"{DATED}-2").exists()


def test_the_printed_commands_run(work, caplog, capsys):
    caplog.set_level("INFO")
    start(model_path="a run")
    (line,) = [record.message for record in caplog.records if record.message.startswith("next: ")]
    commands = [shlex.split(command) for command in line.removeprefix("next: ").split("; ")]
    assert commands and all(command[:3] == ["lmtools", "generate", "a run"] for command in commands)
    for command in commands:
        assert lmtools(command[1:]) == 0


@pytest.mark.parametrize("none", ["none", "None"])
def test_none_saves_nothing_and_says_so(work, caplog, none):
    caplog.set_level("INFO")
    start(model_path=none)
    assert "neither checkpoints nor logs are saved" in caplog.records[0].message
    assert not (work / "runs").exists() and not (work / none).exists()


def test_a_refused_start_leaves_no_folder(work):
    refused(start, "holds no text|is not|does not exist", data_path="absent.jsonl", streaming=True)
    assert not (work / "runs").exists()


def test_all_workers_share_the_folder_that_rank_0_makes(work):
    args = T5PretrainingArgs(**{**T5_RUN, "data_path": ("text.jsonl",), "model_path": "auto"})
    folders = Workers(2).run(lambda backend: run_folder.with_run_directory(args, backend, "t5").model_path)
    assert folders == [DATED, DATED] and len(list((work / "runs").iterdir())) == 1


@pytest.mark.parametrize("variable", ["TORCHELASTIC_MAX_RESTARTS", "HOROVOD_ELASTIC", "SLURM_RESTART_COUNT"])
def test_a_job_that_is_restarted_must_name_its_folder(work, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    args = T5PretrainingArgs(**{**T5_RUN, "data_path": ("text.jsonl",), "model_path": "auto"})
    with pytest.raises(UserError, match=r"may be started again .* give --model_path DIR"):
        run_folder.with_run_directory(args, LocalBackend(), "t5")
