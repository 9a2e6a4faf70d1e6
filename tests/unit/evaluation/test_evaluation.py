"""Predictions of an evaluation: what is kept, counted, written, shown and refused."""

from __future__ import annotations

import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.data.examples.examples import Example
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.evaluation.answers import LabelWords, number_in
from lm_experiments_tools.evaluation.predictions import Predictions
from lm_experiments_tools.metrics.labels import UNKNOWN, label_metrics
from tests.helpers.evaluation_toys import TEXTS, args_of, generated, indices, lines_of, sentences


# ---- text
def test_predictions_stand_beside_references_in_the_order_of_the_examples(tmp_path, decode):
    collector = Predictions(args_of(metrics=("exact_match", "gen_len")), "valid", TEXTS, decode, (), tmp_path / "new")
    collector.add(indices(2, 0), generated("dogs", "the cats sleep"))
    collector.add(indices(1), generated("dogs run"))
    values = collector.reduce(LocalBackend())
    assert values == {"exact_match": pytest.approx(200 / 3), "gen_len": (2 + 4 + 3) / 3}  # the end counts, padding not
    assert lines_of(tmp_path / "new" / "valid.jsonl") == [
        {
            "id": "q1",
            "source": "what do cats do",
            "prediction": "the cats sleep",
            "references": ["cats sleep", "sleep"],
        },
        {"id": "q2", "source": "what do dogs do", "prediction": "dogs run", "references": ["dogs run"]},
        {"id": "q3", "source": "cats or dogs", "prediction": "dogs", "references": ["cats"]},
    ]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["valid.jsonl"]


def test_an_example_without_prediction_is_not_passed_over(decode):
    collector = Predictions(args_of(metrics=("exact_match",)), "valid", TEXTS, decode)
    collector.add(indices(0, 2), generated("sleep", "cats"))
    with pytest.raises(RuntimeError, match="1 of 3 examples of valid were not predicted, the first is q2"):
        collector.reduce(LocalBackend())


def test_padding_of_any_kind_never_reaches_the_tokenizer(decode):
    """Rust's tokenizers fail on negative numbers."""
    outputs = generated("cats sleep", "dogs", filler=-100)["generation_outputs"]
    with pytest.raises(OverflowError):
        decode.tokenizer.batch_decode(outputs)
    assert decode(outputs) == ["cats sleep", "dogs"]
    assert decode.lengths(outputs) == [3, 2]


def test_instructions_are_measured_for_each_task(tmp_path, decode):
    pytest.importorskip("rouge_score")
    examples = [Example("a", ("cats",), name=str(n), group=f"task{n // 2}") for n in range(4)]
    collector = Predictions(args_of(task="instructions", valid_data_path=None), "test", examples, decode, (), tmp_path)
    collector.add(indices(0, 1, 2, 3), generated("cats", "cats", "cats", "dogs"))
    values = collector.reduce(LocalBackend())
    assert (values["rougeL"], values["rougeL/task0"], values["exact_match/task1"]) == (75.0, 100.0, 50.0)
    assert lines_of(tmp_path / "test.jsonl")[3]["group"] == "task1"


# ---- labels and numbers
def test_labels_of_an_encoder(tmp_path):
    args = args_of(model_type="encoder", task="classification", metrics=("accuracy", "f1"))
    collector = Predictions(args, "valid", sentences(1, 0, 1, pair="b"), None, ("no", "yes"), tmp_path)
    collector.add(indices(2, 1), {"logits": torch.tensor([[2.0, 1.0], [3.0, -1.0]], dtype=torch.bfloat16)})
    collector.add(indices(0), {"logits": torch.tensor([[0.0, 1.0]])})
    assert collector.reduce(LocalBackend()) == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}
    records = lines_of(tmp_path / "valid.jsonl")
    assert [(r["pair"], r["prediction"], r["references"]) for r in records] == [
        ("b", "yes", ["yes"]), ("b", "no", ["no"]), ("b", "no", ["yes"])
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["flag", "saved with the model"])
def test_answers_that_are_no_label_are_wrong_and_counted(tmp_path, decode, source):
    words = {"label_words": ("No.", "yes")}
    of_args, of_data = (words, {}) if source == "flag" else ({}, words)
    args = args_of(task="classification", metrics=("accuracy", "precision"), **of_args)
    collector = Predictions(args, "valid", sentences(0, 0, 1, 1), decode, ("bad", "good"), tmp_path, **of_data)
    collector.add(indices(0, 1, 2, 3), generated("no", "cats", "the yes", "yes"))
    values = collector.reduce(LocalBackend())
    # an unknown answer where "bad" was right counts as "good": precision falls too
    assert values == {"accuracy": 0.75, "precision": pytest.approx(2 / 3), "unknown_answers": 0.25}
    records = lines_of(tmp_path / "valid.jsonl")
    assert [r["prediction"] for r in records] == ["bad", None, "good", "good"]
    assert [r["text"] for r in records] == ["no", "cats", "the yes", "yes"]


