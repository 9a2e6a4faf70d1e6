"""Read rows of any file or dataset, and count and limit those that cannot be used.

| kind of a shard (sources.py) | a row is |
|---|---|
| json | a line with a JSON object |
| list | an object of the JSON list |
| table, `.csv` | a record (RFC 4180); the header decides the delimiter: a comma, semicolon, tab or bar |
| table, `.tsv` | a line, split at tabs; quotation marks are text, as in GLUE's files |
| text, lines | a document: the lines between blank lines, or each line |
| dataset | a row of a Hugging Face dataset; numbers of classes become their names |

`rows` yields rows of fine-tuning data, and `read_shard` texts of a corpus. A row that cannot be used is a `BadRecord`:
it has broken JSON, lacks the text key, has invalid UTF-8, or the like. Empty texts and null are dropped without limit.
"""

import csv
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.sources import (
    BOM,
    PythonRows,
    Shard,
    endings,
    kind_of,
    list_inputs,
    open_decompressed,
    plan_shards,
    shards_of,
    skip_line,
)
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import human_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_DOCUMENT_BYTES = 256 << 20  # on disk; encoding needs many times that in memory
_NO_KEY, _OF_TYPE = "no key", "is of type"  # in the reasons for records without a text under the key
_NO_LIST = "a JSON list, not an object: write one object a line (jq -c '.[]' texts.json > texts.jsonl)"
_NO_LINES = "a JSON object over several lines: write each object on one line, or a list of them"
_NOT_UTF8 = 'not UTF-8: save the file as UTF-8 (in a spreadsheet program as "CSV UTF-8")'
_LOGGED = 10  # rejected rows of fine-tuning data that are named one by one
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_COUNTED_BYTES = 256 << 20  # read to number a line: a fraction of a second
_EXCERPT = 1000  # characters of a rejected record in the list, enough to recognise it


class Record(NamedTuple):
    """A row of the input (a line or document), with its position: its text only, or all of its fields.

    Attributes:
        line: line number in the shard, from 1, or number of the row of a dataset; 0 if `path` contains the position.
        raw: the JSON line; empty for other kinds of files.
        number: number of the row in its file or dataset, from 0, where rejected rows count too. Only `rows` sets it.
    """

    value: Any
    path: str
    line: int
    raw: bytes = b""
    number: int = 0

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


class BadRecord(Exception):
    """A record that cannot be used: the reason and, as of a `Record`, the position. It is skipped and counted."""

    def __init__(self, reason: str, is_empty: bool = False, path: str = "", line: int = 0, content: str = ""):
        super().__init__(reason)
        self.is_empty, self.path, self.line, self.content = is_empty, path, line, content

    @property
    def where(self) -> str:
        return Record(None, self.path, self.line).where

    def at(self, record: Record) -> "BadRecord":
        """Return this error with the position of a record."""
        return BadRecord(str(self), self.is_empty, record.path, record.line, excerpt(record.raw))

    def to_json(self) -> str:
        """Return this record as a line of the JSON-lines file that lists all of them."""
        return json.dumps({"file": self.path, "line": self.line, "reason": str(self), "content": self.content})


class TooManyRejected(UserError):
    """Error that stops reading because more records than allowed cannot be used."""


