"""Lines that cannot be used: counted, listed with file and line, and an error when they are too many.

Too many are more than a number that was asked for; where none was, more than 100 that are also more than 0.1 % of what
was read so far, so that a corpus of any size has the patience of a small one. Empty texts never count.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lm_experiments_tools.errors import UserError

ANY_NUMBER = sys.maxsize  # a limit that is none
_LEAST, _RATE = 100, 1000  # bad lines without a limit: this many, or one in so many lines
_VERY_MANY = 10_000
NO_KEY = "no key"  # begins the reason why a record without the key is bad


@dataclass(frozen=True)
class BadLine:
    """A line that could not be used, counted from 1 at the start of its piece."""

    line: int
    reason: str
    content: str


class EmptyText(BadLine):
    """A line whose text is empty: left out like a bad one, but no sign of damage, so that no limit counts it."""


def allowed(limit: int | None, lines: int) -> int:
    """The bad lines that may be among so many: `limit`, or where it is None the larger of 100 and 0.1 % of `lines`."""
    return max(_LEAST, lines // _RATE) if limit is None else limit


def is_hopeless(limit: int | None, bad: int, lines: int) -> bool:
    """True where a part of a text has so many that the rest need not be read: above `limit`, or most of very many."""
    return bad > (max(_VERY_MANY, lines // 2) if limit is None else limit)


def too_many(limit: int | None, lines: int) -> str:
    """The beginning of the sentence."""
    rate = f", and than 0.1 % of the {lines:,} lines read" if limit is None else ""
    return f"more than {allowed(limit, lines)} bad lines{rate}"


class BadLines:
    """Counts what is left out, remembers the first with its place and reason, and stops above what is `allowed`.

    Args:
        limit: how many may be left out; None: the larger of 100 and 0.1 % of the lines read so far.

    Attributes:
        count, first: how many there were, and `place: reason` of the first ("" without one).
        lines: those read so far, the bad ones among them; the others are told by `read`.
    """

    def __init__(self, limit: int | None):
        self.limit, self.count, self.lines, self.first = limit, 0, 0, ""

    def read(self, number: int = 1) -> None:
        """Count lines that can be used."""
        self.lines += number

    def add(self, where: str, reason: str) -> None:
        """Record one; UserError (see `error`) where it is one too many."""
        self.count += 1
        self.lines += 1
        self.first = self.first or f"{where}: {reason}"
        if self.count > allowed(self.limit, self.lines):
            raise self.error()

    def error(self) -> UserError:
        """The sentence for "too many bad lines"."""
        return UserError(f"{too_many(self.limit, self.lines)}: {self.count} so far, the first is {self.first}")


class Quarantine(BadLines):
    """Bad lines that are written to a JSON-lines file (`file`, `line`, `reason`, `content`).

    The file exists only where there was a bad line; one of an earlier run is removed.
    """

    def __init__(self, path: str | os.PathLike, limit: int | None):
        super().__init__(limit)
        self.path = Path(path)
        self._file: TextIO | None = None
        self.path.unlink(missing_ok=True)

    def list_line(self, file: str, bad: BadLine) -> None:
        """Write one to the file and record it; raises as `add`."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (open until close)
        self._file.write(
            json.dumps({"file": file, "line": bad.line, "reason": bad.reason, "content": bad.content}) + "\n"
        )
        self.add(f"{file}:{bad.line}", bad.reason)

    def error(self) -> UserError:
        key = ", name the key that holds the text" if f": {NO_KEY} " in self.first else ""
        return UserError(
            f"{super().error()}; they are listed in {self.path}: mend them{key} or allow more with --max_bad_lines"
        )

    def close(self) -> None:
        """Flush the file to disk."""
        if self._file is not None:
            self._file.close()

    def __str__(self) -> str:
        return f"{self.count} bad lines left out (the first: {self.first}), listed in {self.path}"


def no_documents(
    inputs: Sequence[str], bad_lines: int = 0, first: str = "", listed_in: object = "", empty: int = 0
) -> UserError:
    """The sentence for inputs that hold no document; `first` of the bad lines with its reason, the file of all."""
    all_listed = f"; all are listed in {listed_in}" if listed_in else ""
    details = f" (the first: {first}{all_listed})" if first else ""
    remedy = ": name the key of the text by --text_key" if f": {NO_KEY} " in first else ""
    return UserError(
        f"there is no document in {listed(inputs)}: {bad_lines} bad lines{f', {empty} empty texts' if empty else ''} "
        f"and nothing else{details}{remedy}"
    )


def listed(inputs: Sequence[str]) -> str:
    """Inputs as a message names them."""
    return ", ".join(map(str, inputs)) or "an empty list of inputs"


def no_key(record: dict[str, Any], key: str) -> str:
    """The reason why a record without `key` is bad, with the keys it has."""
    keys = ", ".join(repr(key) for key in list(record)[:8])
    return f"{NO_KEY} {key!r} (there is {keys or 'none'})"
