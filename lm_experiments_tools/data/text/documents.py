"""Raw text -> documents: JSON lines, text files, folders of them, Hugging Face datasets.

| input | a document is |
|---|---|
| `.jsonl`, `.json`, `.ndjson` | one line: an object whose `text_key` is a string |
| `.txt` | a block of lines; blank lines separate documents |
| the same with `.gz`, `.bz2`, `.xz`, `.zst` | as above (`.zst` with pyarrow); in capitals too |
| a folder | all of the above in it (see inputs.py) |
| `name[:config][:split]`, `.parquet` | a row of a Hugging Face dataset, streamed: of the hub, or of Parquet files |

A line that cannot be used (broken JSON, no such key, a number where text should be, no UTF-8, ...) is never dropped in
silence: it comes out as a `BadLine` (an empty text as an `EmptyText`), and so does a document too large for memory, of
which no more than the limit is read. Blank lines of a JSON-lines file are no data and are passed over; so is a UTF-8
byte order mark.

Large plain files are cut into byte ranges (`Piece`) at document boundaries, so that several processes can read one.
"""

import json
import logging
import os
import random
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any, BinaryIO

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.bad_lines import BadLine, EmptyText, Quarantine, no_documents, no_key
from lm_experiments_tools.data.text.compression import endings, open_decompressed
from lm_experiments_tools.data.text.inputs import find_files
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import human_bytes

logger = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 256 << 20  # on disk; encoding one takes many times that in memory
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")
_EMPTY = "is empty"  # ends the reason why there is no text in a text
_SKIP_BYTES = 1 << 20
_EXCERPT = 1000  # characters of a bad line kept in the quarantine file: enough to recognise it


@dataclass(frozen=True)
class Document:
    """A text and where it came from (`file:line`, the line it starts on)."""

    text: str
    source: str


