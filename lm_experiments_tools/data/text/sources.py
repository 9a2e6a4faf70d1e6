"""Named inputs -> files -> shards, the units of parallel work.

| input | is read as |
|---|---|
| `.jsonl`, `.json`, `.ndjson` | JSON lines |
| `.txt` | text, blank lines between documents |
| the same with `.gz`, `.bz2`, `.xz`, `.zst` | as above (`.zst` with pyarrow); in capitals too |
| a folder | all of the above in it, recursively, in sorted order; links are followed, no file is read twice |
| `.parquet`, `.arrow`, a folder of these, `name[:config][:split]` | a Hugging Face dataset, streamed |

Hidden files and this program's own output are never input.
"""

import bz2
import gzip
import io
import logging
import lzma
import os
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, BinaryIO

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import hash_of_ends, human_bytes

logger = logging.getLogger(__name__)

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt",)
READABLE = f"{', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)} (also with {', '.join(COMPRESSIONS)})"
_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:]*)?(:[^:]+)?")
_UNFINISHED = re.compile(r"\.(bin|idx|json)\.tmp[0-9a-f]{12}$")
_TOKEN_SUFFIXES = (".bin", ".idx", ".json")
_PROBED_LINES, _PROBED_BYTES = 1000, 1 << 20  # of a text file, searched for a blank line
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True)
class Shard:
    """A unit of work: bytes start:end of a file (end None: a whole compressed file), or shard `start` of a dataset.

    `stamp` is the `file_stamp` of the file when the shard was planned; None disables the comparison.
    """

    path: str
    kind: str  # "json", "text" or "dataset"
    start: int = 0
    end: int | None = None
    stamp: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Size in bytes on disk (compressed where the file is); 0 for a dataset, whose size is not known."""
        if self.kind == "dataset":
            return 0
        return (self.end if self.end is not None else os.path.getsize(self.path)) - self.start

    def check_unchanged(self) -> None:
        """Raise UserError where the file has changed since the shard was planned."""
        if self.stamp is not None and file_stamp(self.path) != self.stamp:
            raise UserError(f"{self.path} was changed while it was being read; wait until nothing writes to it.")


def file_stamp(path: str) -> tuple[int, int]:
    """(size in bytes, time of the last change in ns) of a file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def whole_file(path: str) -> Shard:
    """A complete file as one shard, of JSON lines where records are read from it."""
    stamp = file_stamp(path)
    return Shard(path, "json", 0, None if endings(path)[1] else stamp[0], stamp)


def plan_shards(inputs: Sequence[str], shard_bytes: int | None = None, max_shards: int | None = None) -> list[Shard]:
    """Cut the inputs into shards of about `shard_bytes` (None: a 64th of all, from 2 to 64 MB), in reading order.

    Shards are larger where there would be more than `max_shards`. Plain files are cut at document boundaries.
    """
    files = find_files(inputs)
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
    """Identity of the text: names, bounds, sizes and ends of files, and files of datasets; no folders or times."""
    bounds = [(os.path.basename(s.path), s.kind, s.start, s.end, s.num_bytes) for s in shards]
    files = dict.fromkeys(shard.path for shard in shards if shard.kind != "dataset")
    return [bounds, list(map(hash_of_ends, files)), list(map(hf_datasets.identity, datasets_of(shards)))]


def datasets_of(shards: Sequence[Shard]) -> list[str]:
    """Names of the datasets among the inputs of shards."""
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
    """Skip a line of any length; True if it was not blank."""
    filled = False
    while block := file.readline(_SKIP_BYTES):
        filled = filled or bool(block.strip())
        if block.endswith(b"\n"):
            break
    return filled


# ---- compression ----


def endings(path: str) -> tuple[str, str]:
    """The suffix of a name and that of its compression, in lower case: (".jsonl", ".gz") of data.JSONL.gz."""
    stem, last = os.path.splitext(os.path.basename(path).lower())
    return (os.path.splitext(stem)[1], last) if last in COMPRESSIONS else (last, "")


def check_readable(path: str) -> None:
    """Refuse a zstd file where pyarrow is missing."""
    if endings(path)[1] == ".zst" and find_spec("pyarrow") is None:
        raise UserError(f"{path} is compressed by zstd, which pyarrow reads: pip install pyarrow, or decompress it")


@contextmanager
def open_decompressed(path: str) -> Iterator[BinaryIO]:
    """Bytes of a file, decompressed by its suffix. Raises EOFError for damaged compressed data."""
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