class RejectedRecords:
    """Counts the records that cannot be used, lists them in a file, and raises UserError if there are too many.

    Args:
        path: JSON-lines file for the rejected records (`file`, `line`, `reason`, `content`), written if there are any;
            None to count them only.
        of_rows: True for rows of fine-tuning data, which have no --text_key. The first rejected ones are logged.
        quiet: True to log none, because another reading of the same rows does.

    Attributes:
        first: "file:line: reason" of the first rejected record, or "".
        num_empty: empty records, which are not in `count`.
    """

    def __init__(self, limit: int, path: Any = None, *, of_rows: bool = False, quiet: bool = False):
        self.limit, self.path = limit, None if path is None else Path(path)
        self.count = self.num_empty = 0
        self.first, self._lacks_key, self._of_rows, self._quiet = "", False, of_rows, quiet
        self._file: TextIO | None = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def add(self, rejected: BadRecord) -> None:
        """Count a record that cannot be used; an empty one in `num_empty`. Raises TooManyRejected above the limit."""
        if rejected.is_empty:
            self.num_empty += 1
            return
        self.count += 1
        where, reason = rejected.where, str(rejected)
        self.first = self.first or f"{where}: {reason}"
        self._lacks_key = self._lacks_key or reason.startswith(_NO_KEY) or f" {_OF_TYPE} " in reason
        if self.count > self.limit:
            listed = "" if self.path is None else f"; they are listed in {self.path}"
            message = f"more than {self.limit} bad lines: {self.count} so far, the first is {self.first}{listed}"
            raise TooManyRejected(f"{message}: fix them or allow more with --max_bad_lines{self.remedy}")
        if self._of_rows and not self._quiet and self.count <= _LOGGED:
            logger.warning("left out %s: %s", where, reason)

    def reject(self, rejected: BadRecord) -> None:
        """List and count a record that cannot be used, see `add`."""
        if self.path is not None and not rejected.is_empty:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "w", encoding="utf-8", buffering=1)
            self._file.write(f"{rejected.to_json()}\n")
        self.add(rejected)

    @property
    def remedy(self) -> str:
        """Advice for error messages if a record had no text under the key; otherwise ""."""
        advice = "; name the key of the text by --text_key or --json-keys (meta.text: the key text of the object meta)"
        return advice if self._lacks_key and not self._of_rows else ""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __str__(self) -> str:
        listed = f", listed in {self.path}" if self.path is not None else ""
        return f"{self.count} bad lines left out (the first: {self.first}){listed}"


def no_documents(inputs: Sequence[str], rejected: RejectedRecords) -> UserError:
    """Build the error for inputs that contain no document."""
    found = f"{rejected if rejected.count else '0 bad lines'}, {rejected.num_empty} empty texts"
    return UserError(f"there is no document in {list_inputs(inputs)}: {found}{rejected.remedy}")


# ---- readers of whole inputs ----


def records(
    paths: Sequence[str], key: str | None, rejected: RejectedRecords, document_per_line: bool = False
) -> Iterator[Record]:
    """Yield all records (lines, documents or rows) of all inputs of a corpus, in order.

    Args:
        key: key of the text in a JSON object or row; None returns all fields as a dict.

    Raises:
        UserError: an input cannot be read, has no usable record, or too many records are rejected.
    """
    found = False
    for shard in plan_shards(paths, shard_bytes=sys.maxsize, document_per_line=document_per_line):
        for record in converted(read_shard(shard, key), lambda record: record, rejected):
            found = True
            yield record
    if rejected.count and rejected.path:
        logger.warning("%s", rejected)
    if rejected.num_empty:
        logger.info("%d empty texts left out", rejected.num_empty)
    if not found:
        raise no_documents(paths, rejected)