@dataclass(frozen=True)
class Piece:
    """A unit of work: bytes start:end of a file (end None: a whole compressed file), or shard `start` of a dataset.

    `stamp` is what `file_stamp` gave for the file when the piece was cut; None: its reader does not compare.
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
        """Raise UserError where the file is not what it was when the piece was cut: its bounds are of the old one."""
        if self.stamp is None or (found := file_stamp(self.path)) == self.stamp:
            return
        sizes = f"{self.stamp[0]:,} bytes then, {found[0]:,} now" if found[0] != self.stamp[0] else "of the same size"
        raise UserError(
            f"{self.path} was changed while it was being read ({sizes}), so what was read of it is a mixture of the "
            f"old and the new text: wait until nothing writes to it any more and start again"
        )


def whole_file(path: str, kind: str = "") -> Piece:
    """All of a file as one piece."""
    stamp = file_stamp(path)
    return Piece(path, kind, 0, None if endings(path)[1] else stamp[0], stamp)


def file_stamp(path: str) -> tuple[int, int]:
    """(size in bytes, time of the last change in ns) of a file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def plan_pieces(inputs: Sequence[str], piece_bytes: int | None = None) -> list[Piece]:
    """Cut the inputs into pieces of about `piece_bytes` (None: a 64th of all, between 2 and 64 MB), in reading order.

    The plan depends on the inputs alone. Raises UserError where an input does not exist or is of an unknown kind, and
    where there is nothing to read at all.
    """
    files = find_files(inputs)
    stamps = {path: file_stamp(path) for path, kind in files if kind != "dataset"}
    size = sum(num_bytes for num_bytes, _ in stamps.values())
    piece_bytes = piece_bytes or min(max(size // 64, 2 << 20), 64 << 20)
    pieces: list[Piece] = []
    for path, kind in files:
        if kind == "dataset":
            pieces += [Piece(path, kind, start=shard) for shard in range(hf_datasets.num_shards(path))]
        elif endings(path)[1]:
            pieces.append(Piece(path, kind, stamp=stamps[path]))
        else:
            bounds = _boundaries(path, kind, stamps[path][0], piece_bytes)
            pieces += [Piece(path, kind, start, end, stamps[path]) for start, end in pairwise(bounds)]
    return pieces


def _boundaries(path: str, kind: str, size: int, piece_bytes: int) -> list[int]:
    """Byte offsets 0 = b0 < b1 < ... = size, each the start of a document (the last: the end of the file)."""
    bounds = [0]
    with open(path, "rb") as file:
        while bounds[-1] + piece_bytes < size:
            file.seek(bounds[-1] + piece_bytes - 1)
            _skip_line(file)  # the rest of a line: blank or not, the line may not be
            while kind == "text" and _skip_line(file):
                pass
            if file.tell() >= size:
                break
            bounds.append(file.tell())
    return [*bounds, size] if size else []


def sample_places(inputs: Sequence[str], piece_bytes: int, most: int) -> list[Piece]:
    """Pieces of about `piece_bytes` from all over the inputs: all there are, or of plain files no more than `most`.

    Where there are more, one place is drawn in each of `most` equal parts of the files' bytes (the same ones each
    time), and nothing is read: `whole_lines` finds the lines of a place. Raises UserError as `plan_pieces`.
    """
    files = find_files(inputs)
    plain = {path: (kind, file_stamp(path)) for path, kind in files if kind != "dataset" and not endings(path)[1]}
    ends = list(accumulate(size for _, (size, _) in plain.values()))
    if not ends or ends[-1] // piece_bytes <= most:
        return plan_pieces(inputs, piece_bytes)
    others = [path for path, _ in files if path not in plain]
    places = plan_pieces(others, piece_bytes) if others else []
    names, draw, part = list(plain), random.Random(0), ends[-1] / most
    for number in range(most):
        position = int(part * number + draw.random() * (part - piece_bytes)) if number else 0
        path = names[bisect_right(ends, position)]
        kind, stamp = plain[path]
        start = position - (ends[bisect_right(ends, position)] - stamp[0])
        places.append(Piece(path, kind, start, min(start + piece_bytes, stamp[0]), stamp))
    return places


def whole_lines(place: Piece) -> Piece | None:
    """The lines that begin in a part of a plain file; None where they are too long to be found in it, other pieces as
    they are."""
    if place.end is None or place.kind == "dataset":
        return place
    size = place.stamp[0]
    with open(place.path, "rb") as file:
        start = _line_begin(file, place.start, place.num_bytes, size)
        end = None if start is None else _line_begin(file, place.end, place.num_bytes, size)
    return None if end is None or end <= start else replace(place, start=start, end=end)


def _line_begin(file: BinaryIO, position: int, within: int, size: int) -> int | None:
    """The first beginning of a line from `position` on, looked for in `within` bytes."""
    if position in (0, size):
        return position
    file.seek(position - 1)
    found = file.read(within).find(b"\n")
    return position + found if found >= 0 else None


def _skip_line(file: BinaryIO) -> bool:
    """Pass over a line of any length; returns whether there was anything on it."""
    filled = False
    while chunk := file.readline(_SKIP_BYTES):
        filled = filled or bool(chunk.strip())
        if chunk.endswith(b"\n"):
            break
    return filled


def read_piece(
    piece: Piece, text_key: str = "text", first_line: int = 1, skip: int = 0
) -> Iterator[Document | BadLine]:
    """The documents of a piece in order, and in between the lines that are none. Lines count from `first_line`.

    The first `skip` of them, documents and bad lines, are passed over.
    """
    if piece.kind == "dataset":
        return _read_dataset(piece, text_key, skip)
    lines = read_lines(piece, first_line)
    items = _read_json(lines, piece.path, text_key) if piece.kind == "json" else _read_text(lines, piece.path)
    return islice(items, skip, None)


def _read_json(lines: Iterator[tuple[int, bytes]], path: str, text_key: str) -> Iterator[Document | BadLine]:
    for number, line in lines:
        if line.strip():
            parsed = parse_json_line(line, text_key)
            if isinstance(parsed, str):
                yield Document(parsed, f"{path}:{number}")
            else:
                yield left_out(number, parsed[0], excerpt(line))


def parse_json_line(line: bytes, text_key: str) -> str | tuple[str]:
    """The text of one JSON line, or a 1-tuple with the reason why there is none."""
    record = parse_json_object(line)
    return record if isinstance(record, tuple) else _text_of(record, text_key)


def parse_json_object(line: bytes, max_bytes: int | None = None) -> dict[str, Any] | tuple[str]:
    """The object on one JSON line, or a 1-tuple with the reason why there is none.

    A line longer than `max_bytes` (None: MAX_DOCUMENT_BYTES) is not parsed.
    """
    if reason := too_long(len(line), max_bytes):
        return (reason,)
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return (f"not UTF-8 at byte {error.start}",)
    except RecursionError:
        return ("not usable JSON: nested too deeply",)
    except ValueError as error:
        return (f"not valid JSON: {error}",)
    return record if isinstance(record, dict) else (f"a JSON {type(record).__name__}, not an object",)


def too_long(num_bytes: int, max_bytes: int | None = None) -> str:
    """Why a document of so many bytes is bad: "" up to `max_bytes` (None: MAX_DOCUMENT_BYTES)."""
    limit = MAX_DOCUMENT_BYTES if max_bytes is None else max_bytes
    return f"a document of more than {human_bytes(limit)}: cut it into several" if num_bytes > limit else ""


def _text_of(record: dict[str, Any], text_key: str) -> str | tuple[str]:
    if text_key not in record:
        return (no_key(record, text_key),)
    text = record[text_key]
    if not isinstance(text, str):
        return (f"{text_key!r} is of type {type(text).__name__}, not a string",)
    reason = _unusable(text)
    return (f"{text_key!r} {reason}",) if reason else text


def _unusable(text: str) -> str:
    return _EMPTY if not text.strip() else unusable_characters(text)


def left_out(line: int, reason: str, content: str) -> BadLine:
    """The item for a line that is no document."""
    return (EmptyText if reason.endswith(_EMPTY) else BadLine)(line, reason, content)


def unusable_characters(text: str) -> str:
    """The reason why no tokenizer can take a text; "" if there is none."""
    if "\0" in text:
        return "contains a NUL character"
    if not text.isascii() and _SURROGATE.search(text):
        return "contains half of a surrogate pair"
    return ""


def _read_text(lines: Iterator[tuple[int, bytes]], path: str) -> Iterator[Document | BadLine]:
    block: list[str] = []
    start = num_bytes = 0
    for number, line in lines:
        if not line.strip():
            if block:
                yield Document("\n".join(block), f"{path}:{start}")
            block, num_bytes = [], 0
            continue
        was_too_long, num_bytes = too_long(num_bytes), num_bytes + len(line)
        if reason := too_long(num_bytes):  # said once; the document goes as a whole
            if not was_too_long:
                yield BadLine(start if block else number, f"{reason} by blank lines", excerpt(line))
            block = []
            continue
        try:
            text = line.decode("utf-8").rstrip("\r\n")
            reason = _unusable(text)
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 at byte {error.start}"
        if reason:
            yield left_out(number, reason, excerpt(line))
            continue
        start = start if block else number
        block.append(text)
    if block:
        yield Document("\n".join(block), f"{path}:{start}")


def read_lines(piece: Piece, first_line: int = 1, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """(line number, bytes) of a byte range or of a whole compressed file.

    Of a line longer than `max_bytes` (None: MAX_DOCUMENT_BYTES) one byte more than that is given, and the rest passed
    over. Raises UserError for a damaged compressed file, and for one that has changed since the piece was cut.
    """
    limit = MAX_DOCUMENT_BYTES if max_bytes is None else max_bytes
    number, position = first_line - 1, piece.start
    piece.check_unchanged()
    try:
        with open_decompressed(piece.path) as file:
            if piece.start:
                file.seek(piece.start)
            while line := file.readline(limit + 1):
                number += 1
                is_first, position = position == 0, position + len(line)
                if len(line) > limit and not line.endswith(b"\n"):
                    _skip_line(file)
                    position = file.tell()
                yield number, line.removeprefix(_BOM) if is_first else line
                if piece.end is not None and position >= piece.end:  # beyond it where the file has changed
                    break
    except EOFError as error:
        piece.check_unchanged()
        raise UserError(f"{piece.path} is damaged after line {number} ({error}); compress or copy it again") from None
    piece.check_unchanged()


@lru_cache(maxsize=64)
def lines_before(piece: Piece) -> int:
    """Lines of the file before a piece of it, from whose own start `read_piece` counts; reads all of that."""
    return 0 if piece.kind == "dataset" else count_lines(piece.path, 0, piece.start)


def count_lines(path: str, start: int, end: int) -> int:
    """Line ends among bytes start:end of a file."""
    lines = 0
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (block := file.read(min(1 << 20, end - start))):
            lines, start = lines + block.count(b"\n"), start + len(block)
    return lines


def excerpt(line: bytes) -> str:
    """The beginning of a bad line, to recognise it by."""
    return line[: 4 * _EXCERPT].rstrip(b"\r\n").decode("utf-8", errors="backslashreplace")[:_EXCERPT]


def _read_dataset(piece: Piece, text_key: str, skip: int) -> Iterator[Document | BadLine]:
    rows = hf_datasets.read_shard(piece.path, piece.start, text_key, skip)
    for number, row in enumerate(rows, skip + 1):
        text = _text_of(row, text_key)
        if isinstance(text, str):
            yield Document(text, f"{piece.path}:{piece.start}:{number}")
        else:
            yield left_out(number, text[0], repr(row)[:_EXCERPT])


def iter_documents(
    inputs: Sequence[str],
    *,
    text_key: str = "text",
    max_bad_lines: int | None = 0,
    quarantine: str | os.PathLike = "bad_lines.jsonl",
) -> Iterator[Document]:
    """All documents of all inputs, in order.

    Bad lines are written to the file `quarantine` and counted, empty texts only counted. UserError is raised by more
    than `max_bad_lines` of the former (None: see bad_lines.py), by an input that cannot be read, and by inputs without
    a single document.
    """
    found, num_empty = False, 0
    with closing(Quarantine(quarantine, max_bad_lines)) as bad_lines:
        for piece in plan_pieces(inputs, piece_bytes=sys.maxsize):
            for item in read_piece(piece, text_key):
                if isinstance(item, EmptyText):
                    num_empty += 1
                elif isinstance(item, BadLine):
                    bad_lines.list_line(piece.path, item)
                else:
                    found = True
                    bad_lines.read()
                    yield item
    if bad_lines.count:
        logger.warning("%s", bad_lines)
    if num_empty:
        logger.info("%d empty texts left out", num_empty)
    if not found:
        raise no_documents(inputs, bad_lines.count, bad_lines.first, bad_lines.path, num_empty)
