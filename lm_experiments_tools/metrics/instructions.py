"""The evaluation of Super-Natural-Instructions: ROUGE and exact match over all examples and for each task.

Source: https://github.com/allenai/natural-instructions eval/automatic/evaluation.py and
https://github.com/yizhongw/Tk-Instruct src/compute_metrics.py, default (English) track.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lm_experiments_tools.metrics.metric import Metric
from lm_experiments_tools.metrics.text import (
    ROUGE_SCORE,
    References,
    best_scores,
    mean_percent,
    rouge_of_examples,
    without_punctuation,
)


def instructions(predictions: Sequence[str], references: References, *, groups: Sequence[str]) -> dict[str, float]:
    """Compute rougeL, rouge1 (with stemmer) and exact_match (articles count), 0 to 100, over all examples.

    Args:
        groups: task of each example. Each task also gets values of its own, such as "rougeL/task".
    """
    kinds = ("rougeL", "rouge1")
    scores = rouge_of_examples(predictions, references, kinds, stem=True)
    matched = best_scores(operator.eq, without_punctuation, predictions, references)
    rows: dict[str, list[int]] = {"": list(range(len(predictions)))}
    for row, group in enumerate(groups):
        if group:
            rows.setdefault(f"/{group}", []).append(row)
    values = {}
    for suffix, chosen in rows.items():
        for kind in kinds:
            values[kind + suffix] = mean_percent([scores[row][kind] for row in chosen])
        values[f"exact_match{suffix}"] = mean_percent([matched[row] for row in chosen])
    return values


METRICS = {
    "instructions": Metric(
        function=instructions,
        tasks=("instructions",),
        scale="0-100",
        values=("rougeL", "rouge1", "exact_match"),
        usual_for=("instructions",),
        disagrees=("scrolls", "exact_match"),
        **ROUGE_SCORE,
    )
}
