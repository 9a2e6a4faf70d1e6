"""Metrics of predicted labels, with one or several labels per example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.metrics.metric import LABELS, SEVERAL_LABELS, Metric

if TYPE_CHECKING:
    import numpy as np

UNKNOWN = -1  # a generated answer that is no label


def label_metrics(
    predictions: Sequence[int], references: Sequence[int], *, num_labels: int, positive_label: int = 1
) -> dict[str, float]:
    """Compute accuracy, f1, precision, recall and f1_macro, 0 to 1, and mcc, -1 to 1, as in scikit-learn.

    With two labels, f1, precision and recall are those of the positive one. With more, they are macro averages over
    the labels that occur, as f1_macro always is. With two labels, UNKNOWN counts as the wrong label, as in T5's
    f1_score_with_invalid.

    Args:
        predictions: index of a label, or UNKNOWN for generated text that names no label.
    """
    import numpy as np

    right, given = np.asarray(references, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    given = np.where(given == UNKNOWN, 1 - right if num_labels == 2 else num_labels, given)
    counts = np.zeros((num_labels + 1, num_labels + 1), dtype=np.int64)  # the last column: unknown answers
    np.add.at(counts, (right, given), 1)

    hits = np.diagonal(counts)[:num_labels].astype(np.float64)
    of_prediction, of_reference = counts.sum(0)[:num_labels], counts.sum(1)[:num_labels]
    both = of_prediction + of_reference
    occurring = both > 0
    averaged = np.arange(2) == positive_label if num_labels == 2 else occurring

    def mean_ratio(part: np.ndarray, whole: np.ndarray, labels: np.ndarray = averaged) -> float:
        """Over labels; 0 where there is nothing to divide by, as scikit-learn."""
        return float(np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)[labels].mean())

    return {
        "accuracy": float(hits.sum() / counts.sum()),
        "f1": mean_ratio(2 * hits, both),
        "precision": mean_ratio(hits, of_prediction),
        "recall": mean_ratio(hits, of_reference),
        "f1_macro": mean_ratio(2 * hits, both, occurring),
        "mcc": _mcc(counts),
    }


def _mcc(counts: np.ndarray) -> float:
    """Gorodkin's R_K, which is Matthews' coefficient for two labels; 0 where one side has one label only."""
    table = counts.astype(object)  # exact integers: products of four counts exceed 64 bits
    of_reference, of_prediction, total = table.sum(1), table.sum(0), table.sum()
    covariance = int(table.trace() * total - of_reference @ of_prediction)
    spread = int(total**2 - of_prediction @ of_prediction) * int(total**2 - of_reference @ of_reference)
    return covariance / math.sqrt(spread) if spread else 0.0


def several_label_metrics(
    predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]], *, num_labels: int
) -> dict[str, float]:
    """Compute f1_micro, f1_macro and subset_accuracy, 0 to 1, as in scikit-learn (zero_division=0).

    Args:
        predictions, references: ascending indices of the labels of each example.
    """
    import numpy as np

    counts = np.zeros((3, num_labels))  # of each label: rightly given, given, right
    for given, right in zip(predictions, references, strict=True):
        for row, labels in zip(counts, (set(given) & set(right), given, right), strict=True):
            row[list(labels)] += 1
    hits, both = counts[0], counts[1] + counts[2]
    equal = sum(tuple(given) == tuple(right) for given, right in zip(predictions, references, strict=True))
    return {
        "f1_micro": float(2 * hits.sum() / both.sum()) if both.any() else 0.0,
        "f1_macro": float(np.divide(2 * hits, both, out=np.zeros(num_labels), where=both > 0).mean()),
        "subset_accuracy": equal / len(predictions),
    }


def f1_macro(predictions: Sequence[Any], references: Sequence[Any], *, num_labels: int) -> dict[str, float]:
    """Compute f1_macro of examples with one label each, or with several, among other metrics."""
    metrics = label_metrics if isinstance(references[0], int) else several_label_metrics
    return metrics(predictions, references, num_labels=num_labels)


_OF_SEVERAL = Metric(function=several_label_metrics, tasks=SEVERAL_LABELS, scale="0-1", usual_for=SEVERAL_LABELS)
METRICS = {
    "accuracy": Metric(function=label_metrics, tasks=LABELS, scale="0-1", usual_for=LABELS),
    "f1": Metric(function=label_metrics, tasks=LABELS, scale="0-1", usual_for=LABELS),
    "precision": Metric(function=label_metrics, tasks=LABELS, scale="0-1"),
    "recall": Metric(function=label_metrics, tasks=LABELS, scale="0-1"),
    "mcc": Metric(function=label_metrics, tasks=LABELS, scale="-1 to 1"),
    "f1_micro": _OF_SEVERAL,
    "f1_macro": Metric(
        function=f1_macro, tasks=LABELS + SEVERAL_LABELS, scale="0-1", usual_for=LABELS + SEVERAL_LABELS
    ),
    "subset_accuracy": _OF_SEVERAL,
}
