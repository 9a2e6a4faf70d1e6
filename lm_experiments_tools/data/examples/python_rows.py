"""Rows that a program has in memory, in the place of the path of a file.

`PythonRows` is text, so that it goes where a path goes: through the settings, into the record of a run (its name), and
to `rows.read_rows`, which takes the rows out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lm_experiments_tools.errors import UserError


class PythonRows(str):
    """Rows as dicts, or several splits of them by name.

    Attributes:
        rows: gives its dicts as often as it is asked; or a mapping from the names of splits to such things.
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
        """The rows of each split, of what has several (a `datasets.DatasetDict`)."""
        return self.rows if isinstance(self.rows, Mapping) else None

    def of_split(self, name: str) -> PythonRows:
        """The rows of one of the splits."""
        return PythonRows(f"{self}[{name!r}]", self.splits[name])

    def dicts(self) -> Iterator[dict[str, Any]]:
        """The rows, from the first one on.

        Raises:
            UserError: one is something else.
        """
        for number, row in enumerate(self.rows):
            if not isinstance(row, Mapping):
                table = " (of a table of pandas: table.to_dict('records'))" if hasattr(self.rows, "to_dict") else ""
                raise UserError(
                    f"{self}, row {number} is of type {type(row).__name__}, not a dict: give rows such as "
                    f'{{"source": "a text", "target": "another"}}{table}.'
                )
            yield dict(row)


def is_path(value: Any) -> bool:
    """True for what names a file: text, or a path of the standard library."""
    return isinstance(value, str) or hasattr(value, "__fspath__")


def as_source(value: Any, name: str) -> str:
    """What the setting `name` was given as data, a path or rows, as text.

    Raises:
        UserError: it is neither.
    """
    if isinstance(value, PythonRows):
        return value
    if is_path(value):
        return str(value)
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise UserError(f"{name} is of type {type(value).__name__}: give a path, or rows as dicts.")
    return PythonRows(f"rows given as {name}", value)


def as_sources(value: Any, name: str) -> tuple[str, ...]:
    """The same of a setting that takes several: paths, data sets, or the rows of one."""
    if is_path(value) or not isinstance(value, list | tuple) or any(isinstance(item, Mapping) for item in value):
        return (as_source(value, name),)
    several = len(value) > 1
    return tuple(as_source(item, f"{name}[{number}]" if several else name) for number, item in enumerate(value))
