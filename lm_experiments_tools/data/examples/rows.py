"""Read rows of fine-tuning data from files and datasets, as dicts with their position for error messages.

| input | a row is |
|---|---|
| `.jsonl`, `.json`, `.ndjson` | one line: a JSON object |
| `.json` with one list, or an object with a list "data" | an object of the list |
| `.csv` | a record (RFC 4180: quoted fields may contain commas and line ends); the first one names the columns |
| `.tsv` | one line, split at tabs, without quoting (as GLUE's files); the first one names the columns |
| `.parquet`, `.arrow`, `name[:config][:split]` | a row of a Hugging Face dataset, of files or of the hub |
| `PythonRows` | a dict |

Files may be compressed (`.gz`, `.bz2`, `.xz`, `.zst`). CoLA's files, which have no column names, are recognized. Rows
of MNLI's files also have the names premise and hypothesis.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    decoded,
    parse_object,
    read_lines,
    read_shard,
    too_long,
)
from lm_experiments_tools.data.text.sources import (
    COMPRESSIONS,
    JSON_SUFFIXES,
    check_readable,
    endings,
    find_files,
    whole_file,
)
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

CSV_SUFFIXES = (".csv",)
TSV_SUFFIXES = (".tsv",)
SUFFIXES = JSON_SUFFIXES + CSV_SUFFIXES + TSV_SUFFIXES
# Names of the files of a split in a folder, the first one that is there.
FILES_OF = {
    "train": ("train",),
    "valid": ("dev", "validation", "valid", "dev_matched", "validation_matched"),
    "test": ("test", "test_matched"),
}
_COLA = ("source", "label", "mark", "sentence")
_MNLI = {"promptID", "pairID", "sentence1", "sentence2"}  # of its table, and of SNLI's in the same form
_LOGGED = 10  # bad rows that are named one by one


@dataclass(frozen=True)
class Row:
    """One row of fine-tuning data: its fields as a dict, and its position (`file:line`) for error messages."""

    where: str
    fields: dict[str, Any]

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
    """Return the path of the data of one split. For a folder, this is the file that is named after the split.

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
    return path


def _split_of_rows(rows: PythonRows, split: str) -> PythonRows:
    """The rows of a split, where there are several of them."""
    if rows.splits is None:
        return rows
    for name in FILES_OF[split]:
        if name in rows.splits:
            return rows.of_split(name)
    raise UserError(f"{rows} has no split {' or '.join(FILES_OF[split])}, only {', '.join(map(str, rows.splits))}.")


def _file_in(folder: str, split: str) -> str:
    names = sorted(os.listdir(folder))
    for stem in (stem + suffix for stem in FILES_OF[split] for suffix in SUFFIXES):
        for name in (stem + compression for compression in ("", *COMPRESSIONS)):
            if os.path.isfile(os.path.join(folder, name)):
                return os.path.join(folder, name)
    data_files = [name for name in names if hf_datasets.is_data_file(name)]
    for stem in FILES_OF[split]:  # of several files too: train-00000-of-00002.parquet
        if any(re.match(rf"{stem}[-_.]", name) for name in data_files):
            return f"{folder}::{'validation' if split == 'valid' else split}"
    others = [stem for other, stems in FILES_OF.items() if other != "train" for stem in stems]
    if data_files and not any(re.match(rf"{stem}[-_.]", name) for stem in others for name in data_files):
        return folder  # of one split, or of none by their names
    raise UserError(
        f"folder {folder} has none of the {split} files {', '.join(f'{stem}.tsv' for stem in FILES_OF[split])} "
        f"(or .csv, .jsonl, .json, .parquet): it has {', '.join(names[:8]) or 'nothing'}."
    )


def read_rows(path: str, bad: BadRows) -> Iterator[Row]:
    """Yield all rows of a fine-tuning data file or dataset.

    Args:
        path: a path that `resolve` returned.
        bad: counts and logs rows that cannot be used.

    Raises:
        UserError: a file is damaged, or there are too many bad rows.
    """
    if isinstance(path, PythonRows):
        classes = hf_datasets.class_names(getattr(path.rows, "features", None))
        for number, fields in enumerate(path.dicts()):
            yield Row(f"{path}, row {number}", _with_class_names(fields, classes))
    elif not _is_file_of_rows(path):
        yield from _read_dataset(path)
    elif endings(path)[0] in JSON_SUFFIXES:
        yield from _read_json(path, bad)
    else:
        yield from _read_table(path, bad)


