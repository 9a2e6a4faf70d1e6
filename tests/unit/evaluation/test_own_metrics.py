"""A user's own metrics by flag (docs/extending.md), and how CONTRIBUTING.md adds a built-in one."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.evaluation.predictions import Predictions
from lm_experiments_tools.metrics import METRICS, text
from tests.helpers import ROOT
from tests.helpers.evaluation_toys import TEXTS, args_of, generated, indices, sentences

OWN, BUILT_IN = (
    re.search(r"^##+ A metric\n.*?^```python[^\n]*\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)[1]
    for page in ("docs/extending.md", "CONTRIBUTING.md")
)
CODE = """
def seen(predictions, references): seen.sides = predictions, references; return {"seen": 1, "half": 0.5}
def grouped(predictions, references, *, groups): return float(len(groups))
def undefined(predictions, references): return float("nan")
def text(predictions, references): return "good"
def infinite(predictions, references): return {"a": float("inf")}
def loss(predictions, references): return 1.0
def exact_match(predictions, references): return 1.0
def alone(predictions): return 1.0
"""


@pytest.fixture(autouse=True)
def my_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "my_metrics", raising=False)
    (tmp_path / "my_metrics.py").write_text(OWN + CODE)
    yield
    sys.modules.pop("my_metrics", None)


def values_by(decode, *metrics, **changes):
    collector = Predictions(args_of(metrics=metrics, **changes), "valid", TEXTS, decode)
    collector.add(indices(0, 1, 2), generated("cats sleep", "dogs", "cats run"))
    return collector.reduce(LocalBackend())


def test_function_of_the_page_is_measured_beside_a_built_in_one(decode):
    values = values_by(decode, "my_metrics:length_ratio", "exact_match")
    assert values == {"length_ratio": 1.0, "exact_match": pytest.approx(100 / 3)}


def test_built_in_metric_of_the_page_needs_no_other_change(decode, monkeypatch):
    sacrebleu = pytest.importorskip("sacrebleu")
    monkeypatch.setattr(text, "METRICS", {})
    space = dict(vars(text))
    exec(BUILT_IN, space)
    monkeypatch.setitem(METRICS, "ter", text.METRICS["ter"])
    streams = [["cats sleep", "dogs run", "cats"], ["sleep", None, None]]
    expected = sacrebleu.corpus_ter(["cats sleep", "dogs", "cats run"], streams).score
    assert values_by(decode, "ter", optimize_metric="ter") == {"ter": expected} and expected > 0
    assert args_of(metrics=("ter",), optimize_metric="ter").resolved().optimize_mode == "min"


def test_text_comes_as_lists_of_strings_and_a_dict_gives_several_values(decode):
    assert values_by(decode, "my_metrics:seen", "my_metrics:grouped") == {"seen": 1.0, "half": 0.5, "grouped": 3.0}
    assert sys.modules["my_metrics"].seen.sides == (
        ["cats sleep", "dogs", "cats run"], [["cats sleep", "sleep"], ["dogs run"], ["cats"]]
    )  # fmt: skip


def test_labels_come_by_name_and_numbers_as_numbers(decode):
    args = args_of(task="classification", metrics=("my_metrics:seen",))
    collector = Predictions(args, "valid", sentences(1, 0), decode, ("no", "yes"))
    collector.add(indices(0, 1), generated("yes", "cats"))
    assert collector.reduce(LocalBackend()) == {"seen": 1.0, "half": 0.5, "unknown_answers": 0.5}
    assert sys.modules["my_metrics"].seen.sides == (["yes", None], ["yes", "no"])
    args = args_of(model_type="encoder", task="regression", metrics=("my_metrics:seen", "mse"))
    collector = Predictions(args, "valid", sentences(1.0, 2.5))
    collector.add(indices(1, 0), {"logits": torch.tensor([[2.0], [1.0]])})
    assert collector.reduce(LocalBackend())["mse"] == 0.125
    assert sys.modules["my_metrics"].seen.sides == ([1.0, 2.0], [1.0, 2.5])


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            ("my_metrics:text",),
            "--metrics my_metrics:text returned 'good' of type str as 'text': return a finite number",
        ),
        (("my_metrics:infinite",), "returned inf of type float as 'a': return a finite number"),
        (("my_metrics:loss",), "--metrics my_metrics:loss returned loss, which there is already"),
        (("exact_match", "my_metrics:exact_match"), "returned exact_match, which there is already"),
    ],
)
def test_result_that_is_no_value_is_refused(names, sentence, decode):
    with pytest.raises(UserError) as error:
        values_by(decode, *names)
    assert sentence in str(error.value)