def rows(source: str, rejected: RejectedRecords, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yield all rows of one file, dataset or `PythonRows`, with all fields as a dict in `Record.value`.

    Args:
        columns: names of the columns of tables without a header, whose first line has none of these names.

    Raises:
        UserError: a file is damaged, or too many rows are rejected.
    """
    if isinstance(source, PythonRows):
        found: Iterable[Record | BadRecord] = _python_rows(source)
    else:
        shards = shards_of(source, kind_of(source) or "dataset")
        found = chain.from_iterable(read_shard(shard, None, columns=columns) for shard in shards)
    for number, item in enumerate(found):
        if isinstance(item, BadRecord):
            rejected.reject(item)
        else:
            yield Record(item.value, item.path, item.line, b"", number)


def converted(items: Iterable[Any], convert: Callable[[Any], T], rejected: RejectedRecords) -> Iterator[T]:
    """Yield `convert(item)` for each record that can be used, and count the other records as rejected.

    Args:
        items: records; an item may be a `BadRecord`, a record that was found unusable before.
        convert: function that raises BadRecord for records that cannot be used.
    """
    for item in items:
        if isinstance(item, BadRecord):
            rejected.reject(item)
            continue
        try:
            result = convert(item)
        except BadRecord as error:
            rejected.reject(error.at(item))
        else:
            yield result


def read_shard(
    shard: Shard, key: str | None = "text", skip: int = 0, columns: Sequence[str] = ()
) -> Iterator[Record | BadRecord]:
    """Yield the records of a shard (a part of a file or dataset) in order."""
    if shard.kind == "dataset":
        fields = hf_datasets.read_shard(shard.path, shard.start, key or "", skip)
        found: Iterable[Record | BadRecord] = (Record(row, shard.path, n) for n, row in enumerate(fields, skip + 1))
    elif shard.kind == "table":
        found = islice(_table_records(shard, columns), skip, None)
    else:
        read = {"json": _json_records, "list": _list_records}.get(shard.kind, _text_records)
        found = islice(read(shard), skip, None)
    is_text = shard.kind in ("text", "lines")  # whose lines are checked already
    for item in found:
        if key is None or isinstance(item, BadRecord):
            yield item
            continue
        try:
            yield item._replace(value=item.value["text"] if is_text else text_of(item.value, key))
        except BadRecord as error:
            yield error.at(item)


# ---- readers of each kind ----


def _json_records(shard: Shard) -> Iterator[Record | BadRecord]:
    for number, line in read_lines(shard):
        if not line.strip():
            continue
        try:
            yield Record(parse_object(line), shard.path, number, line)
        except BadRecord as error:
            yield error.at(Record(None, shard.path, number, line))


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse a line that contains a JSON object. Raises BadRecord if it does not, or is too long."""
    try:
        fields = json.loads(decoded(line))
    except RecursionError:
        raise BadRecord("not usable JSON: nested too deeply") from None
    except ValueError as error:
        reasons = {b"[": _NO_LIST, b"{": _NO_LINES}
        reason = reasons.get(line.strip(), f"not valid JSON: {error}")
        raise BadRecord(reason) from None
    if not isinstance(fields, dict):
        raise BadRecord(_NO_LIST if isinstance(fields, list) else f"a JSON {type(fields).__name__}, not an object")
    return fields


def _list_records(shard: Shard) -> Iterator[Record | BadRecord]:
    lines = [line for _, line in read_lines(shard)]
    if reason := too_long(max(map(len, lines))):
        raise UserError(f"{shard.path} is a list of JSON on one line, {reason} lines: jq -c '.[]' does.")
    try:
        found = json.loads(b"".join(lines))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{shard.path} begins as a list of JSON, which it is not ({error}): fix it.") from None
    for number, item in enumerate(found):
        where = f"{shard.path}, element {number}"
        is_row, reason = isinstance(item, dict), f"a JSON {type(item).__name__}, not an object"
        yield Record(item, where, 0) if is_row else BadRecord(reason, path=where)


def _table_records(shard: Shard, columns: Sequence[str]) -> Iterator[Record | BadRecord]:
    names: Sequence[str] = ()
    for line, values in _cells(shard):
        if isinstance(values, BadRecord):
            yield values
            continue
        if not names:
            has_header = not columns or not {*columns}.isdisjoint(map(str.strip, values))
            names = _column_names(shard.path, values) if has_header else columns
            if has_header:
                continue
        text = "".join(values)
        if not text.isascii() and _SURROGATE.search(text):
            yield BadRecord(_NOT_UTF8, False, shard.path, line)
        elif not text.strip():
            if len(values) > 1:  # a row of empty cells, unlike a blank line, counts as one
                yield BadRecord("is empty", True, shard.path, line)
        elif len(values) < len(names) or "".join(values[len(names) :]).strip():  # empty cells may fill a row up
            reason = f"{len(values)} columns, where the first line has {len(names)}"
            yield BadRecord(reason, False, shard.path, line)
        else:  # pandas gives its index no name
            fields = {name: value for name, value in zip(names, values, strict=False) if name}
            yield Record(fields, shard.path, line)


def _cells(shard: Shard) -> Iterator[tuple[int, list[str] | BadRecord]]:
    """First line and cells of each record, which may extend over several lines."""
    lines = (line.decode("utf-8", "surrogateescape") for _, line in read_lines(shard))
    if endings(shard.path)[0] == ".tsv":
        yield from ((number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(lines, 1))
        return
    header = next(lines, "")
    delimiter = max(",;\t|", key=re.sub('"[^"]*"', "", header).count)
    csv.field_size_limit(MAX_DOCUMENT_BYTES)  # of the process; the default of 128 KiB is less than a SCROLLS input
    reader = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            yield first, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                where = f"{shard.path}:{first}"
                raise UserError(f"{where}: a quotation mark of this record is never closed: fix it.") from None
            yield first, BadRecord(f"not valid csv: {error}", False, shard.path, first)


def _column_names(path: str, values: list[str]) -> tuple[str, ...]:
    """Column names, "" for unnamed columns; trailing unnamed columns are dropped."""
    if unusable_characters("".join(values)):
        raise UserError(f"{path}: its first line is {_NOT_UTF8}.")
    names = tuple(value.strip() for value in values)
    while names and not names[-1]:
        names = names[:-1]
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        raise UserError(f"{path} names a column twice in its first line ({', '.join(named)}): rename one.")
    return names


def _text_records(shard: Shard) -> Iterator[Record | BadRecord]:
    block: list[str] = []
    start = size = 0
    for number, line in read_lines(shard):
        is_blank = not line.strip()
        if is_blank or shard.kind == "lines":
            if block:
                yield Record({"text": "\n".join(block)}, shard.path, start)
            block, size = [], 0
        if is_blank:
            continue
        was_too_long, size = too_long(size), size + len(line)
        if reason := too_long(size):  # the whole document is rejected, and reported once
            if not was_too_long:
                where = Record(None, shard.path, start if block else number, line)
                yield BadRecord(f"{reason} by blank lines").at(where)
            block = []
            continue
        try:
            text = _usable_line(line)
        except BadRecord as error:
            yield error.at(Record(None, shard.path, number, line))
            continue
        start = start if block else number
        block.append(text)
    if block:
        yield Record({"text": "\n".join(block)}, shard.path, start)


def _usable_line(line: bytes) -> str:
    text = decoded(line).rstrip("\r\n")
    if not text.strip():
        raise BadRecord("is empty", is_empty=True)
    if reason := unusable_characters(text):
        raise BadRecord(reason)
    return text


def _python_rows(source: PythonRows) -> Iterator[Record]:
    found = source.rows
    classes = hf_datasets.class_names(getattr(found, "features", None))  # of a Hugging Face dataset
    if hasattr(found, "notna"):  # of pandas, whose missing cells become None
        found = found.astype(object).where(found.notna(), None).to_dict("records")
    for of_table in ("to_dicts", "to_pylist"):  # of polars and pyarrow
        found = getattr(found, of_table)() if hasattr(found, of_table) else found
    for number, fields in enumerate(found):
        where = f"{source}, row {number}"
        if not isinstance(fields, Mapping):
            raise UserError(f"{where} is of type {type(fields).__name__}, not a dict.")
        yield Record(hf_datasets.with_class_names(dict(fields), classes), where, 0)


# ---- lines and fields ----


def decoded(line: bytes) -> str:
    """Decode a line from UTF-8. Raises BadRecord if it is invalid or too long."""
    if reason := too_long(len(line)):
        raise BadRecord(reason)
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 at byte {error.start}") from None


def too_long(num_bytes: int) -> str:
    """Return the reason to reject a document of `num_bytes` bytes because it is too long, or "" if it is not."""
    if num_bytes <= MAX_DOCUMENT_BYTES:
        return ""
    return f"a document of more than {human_bytes(MAX_DOCUMENT_BYTES)}: cut it into several"


def field_of(fields: dict[str, Any], key: str) -> Any:
    """Return the value of a field (`meta.text`: also of text in meta). Raises BadRecord, with the keys, without it."""
    if key in fields:
        return fields[key]
    outer, _, inner = key.partition(".")
    if inner and outer in fields and isinstance(fields[outer], dict | None):
        return None if fields[outer] is None else field_of(fields[outer], inner)
    keys = ", ".join(repr(name) for name in list(fields)[:8])
    raise BadRecord(f"{_NO_KEY} {key!r} (there is {keys or 'none'})")


def text_of(fields: dict[str, Any], key: str) -> str:
    """Return the text in a record's field. Raises BadRecord if the field is missing or has no usable text."""
    text = field_of(fields, key)
    if text is not None and not isinstance(text, str):
        raise BadRecord(f"{key!r} {_OF_TYPE} {type(text).__name__}, not a string")
    if not text or not text.strip():
        raise BadRecord(f"{key!r} is empty", is_empty=True)
    if reason := unusable_characters(text):
        raise BadRecord(f"{key!r} {reason}")
    return text


def unusable_characters(text: str) -> str:
    """Return the reason why no tokenizer can encode a text, or ""."""
    if "\0" in text:
        return "contains a NUL character"
    if not text.isascii() and _SURROGATE.search(text):
        return "contains half of a surrogate pair"
    return ""


def read_lines(shard: Shard) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a shard (a part of a text file), as (line number, bytes).

    A line of more than MAX_DOCUMENT_BYTES is cut to one byte more, so that its length shows that it was too long.

    Raises UserError: the file is damaged or was changed.
    """
    limit, number, position = MAX_DOCUMENT_BYTES, 0, shard.start
    shard.check_unchanged()
    try:
        with open_decompressed(shard.path) as file:
            if shard.start:
                file.seek(shard.start)
            while line := file.readline(limit + 1):
                number += 1
                is_first, position = position == 0, position + len(line)
                if len(line) > limit and not line.endswith(b"\n"):
                    skip_line(file)
                    position = file.tell()
                yield number, line.removeprefix(BOM) if is_first else line
                if shard.end is not None and position >= shard.end:  # beyond it where the file has changed
                    break
    except EOFError as error:
        shard.check_unchanged()
        raise UserError(f"{shard.path} is damaged after line {number} ({error}); compress or copy it again") from None
    shard.check_unchanged()


def locate(shard: Shard, rejected: BadRecord) -> BadRecord:
    """Give a rejected record a position that a user can find: the line in the file instead of the line in the shard.

    For datasets, and for shards that begin beyond 256 MiB of a file, the path names the shard (part) instead.
    """
    path, line = rejected.path, rejected.line
    if shard.kind == "dataset":
        path = f"{shard.path}, shard {shard.start}"
    elif shard.start > _MAX_COUNTED_BYTES:
        path = f"{shard.path}, from byte {shard.start} on"
    elif line:
        line += _lines_before(shard)
    return BadRecord(str(rejected), rejected.is_empty, path, line, rejected.content)


@lru_cache(maxsize=64)
def _lines_before(shard: Shard) -> int:
    return count_lines(shard.path, 0, shard.start)


def count_lines(path: str, start: int, end: int) -> int:
    """Return the number of line ends between the bytes `start` and `end` of a file."""
    lines = 0
    with open(path, "rb") as file:
        file.seek(start)
        while block := file.read(min(end - start, 1 << 20)):
            lines, start = lines + block.count(b"\n"), start + len(block)
    return lines


def excerpt(line: bytes) -> str:
    """Return the beginning of a line of text, for error messages."""
    return line[: 4 * _EXCERPT].rstrip(b"\r\n").decode("utf-8", errors="backslashreplace")[:_EXCERPT]


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
