"""Metrics of fine-tuning against the programs that people compare with: the same numbers, to the digit."""

import importlib.util
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.config.finetuning import FinetuningArgs
from lm_experiments_tools.data.examples.examples import Example
from lm_experiments_tools.evaluation.answers import LabelWords
from lm_experiments_tools.evaluation.predictions import Predictions
from lm_experiments_tools.metrics import text
from lm_experiments_tools.metrics.instructions import instructions
from lm_experiments_tools.metrics.labels import UNKNOWN, label_metrics, several_label_metrics
from lm_experiments_tools.metrics.numbers import mse, pearson, spearman
from tests.helpers.real_data import DATA, lacking

hypothesis = pytest.importorskip("hypothesis")
given, settings, strategies = hypothesis.given, hypothesis.settings, hypothesis.strategies

SCITLDR = DATA / "seq2seq" / "scitldr" / "test_multiref.jsonl"
SNI = DATA / "sni"
TASKS = (
    "task033_winogrande_answer_generation",
    "task039_qasc_find_overlapping_words",
    "task1393_superglue_copa_text_completion",
    "task1728_web_nlg_data_to_text",
)
# rougeL, rouge1, exact_match of all and of each task, by yizhongw/Tk-Instruct's src/compute_metrics.py.
GOLDEN_INSTRUCTIONS = {
    "": (66.7537, 67.0523, 39.2982),
    "/task033_winogrande_answer_generation": (56.8182, 56.8182, 34.0909),
    "/task039_qasc_find_overlapping_words": (56.9106, 56.9106, 34.1463),
    "/task1393_superglue_copa_text_completion": (71.0, 71.0, 49.0),
    "/task1728_web_nlg_data_to_text": (70.9148, 71.7657, 34.0),
}


def summaries(number: int = 15) -> tuple[list[str], list[list[str]]]:
    """Two sentences of each abstract, on lines of their own, beside 1 to 5 human summaries."""
    if reason := lacking(SCITLDR):
        pytest.skip(reason)
    rows = [json.loads(line) for line in SCITLDR.read_text().splitlines()[:number]]
    predictions = ["\n".join(row["source"].split(". ")[:2]) for row in rows]
    return predictions, [row["targets"][: 1 + index % 5] for index, row in enumerate(rows)]


# ---- text


@pytest.mark.parametrize("tokenize", ["13a", "intl", "zh", "char", "none"])
def test_bleu_of_chinese_is_sacrebleus_by_each_tokenizer(tokenize):
    sacrebleu = pytest.importorskip("sacrebleu")
    predictions = ["今天天气很好，我们去公园散步吧。", "他在北京大学学习 Physics。"]
    references = ["今天天气不错，我们去公园走走吧。", "她在北京大学学习 Physics。"]
    expected = sacrebleu.corpus_bleu(predictions, [references], tokenize=tokenize).score
    args = FinetuningArgs(model_cfg="m", valid_data_path="y", metrics=("bleu",), bleu_tokenize=tokenize)
    examples = [Example("s", (reference,), name=reference) for reference in references]

    class Decoder:
        def __call__(self, token_ids):
            return [predictions[number] for number in token_ids[:, 0].tolist()]

        def lengths(self, token_ids):
            return [1] * len(token_ids)

    collector = Predictions(args, "valid", examples, Decoder())
    collector.add({"example": torch.arange(2)}, {"generation_outputs": torch.arange(2)[:, None]})
    assert collector.reduce(LocalBackend()) == {"bleu": expected}
    assert expected > 20 or tokenize in ("13a", "intl", "none")


def test_examples_may_have_different_numbers_of_references():
    """Repeating a reference changes neither BLEU's clipped counts nor chrF's best one."""
    sacrebleu = pytest.importorskip("sacrebleu")
    predictions, references = summaries()
    assert len({len(wanted) for wanted in references}) > 2
    streams = [[wanted[min(i, len(wanted) - 1)] for wanted in references] for i in range(5)]
    bleu = sacrebleu.corpus_bleu(predictions, streams).score
    assert text.bleu(predictions, references) == bleu
    assert text.bleu(predictions, [wanted[:1] for wanted in references]) < bleu
    assert text.chrf(predictions, references) == sacrebleu.corpus_chrf(predictions, streams).score


