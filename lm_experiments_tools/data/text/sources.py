"""Find the input files of a tokenization or run, and cut them into shards (parts) for parallel work.

| input | read as |
|---|---|
| `.jsonl`, `.json`, `.ndjson` | JSON lines |
| `.txt` | text, with blank lines between documents, or a document on each line |
| the same with `.gz`, `.bz2`, `.xz`, `.zst` | the same, decompressed (`.zst` needs pyarrow) |
| `.parquet`, `.arrow` | rows of a Hugging Face dataset, streamed |
| a folder, also of `Dataset.save_to_disk` | all of the above in it, recursively, in sorted order, no file twice |
| `folder::split` | the files of one split in a folder |
| `name[:config][:split]` | a dataset of the hub, or a clone of its repository (Parquet files with a README.md) |

A file belongs to the split that its name, or that of a folder above it, has as a word (train-00000-of-00002.parquet,
validation/data.txt). Without `::split`, a folder with files of `train` is read without those of other splits.
Suffixes may be in upper case. Hidden files and files that this program wrote are ignored.
"""

import bz2
import gzip
import io
import logging
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt",)
READABLE = f"{', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)} (also with {', '.join(COMPRESSIONS)})"
_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:]*)?(:[^:]+)?")
_SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(_SPLIT_OF)})(?![a-z])")
_UNFINISHED = re.compile(r"\.(bin|idx|json)\.tmp[0-9a-f]{12}$")
_TOKEN_SUFFIXES = (".bin", ".idx", ".json")
_PROBED_LINES, _PROBED_BYTES = 1000, 1 << 16  # of a text file: one of them without a blank line is unusual
_MAX_LISTED = 8  # kinds of unreadable files in a message
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True)
class Shard:
    """A part of the input text that can be processed independently: a range of a file, or one shard of a dataset.

    Attributes:
        start, end: range of bytes of the file, `end` None for a complete compressed file. `start` is the number of the
            shard for a dataset.
        stamp: result of `file_stamp` when the shard was planned; None to allow changes of the file.
    """

    path: str
    kind: str  # "json", "text", "lines" (of text, each a document) or "dataset"
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


def whole_file(path: str) -> Shard:
    """Return a complete file as one shard (part of the text). Records that are read from it are JSON lines."""
    stamp = file_stamp(path)
    return Shard(path, "json", 0, None if endings(path)[1] else stamp[0], stamp)


