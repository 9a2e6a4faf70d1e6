"""The class `Metric`, which describes a metric of fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TEXT, LABELS, NUMBERS = ("text_to_text", "instructions"), ("classification",), ("regression",)  # kinds of task
SEVERAL_LABELS = ("multi_label",)


class GivenFunction(str):
    """A user's metric function, passed as an object instead of a `module:function` name."""

    function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> GivenFunction:
        """Make a name from the function's module and qualified name."""
        where = getattr(function, "__module__", None) or "__main__"
        made = super().__new__(cls, f"{where}:{getattr(function, '__qualname__', type(function).__name__)}")
        made.function = function
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> GivenFunction:
        return self


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Description of a metric: its function, its values and the tasks that it is for.

    Attributes:
        function: called once on rank 0 with the predictions and references of all examples; returns a number, or
            numbers by name. It may have keyword-only parameters: groups (task of each example), num_labels,
            positive_label (index), num_tokens (int64[examples], generated tokens) and bleu_tokenize. None: computed by
            the training loop.
        tasks: kinds of task that it is for.
        scale: range of the values, for the documentation.
        values: names of the values; empty if there is one value with the metric's name.
        usual_for: tasks for which it is a default metric.
        lower_is_better: True if a smaller value is better.
        needs_references: False if it can be computed without labels or targets.
        package: name of the required package, and `module`, the module to import.
        prepare: called with the same keywords before the evaluation starts; raises UserError.
        disagrees: metrics that define a value of the same name differently.
        writes_by_id: True to also write {id: prediction}, for submission to a benchmark.
        is_own: True for a user's function, which gets label names instead of indices.
    """

    function: Callable[..., Any] | None
    tasks: tuple[str, ...] = ()
    scale: str = ""
    values: tuple[str, ...] = ()
    usual_for: tuple[str, ...] = ()
    lower_is_better: bool = False
    needs_references: bool = True
    package: str = ""
    module: str = ""
    prepare: Callable[..., Any] | None = None
    disagrees: tuple[str, ...] = ()
    writes_by_id: bool = False
    is_own: bool = False
