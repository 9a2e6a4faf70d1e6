"""Metrics of predicted labels, from the table of how often each label was taken for each other one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

UNKNOWN = -1  # a generated answer that is no label


def _confusion(predictions: Sequence[int], references: Sequence[int], number: int) -> np.ndarray:
    """int64[number + 1, number + 1] counts of (reference, prediction); the last column holds unknown answers.

    Of two labels an unknown answer counts as the other one than was right, so that it is wrong for F1 as well (T5's
    f1_score_with_invalid).
    """
    right, given = np.asarray(references, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    unknown = given == UNKNOWN
    given = np.where(unknown, 1 - right if number == 2 else number, given)
    counts = np.zeros((number + 1, number + 1), dtype=np.int64)
    np.add.at(counts, (right, given), 1)
    return counts


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """0 where there is nothing to divide by, as scikit-learn."""
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)


def _mcc(counts: np.ndarray) -> float:
    """Gorodkin's R_K, which is Matthews' coefficient for two labels; 0 where one side has one label only."""
    table = counts.astype(object)  # exact integers: products of four counts exceed 64 bits
    of_reference, of_prediction, total = table.sum(1), table.sum(0), table.sum()
    covariance = int(np.trace(table) * total - of_reference @ of_prediction)
    spread = int(total**2 - of_prediction @ of_prediction) * int(total**2 - of_reference @ of_reference)
    return covariance / math.sqrt(spread) if spread else 0.0


def class_metrics(
    names: Sequence[str], predictions: Sequence[int], references: Sequence[int], num_labels: int
) -> dict[str, float]:
    """The metrics `names` of accuracy, f1, precision, recall and mcc.

    Args:
        predictions: number of a label, or UNKNOWN.
        references: numbers of the right labels.
    """
    counts = _confusion(predictions, references, num_labels)
    hits = np.diagonal(counts)[:num_labels].astype(np.float64)
    given, right = counts.sum(0)[:num_labels], counts.sum(1)[:num_labels]
    kept = np.array([False, True]) if num_labels == 2 else (given + right) > 0
    of_labels = {
        "precision": _ratio(hits, given),
        "recall": _ratio(hits, right),
        "f1": _ratio(2 * hits, given + right),
    }
    values = {name: float(label_values[kept].mean()) for name, label_values in of_labels.items()}
    values |= {"accuracy": float(hits.sum() / counts.sum()), "mcc": _mcc(counts)}
    return {name: values[name] for name in names}
