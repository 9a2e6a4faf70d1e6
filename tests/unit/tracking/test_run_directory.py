"""The run directory: re-runnable records, never overwritten; refusal of another run's directory; log files."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from lm_experiments_tools.config.flags import harmless_flags
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tracking.run_directory import RunDirectory, setup_logging

ARGS = {
    "model_path": "runs/a",
    "lr": 1e-5,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "iters": 100,
    "optimizer": None,
    "fp16": False,
    "source_prefix": "yes: # no\n",
    "data": [1, 2],
}
ORIGINS = {"lr": "command line", "iters": "run.yaml"}


@pytest.fixture(autouse=True)
def clean_logging():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def in_use(directory: RunDirectory) -> RunDirectory:
    (directory.path / "metrics.jsonl").write_text("{}\n")
    return directory


def test_start_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    directory = RunDirectory(tmp_path / "a" / "b")
    directory.write_start(ARGS, ORIGINS, {"d_model": 16}, world_size=2)
    config = json.loads((directory.path / "config.json").read_text())
    assert {name: config[name] for name in ARGS} == ARGS
    assert config["ENV"]["CUDA_VISIBLE_DEVICES"] == "1" and config["MACHINE"] and config["WORLD_SIZE"] == 2
    text = (directory.path / "config.yaml").read_text()
    assert yaml.safe_load(text) == ARGS
    assert "lr: 1.0e-05  # command line" in text.splitlines() and "iters: 100  # run.yaml" in text.splitlines()
    environment = json.loads((directory.path / "env.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and environment["python"] == sys.version
    assert environment["command"] == sys.orig_argv
    assert environment["cpu"]["count"] == os.cpu_count() and environment["gpus"] == []
    assert json.loads((directory.path / "model_config.json").read_text()) == {"d_model": 16}


def test_second_start_never_touches_the_first(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.write_start(ARGS, ORIGINS, {"d_model": 16})
    first = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    second = RunDirectory(tmp_path)
    second.write_start({**ARGS, "iters": 200}, ORIGINS, {"d_model": 32})
    assert {name: (tmp_path / name).read_bytes() for name in first} == first
    assert json.loads((tmp_path / "config.1.json").read_text())["iters"] == 200
    assert json.loads((tmp_path / "model_config.1.json").read_text()) == {"d_model": 32}
    assert {"config.1.yaml", "env.1.json"} <= {file.name for file in tmp_path.iterdir()}


def test_settings_are_compared_by_meaning_and_refused_by_the_flags_that_were_given(tmp_path):
    before = {"from_pretrained": "runs/a/", "init_checkpoint": "b/../runs/a", "lr": 1}
    directory = in_use(RunDirectory(tmp_path))
    directory.write_start(before, {})
    for spelled in ("runs/./a", "runs/a"):
        same = {**before, "from_pretrained": spelled, "init_checkpoint": spelled}
        assert directory.check_compatible(same, resume=False) == {}
    other = {**before, "from_pretrained": "runs/b", "init_checkpoint": "runs/b", "lr": 2}
    with pytest.raises(
        UserError, match=r'settings: from_pretrained \("runs/a/" .*\), lr \(1 then, 2 now\); choose'
    ) as error:
        directory.check_compatible(other, resume=False)
    assert "init_checkpoint" not in str(error.value).partition("; choose")[0]


def git(repository: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        cwd=repository,
        check=True,
        capture_output=True,
    )


def test_git_state_can_be_restored(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init")
    (repository / "code.py").write_text("a = 1\n")
    git(repository, "add", "code.py")
    git(repository, "commit", "-m", "first")
    (repository / "code.py").write_text("a = 2  # é\n")
    (repository / "new.py").write_text("")
    monkeypatch.chdir(repository)
    directory = RunDirectory(tmp_path / "run")
    directory.write_start(ARGS, {})
    assert "?? new.py" in (directory.path / "git_status.txt").read_text()
    commit = json.loads((directory.path / "config.json").read_text())["COMMIT"]
    git(repository, "checkout", "--", "code.py")
    git(repository, "checkout", commit)
    git(repository, "apply", str(directory.path / "git.diff"))
    assert (repository / "code.py").read_text() == "a = 2  # é\n"


def test_other_configuration_is_refused_unless_asked_for(tmp_path, caplog):
    directory = RunDirectory(tmp_path)
    assert directory.check_compatible(ARGS, False) == {}
    directory.write_start(ARGS, ORIGINS)
    changed = {**ARGS, "lr": 3e-4, "iters": 5, "log_interval": 7, "model_path": "elsewhere", "data": (1, 2)}
    assert directory.check_compatible(changed, False) == {}, "nothing was trained yet: nothing to protect"
    in_use(directory)
    check = partial(directory.check_compatible, harmless=harmless_flags(T5PretrainingArgs))
    with pytest.raises(UserError, match=r"lr \(1e-05 then, 0\.0003 now\); choose another --model_path") as error:
        check(changed, False)
    assert not any(word in str(error.value) for word in ("iters", "log_interval", "data"))
    assert check(changed, True) == {"lr": (1e-5, 3e-4)}
    assert "lr (1e-05 then, 0.0003 now)" in caplog.text
    assert check({**ARGS, "iters": 10**6}, False) == {}


def test_another_split_of_the_same_global_batch_is_compatible(tmp_path):
    directory = in_use(RunDirectory(tmp_path))
    directory.write_start(ARGS, ORIGINS, world_size=2)
    same = {**ARGS, "batch_size": 16, "gradient_accumulation_steps": 1}
    assert directory.check_compatible(same, False, world_size=1) == {}
    with pytest.raises(UserError, match=r"global_batch_size \(16 then, 32 now\)"):
        directory.check_compatible(same, False, world_size=2)
    with pytest.raises(UserError, match=r"batch_size \(4 then, 16 now\)"):
        directory.check_compatible(same, False)


def test_damaged_config_and_unusable_path_are_one_sentence(tmp_path):
    directory = in_use(RunDirectory(tmp_path))
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"config\.json is not valid JSON.* Fix or remove it"):
        directory.check_compatible(ARGS, False)
    with pytest.raises(UserError, match="--model_path"):
        RunDirectory(tmp_path / "config.json" / "x")
    with pytest.raises(UserError, match="--model_path"):
        setup_logging(tmp_path / "config.json", rank=0)


def test_recorded_yaml_gives_the_same_arguments_back(tmp_path):
    from lm_experiments_tools.config.cli import parse

    given = ["--data_path", "d", "--model_path", str(tmp_path), "--lr", "1e-5", "--model_cfg", "m.json", "--bf16"]
    given += ["--vocab", "v.model"]
    first, origins = parse(T5PretrainingArgs, given)
    RunDirectory(tmp_path).write_start(asdict(first), origins)
    again, _ = parse(T5PretrainingArgs, ["--config", str(tmp_path / "config.yaml")])
    assert again == first


def test_every_rank_has_a_log_file_and_only_rank_0_a_console(tmp_path, capsys):
    setup_logging(tmp_path, 0)  # twice, which doubles nothing
    for rank in (0, 1):
        setup_logging(tmp_path, rank)
        logging.getLogger("a").info("hello from %d", rank)
        logging.getLogger("a").warning("careful")
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert text.count(f"rank{rank} INFO a: hello from {rank}") == 1 and "WARNING" in text
    assert capsys.readouterr().err == "hello from 0\nwarning: careful\n"
