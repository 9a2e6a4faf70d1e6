"""Metrics of fine-tuning, by the rules and on the scales of the programs that people compare with; imports errors.

A metric is a function and its entry in the `METRICS` of its file. The command line reads them, so these files import
the standard library alone at their top. docs/finetuning.md has the table, docs/new_metric.md how to add one.
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
    """True for module:function, which names a user's metric."""
    return ":" in name


def metrics_of(task: str) -> tuple[str, ...]:
    """Names of the metrics that a task may have."""
    return tuple(name for name, metric in METRICS.items() if task in metric.tasks)


def usual_metrics(task: str) -> tuple[str, ...]:
    """Names of the metrics that a task has where --metrics is not given."""
    return tuple(name for name, metric in METRICS.items() if task in metric.usual_for)


def values_of(name: str) -> tuple[str, ...]:
    """Names of the values of a metric of `METRICS`."""
    return METRICS[name].values or (name,)


def lower_is_better(value: str) -> bool:
    """True for the name of a value that is better when low: by the registry, else by the words in the name.

    The name may include a task: `rougeL/TASK` for instructions, `TASK/METRIC/FILTER` for lm_eval.
    """
    known = {known: metric.lower_is_better for name, metric in METRICS.items() for known in values_of(name)}
    named_by_words = _LOW.search(value.partition("/")[2] or value) is not None
    return next((known[part] for part in value.split("/") if part in known), named_by_words)