def _is_file_of_rows(path: str) -> bool:
    return endings(path)[0] in SUFFIXES


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    return read_lines(whole_file(path))


def _read_json(path: str, bad: BadRows) -> Iterator[Row]:
    if endings(path)[0] == ".json" and (whole := _whole_json(path)) is not None:
        for number, record in enumerate(whole):
            if isinstance(record, dict):
                yield Row(f"{path}, element {number}", record)
            else:
                bad.add(f"{path}, element {number}", f"a JSON {type(record).__name__}, not an object")
        return
    for item in read_shard(whole_file(path), None):
        if isinstance(item, Record):
            yield Row(f"{path}:{item.line}", item.value)
        else:
            bad.reject(item)


def _whole_json(path: str) -> list[Any] | None:
    """The list that a file is, or has as "data"; None for JSON lines."""
    first = next((line for _, line in _lines(path) if line.strip()), b"").strip()
    try:
        is_whole = isinstance(parse_object(first).get("data"), list)
    except BadRecord:
        is_whole = first[:1] == b"[" or first == b"{" or (first[:1] == b"{" and b'"data"' in first)
    if not is_whole:
        return None
    lines = [line for _, line in _lines(path)]
    try:
        found = json.loads(b"".join(lines))
    except (ValueError, RecursionError) as error:
        reason = too_long(max(map(len, lines))) or error
        raise UserError(f"{path} is neither JSON lines nor one list of objects ({reason}): fix it.") from None
    found = found.get("data") if isinstance(found, dict) else found
    if not isinstance(found, list):
        raise UserError(f'{path} is one JSON object without a list called "data": give a list, or an object a line.')
    return found


def _read_table(path: str, bad: BadRows) -> Iterator[Row]:
    records = _csv_records(path, bad) if endings(path)[0] in CSV_SUFFIXES else _tsv_records(path, bad)
    columns: tuple[str, ...] = ()
    for number, values in records:
        if not columns:
            if endings(path)[0] not in CSV_SUFFIXES and _is_cola(values):
                columns = _COLA
            else:
                columns = _column_names(path, values)
                continue
        if len(values) == len(columns):
            fields = dict(zip(columns, values, strict=True))
            if _MNLI <= fields.keys():
                fields |= {"premise": fields["sentence1"], "hypothesis": fields["sentence2"]}
            yield Row(f"{path}:{number}", fields)
        else:
            bad.add(f"{path}:{number}", f"{len(values)} columns, where the first line has {len(columns)}")


def _is_cola(values: list[str]) -> bool:
    return len(values) == 4 and values[1] in ("0", "1") and values[2] in ("", "*")


def _column_names(path: str, values: list[str]) -> tuple[str, ...]:
    names = tuple(value.strip() for value in values)
    if len(set(names)) < len(names):
        raise UserError(f"{path} names a column twice in its first line ({', '.join(names)}): rename one.")
    return names


def _decoded(path: str, bad: BadRows) -> Iterator[tuple[int, str]]:
    for number, line in _lines(path):
        try:
            yield number, decoded(line)
        except BadRecord as error:
            bad.add(f"{path}:{number}", str(error))


def _tsv_records(path: str, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    for number, line in _decoded(path, bad):
        if line.strip():
            yield number, line.rstrip("\r\n").split("\t")


def _csv_records(path: str, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    """(first line, values) of each record, which may go over several lines."""
    csv.field_size_limit(MAX_DOCUMENT_BYTES)  # of the process; the default of 128 KiB is less than a SCROLLS input
    last = 0

    def lines() -> Iterator[str]:
        nonlocal last
        for number, line in _decoded(path, bad):
            last = number
            yield line

    reader = csv.reader(lines(), strict=True)
    while True:
        first = last + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise UserError(f"{path}:{first}: a quotation mark of this record is never closed: fix it.") from None
            bad.add(f"{path}:{first}", f"not valid csv: {error}")
            continue
        if values:
            yield first, values


def _read_dataset(item: str) -> Iterator[Row]:
    number, classes = 0, hf_datasets.class_names(hf_datasets.load_streaming(item).features)
    for shard in range(hf_datasets.num_shards(item)):
        for fields in hf_datasets.read_shard(item, shard, ""):
            number += 1
            yield Row(f"{item}, row {number}", _with_class_names(fields, classes))
