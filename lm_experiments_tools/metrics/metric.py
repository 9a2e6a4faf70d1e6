"""Definition of a metric, as the command line, the evaluation and the documentation read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TEXT, LABELS, NUMBERS = ("text_to_text", "instructions"), ("classification",), ("regression",)  # kinds of task
SEVERAL_LABELS = ("multi_label",)


class GivenFunction(str):
    """A user's function as the name module:function, where a program gives the function itself."""

    function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> GivenFunction:
        """The name that the function was defined by, which need not lead back to it (a lambda)."""
        where = getattr(function, "__module__", None) or "__main__"
        made = super().__new__(cls, f"{where}:{getattr(function, '__qualname__', type(function).__name__)}")
        made.function = function
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> GivenFunction:
        return self


@dataclass(frozen=True, kw_only=True)
class Metric:
    """An entry of `METRICS`, or a user's own function.

    Attributes:
        function: of the predictions and references of all examples, called once, on rank 0; gives one value, or
            several by name, of which those in `values` count. Its keyword-only parameters are filled by name: groups
            (task of each example), num_labels, num_tokens (int64[examples], generated) and bleu_tokenize. None: the
            loop computes it.
        tasks: tasks that the metric applies to.
        scale: range of the values, for the documentation.
        values: their names; empty: the metric's own name. A value may also be given for each group, as value/group.
        usual_for: tasks that compute it where --metrics is not given.
        lower_is_better: else a higher value is.
        needs_references: else it is computed for examples without labels or targets too.
        package: to be installed for it, and `module`, which is then imported.
        prepare: called before anything is predicted, with keywords as `function`; raises UserError.
        disagrees: metrics that compute a value of the same name by another rule.
        writes_by_id: also write the predictions as {id: prediction}, which its benchmark takes.
        is_own: a user's function, which gets labels by their names.
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