def plan_shards(
    inputs: Sequence[str],
    shard_bytes: int | None = None,
    max_shards: int | None = None,
    document_per_line: bool = False,
) -> list[Shard]:
    """Cut the input text into shards for parallel work, in reading order. Plain files are cut between documents.

    Args:
        inputs: files, folders and datasets.
        shard_bytes: approximate size of a shard; None for 1/64 of the total, from 2 to 64 MB.
        max_shards: maximum number of shards; None for no limit.
        document_per_line: each line of a text file is a document, instead of the lines between blank lines.
    """
    files = find_files(inputs, document_per_line)
    stamps = {path: file_stamp(path) for path, kind in files if kind != "dataset"}
    size = sum(num_bytes for num_bytes, _ in stamps.values())
    shard_bytes = shard_bytes or min(max(size // 64, 2 << 20), 64 << 20)
    shard_bytes = max(shard_bytes, -(-size // max_shards)) if max_shards else shard_bytes
    shards: list[Shard] = []
    for path, kind in files:
        if kind == "dataset":
            shards += [Shard(path, kind, start=number) for number in range(hf_datasets.num_shards(path))]
        elif endings(path)[1]:
            shards.append(Shard(path, kind, stamp=stamps[path]))
        else:
            bounds = _boundaries(path, kind, stamps[path][0], shard_bytes)
            shards += [Shard(path, kind, start, end, stamps[path]) for start, end in pairwise(bounds)]
    return shards


def content_of(shards: Sequence[Shard]) -> list[Any]:
    """Identify the text in shards, to notice that it has changed: sizes, first and last bytes, bounds.

    Moving, copying or renaming the files does not change the result.
    """
    bounds = [(s.kind, s.start, s.end, s.num_bytes) for s in shards]
    files = dict.fromkeys(shard.path for shard in shards if shard.kind != "dataset")
    return [bounds, list(map(hash_of_ends, files)), list(map(hf_datasets.identity, datasets_of(shards)))]


def datasets_of(shards: Sequence[Shard]) -> list[str]:
    """Return the names of the Hugging Face datasets that the given shards (parts of the text) belong to."""
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


# ---- compression ----


def endings(path: str) -> tuple[str, str]:
    """Return the two suffixes of a file name in lower case, its format and its compression.

    They are (".jsonl", ".gz") for data.JSONL.gz.
    """
    stem, last = os.path.splitext(os.path.basename(path).lower())
    return (os.path.splitext(stem)[1], last) if last in COMPRESSIONS else (last, "")


def check_readable(path: str) -> None:
    """Raise UserError if a file is compressed with zstd and pyarrow, which reads it, is not installed."""
    if endings(path)[1] == ".zst" and find_spec("pyarrow") is None:
        raise UserError(f"{path} is compressed by zstd, which pyarrow reads: pip install pyarrow, or decompress it")


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


# ---- inputs ----


def find_files(inputs: Sequence[str], document_per_line: bool = False) -> list[tuple[str, str]]:
    """Find all files and datasets of the inputs, searching folders recursively.

    Args:
        document_per_line: each line of a text file is a document.

    Returns:
        (path, kind) of each, where kind is one of `Shard.kind`.

    Raises:
        UserError: an input does not exist, is unreadable or empty, or is given twice.
    """
    found = [_resolve(os.fspath(item)) for item in inputs]
    _check_disjoint(inputs, found)
    files = [file for of_item in found for file in of_item]
    if not any(kind == "dataset" or os.path.getsize(path) for path, kind in files):
        raise UserError(f"there is no text in {list_inputs(inputs)}: {len(files)} files, all of them empty")
    for path, kind in files:
        if kind != "dataset":
            check_readable(path)
    if document_per_line:
        return [(path, "lines" if kind == "text" else kind) for path, kind in files]
    if blocks := [path for path, kind in files if kind == "text" and _is_one_block(path)]:
        _warn_once(
            f"{blocks[0]} ({len(blocks)} of {len(files)} files) is one document for 1,000 lines or 64 KiB: separate "
            "documents by blank lines, or give --document_per_line"
        )
    return files


def list_inputs(inputs: Sequence[str]) -> str:
    """Format a list of input files, folders and datasets for a message."""
    return ", ".join(map(str, inputs)) or "an empty list of inputs"


def _is_one_block(path: str) -> bool:
    """True if a text begins with many or long lines and no blank line. Raises UserError for lines that end in CR."""
    try:
        with open_decompressed(path) as file:
            head = file.read(1 << 20).strip()
    except (OSError, EOFError):  # reported where the file is read
        return False
    if b"\r" in head and b"\n" not in head:
        raise UserError(f"{path} ends its lines by a carriage return alone: convert them (tr '\\r' '\\n')")
    lines = head.split(b"\n", _PROBED_LINES)
    is_long = len(lines) > _PROBED_LINES or (len(lines) > 1 and len(head) >= _PROBED_BYTES)
    return is_long and all(line.strip() for line in lines[:_PROBED_LINES])


def _check_disjoint(inputs: Sequence[str], found: Sequence[list[tuple[str, str]]]) -> None:
    """Refuse a file or dataset that two inputs name: its documents would be read twice."""
    first: dict[object, int] = {}
    for number, files in enumerate(found):
        for path, _ in files:
            status = os.stat(path) if os.path.exists(path) else None
            other = first.setdefault((status.st_dev, status.st_ino) if status else path, number)
            if other != number:
                raise UserError(f"{path} is named twice, by the inputs {inputs[other]} and {inputs[number]}")


def _resolve(item: str) -> list[tuple[str, str]]:
    if os.path.isdir(item):
        return _files_in(item)
    if os.path.exists(item):
        kind = "dataset" if hf_datasets.is_data_file(item) else _kind(item)
        if not kind or not os.path.isfile(item):
            raise UserError(f"{item} is no file of {READABLE}, {', '.join(hf_datasets.DATA_SUFFIXES)}")
        return [(item, kind)]
    name, config, split = hf_datasets.split_name(item)
    if os.path.isdir(name):
        if config in _SPLIT_OF and split == "train":  # folder:split
            config, split = None, config
        if config is None and split in _SPLIT_OF and not _is_clone(name):
            return _files_in(name, _SPLIT_OF[split])
        return [(item, "dataset")]  # folder:config:split
    looks_local = item.startswith((".", "/", "~")) or os.path.isdir(os.path.dirname(item) or "\0")
    if looks_local or _kind(item) or not _DATASET_NAME.fullmatch(item):
        raise UserError(f"{item} does not exist")
    return [(item, "dataset")]


def _kind(path: str) -> str:
    suffix = endings(path)[0]
    if hf_datasets.is_data_file(path):
        return "dataset"
    return "json" if suffix in JSON_SUFFIXES else "text" if suffix in TEXT_SUFFIXES else ""


def _is_clone(folder: str) -> bool:
    """True for a repository of the hub, whose README.md may describe configurations."""
    return os.path.isfile(f"{folder}/README.md") and {_kind(path) for path in _walk(folder)} <= {"", "dataset"}


def _files_in(folder: str, split: str = "") -> list[tuple[str, str]]:
    if not split and _is_clone(folder):
        return [(folder, "dataset")]
    found = _walk(folder)
    files = [(path, _kind(path)) for path in found if _kind(path)]
    others = [path for path in found if not _kind(path)]
    if not files:
        raise UserError(f"folder {folder} has no {READABLE} file in it ({len(others)} others)")
    files = _of_split(folder, files, split)
    if dangling := next((path for path, _ in files if not os.path.exists(path)), None):
        raise UserError(f"{dangling} is a link to {os.readlink(dangling)}, which does not exist: fix or remove it")
    _report_skipped(folder, [path for path, _ in files], others)
    return files


def _of_split(folder: str, files: list[tuple[str, str]], split: str) -> list[tuple[str, str]]:
    """The files of a split; by default those of "train" and of no split, if there is a file of "train"."""
    words = [_SPLIT_WORD.search(os.path.relpath(path, folder).lower()) for path, _ in files]
    splits = ["" if word is None else _SPLIT_OF[word[0]] for word in words]
    if not split and "train" not in splits:
        return files
    chosen = [file for file, found in zip(files, splits, strict=True) if found in (split, split or "train")]
    if not chosen:
        raise UserError(f"folder {folder} has no file of the split {split} by its name")
    others = ", ".join(f"{folder}::{name}" for name in dict.fromkeys(splits) if name not in ("", "train"))
    if others and not split:
        _warn_once(
            f"folder {folder}: {len(files) - len(chosen)} files of other splits than train are left out ({others})"
        )
    return chosen


def _walk(folder: str) -> list[str]:
    """Sorted paths of all files that may be input, each file once and under its own name rather than a link's."""
    folders, seen, links = [folder], set(), []
    found: dict[str, str] = {}
    for start in folders:  # extended below by links to folders
        for path, below, names in os.walk(start, onerror=_refuse):
            real = os.path.realpath(path)
            if real in seen:
                below.clear()
                continue
            seen.add(real)
            below[:] = [name for name in below if not (name.startswith(".") or _is_unfinished_work(path, name))]
            folders += sorted(filter(os.path.islink, (os.path.join(path, name) for name in below)))
            names = _without_metadata(path, names)
            siblings = set(names)
            for name in names:
                if name.startswith(".") or _is_output(name, siblings):
                    continue
                file = os.path.join(path, name)
                if os.path.exists(file) and not os.path.isfile(file):  # opening a named pipe would block forever
                    _warn_once(f"{file} is no regular file and is passed over")
                elif os.path.islink(file):
                    links.append(file)
                else:
                    found.setdefault(os.path.join(real, name), file)
    for link in sorted(links):
        found.setdefault(os.path.realpath(link), link)
    return sorted(found.values())


def _refuse(error: OSError) -> None:
    raise UserError(f"folder {error.filename} cannot be read: {error.strerror}") from None


def _is_output(name: str, siblings: Collection[str]) -> bool:
    stem, suffix = os.path.splitext(name)
    whole = f"{stem}.idx" in siblings and (suffix == ".json" or f"{stem}.bin" in siblings)
    return name.endswith(".bad_lines.jsonl") or bool(_UNFINISHED.search(name)) or (whole and suffix in _TOKEN_SUFFIXES)


def _without_metadata(path: str, names: list[str]) -> list[str]:
    """File names to read in a folder; of one that `Dataset.save_to_disk` wrote its data files, not caches of `map`."""
    if {"state.json", "dataset_info.json"} <= set(names):
        data_files = read_json(Path(path, "state.json")).get("_data_files") or []
        return [file["filename"] for file in data_files]
    return [name for name in names if name not in ("dataset_dict.json", "dataset_info.json", "dataset_infos.json")]


def _is_unfinished_work(path: str, name: str) -> bool:
    return name.endswith(".shards") and os.path.isfile(os.path.join(path, name, "plan.json"))


def _report_skipped(folder: str, files: Sequence[str], others: Sequence[str]) -> None:
    """Warn of unreadable files in a folder; UserError where they have more bytes than the readable ones."""
    sizes = {path: os.path.getsize(path) for path in others if os.path.isfile(path) and os.path.getsize(path)}
    if not sizes:
        return
    skipped, read = sum(sizes.values()), sum(map(os.path.getsize, files))
    kinds = Counter(os.path.splitext(path)[1].lower() or "without an ending" for path in sizes)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_MAX_LISTED))
    what = f"folder {folder}: {len(sizes)} files of {human_bytes(skipped)} ({named})"
    if skipped > read:
        raise UserError(
            f"most of {what} cannot be read, {len(files)} of {human_bytes(read)} can: name the files to read, convert "
            "the others or move them away"
        )
    _warn_once(f"{what} are passed over, {len(files)} of {human_bytes(read)} are read")


@cache  # several plans may be made of the same inputs
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
