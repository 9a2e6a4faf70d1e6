"""docs/new_objective.md: its code, in a file of a user's, trains by `--task module:Class`."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lm_experiments_tools.config.objectives import OBJECTIVES
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import source_imports
from run_t5_pretraining import main
from tests.helpers import ROOT
from tests.helpers.runs import TINY, records, tiny_run, words

(CODE,) = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "new_objective.md").read_text(encoding="utf-8"), re.DOTALL
)
TASK = "deshuffling:Deshuffling"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a run in a folder with the page's file."""
    flags = tiny_run(tmp_path, {**TINY, "dropout_rate": 0.1}, backend="local", input_seq_len=16, task=TASK)
    (tmp_path / "deshuffling.py").write_text(CODE + "\n\nNO_OBJECTIVE = dict\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda **changed: main(words(**{**flags, **changed}))


def test_it_trains_and_a_restart_changes_no_bit(start, tmp_path):
    flags = {"task_options": "window=4"}
    start(**flags, iters=1, model_path="streamed", streaming=True)
    start(**flags, iters=4, model_path="whole")
    for iters in (2, 4):
        start(**flags, iters=iters, model_path="run")
    assert records("run") and [line["loss"] for line in records("run")] == [line["loss"] for line in records("whole")]
    ours, whole = (load_file(f"{run}/last/model.safetensors") for run in ("run", "whole"))
    assert ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in whole)
    with pytest.raises(UserError, match=r"other settings: .*task_options"):
        start(**flags | {"task_options": "window=5"}, iters=4, model_path="run")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"task": "deshuffling:Deshufling"}, "--task deshuffling:Deshufling: .*did you mean 'Deshuffling'"),
        ({"task": "deshufling:Deshuffling"}, "its file must import from lm_experiments_tools.data.objectives"),
        ({"task": "deshuffling:NO_OBJECTIVE"}, "--task deshuffling:NO_OBJECTIVE has no `objective`"),
        ({"task_options": "windw=4"}, f"--task {TASK} has no option 'windw'; did you mean 'window'"),
        ({"task_options": "window=wide"}, f"--task {TASK}: window is 'wide', but it takes a whole number"),
        ({"task": "ul2", "task_options": "window=4"}, "--task_options is not read by --task ul2 but by module:Class"),
        ({"target_seq_len": 4}, f"--target_seq_len is not read by --task {TASK} but by"),
        ({"model_cls": "transformers:GPT2LMHeadModel", "model_cfg": "gpt2.json"}, f"--task {TASK} is for encoder-dec"),
    ],
)
def test_what_it_does_not_read_or_train_is_refused(start, tmp_path, flags, sentence):
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8}))
    with pytest.raises(UserError, match=sentence):
        start(**{**flags, "iters": 1, "model_path": "refused"})


def test_the_datasets_worked_example():
    made = {}
    exec(CODE, made)
    stream = SimpleNamespace(tokens=np.arange(10, 42, dtype=np.uint16), fingerprint="x")
    vocabulary = SimpleNamespace(size=100, eos_id=1, pad_id=0)
    context = SimpleNamespace(args=SimpleNamespace(input_seq_len=7), vocabulary=vocabulary, seed=0)
    data = made["Deshuffling"](context, stream, window=4)
    batch = data.batch(np.arange(500 * len(data)))
    inputs, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    assert ([12, 10, 13, 11, 15, 14, 1], [10, 11, 12, 13, 14, 15, 1]) in list(zip(inputs, labels, strict=True))
    for row, target in zip(inputs, labels, strict=True):
        text = [token for token in target if token >= 10]
        assert target == [*text, 1, *[-100] * (6 - len(text))] and row[len(text) :] == [1, *[0] * (6 - len(text))]
        assert sorted(row[:4]) == sorted([*text, 1, 0, 0][:4]) and sorted(row[: len(text)]) == sorted(text)
    assert (batch["attention_mask"] == (batch["input_ids"] != 0)).all()


def test_every_objective_is_named_in_the_help_of_the_flag_and_on_the_page_of_objectives():
    page = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    source = (ROOT / "lm_experiments_tools" / "config" / "objectives.py").read_text(encoding="utf-8")
    text = source.split('    task: str = "span_corruption"\n')[1].split('"""')[1]
    assert all(name in text and f"| `{name}` |" in page for name in OBJECTIVES)


def test_a_module_is_one_of_objectives_by_its_imports_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "ours" / "deep"  # without __init__.py
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text("from lm_experiments_tools.data.objectives.registry import Objective\n1 / 0\n")
    (folder / "seqios.py").write_text('"""Unlike lm_experiments_tools.data.objectives."""\nimport seqio\n')
    home = "lm_experiments_tools.data.objectives"
    assert source_imports("ours.deep.mine", home)
    assert not source_imports("ours.deep.seqios", home) and not source_imports("ours.deep.none", home)
