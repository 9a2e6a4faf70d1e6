"""The text of `--help`: what is shown when, defaults, what it costs."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
import typing

import pytest

from lm_experiments_tools.config import cli
from lm_experiments_tools.config.bert import BertPretrainingArgs
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.config.flags import help_groups
from lm_experiments_tools.config.help import ESSENTIAL
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.config.training import ModelArgs

SCRIPTS = {
    "run_t5_pretraining": T5PretrainingArgs,
    "run_bert_pretraining": BertPretrainingArgs,
    "run_finetuning": FinetuningArgs,
}
HELP = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
import {script}
try:
    {script}.main({words})
finally:
    sys.setprofile(None)
    heavy = {{"torch", "transformers", "tensorflow", "numpy", "datasets", "accelerate", "horovod"}} & set(sys.modules)
    assert not heavy, heavy
    assert len(sys.modules) < 400 and calls < 1_000_000, (len(sys.modules), calls)
"""


def shown(args_class, capsys, monkeypatch, *topic: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")  # one column of groups, in which a flag and its help follow each other
    with pytest.raises(SystemExit) as stop:
        cli.parse(args_class, ["--help", *topic])
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_flag_in_groups_at_the_cost_of_few_calls(script, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code = HELP.format(script=script, words=["--help", "all"])
    result = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert (result.returncode, result.stderr) == (0, "")  # no warning either
    text = result.stdout
    for field in dataclasses.fields(SCRIPTS[script]):
        assert f"--{field.name}" in text
    for group in ("data", "model", "optimizer", "run", "schedule", "batch", "precision", "validation", "checkpoint"):
        assert f"{group} options" in text or (group, script) == ("data", "run_finetuning")
    assert importlib.import_module(script).__doc__.split()[0] in text and "(default: 1e-08)" in text
    assert " ".join(text.split()).count(ModelArgs.__doc__) == 1
    assert "--help GROUP" not in text, "nothing is left out"


@pytest.mark.parametrize("args_class", SCRIPTS.values())
def test_help_alone_shows_what_matters(args_class, capsys, monkeypatch):
    text = shown(args_class, capsys, monkeypatch)
    names = {field.name for field in dataclasses.fields(args_class)} | {"config", "print_config", "dry_run"}
    for name in names:
        own_line = text.count(f" --{name} ") or text.count(f" --{name}, ")
        assert bool(own_line) or name not in ESSENTIAL, name
    assert 18 <= len(names & ESSENTIAL) <= 28 and "--lr_drop_eps" not in text and "--allow_pickle" not in text
    assert f"--help all shows all {len(names)} flags, --help GROUP one of" in text


def test_help_of_one_group(capsys, monkeypatch):
    text = shown(T5PretrainingArgs, capsys, monkeypatch, "schedule")
    assert "--lr_drop_eps FLOAT" in text and "schedule options" in text and "--batch_size" not in text
    assert shown(T5PretrainingArgs, capsys, monkeypatch, "lr_drop_eps") == text, "a flag shows its group"
    assert shown(T5PretrainingArgs, capsys, monkeypatch, "--lr-drop-eps".lstrip("-")) == text
    assert "--vocab_file" in shown(BertPretrainingArgs, capsys, monkeypatch, "data"), "bert_data"


@pytest.mark.parametrize("args_class", SCRIPTS.values())
def test_every_flag_is_in_one_group_with_a_sentence(args_class, capsys, monkeypatch):
    names = [name for group in help_groups(args_class) for name in inspect.get_annotations(group)]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(args_class))
    text = shown(args_class, capsys, monkeypatch, "all")
    assert text.count("(default: ") + text.count("(required)") >= len(names) + 2  # those of --config
    for name, kind in typing.get_type_hints(args_class).items():
        after_flag = text.split(f"--{name} " if kind is not bool else f"--no_{name} ", 1)[1]
        assert "." in after_flag.split("(default", 1)[0].split("(required", 1)[0], name
