"""Find the files and datasets that are named as input, and cut them into shards (parts) for parallel work.

| input | read as |
|---|---|
| `.jsonl`, `.ndjson`, `.json` | JSON lines; a `.json` that begins with `[`: one list of objects |
| `.csv`, `.tsv` | a table, whose first line names its columns |
| `.txt` | text, with blank lines between documents, or a document on each line |
| the same with `.gz`, `.bz2`, `.xz`, `.zst` | the same, decompressed (`.zst` needs pyarrow) |
| `.parquet`, `.arrow` | rows of a Hugging Face dataset, streamed |
| a folder, also of `Dataset.save_to_disk` | all of the above in it, recursively, in sorted order, no file twice |
| `folder::split` | the files of one split in a folder |
| `name[:config][:split]` | a dataset of the hub |

A file of a corpus belongs to the split that its name, or that of a folder above it, has as a word
(train-00000-of-00002.parquet, validation/data.txt). Without `::split`, a folder with files of `train` is read without
those of other splits. In fine-tuning the file of a split has its name alone (`file_of_split`). Suffixes may be in
upper case. Hidden files and files that this program wrote are ignored.
"""

import bz2
import gzip
import io
import logging
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import hash_of_ends, human_bytes, read_json

logger = logging.getLogger(__name__)

BOM = b"\xef\xbb\xbf"
_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSIONS = (*_OPEN, ".zst")
_KINDS = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "table"),
    ".txt": "text",
    **dict.fromkeys(hf_datasets.DATA_SUFFIXES, "dataset"),
}
READABLE = f"{', '.join(_KINDS)} (text also with {', '.join(COMPRESSIONS)})"
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}
_SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(_SPLIT_OF)})(?![a-z])")
_DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:]*)?(:[^:]+)?")
_OUTPUTS = re.compile(r"\.(bin|idx)$|\.(bin|idx|json)\.tmp[0-9a-f]{12}$|\.bad_lines\.jsonl$")
_SHARDS = re.compile(r"\.shards-[0-9a-f]{16}$")
_PROBED_LINES, _PROBED_BYTES = 1000, 1 << 16  # of a text file: one of them without a blank line is unusual
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True)
class Shard:
    """A part of the input that can be processed independently: a range of a file, or one shard of a dataset.

    Attributes:
        kind: "json" (lines), "list" (of JSON), "table", "text", "lines" (of text, each a document) or "dataset".
        start, end: range of bytes of the file, `end` None for a complete compressed file. `start` is the number of the
            shard for a dataset.
        stamp: result of `file_stamp` when the shard was planned; None to allow changes of the file.
    """

    path: str
    kind: str
    start: int = 0
    end: int | None = None
    stamp: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of this part of the text on disk in bytes; 0 for a dataset, whose size is unknown."""
        if self.kind == "dataset":
            return 0
        return (self.end if self.end is not None else os.path.getsize(self.path)) - self.start

    def check_unchanged(self) -> None:
        """Raise UserError if this shard's file has changed since the text was divided into shards."""
        if self.stamp is not None and file_stamp(self.path) != self.stamp:
            raise UserError(f"{self.path} was changed while it was being read; wait until nothing writes to it.")


