"""Rows in memory that can be used like the path of a file.

`PythonRows` is a string (its name), so that settings and logs of a run can contain it. `read_rows` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lm_experiments_tools.errors import UserError


class PythonRows(str):
    """Rows as dicts, or several splits of them.

    `rows` is an iterable that can be repeated, or maps names of splits to such iterables.
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
        """Rows by split, if there are several splits (as in a `datasets.DatasetDict`); else None."""
        return self.rows if isinstance(self.rows, Mapping) else None

    def of_split(self, name: str) -> PythonRows:
        """Return the rows of one split."""
        return PythonRows(f"{self}[{name!r}]", self.splits[name])

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Yield the rows. Raises UserError if one is not a dict."""
        for number, row in enumerate(self.rows):
            if not isinstance(row, Mapping):
                raise UserError(f"{self}, row {number} is of type {type(row).__name__}, not a dict.")
            yield dict(row)


def is_path(value: Any) -> bool:
    return isinstance(value, str) or hasattr(value, "__fspath__")


def as_source(value: Any, name: str) -> str:
    """Convert the value of the setting `name` (a path or rows) to a string. Raises UserError for other types."""
    if isinstance(value, PythonRows):
        return value
    if is_path(value):
        return str(value)
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise UserError(f"{name} is of type {type(value).__name__}: give a path, or rows as dicts.")
    return PythonRows(f"rows given as {name}", value)


def as_sources(value: Any, name: str) -> tuple[str, ...]:
    """Convert the value of the setting `name` (one or several paths, or rows) to strings. Raises as `as_source`."""
    if is_path(value) or not isinstance(value, list | tuple) or any(isinstance(item, Mapping) for item in value):
        return (as_source(value, name),)
    several = len(value) > 1
    return tuple(as_source(item, f"{name}[{number}]" if several else name) for number, item in enumerate(value))
