"""Fine-tuning data in memory that can be passed wherever the path of a file is expected.

`PythonRows` is a subclass of `str` whose text is its name, so that the settings and logs of a run can contain it.
`read_rows` yields its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lm_experiments_tools.errors import UserError


class PythonRows(str):
    """Fine-tuning data in memory: rows as dicts, or several splits of rows, usable in place of a path.

    Args:
        name: text that stands for the rows in settings and logs.
        rows: iterable of dicts, or a mapping from names of splits to such iterables.
    """

    rows: Any

    def __new__(cls, name: str, rows: Any) -> PythonRows:
        """Rows of this name; what can be read only once (a generator) is read here, into a list."""
        made = super().__new__(cls, name)
        made.rows = list(rows) if iter(rows) is rows else rows
        return made

    def __eq__(self, other: object) -> bool:
        """True for the same rows: others may have the same name."""
        return super().__eq__(other) is True and getattr(other, "rows", None) is self.rows

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> PythonRows:
        return self  # a record of the settings is no reason to copy the data

    @property
    def splits(self) -> Mapping[str, Any] | None:
        """Mapping from split names to rows, as in a `datasets.DatasetDict`; None if there is only one set of rows."""
        return self.rows if isinstance(self.rows, Mapping) else None

    def of_split(self, name: str) -> PythonRows:
        """Return the rows of the split with this name, such as "train"."""
        return PythonRows(f"{self}[{name!r}]", self.splits[name])

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dicts, those of a table too. Raises UserError if a row is not a dict."""
        rows = self.rows
        if hasattr(rows, "notna"):  # of pandas, whose missing cells become None
            rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
        for of_table in ("to_dicts", "to_pylist"):  # of polars and pyarrow
            rows = getattr(rows, of_table)() if hasattr(rows, of_table) else rows
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"{self}, row {number} is of type {type(row).__name__}, not a dict.")
            yield dict(row)


def is_path(value: Any) -> bool:
    return isinstance(value, str) or hasattr(value, "__fspath__")


def as_source(value: Any, name: str) -> str:
    """Convert a data setting, given as a path or as Python rows, to a string that `read_rows` accepts.

    Args:
        value: a path, a `PythonRows`, or rows in memory.
        name: name of the setting, for error messages.

    Raises:
        UserError: the value has another type.
    """
    if isinstance(value, PythonRows):
        return value
    if is_path(value):
        return str(value)
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise UserError(f"{name} is of type {type(value).__name__}: give a path, or rows as dicts.")
    return PythonRows(f"rows given as {name}", value)


def as_sources(value: Any, name: str) -> tuple[str, ...]:
    """Convert a data setting with one or several paths, or rows in memory, to a tuple of strings.

    Args:
        value: a path, a sequence of paths, or rows in memory.
        name: name of the setting, for error messages.

    Raises:
        UserError: a value has another type.
    """
    if is_path(value) or not isinstance(value, list | tuple) or any(isinstance(item, Mapping) for item in value):
        return (as_source(value, name),)
    several = len(value) > 1
    return tuple(as_source(item, f"{name}[{number}]" if several else name) for number, item in enumerate(value))
