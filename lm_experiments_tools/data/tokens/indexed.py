"""Memory-mapped token files in Megatron's `.bin` / `.idx` format.

    PREFIX.bin   the token ids of all sequences, little endian, one after the other, no header
    PREFIX.idx   b"MMIDIDX\\0\\0" | u64 version = 1 | u8 dtype code | u64 n = sequences | u64 d = documents + 1
                 | i32 lengths[n] | i64 byte pointers[n] | i64 document_indices[d] | optional i8 modes[n]
    PREFIX.json  ours: where the tokens came from (vocabulary, counts), sha256 of the .bin; other readers ignore it

Document j has the sequences document_indices[j] : document_indices[j + 1]. One worked example: the documents
[[5, 6], [7]] and [[8, 9]] (a document is a list of sequences) give tokens 5 6 7 8 9, lengths [2, 1, 2], pointers
[0, 4, 6] at uint16, document_indices [0, 2, 3]. megatron/core/datasets/indexed_dataset.py defines the format.
"""

import glob
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lm_experiments_tools.checkpoint.manifest import sha256_of
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import naming, read_json

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_REMEDY = "copy both again or tokenize again"
_OWN_BYTES = 6  # of the unique part of a temporary name
_CHECK_BLOCK = 1 << 20  # index entries checked at a time: bounds the memory of opening a large index
_DOCUMENTS = 1 << 12  # copied at a time


def dataset_paths(prefix: str | os.PathLike) -> tuple[Path, Path, Path]:
    """Return the paths of the three files of tokenized data: PREFIX.bin, PREFIX.idx and PREFIX.json."""
    prefix = os.fspath(prefix)
    return Path(prefix + ".bin"), Path(prefix + ".idx"), Path(prefix + ".json")


def dataset_exists(prefix: str | os.PathLike) -> bool:
    """Return True if PREFIX.bin and PREFIX.idx exist."""
    bin_path, idx_path, _ = dataset_paths(prefix)
    return bin_path.is_file() and idx_path.is_file()


def read_meta(prefix: str | os.PathLike) -> dict[str, Any]:
    """Return the content of PREFIX.json, which describes a token file; {} without it. UserError if it is damaged."""
    path = dataset_paths(prefix)[2]
    return read_json(path) if path.is_file() else {}


def token_prefix(path: str | os.PathLike) -> str | None:
    """Return the prefix of a token file, the path of its .bin and .idx files without suffix; None if there is none.

    Raises UserError: only one of PREFIX.bin and PREFIX.idx exists.
    """
    path = os.fspath(path)
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    bin_path, idx_path, _ = dataset_paths(prefix)
    found = [file for file in (bin_path, idx_path) if file.is_file()]
    if len(found) == 1 and (prefix != path or not os.path.exists(path)):
        missing = idx_path if found[0] == bin_path else bin_path
        raise UserError(f"{found[0]} exists without {missing}: copy that too, or make both by `lmtools tokenize`")
    return prefix if len(found) == 2 else None