def file_stamp(path: str) -> tuple[int, int]:
    """Return the size of a file in bytes and its modification time in ns, to notice that it has changed."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def plan_shards(
    inputs: Sequence[str],
    shard_bytes: int | None = None,
    max_shards: int | None = None,
    document_per_line: bool = False,
) -> list[Shard]:
    """Cut the input text into shards for parallel work, in reading order. Plain files are cut between documents.

    Args:
        shard_bytes: approximate size of a shard; None for 1/64 of the total, from 2 to 64 MB.
    """
    files = find_files(inputs, document_per_line)
    size = sum(os.path.getsize(path) for path, kind in files if kind != "dataset")
    shard_bytes = shard_bytes or min(max(size // 64, 2 << 20), 64 << 20)
    shard_bytes = max(shard_bytes, -(-size // max_shards)) if max_shards else shard_bytes
    return [shard for path, kind in files for shard in shards_of(path, kind, shard_bytes)]


def shards_of(path: str, kind: str, shard_bytes: int | None = None) -> list[Shard]:
    """Cut one file or dataset of a kind (see `Shard`) into shards; None cuts no file."""
    if kind == "dataset":
        return [Shard(path, kind, start=number) for number in range(hf_datasets.num_shards(path))]
    stamp = file_stamp(path)
    if endings(path)[1]:
        return [Shard(path, kind, stamp=stamp)]
    whole = shard_bytes is None or kind in ("list", "table")
    bounds = _boundaries(path, kind, stamp[0], stamp[0] if whole else shard_bytes)
    return [Shard(path, kind, start, end, stamp) for start, end in pairwise(bounds)]


def content_of(shards: Sequence[Shard]) -> list[Any]:
    """Identify the text in shards, to notice that it has changed: sizes, first and last bytes, bounds.

    Moving, copying or renaming the files does not change the result.
    """
    bounds = [(s.kind, s.start, s.end, s.num_bytes) for s in shards]
    files = dict.fromkeys(shard.path for shard in shards if shard.kind != "dataset")
    return [bounds, list(map(hash_of_ends, files)), list(map(hf_datasets.identity, datasets_of(shards)))]


def datasets_of(shards: Sequence[Shard]) -> list[str]:
    """Return the names of the Hugging Face datasets that shards belong to."""
    return list(dict.fromkeys(shard.path for shard in shards if shard.kind == "dataset"))


def _boundaries(path: str, kind: str, size: int, shard_bytes: int) -> list[int]:
    """Byte offsets 0 = b0 < b1 < ... = size; each but the last is the start of a document."""
    bounds = [0]
    with open(path, "rb") as file:
        while bounds[-1] + shard_bytes < size:
            file.seek(bounds[-1] + shard_bytes - 1)
            skip_line(file)  # the rest of a line, which may be non-blank whatever is left of it
            while kind == "text" and skip_line(file):
                pass
            if file.tell() >= size:
                break
            bounds.append(file.tell())
    return [*bounds, size] if size else []


def skip_line(file: BinaryIO) -> bool:
    """Skip the next line of a file, of any length. Returns True if the line was not blank."""
    filled = False
    while block := file.readline(_SKIP_BYTES):
        filled = filled or bool(block.strip())
        if block.endswith(b"\n"):
            break
    return filled


def endings(path: str) -> tuple[str, str]:
    """Return the format and the compression of a file by its name: (".jsonl", ".gz") for data.JSONL.gz."""
    stem, last = os.path.splitext(os.path.basename(path).lower())
    return (os.path.splitext(stem)[1], last) if last in COMPRESSIONS else (last, "")


def kind_of(path: str) -> str:
    """Return the kind of a file (see `Shard`) by its suffix, "" if none reads it. A `.json` may begin a list by `[`.

    Raises UserError: the file needs pyarrow, which is not installed.
    """
    suffix, compression = endings(path)
    kind = _KINDS.get(suffix, "")
    if kind and compression == ".zst" and find_spec("pyarrow") is None:
        raise UserError(f"{path} is compressed by zstd, which pyarrow reads: pip install pyarrow, or decompress it")
    if kind == "dataset" and compression:
        return ""
    is_list = suffix == ".json" and _head(path, 1024).removeprefix(BOM).lstrip().startswith(b"[")
    return "list" if is_list else kind


def _head(path: str, size: int) -> bytes:
    """The first bytes of a file, decompressed; none of a damaged one, which is reported where it is read."""
    try:
        with open_decompressed(path) as file:
            return file.read(size)
    except EOFError:
        return b""


@contextmanager
def open_decompressed(path: str) -> Iterator[BinaryIO]:
    """Open a file and decompress it according to its suffix. Raises EOFError if the compressed data are damaged."""
    compression = endings(path)[1]
    try:
        if compression == ".zst":
            import pyarrow

            with io.BufferedReader(pyarrow.input_stream(path, compression="zstd")) as file:
                yield file
        else:
            with _OPEN.get(compression, open)(path, "rb") as file:
                yield file
    except (zlib.error, lzma.LZMAError) as error:
        raise EOFError(str(error)) from None
    except OSError as error:
        if error.errno is not None:  # errors of the disk have a number, those of decompressors do not
            raise
        raise EOFError(str(error)) from None


# ---- inputs of a corpus ----


def find_files(inputs: Sequence[str], document_per_line: bool = False) -> list[tuple[str, str]]:
    """Find all files and datasets of the inputs, searching folders recursively.

    Returns:
        (path, kind) of each, where kind is one of `Shard.kind`.

    Raises:
        UserError: an input does not exist, is unreadable or empty, or is given twice.
    """
    found = [_files_of(os.fspath(item)) for item in inputs]
    first: dict[str, int] = {}
    for number, (path, _) in ((number, file) for number, files in enumerate(found) for file in files):
        if (other := first.setdefault(os.path.realpath(path), number)) != number:
            raise UserError(f"{path} is named twice, by the inputs {inputs[other]} and {inputs[number]}")
    files = [file for of_item in found for file in of_item]
    if not any(kind == "dataset" or os.path.getsize(path) for path, kind in files):
        raise UserError(f"there is no text in {list_inputs(inputs)}: {len(files)} files, all of them empty")
    if document_per_line:
        return [(path, "lines" if kind == "text" else kind) for path, kind in files]
    if blocks := [path for path, kind in files if kind == "text" and _is_one_block(path)]:
        _warn_once(
            f"{blocks[0]} ({len(blocks)} of {len(files)} files) is one document for 1,000 lines or 64 KiB: separate "
            "documents by blank lines, or give --document_per_line"
        )
    return files


def list_inputs(inputs: Sequence[str]) -> str:
    return ", ".join(map(str, inputs)) or "an empty list of inputs"


def _is_one_block(path: str) -> bool:
    """True if a text begins with many or long lines and no blank line."""
    head = _head(path, 1 << 20).strip()
    lines = head.split(b"\n", _PROBED_LINES)
    is_long = len(lines) > _PROBED_LINES or (len(lines) > 1 and len(head) >= _PROBED_BYTES)
    return is_long and all(line.strip() for line in lines[:_PROBED_LINES])


def _files_of(item: str) -> list[tuple[str, str]]:
    """Return (path, kind) of each file or dataset of one input, see `find_files`."""
    if os.path.isdir(item):
        return _files_in(item)
    if os.path.exists(item):
        return [(item, _kind_of_input(item))]
    name, config, split = hf_datasets.split_name(item)
    if os.path.isdir(name):
        if config is None and split in _SPLIT_OF:
            return _files_in(name, _SPLIT_OF[split])
        if config in _SPLIT_OF:
            raise UserError(f"{item}: write {name}::{config} for the files of a split")
    else:
        _check_hub_name(item)
    return [(item, "dataset")]


def _kind_of_input(path: str) -> str:
    """Kind of a file that exists. Raises UserError if there is none."""
    if not os.path.isfile(path) or not (kind := kind_of(path)):
        raise UserError(f"{path} is no file of {READABLE}")
    return kind


def _check_hub_name(item: str) -> None:
    """Raise UserError if what does not exist here cannot be the name of a dataset either."""
    looks_local = item.startswith((".", "/", "~")) or os.path.isdir(os.path.dirname(item) or "\0")
    if looks_local or endings(item)[0] in _KINDS or not _DATASET_NAME.fullmatch(item):
        raise UserError(f"{item} does not exist")


def _files_in(folder: str, split: str = "") -> list[tuple[str, str]]:
    """The files of a split; by default those of "train" and of no split if there is a file of "train", else all."""
    kinds = {path: kind_of(path) for path in _walk(folder)}
    splits = {path: _split_of(folder, path) for path, kind in kinds.items() if kind}
    others = [path for path, kind in kinds.items() if not kind]
    if not splits:
        raise UserError(f"folder {folder} has no {READABLE} file in it ({len(others)} others)")
    default = ("", "train") if "train" in splits.values() else splits.values()
    files = [(path, kinds[path]) for path, found in splits.items() if found in ((split,) if split else default)]
    if not files:
        raise UserError(f"folder {folder} has no file of the split {split} by its name")
    if not split and len(files) < len(splits):
        left_out = [f"{folder}::{name}" for name in dict.fromkeys(splits.values()) if name not in default]
        number, names = len(splits) - len(files), ", ".join(left_out)
        _warn_once(f"folder {folder}: {number} files of other splits than train are left out ({names})")
    if not split and (sizes := {path: size for path in others if (size := os.path.getsize(path))}):
        _warn_once(
            f"folder {folder}: {len(sizes)} files of {human_bytes(sum(sizes.values()))} are passed over, such as "
            f"{next(iter(sizes))}; {len(files)} are read"
        )
    return files


def _split_of(folder: str, path: str) -> str:
    """The split that a file in a folder belongs to by its path, "" for none."""
    word = _SPLIT_WORD.search(os.path.relpath(path, folder).lower())
    return "" if word is None else _SPLIT_OF[word[0]]


def _walk(folder: str) -> list[str]:
    """Sorted paths of all files that may be input, also behind links, each file once."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for path, below, names in os.walk(folder, onerror=_refuse, followlinks=True):
        if (real := os.path.realpath(path)) in seen:  # a second link to it, or a loop
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if not (name.startswith(".") or _SHARDS.search(name))]
        own = {f"{name[:-4]}.json" for name in names if name.endswith(".idx")}
        for name in sorted(_without_metadata(path, names)):
            if name.startswith(".") or name in own or _OUTPUTS.search(name):
                continue
            file = os.path.join(path, name)
            if not os.path.exists(file):
                raise UserError(f"{file} is a link to {os.readlink(file)}, which does not exist: fix or remove it")
            if os.path.isfile(file):  # opening a named pipe would block forever
                found.setdefault(os.path.realpath(file), file)
    return sorted(found.values())


