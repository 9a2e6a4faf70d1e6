"""docs/new_objective.md: its code is put in its two places in a copy of the package, and trains."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lm_experiments_tools.config.objectives import OBJECTIVES
from tests.helpers import ROOT
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

DATASET, ENTRY, FLAG = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "new_objective.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package with the page's code in its two files, and a text to train on."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "lm_experiments_tools", folder / "lm_experiments_tools")
    shutil.copy(ROOT / "run_t5_pretraining.py", folder)
    (folder / "lm_experiments_tools" / "data" / "objectives" / "deshuffling.py").write_text(DATASET)
    config = folder / "lm_experiments_tools" / "config" / "objectives.py"
    source = config.read_text(encoding="utf-8")
    for before, code in (("# module:name, whose", ENTRY), ("    bucket_rows: ", FLAG)):
        assert source.count(before) == 1
        source = source.replace(before, f"{code}{before}")
    config.write_text(source, encoding="utf-8")
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(40))}) for i in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    numbered_words_vocabulary(folder)
    return folder


def run(copy, **flags):
    settings = {"model_cfg": ROOT / "models_configs" / "t5_configs" / "t5-micro.json", "data_path": "text.jsonl"}
    settings |= {"vocab": next(copy.glob("*.model")), "input_seq_len": 16, "batch_size": 4, "lr": 1e-3, "iters": 2}
    settings |= {"log_interval": 1, "data_n_workers": 1, "backend": "local", "model_path": "run", **flags}
    command = [sys.executable, "run_t5_pretraining.py", *(f"--{name}={value}" for name, value in settings.items())]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=environment, text=True, capture_output=True)


def test_the_page_about_objectives_is_right(copy):
    assert len(DATASET.splitlines()) <= 45
    result = run(copy, task="deshuffling", shuffle_window=4)
    assert result.returncode == 0, result.stderr
    assert "deshuffling of 15 tokens" in result.stderr
    assert json.loads((copy / "run" / "metrics.json").read_text())["train"]["loss"] > 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"task": "ul2", "shuffle_window": 4}, "--shuffle_window is not read by --task ul2 but by deshuffling"),
        ({"task": "deshuffling", "shuffle_window": 0}, "--shuffle_window is 0: it must be at least 1"),
        ({"task": "deshuffling", "target_seq_len": 4}, "--target_seq_len is not read by --task deshuffling but by"),
        (
            {"task": "deshuffling", "model_cls": "transformers:GPT2LMHeadModel", "model_cfg": "gpt2.json"},
            "--task deshuffling is for encoder-decoders",
        ),
    ],
)
def test_what_it_does_not_read_or_train_is_refused(copy, flags, sentence):
    (copy / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8}))
    result = run(copy, model_path="refused", **flags)
    assert result.returncode == 2 and sentence in result.stderr, result.stderr


def test_the_datasets_worked_example():
    made = {}
    exec(DATASET, made)
    tape = SimpleNamespace(tokens=np.arange(10, 42, dtype=np.uint16), fingerprint="x")
    data = made["DeshufflingDataset"](tape, 6, 4, 1, pad_id=0, vocab_size=100, seed=0)
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