def rouge_by_hand(predictions, references, kinds, stem):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(kinds, use_stemmer=stem)
    best = [
        [max(scorer.score(reference, prediction)[kind].fmeasure for reference in wanted) for kind in kinds]
        for prediction, wanted in zip(predictions, references, strict=True)
    ]
    return dict(zip(kinds, 100 * np.mean(best, axis=0), strict=True))


def test_rouge_is_rouge_scores_with_the_best_reference():
    predictions, references = summaries()
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    values = text.rouge(predictions, references)
    assert values == pytest.approx(rouge_by_hand(predictions, references, kinds, stem=True), rel=1e-13)
    assert values["rougeL"] != values["rougeLsum"]  # lines are sentences
    assert values["rouge1"] != pytest.approx(rouge_by_hand(predictions, references, ["rouge1"], False)["rouge1"])


def test_scrolls_example_of_its_metric():
    """Numbers from the documentation of tau/scrolls' metrics/scrolls.py."""
    pytest.importorskip("rouge_score")
    predictions = ["exact match example", "hello there", "general kenobi"]
    references = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]
    values = {name: round(value, 4) for name, value in text.scrolls(predictions, references).items()}
    assert values == {
        "rouge1": 72.2222, "rouge2": 33.3333, "rougeL": 72.2222, "rouge_geometric_mean": 55.8136, "f1_tokens": 72.2222,
        "exact_match": 33.3333,
    }  # fmt: skip


@pytest.fixture(scope="module")
def squad():
    """t5's evaluation of SQuAD, loaded from its file: the package would load TensorFlow."""
    package = importlib.util.find_spec("t5")
    if package is None:
        pytest.skip("t5 is not installed")
    spec = importlib.util.spec_from_file_location("qa_utils", Path(package.origin).parent / "evaluation/qa_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WORDS = strategies.lists(
    strategies.sampled_from(["the", "a", "An", "cat", "Cat.", "sat", "42", "-", "é", "it's", "  "]), max_size=6
).map(" ".join)


@settings(max_examples=80, deadline=None)
@given(
    strategies.lists(strategies.tuples(WORDS, strategies.lists(WORDS, min_size=1, max_size=3)), min_size=1, max_size=8)
)
def test_exact_match_and_f1_are_t5s_squad(squad, rows):
    predictions, references = [row[0] for row in rows], [row[1] for row in rows]
    theirs = squad.qa_metrics(
        [[squad.normalize_squad(reference) for reference in wanted] for wanted in references],
        [squad.normalize_squad(prediction) for prediction in predictions],
    )
    assert text.exact_match(predictions, references) == pytest.approx(theirs["em"])
    assert text.f1_tokens(predictions, references) == pytest.approx(theirs["f1"])


# ---- natural-instructions
def instances() -> tuple[list[str], list[list[str]], list[str]]:
    """Each instance answered by its own last output in capitals, by that with an article, or by the next one's."""
    files = [SNI / "tasks" / f"{task}.json" for task in TASKS]
    if reason := lacking(*files):
        pytest.skip(reason)
    pytest.importorskip("rouge_score")
    predictions, references, groups = [], [], []
    for file in files:
        outputs = [instance["output"] for instance in json.loads(file.read_text())["Instances"]]
        for row, wanted in enumerate(outputs):
            answers = (wanted[-1].upper() + "!", "the " + wanted[-1], outputs[(row + 1) % len(outputs)][0])
            predictions.append(answers[row % 3])
            references.append(wanted)
            groups.append(file.stem)
    return predictions, references, groups


def rounded(values):
    return {name: round(value, 4) for name, value in values.items()}


def test_instructions_give_the_stored_numbers_of_the_projects_script():
    predictions, references, groups = instances()
    values = rounded(instructions(predictions, references, groups=groups))
    for suffix, expected in GOLDEN_INSTRUCTIONS.items():
        assert tuple(values.pop(name + suffix) for name in ("rougeL", "rouge1", "exact_match")) == expected
    assert not values