def _refuse(error: OSError) -> None:
    raise UserError(f"folder {error.filename} cannot be read: {error.strerror}") from None


def _without_metadata(path: str, names: list[str]) -> list[str]:
    """File names to read in a folder; of one that `Dataset.save_to_disk` wrote its data files, not caches of `map`."""
    if {"state.json", "dataset_info.json"} <= set(names):
        data_files = read_json(Path(path, "state.json")).get("_data_files") or []
        return [file["filename"] for file in data_files]
    return [name for name in names if name not in ("dataset_dict.json", "dataset_info.json", "dataset_infos.json")]


@cache  # several plans may be made of the same inputs
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


# ---- rows of a split, for fine-tuning ----


class PythonRows(str):
    """Rows in memory that can be passed wherever the path of a file is expected: a `str` whose text is their name."""

    rows: Any

    def __new__(cls, name: str, rows: Any) -> "PythonRows":
        made = super().__new__(cls, name)
        made.rows = list(rows) if iter(rows) is rows else rows  # a generator can be read only once
        return made

    def __eq__(self, other: object) -> bool:
        """True for the same rows: others may have the same name."""
        return super().__eq__(other) is True and getattr(other, "rows", None) is self.rows

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> "PythonRows":
        return self  # a record of the settings is no reason to copy the data