def test_label_words_are_told_apart_as_long_as_they_differ():
    label_of = LabelWords(["A", "B", "the B", "+", "-"])
    assert [label_of(answer) for answer in ("A", "a.", "B", "The b", "+", "-", "", "the", "c")] == [
        0, 0, 1, 2, 3, 4, UNKNOWN, UNKNOWN, UNKNOWN
    ]  # fmt: skip
    with pytest.raises(UserError, match="'yes' stands for several labels"):
        LabelWords(["yes", "no", " yes"])


def test_labels_never_met_are_not_part_of_the_mean():
    cases = (
        ([0, 2], 5, {"f1": 1.0, "mcc": 1.0}),
        ([1, 1], 2, {"f1": 1.0, "mcc": 0.0}),  # one class: as scikit-learn
        ([0, 0], 2, {"f1": 0.0, "precision": 0.0}),
    )
    for labels, number, expected in cases:
        assert label_metrics(labels, labels, num_labels=number).items() >= expected.items()


def test_numbers_of_an_encoder_and_of_text(tmp_path, decode):
    args = args_of(model_type="encoder", task="regression", metrics=("mse",))
    collector = Predictions(args, "valid", sentences(1.0, 2.5), None, (), tmp_path)
    collector.add(indices(1, 0), {"logits": torch.tensor([[2.0], [1.0]])})
    assert collector.reduce(LocalBackend()) == {"mse": 0.125}
    assert [r["prediction"] for r in lines_of(tmp_path / "valid.jsonl")] == [1.0, 2.0]

    collector = Predictions(args_of(task="regression", metrics=("mse",)), "valid", sentences(0.5, 1.0), decode)
    collector.add(indices(0, 1), generated("0.5", "cats"))
    assert collector.reduce(LocalBackend()) == {"mse": 2.0, "unknown_answers": 0.5}  # (1 - -1)^2 / 2
    assert [number_in(answer) for answer in (" 3.0 ", "-1e2", "nan", "inf", "three", "")] == [3, -100] + [None] * 4


# ---- input that cannot be measured
def test_examples_without_references_are_predicted_and_only_their_length_is_measured(tmp_path, decode):
    collector = Predictions(args_of(), "test", [Example("a", name="1")], decode, (), tmp_path)
    collector.add(indices(0), generated("cats"))
    assert collector.reduce(LocalBackend()) == {"gen_len": 2.0}
    assert lines_of(tmp_path / "test.jsonl") == [{"id": "1", "source": "a", "prediction": "cats", "references": []}]
    collector = Predictions(args_of(metrics=("bleu",)), "test", [Example("a", name="1")], decode)
    collector.add(indices(0), generated("cats"))
    assert collector.reduce(LocalBackend()) == {}


def test_references_that_only_some_have_are_refused(decode):
    with pytest.raises(UserError, match="1 of 4 examples of the valid data have no reference, the first is 7"):
        Predictions(args_of(), "valid", [*TEXTS, Example("a", name="7")], decode)
    with pytest.raises(UserError, match="1 of 2 examples"):
        Predictions(
            args_of(model_type="encoder", task="classification"), "valid", sentences(0, None), None, ("a", "b")
        )


@pytest.mark.parametrize("metrics", [("rouge", "scrolls"), ("instructions", "exact_match")])
def test_metrics_that_give_one_value_by_two_rules_are_refused(metrics, decode):
    args = args_of(task="instructions", valid_data_path=None, metrics=metrics)
    with pytest.raises(UserError, match="by different rules: choose one"):
        Predictions(args, "valid", TEXTS, decode)