# ---- classes
LABELS = strategies.integers(2, 5).flatmap(
    lambda n: strategies.tuples(
        strategies.just(n),
        strategies.lists(strategies.tuples(strategies.integers(-1, n - 1), strategies.integers(0, n - 1)), min_size=1),
    )
)


def class_metrics_by_scikit_learn(predictions, references, number, positive=1):
    metrics = pytest.importorskip("sklearn.metrics")
    if number == 2:
        predictions = [1 - r if p == UNKNOWN else p for p, r in zip(predictions, references, strict=True)]
    known = sorted({*predictions, *references} - {UNKNOWN})
    macro = {"average": "macro", "labels": known, "zero_division": 0}
    options = {"average": "binary", "pos_label": positive, "zero_division": 0} if number == 2 else macro
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = {
            name: getattr(metrics, f"{name}_score")(references, predictions, **options)
            for name in ("f1", "precision", "recall")
        }
        return {
            **values,
            "f1_macro": metrics.f1_score(references, predictions, **macro),
            "accuracy": metrics.accuracy_score(references, predictions),
            "mcc": metrics.matthews_corrcoef(references, predictions),
        }


@settings(max_examples=60, deadline=None)
@given(LABELS, strategies.integers(0, 1))
def test_class_metrics_are_scikit_learns(case, positive):
    number, rows = case
    predictions, references = [row[0] for row in rows], [row[1] for row in rows]
    expected = class_metrics_by_scikit_learn(predictions, references, number, positive)
    values = label_metrics(predictions, references, num_labels=number, positive_label=positive)
    assert values == pytest.approx(expected, rel=1e-12, abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(strategies.lists(strategies.tuples(*[strategies.sets(strategies.integers(0, 3))] * 2), min_size=1))
def test_metrics_of_several_labels_are_scikit_learns(pairs):
    metrics = pytest.importorskip("sklearn.metrics")
    predictions, references = ([tuple(sorted(side)) for side in sides] for sides in zip(*pairs, strict=True))
    theirs = [[[float(label in row) for label in range(4)] for row in side] for side in (references, predictions)]
    expected = {
        "f1_micro": metrics.f1_score(*theirs, average="micro", zero_division=0),
        "f1_macro": metrics.f1_score(*theirs, average="macro", zero_division=0),
        "subset_accuracy": metrics.accuracy_score(*theirs),
    }
    assert several_label_metrics(predictions, references, num_labels=4) == pytest.approx(expected, rel=1e-12)


# ---- numbers
NUMBERS = strategies.integers(-800, 800).map(lambda eighths: eighths / 8)


@settings(max_examples=60, deadline=None)
@given(strategies.lists(strategies.tuples(NUMBERS, NUMBERS), min_size=2, max_size=30))
def test_number_metrics_are_scipys_and_scikit_learns(rows):
    stats, metrics = pytest.importorskip("scipy.stats"), pytest.importorskip("sklearn.metrics")
    predictions, references = np.array(rows).T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {
            "mse": metrics.mean_squared_error(references, predictions),
            "pearson": stats.pearsonr(predictions, references)[0],
            "spearman": stats.spearmanr(predictions, references)[0],
        }
    ours = {metric.__name__: metric(predictions, references) for metric in (mse, pearson, spearman)}
    assert ours == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


def test_a_constant_side_gives_nan_and_a_warning_as_scipy(caplog):
    stats = pytest.importorskip("scipy.stats")
    with pytest.warns(stats.ConstantInputWarning):
        assert math.isnan(stats.pearsonr([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])[0])
    sides = [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]
    assert math.isnan(pearson(*sides)) and math.isnan(spearman(*sides)) and mse(*sides) == pytest.approx(5 / 3)
    assert "all 3 predictions are equal" in caplog.text


def test_label_words_accept_what_squads_normalisation_makes_equal(squad):
    label_of = LabelWords(["entailment", "not_entailment", "The neutral one"])
    for answer, number in (("Entailment.", 0), ("notentailment", 1), ("neutral one", 2), ("neutral", UNKNOWN)):
        assert label_of(answer) == number
    assert squad.normalize_squad("neutral one") == squad.normalize_squad("The neutral one")