def as_source(value: Any, name: str) -> str:
    """Convert a data setting to a string: the path, or `PythonRows`. Raises UserError for another type."""
    if isinstance(value, str | os.PathLike):
        return value if isinstance(value, str) else os.fspath(value)
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise UserError(f"{name} is of type {type(value).__name__}: give a path, or rows as dicts.")
    return PythonRows(f"rows given as {name}", value)


def as_sources(value: Any, name: str) -> tuple[str, ...]:
    """Convert a data setting with one or several paths or rows in memory to a tuple; see `as_source`."""
    if not isinstance(value, list | tuple) or any(isinstance(item, Mapping) for item in value):
        return (as_source(value, name),)
    several = len(value) > 1
    return tuple(as_source(item, f"{name}[{number}]" if several else name) for number, item in enumerate(value))


def file_of_split(path: str, split: str) -> str:
    """Return what holds the rows of one split: the file that is named after it in a folder, a dataset, or the path.

    Raises UserError: the data cannot be read.
    """
    words = _SPLITS[_SPLIT_OF[split]]
    if isinstance(path, PythonRows):
        if not isinstance(path.rows, Mapping):
            return path
        if name := next((name for name in words if name in path.rows), None):
            return PythonRows(f"{path}[{name!r}]", path.rows[name])
        raise UserError(f"{path} has no split {' or '.join(words)}, only {', '.join(map(str, path.rows))}.")
    if os.path.isdir(path):
        return _file_in(path, words)
    if os.path.exists(path):
        _kind_of_input(path)
        return path
    if not os.path.exists(hf_datasets.split_name(path)[0]):
        _check_hub_name(path)
    return hf_datasets.with_split(path, words[0])


def text_of_split(path: str, split: str) -> str:
    """Return what holds the text of one split, as `file_of_split`; of a folder with files of `train` all its files."""
    if not os.path.isdir(path):
        return path if os.path.exists(path) else file_of_split(path, split)
    has_train = "train" in (_split_of(path, file) for file in _walk(path))
    return f"{path}::{_SPLIT_OF[split]}" if has_train else path


def _file_in(folder: str, words: Sequence[str]) -> str:
    names = sorted(os.listdir(folder))
    kinds = {name: _KINDS.get(endings(name)[0]) for name in names}
    stems = [name.lower().removesuffix("".join(endings(name))).removesuffix("_matched") for name in names]
    files = [n for n, stem in zip(names, stems, strict=True) if stem in words and kinds[n] in ("json", "table")]
    if len(files) > 1:
        raise UserError(f"folder {folder} has several {words[0]} files, {', '.join(files)}: name one of them.")
    if files:
        return os.path.join(folder, files[0])
    data_files = [name for name in names if kinds[name] == "dataset"]
    begins = {re.split("[-_.]", name)[0] for name in data_files}  # train-00000-of-00002.parquet
    if not begins.isdisjoint(words):
        return hf_datasets.with_split(folder, words[0])
    for name in (*words, "data"):  # a DatasetDict on disk, a snapshot of the hub
        if os.path.isdir(os.path.join(folder, name)):
            return _file_in(os.path.join(folder, name), words)
    if data_files and begins.isdisjoint(_SPLIT_OF):
        return folder  # rows of no split by their names
    raise UserError(
        f"folder {folder} has none of the {words[0]} files {', '.join(f'{word}.tsv' for word in words)} "
        f"(or .csv, .jsonl, .json, .parquet): it has {', '.join(names[:8]) or 'nothing'}."
    )
