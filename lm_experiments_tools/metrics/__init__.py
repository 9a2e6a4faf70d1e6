"""Metrics of fine-tuning, with the definitions and scales of their reference implementations.

A metric is a function and its entry in the `METRICS` of its file. docs/finetuning.md lists all metrics, and
CONTRIBUTING.md shows how to add one.
"""

import re

from lm_experiments_tools.metrics import instructions, labels, numbers, text
from lm_experiments_tools.metrics.metric import Metric

_PERPLEXITY = Metric(
    function=None,
    tasks=("causal_lm",),
    scale="from 1, from 0",
    values=("perplexity", "bits_per_byte"),
    usual_for=("causal_lm",),
    lower_is_better=True,
)
METRICS: dict[str, Metric] = {
    **instructions.METRICS,
    **text.METRICS,
    **labels.METRICS,
    **numbers.METRICS,
    "perplexity": _PERPLEXITY,
}
# Values without an entry: of suites, of users' functions and of other programs.
_LOW = re.compile(
    r"(?:^|[\W_])(?:loss|perplexity|ppl|nll|entropy|bits|bpb|bpc|r?mse|mae|mape|errors?|[wcpt]er|brier|ece|distance"
    r"|unknown_answers)(?:$|[\W_])"
)


def is_own(name: str) -> bool:
    """Return True if a metric's name has the form `module:function`, which names a user's function."""
    return ":" in name


def metrics_of(task: str) -> tuple[str, ...]:
    return tuple(name for name, metric in METRICS.items() if task in metric.tasks)


def usual_metrics(task: str) -> tuple[str, ...]:
    return tuple(name for name, metric in METRICS.items() if task in metric.usual_for)


def values_of(name: str) -> tuple[str, ...]:
    """Return the names of a metric's values: ("rouge1", "rouge2", ...) for "rouge"."""
    return METRICS[name].values or (name,)


def lower_is_better(value: str) -> bool:
    """Return True if lower values of a metric are better, as for "loss" or "mse".

    Args:
        value: name of a metric value, or `rougeL/TASK` (instructions), or `TASK/METRIC/FILTER` (lm_eval). For unknown
            names the words in it decide.
    """
    known = {known: metric.lower_is_better for name, metric in METRICS.items() for known in values_of(name)}
    named_by_words = _LOW.search(value.partition("/")[2] or value) is not None
    return next((known[part] for part in value.split("/") if part in known), named_by_words)