def remove_unfinished(prefix: str | os.PathLike) -> None:
    """Delete the temporary files that killed writers of a token file left. The caller must hold the lock of PREFIX."""
    for path in dataset_paths(prefix):
        for left in path.parent.glob(f"{glob.escape(path.name)}.tmp{'[0-9a-f]' * 2 * _OWN_BYTES}"):
            left.unlink(missing_ok=True)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype for ids below `vocab_size`: uint16 or int32."""
    return np.dtype(np.uint16) if vocab_size < 65536 else np.dtype(np.int32)


class IndexedDatasetWriter:
    """Writer of token files: PREFIX.bin with the ids and PREFIX.idx with the index, which is in memory until the end.

    The files appear after `finalize`. As a context manager, the writer finalizes at the end, or deletes its files
    after an exception. `durable=False` skips fsync.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: Any, *, durable: bool = True):
        self.dtype = np.dtype(dtype)
        self.bin_path, self.idx_path, self.meta_path = paths = dataset_paths(prefix)
        self.bin_path.parent.mkdir(parents=True, exist_ok=True)
        unique = secrets.token_hex(_OWN_BYTES)  # process numbers repeat on a disk that machines share
        self._temporary = {path: path.with_name(f"{path.name}.tmp{unique}") for path in paths}
        self._bin = open(self._temporary[self.bin_path], "wb")
        self._lengths = [np.empty(0, "<i4")]
        self._document_sizes = [np.empty(0, "<i8")]
        self._digest = hashlib.sha256()
        self._durable = durable
        self.num_sequences = self.num_documents = self.num_tokens = 0

    def add_documents(self, ids: np.ndarray, sequence_lengths: np.ndarray, num_sequences: np.ndarray) -> None:
        """Append documents: ids and lengths of all their sequences, and the number of sequences of each document.

        Raises ValueError: the lengths do not sum to the numbers of ids and sequences, or an id does not fit the dtype.
        """
        if sequence_lengths.sum() != len(ids) or num_sequences.sum() != len(sequence_lengths):
            raise ValueError("lengths do not sum to the number of ids, or sequences to that of documents")
        limits = np.iinfo(self.dtype)
        if len(ids) and (ids.min() < limits.min or ids.max() > limits.max):
            raise ValueError(f"ids from {ids.min()} to {ids.max()} do not fit {self.dtype}")
        content = ids.astype(self.dtype.newbyteorder("<")).tobytes()
        with naming(self.bin_path):
            self._bin.write(content)
        self._digest.update(content)
        self._lengths.append(sequence_lengths.astype("<i4"))
        self._document_sizes.append(num_sequences.astype("<i8"))
        self.num_tokens += len(ids)
        self.num_sequences += len(sequence_lengths)
        self.num_documents += len(num_sequences)

    def finalize(self, meta: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write the index and give all files their final names, so that an index is never next to other tokens.

        Args:
            meta: entries of PREFIX.json in addition to those about the tokens; None writes no such file.

        Returns:
            The content of PREFIX.json.
        """
        names = ("num_documents", "num_sequences", "num_tokens")
        content = {**(meta or {}), **{name: getattr(self, name) for name in names}}
        content |= {"dtype": self.dtype.name, "bin_sha256": self._digest.hexdigest()}
        with naming(self.bin_path):
            self._flush_and_close(self._bin)
        with naming(self.idx_path), open(self._temporary[self.idx_path], "wb") as file:
            self._write_index(file)
            self._flush_and_close(file)
        written = [self.bin_path]
        if meta is not None:
            with naming(self.meta_path), open(self._temporary[self.meta_path], "wb") as file:
                file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
                self._flush_and_close(file)
            written.append(self.meta_path)
        # The index goes first and comes back last, so that a kill in between leaves "no dataset", not a wrong one.
        self.idx_path.unlink(missing_ok=True)
        self.meta_path.unlink(missing_ok=True)
        for path in (*written, self.idx_path):
            os.replace(self._temporary[path], path)
        return content

    def _flush_and_close(self, file: Any) -> None:
        file.flush()
        if self._durable:
            os.fsync(file.fileno())
        file.close()

    def _write_index(self, file: Any) -> None:
        lengths = np.concatenate(self._lengths)
        pointers = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        document_indices = np.zeros(self.num_documents + 1, "<i8")
        np.cumsum(np.concatenate(self._document_sizes), out=document_indices[1:])
        file.write(_HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(lengths), len(document_indices)))
        for array in (lengths, pointers, document_indices):
            file.write(array)

    def abort(self) -> None:
        """Close and delete the unfinished token files of this writer."""
        with suppress(OSError):  # what is still in the buffer of a full disk
            self._bin.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None:
            self.abort()
        elif not self._bin.closed:
            self.finalize()


def _update_from_file(digest: Any, path: Path) -> None:
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)


class IndexedDataset:
    """Reader of a token file (PREFIX.bin and PREFIX.idx): random access through memory maps.

    The whole index is checked on opening.

    Attributes:
        tokens: memmap [num_tokens], all sequences in file order.
        sequence_lengths: int32[number of sequences], in tokens.
        sequence_pointers: int64[number of sequences], byte offset of each sequence in the .bin.
        document_indices: int64[num_documents + 1], first sequence of each document.
        dtype, num_tokens, num_documents: dtype of the ids, and numbers of tokens and documents.
        meta: the content of PREFIX.json, or {}.

    Raises:
        UserError: a file is missing, cut short or of another format, or its numbers contradict each other.
    """

    def __init__(self, prefix: str | os.PathLike):
        if (found := token_prefix(prefix)) is None:
            raise UserError(f"token file {prefix}.idx does not exist; `lmtools tokenize` makes it from text")
        self.prefix = found
        self.bin_path, self.idx_path, self.meta_path = dataset_paths(found)
        self._read_index()
        self.num_tokens = self.bin_path.stat().st_size // self.dtype.itemsize
        self.num_documents = len(self.document_indices) - 1
        self._check_index()
        file_dtype = self.dtype.newbyteorder("<")
        # numpy cannot map an empty file
        self.tokens = np.memmap(self.bin_path, file_dtype, "r") if self.num_tokens else np.empty(0, file_dtype)
        self.meta = read_meta(self.prefix)
        self._check_meta()

    def _read_index(self) -> None:
        size = self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            header = file.read(_HEADER.size)
        if not header.startswith(MAGIC):
            raise UserError(f"{self.idx_path} is not a Megatron index: it begins with {header[:9]!r}, not {MAGIC!r}")
        if len(header) < _HEADER.size:
            raise self._damaged(f"its header has {len(header)} of {_HEADER.size} bytes")
        _, version, code, num_sequences, num_indices = _HEADER.unpack(header)
        if version != VERSION:
            raise UserError(f"{self.idx_path} has format version {version}; only version {VERSION} is known")
        if code not in _DTYPES or np.dtype(_DTYPES[code]).kind not in "iu":
            raise UserError(f"{self.idx_path} holds elements of dtype code {code}, which are not integer token ids")
        self.dtype = np.dtype(_DTYPES[code])
        needed = _HEADER.size + 12 * num_sequences + 8 * num_indices
        if size not in (needed, needed + num_sequences):  # multimodal Megatron data adds one byte of mode per sequence
            raise self._damaged(
                f"its header announces {num_sequences} sequences and {num_indices} document bounds, "
                f"{needed} bytes, but the file has {size}"
            )
        index = np.memmap(self.idx_path, np.uint8, "r")
        lengths_end = _HEADER.size + 4 * num_sequences
        pointers_end = lengths_end + 8 * num_sequences
        self.sequence_lengths = index[_HEADER.size : lengths_end].view("<i4")
        self.sequence_pointers = index[lengths_end:pointers_end].view("<i8")
        self.document_indices = index[pointers_end:needed].view("<i8")

    def _check_index(self) -> None:
        lengths, pointers, documents = self.sequence_lengths, self.sequence_pointers, self.document_indices
        pointer = 0
        for start in range(0, len(lengths), _CHECK_BLOCK):
            block = lengths[start : start + _CHECK_BLOCK]
            if block.min() < 0:
                raise self._damaged(f"sequence {start + int(np.argmax(block < 0))} has a negative length")
            ends = pointer + np.cumsum(block, dtype=np.int64) * self.dtype.itemsize
            starts = np.concatenate([[pointer], ends[:-1]])
            wrong = starts != pointers[start : start + _CHECK_BLOCK]
            if wrong.any():
                at = int(np.argmax(wrong))
                raise self._damaged(
                    f"sequence {start + at} should start at byte {starts[at]}, its pointer says {pointers[start + at]}"
                )
            pointer = int(ends[-1])
        if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths):
            raise self._damaged(f"its document bounds do not run from 0 to its {len(lengths)} sequences")
        for start in range(0, len(documents), _CHECK_BLOCK):
            if (np.diff(documents[start : start + _CHECK_BLOCK + 1]) < 0).any():
                raise self._damaged("its document bounds decrease")
        if (size := self.bin_path.stat().st_size) != pointer:
            raise UserError(f"{self.bin_path} has {size} bytes but {self.idx_path} describes {pointer}; {_REMEDY}")

    def _damaged(self, detail: str) -> UserError:
        return UserError(f"{self.idx_path} is damaged: {detail}; {_REMEDY}")

    def _check_meta(self) -> None:
        facts = {"dtype": self.dtype.name, "num_documents": self.num_documents, "num_tokens": self.num_tokens}
        for key, value in facts.items():
            if self.meta.get(key, value) != value:
                raise UserError(
                    f"{self.meta_path} records {key} {self.meta[key]}, but {self.idx_path} has {value}; {_REMEDY}"
                )

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the index and, if PREFIX.json records it, of the tokens.

        Raises UserError: the .bin file was changed after PREFIX.json was written.
        """
        digest = hashlib.sha256()
        _update_from_file(digest, self.idx_path)
        digest.update(str(self.bin_path.stat().st_size).encode())
        if (recorded := self.meta.get("bin_sha256")) is not None:
            if self.bin_path.stat().st_mtime_ns > self.meta_path.stat().st_mtime_ns:
                self.check_content()
            digest.update(str(recorded).encode())
        return digest.hexdigest()

    def check_content(self) -> bool:
        """Compare the .bin file with the sha256 in PREFIX.json. Returns False without it; UserError if they differ."""
        recorded = self.meta.get("bin_sha256")
        if recorded is None:
            return False
        if (found := sha256_of(self.bin_path)) != recorded:
            raise UserError(
                f"{self.bin_path} was changed after it was written: its sha256 is {found[:12]}, not "
                f"{str(recorded)[:12]} as recorded; {_REMEDY}"
            )
        return True

    def offsets(self, sequences: np.ndarray) -> np.ndarray:
        """Return the index int64[n] of the first token of each sequence, given sequence numbers int64[n].

        For the number after the last sequence, the result is `num_tokens`.
        """
        inside = np.minimum(sequences, len(self) - 1)
        begins = np.asarray(self.sequence_pointers[inside]) // self.dtype.itemsize if len(self) else 0
        return np.where(sequences == inside, begins, self.num_tokens)

    def document_bounds(self) -> Iterator[np.ndarray]:
        """Yield `document_indices`, the first sequence of each document, in blocks that fit in memory.

        A block int64[k + 1] has the bounds of k documents. Consecutive blocks overlap by one entry.
        """
        for start in range(0, self.num_documents, _CHECK_BLOCK):
            yield np.array(self.document_indices[start : start + _CHECK_BLOCK + 1])

    def blocks(self, num_documents: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield all or the first `num_documents` documents as `add_documents` takes them, some thousand at a time."""
        bounds = self.document_indices[: None if num_documents is None else num_documents + 1]
        for start in range(0, len(bounds) - 1, _DOCUMENTS):
            here = np.array(bounds[start : start + _DOCUMENTS + 1])
            begin, end = self.offsets(here[[0, -1]])
            yield self.tokens[begin:end], self.sequence_lengths[here[0] : here[-1]], np.diff(here)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """The ids of sequence `index` (a read-only view of the memory map)."""
        index = range(len(self))[index]
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sequence_lengths[index])]

    def __reduce__(self) -> tuple:
        # A pickled memmap carries its content: a loader worker gets the path instead and maps the file itself.
        return IndexedDataset, (self.prefix,)
