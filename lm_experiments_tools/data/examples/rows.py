"""Read rows of fine-tuning data from files and datasets, as dicts with their position for error messages.

| input | a row is |
|---|---|
| `.jsonl`, `.json`, `.ndjson` | one line: a JSON object |
| `.json` with one list, or one object with a list of objects "data" | an object of the list |
| `.csv` | a record (RFC 4180: quoted fields may contain delimiters and line ends); the first one names the columns |
| `.tsv` | one line, split at tabs, without quoting (as GLUE's files); the first one names the columns |
| `.parquet`, `.arrow`, `name[:config][:split]` | a row of a Hugging Face dataset, of files or of the hub |
| `PythonRows` | a dict |

The first line of a `.csv` decides its delimiter: a comma, semicolon, tab or bar, or the one of a line `sep=;`. A
`.tsv` whose first line is quoted is read with quoting. Tables are UTF-8, or UTF-16 with a byte order mark. Files may
be compressed (`.gz`, `.bz2`, `.xz`, `.zst`). CoLA's files, which have no column names, are recognized. Rows of MNLI's
files also have the names premise and hypothesis.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lm_experiments_tools.data.examples.python_rows import PythonRows
from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.records import (
    MAX_DOCUMENT_BYTES,
    BadRecord,
    Record,
    Rejected,
    RejectedRecords,
    allowed,
    parse_object,
    read_lines,
    read_shard,
    too_long,
)
from lm_experiments_tools.data.text.sources import (
    JSON_SUFFIXES,
    check_readable,
    endings,
    find_files,
    open_decompressed,
    whole_file,
)
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

CSV_SUFFIXES = (".csv",)
TSV_SUFFIXES = (".tsv",)
SUFFIXES = JSON_SUFFIXES + CSV_SUFFIXES + TSV_SUFFIXES
# Names of the files, or of the subfolders, of a split in a folder: those of Hugging Face, and GLUE's of MNLI.
FILES_OF = {
    "train": ("train", "training"),
    "valid": ("dev", "validation", "valid", "val", "dev_matched", "validation_matched"),
    "test": ("test", "testing", "test_matched"),
}
_HUB_NAMES = {"train": "train", "valid": "validation", "test": "test"}
_COLA = ("source", "label", "mark", "sentence")
_MNLI = {"promptID", "pairID", "sentence1", "sentence2"}  # of its table, and of SNLI's in the same form
_LOGGED = 10  # bad rows that are named one by one
_DELIMITERS = ",;\t|"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
# A cell that only a quoted table has: it is in quotation marks, and those within it are doubled.
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')
_NOT_UTF8 = 'not UTF-8: save the file as UTF-8 (in a spreadsheet program as "CSV UTF-8")'
_UNQUOTED = "a .tsv is read without quoting: rename a quoted table to .csv, which may have tabs too"
# The position of a row with its fields; with the reason why it cannot be read; or with None if all of it is blank.
Entry = tuple[str, dict[str, Any] | BadRecord | None]


@dataclass(frozen=True)
class Row:
    """One row of fine-tuning data.

    Attributes:
        where: position (`file:line`) for error messages.
        fields: its fields as a dict.
        number: number of the row in its file or dataset, from 0. Rows that cannot be used count too.
    """

    where: str
    fields: dict[str, Any]
    number: int = 0

    def rejected(self, error: BadRecord) -> Rejected:
        """Return the record that reports this row as rejected, with the error as its reason."""
        return Rejected(self.where, 0, str(error))


class NamedClass(int):
    """A class number, as an int that also knows the name of its class.

    It represents a value of a `ClassLabel` column of a Hugging Face dataset.
    """

    name: str


def _with_class_names(fields: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    for column, names in classes.items():
        value = fields.get(column)
        if isinstance(value, list):
            fields[column] = [_named_class(number, names) for number in value]
        else:
            fields[column] = _named_class(value, names)
    return fields


def _named_class(value: Any, names: Sequence[str]) -> Any:
    if not isinstance(value, int) or not 0 <= value < len(names):  # -1 and null: none
        return value
    named = NamedClass(value)
    named.name = names[value]
    return named


class BadRows(RejectedRecords):
    """Counter of rows that cannot be used. It logs them, and raises UserError if there are too many.

    Args:
        limit: maximum number of bad rows; None for 100, or 0.1 % of the rows if that is more.
        quiet: True to count without logging, because an earlier reading of the same data has logged them.
    """

    names_key_flag = False

    def __init__(self, limit: int | None, *, quiet: bool = False) -> None:
        super().__init__(limit)
        self.quiet = quiet

    def add(self, where: str, reason: str) -> None:
        super().add(where, reason)
        if self.count <= _LOGGED and not self.quiet:
            logger.warning("left out %s: %s", where, reason)

    def error(self) -> UserError:
        more = "" if self.limit == 0 else f"more than {allowed(self.limit, self.lines)} bad rows, the first is "
        return UserError(f"{more}{self.first}; fix it, or raise --max_bad_lines.")

    def report(self) -> None:
        """Log the number of bad rows, after all rows are read."""
        if self.count > _LOGGED:
            logger.warning("%d bad rows left out in all, the first is %s", self.count, self.first)


def resolve(path: str, split: str) -> str:
    """Return the path of the data of one split.

    For a folder, this is the file that is named after the split. A dataset `name[:config]` gets the split's name.

    Args:
        path: file, folder or dataset.
        split: name of the split, such as "train".

    Raises:
        UserError: the data cannot be read.
    """
    if isinstance(path, PythonRows):
        return _split_of_rows(path, split)
    if os.path.isdir(path):
        return _file_in(path, split)
    if os.path.exists(path):
        if not _is_file_of_rows(path) and not hf_datasets.is_data_file(path):
            raise UserError(f"{path} is none of {', '.join((*SUFFIXES, *hf_datasets.DATA_SUFFIXES))}.")
        check_readable(path)
    elif _is_file_of_rows(path) or hf_datasets.is_data_file(path):
        raise UserError(f"{path} does not exist.")
    else:
        find_files([path])  # refuses what cannot be the name of a dataset
        return with_split(path, split)
    return path


def with_split(item: str, split: str) -> str:
    """Return the name `name[:config][:split]` of a dataset with this split, such as "valid", if it names none."""
    name, config, _ = hf_datasets.split_name(item)
    return item if item.count(":") > 1 else f"{name}:{config or ''}:{_HUB_NAMES[split]}"


def _split_of_rows(rows: PythonRows, split: str) -> PythonRows:
    """The rows of a split, where there are several of them."""
    if rows.splits is None:
        return rows
    for name in FILES_OF[split]:
        if name in rows.splits:
            return rows.of_split(name)
    raise UserError(f"{rows} has no split {' or '.join(FILES_OF[split])}, only {', '.join(map(str, rows.splits))}.")


def _file_in(folder: str, split: str) -> str:
    names, stems = sorted(os.listdir(folder)), FILES_OF[split]
    files = [name for name in names if _is_file_of_rows(name) and _stem(name) in stems]
    if len(files) > 1:
        raise UserError(f"folder {folder} has several {split} files, {', '.join(files)}: name one of them.")
    if files:
        return os.path.join(folder, files[0])
    data_files = [name for name in names if hf_datasets.is_data_file(name)]
    if any(re.match(rf"{stem}[-_.]", name) for stem in stems for name in data_files):
        return f"{folder}::{_HUB_NAMES[split]}"  # of several files too: train-00000-of-00002.parquet
    for name in (*stems, "data"):  # a DatasetDict on disk, a snapshot of the hub
        if os.path.isdir(os.path.join(folder, name)):
            return _file_in(os.path.join(folder, name), split)
    others = [stem for other, names_of in FILES_OF.items() if other != split for stem in names_of]
    if data_files and not any(re.match(rf"{stem}[-_.]", name) for stem in others for name in data_files):
        return folder  # of one split, or of none by their names
    raise UserError(
        f"folder {folder} has none of the {split} files {', '.join(f'{stem}.tsv' for stem in stems)} "
        f"(or .csv, .jsonl, .json, .parquet): it has {', '.join(names[:8]) or 'nothing'}."
    )


def _stem(name: str) -> str:
    return name.lower().removesuffix("".join(endings(name)))


def read_rows(path: str, bad: BadRows) -> Iterator[Row]:
    """Yield all rows of a fine-tuning data file or dataset.

    Args:
        path: a path that `resolve` returned.
        bad: counts and logs rows that cannot be used.

    Raises:
        UserError: a file is damaged, or there are too many bad rows.
    """
    classes: dict[str, list[str]] = {}
    if isinstance(path, PythonRows):
        classes = hf_datasets.class_names(getattr(path.rows, "features", None))
        entries = ((f"{path}, row {number}", fields) for number, fields in enumerate(path.dicts()))
    elif not _is_file_of_rows(path):
        classes = hf_datasets.class_names(hf_datasets.load_streaming(path).features)
        shards = (hf_datasets.read_shard(path, shard, "") for shard in range(hf_datasets.num_shards(path)))
        rows = enumerate(chain.from_iterable(shards), 1)
        entries = ((f"{path}, row {number}", fields) for number, fields in rows)
    else:
        entries = _read_json(path) if endings(path)[0] in JSON_SUFFIXES else _read_table(path)
    for number, (where, found) in enumerate(entries):
        if isinstance(found, BadRecord):
            bad.add(where, str(found))
        elif found is not None:
            yield Row(where, _with_class_names(found, classes), number)


def _is_file_of_rows(path: str) -> bool:
    return endings(path)[0] in SUFFIXES


def _read_json(path: str) -> Iterator[Entry]:
    if endings(path)[0] == ".json" and (whole := _whole_json(path)) is not None:
        for number, record in enumerate(whole):
            is_row = isinstance(record, dict)
            error = BadRecord(f"a JSON {type(record).__name__}, not an object")
            yield f"{path}, element {number}", record if is_row else error
        return
    for item in read_shard(whole_file(path), None):
        yield f"{path}:{item.line}", item.value if isinstance(item, Record) else BadRecord(item.reason)


def _whole_json(path: str) -> list[Any] | None:
    """The list that a file is, or has as "data"; None for JSON lines."""
    filled = (line.strip() for _, line in read_lines(whole_file(path)) if line.strip())
    first, is_alone = next(filled, b""), next(filled, None) is None
    try:
        data = parse_object(first).get("data")
        is_whole = is_alone and isinstance(data, list) and all(isinstance(item, dict) for item in data)
    except BadRecord:
        is_whole = first[:1] == b"[" or first == b"{" or (first[:1] == b"{" and b'"data"' in first)
    if not is_whole:
        return None
    lines = [line for _, line in read_lines(whole_file(path))]
    try:
        found = json.loads(b"".join(lines))
    except (ValueError, RecursionError) as error:
        reason = too_long(max(map(len, lines))) or error
        raise UserError(f"{path} is neither JSON lines nor one list of objects ({reason}): fix it.") from None
    found = found.get("data") if isinstance(found, dict) else found
    if not isinstance(found, list):
        raise UserError(f'{path} is one JSON object without a list called "data": give a list, or an object a line.')
    return found


def _read_table(path: str) -> Iterator[Entry]:
    is_csv, columns, skipped = endings(path)[0] in CSV_SUFFIXES, (), 0
    lines = _text_lines(path, newline="" if is_csv else "\n")
    first, delimiter = next(lines, ""), "\t"
    if is_csv and first.lower().startswith("sep="):  # a line for Excel alone
        first, delimiter, skipped = next(lines, ""), first[4:5], 1
    elif is_csv:
        delimiter = max(_DELIMITERS, key=re.sub('"[^"]*"', "", first).count)
    is_quoted, is_warned = is_csv or first.startswith('"'), False
    for number, values in _records(path, chain([first], lines), delimiter if is_quoted else ""):
        where = f"{path}:{number + skipped}"
        if isinstance(values, BadRecord):
            yield where, values
        elif not columns and not is_csv and _is_cola(values):
            columns = _COLA
            yield where, _fields(values, columns, is_quoted)
        elif not columns:
            columns = _column_names(path, values)
        elif any(map(str.strip, values)):
            if not (is_quoted or is_warned) and any('""' in value and _QUOTED.fullmatch(value) for value in values):
                is_warned = True  # no error, because some of GLUE's questions are so written
                logger.warning("%s: quotation marks around a value are read as text; %s", where, _UNQUOTED)
            yield where, _fields(values, columns, is_quoted)
        elif len(values) > 1:
            yield where, None


def _fields(values: list[str], columns: Sequence[str], is_quoted: bool) -> dict[str, Any] | BadRecord:
    """The fields of a row of a table. Spreadsheets fill rows up with empty cells, and pandas names no index."""
    if len(values) < len(columns) or any(map(str.strip, values[len(columns) :])):
        hint = f"; {_UNQUOTED}" if not is_quoted and any('"' in value for value in values) else ""
        return BadRecord(f"{len(values)} columns, where the first line has {len(columns)}{hint}")
    if not _is_utf8(values):
        return BadRecord(_NOT_UTF8)
    fields = {name: value for name, value in zip(columns, values, strict=False) if name}
    if _MNLI <= fields.keys():
        fields |= {"premise": fields["sentence1"], "hypothesis": fields["sentence2"]}
    return fields


def _is_utf8(values: list[str]) -> bool:
    try:
        return "".join(values).encode() is not None
    except UnicodeEncodeError:  # of a byte that is not UTF-8
        return False


def _is_cola(values: list[str]) -> bool:
    return len(values) == 4 and values[1] in ("0", "1") and values[2] in ("", "*")


def _column_names(path: str, values: list[str]) -> tuple[str, ...]:
    """Column names, "" for unnamed columns; trailing unnamed columns are dropped."""
    if not _is_utf8(values) or "\0" in "".join(values):
        raise UserError(f"{path}: its first line is {_NOT_UTF8}.")
    names = [value.strip() for value in values]
    while names and not names[-1]:
        names.pop()
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        raise UserError(f"{path} names a column twice in its first line ({', '.join(named)}): rename one.")
    return tuple(names)


def _text_lines(path: str, newline: str) -> Iterator[str]:
    """Lines of a text file, of UTF-16 if it begins with its mark. Bytes that are not UTF-8 become lone surrogates."""
    shard = whole_file(path)
    try:
        with open_decompressed(path) as file:
            encoding = "utf-16" if file.peek(2)[:2] in _UTF16 else "utf-8-sig"
            yield from io.TextIOWrapper(file, encoding, errors="surrogateescape", newline=newline)
    except (EOFError, UnicodeDecodeError) as error:  # of a compressed file, of half a character of UTF-16
        shard.check_unchanged()
        raise UserError(f"{path} is damaged ({error}); compress or copy it again.") from None
    shard.check_unchanged()


def _records(path: str, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str] | BadRecord]]:
    """(first line, values) of each record. One with a quoted value may go over several lines.

    Args:
        delimiter: character between quoted values; "" for tabs without quoting.
    """
    if not delimiter:
        yield from ((number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(lines, 1))
        return
    csv.field_size_limit(MAX_DOCUMENT_BYTES)  # of the process; the default of 128 KiB is less than a SCROLLS input
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            values: list[str] | BadRecord = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise UserError(f"{path}:{first}: a quotation mark of this record is never closed: fix it.") from None
            values = BadRecord(f"not valid csv: {error}")
        yield first, values