def find_files(inputs: Sequence[str]) -> list[tuple[str, str]]:
    """(path, kind) of all files and of the datasets by name, which are not opened; kind: json, text or dataset.

    Raises:
        UserError: an input that does not exist, is unreadable, empty or named twice.
    """
    found = [_resolve(os.fspath(item)) for item in inputs]
    _check_disjoint(inputs, found)
    files = [file for of_item in found for file in of_item]
    if not any(kind == "dataset" or os.path.getsize(path) for path, kind in files):
        raise UserError(f"there is no text in {list_inputs(inputs)}: {len(files)} files, all of them empty")
    for path, kind in files:
        if kind != "dataset":
            check_readable(path)
        if kind == "text":
            _warn_of_one_block(path)
    return files


def list_inputs(inputs: Sequence[str]) -> str:
    """Inputs as a message names them."""
    return ", ".join(map(str, inputs)) or "an empty list of inputs"


def _warn_of_one_block(path: str) -> None:
    try:
        with open_decompressed(path) as file:
            lines = file.read(_PROBED_BYTES).split(b"\n")
    except (OSError, EOFError):  # reported where the file is read
        return
    if len(lines) > _PROBED_LINES and all(line.strip() for line in lines[:_PROBED_LINES]):
        _warn_once(f"{path} has no blank line in its first {_PROBED_LINES:,} lines, which are one document")


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
    if os.path.isdir(hf_datasets.split_name(item)[0]):
        return [(item, "dataset")]  # folder:config:split
    looks_local = item.startswith((".", "/", "~")) or os.path.isdir(os.path.dirname(item) or "\0")
    if looks_local or _kind(item) or not _DATASET_NAME.fullmatch(item):
        raise UserError(f"{item} does not exist")
    return [(item, "dataset")]


def _kind(path: str) -> str:
    suffix = endings(path)[0]
    return "json" if suffix in JSON_SUFFIXES else "text" if suffix in TEXT_SUFFIXES else ""


def _files_in(folder: str) -> list[tuple[str, str]]:
    found = _walk(folder)
    files = [(path, _kind(path)) for path in found if _kind(path)]
    others = [path for path in found if not _kind(path)]
    if not files and any(map(hf_datasets.is_data_file, others)):
        return [(folder, "dataset")]
    if not files:
        raise UserError(f"folder {folder} has no {READABLE} file in it ({len(others)} others)")
    if dangling := next((path for path, _ in files if not os.path.exists(path)), None):
        raise UserError(f"{dangling} is a link to {os.readlink(dangling)}, which does not exist: fix or remove it")
    _report_skipped(folder, [path for path, _ in files], others)
    return files


def _walk(folder: str) -> list[str]:
    """Sorted paths of all files that may be input; links are followed, and each file is found once."""
    seen: set[str] = set()
    found: dict[str, str] = {}
    for path, below, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real = os.path.realpath(path)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not (name.startswith(".") or _is_unfinished_work(path, name)))
        for name in sorted(names):
            file = os.path.join(path, name)
            is_special = os.path.exists(file) and not os.path.isfile(file)  # opening a named pipe would block forever
            if not (name.startswith(".") or is_special or _is_output(name, names)):
                found.setdefault(os.path.realpath(file), file)
    return sorted(found.values())


def _refuse(error: OSError) -> None:
    raise UserError(f"folder {error.filename} cannot be read: {error.strerror}") from None


def _is_output(name: str, siblings: Collection[str]) -> bool:
    stem, suffix = os.path.splitext(name)
    whole = f"{stem}.idx" in siblings and (suffix == ".json" or f"{stem}.bin" in siblings)
    return name.endswith(".bad_lines.jsonl") or bool(_UNFINISHED.search(name)) or (whole and suffix in _TOKEN_SUFFIXES)


def _is_unfinished_work(path: str, name: str) -> bool:
    return name.endswith(".shards") and os.path.isfile(os.path.join(path, name, "plan.json"))


def _report_skipped(folder: str, files: Sequence[str], others: Sequence[str]) -> None:
    """Warn of unreadable files in a folder; UserError where they have more bytes than the readable ones."""
    skipped, read = (sum(os.path.getsize(path) for path in paths if os.path.isfile(path)) for paths in (others, files))
    if not skipped:
        return
    what = f"folder {folder}: {len(others)} files of {human_bytes(skipped)} (the first is {others[0]})"
    readable = f"{len(files)} of {human_bytes(read)}"
    if skipped > read:
        raise UserError(
            f"most of {what} cannot be read, {readable} can: name the files to read, convert the others or move them "
            "away"
        )
    _warn_once(f"{what} are passed over, {readable} are read")


@cache  # several plans may be made of the same inputs
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
