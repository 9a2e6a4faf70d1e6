"""Metrics of a fine-tuning run: find them by name, check them, and compute them."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from numbers import Real
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.metrics import METRICS, is_own, values_of
from lm_experiments_tools.metrics.metric import GivenFunction, Metric
from lm_experiments_tools.names import resolve_name

if TYPE_CHECKING:
    from lm_experiments_tools.config.finetuning import FinetuningArgs

FACTS = ("groups", "num_labels", "positive_label", "num_tokens", "bleu_tokenize")
RESERVED = ("loss", "unknown_answers")  # values that are there without a metric


def chosen_metrics(args: FinetuningArgs) -> dict[str, Metric]:
    """Return the metrics of `--metrics` by name; `module:function` is a user's function.

    Raises UserError for metrics that define one value differently, a missing package, or an unsuitable function.
    """
    metrics = {name: _own(name) if is_own(name) else METRICS[name] for name in args.metric_names()}
    for (first, one), (second, other) in combinations(metrics.items(), 2):
        if second in one.disagrees or first in other.disagrees:
            both = " and ".join(value for value in values_of(first) if value in values_of(second))
            raise UserError(
                f"--metrics {first} and --metrics {second} compute {both} by different rules: choose one of them."
            )
    for name, metric in metrics.items():
        if metric.package:
            _check_package(name, metric)
        if metric.prepare is not None:
            metric.prepare(**_asked(metric.prepare, vars(args)))
    return metrics


def _check_package(name: str, metric: Metric) -> None:
    try:
        importlib.import_module(metric.module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"--metrics {name} is computed by {metric.package}, which is not installed ({error}): "
            f"pip install {metric.package}."
        ) from None


def _own(name: str) -> Metric:
    """A user's function as a metric."""
    function = name.function if isinstance(name, GivenFunction) else resolve_name(name, said=f"--metrics {name}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some builtins; calling them will show
        return Metric(function=function, is_own=True)
    try:
        signature.bind([], [], **_asked(function, dict.fromkeys(FACTS)))
    except TypeError as error:
        raise UserError(
            f"--metrics {name} takes {signature}, not (predictions, references) ({error}): see docs/extending.md."
        ) from None
    return Metric(function=function, is_own=True)


def _asked(function: Callable[..., Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that the function's keyword-only parameters name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some builtins, which ask for none
        return {}
    return {p.name: facts[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in facts}


def measured(
    name: str,
    metric: Metric,
    predictions: Sequence[Any],
    references: Sequence[Any],
    facts: Mapping[str, Any],
    known: Collection[str] = (),
) -> dict[str, float]:
    """Compute a metric over all examples; returns its values by name.

    `facts` are values for keyword-only parameters of the metric's function (see `Metric`). UserError for a user's
    function that returns anything but numbers, or a name in `known`, the values of other metrics.
    """
    found = metric.function(predictions, references, **_asked(metric.function, facts))
    if metric.is_own:
        return _checked(name, found, known)
    values = found if isinstance(found, dict) else {name: found}
    wanted = metric.values or (name,)
    return {value: number for value, number in values.items() if value.partition("/")[0] in wanted}


def _checked(name: str, found: Any, known: Collection[str]) -> dict[str, float]:
    """The values that a user's function returned; nan says that one is undefined."""
    values = found if isinstance(found, Mapping) else {name.rpartition(":")[2].rpartition(".")[2]: found}
    if not values:
        raise UserError(f"--metrics {name} returned an empty dict: return a number, or numbers by name.")
    for value, number in values.items():
        if not isinstance(value, str) or not isinstance(number, Real) or math.isinf(number):
            raise UserError(
                f"--metrics {name} returned {number!r} of type {type(number).__name__} as {value!r}: return a finite "
                "number (or nan where it is undefined), or such numbers by name."
            )
        if value in known or value in RESERVED:
            raise UserError(f"--metrics {name} returned {value}, which there is already: give it another name.")
    return {value: float(number) for value, number in values.items()}
