"""Documents of the training data that are held out for validation (`--valid_fraction`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter, dataset_exists
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256, locked

# Counts of the whole file, which its parts do not have.
_OF_THE_WHOLE = ("num_bytes", "bad_lines", "empty_documents")
_ADVICE = "Change it, name --valid_data_path, or give --document_per_line if each line of a .txt file is a document."


def hold_out(
    datasets: Sequence[IndexedDataset], fraction: float, cache_dir: str | os.PathLike
) -> tuple[list[str], str]:
    """Copy token files without their held-out documents, and these into one more file, unless that has been done.

    A document is held out by a hash of its tokens: on each start, for any number of workers, in any order, among any
    other documents. Equal documents stay together.

    Returns:
        Prefixes of the copies, and that of the held-out documents.

    Raises:
        UserError: no document is held out, or none of a file is left.
    """
    key = json_sha256([[dataset.fingerprint for dataset in datasets], fraction])[:16]
    prefixes = [os.path.join(cache_dir, f"without_held_out-{key}-{number}") for number in range(len(datasets))]
    held_out = os.path.join(cache_dir, f"held_out-{key}")
    with locked(Path(f"{held_out}.cache.lock")):
        if not all(map(dataset_exists, (*prefixes, held_out))):
            _write(datasets, fraction, prefixes, held_out)
    return prefixes, held_out


def _write(datasets: Sequence[IndexedDataset], fraction: float, prefixes: Sequence[str], held_out: str) -> None:
    with ExitStack() as writers:
        widest = max((dataset.dtype for dataset in datasets), key=lambda dtype: dtype.itemsize)
        valid = writers.enter_context(IndexedDatasetWriter(held_out, widest))
        trains = [
            writers.enter_context(IndexedDatasetWriter(prefix, dataset.dtype))
            for dataset, prefix in zip(datasets, prefixes, strict=True)
        ]
        for dataset, train in zip(datasets, trains, strict=True):
            for block in dataset.blocks():
                _divide(block, fraction, train, valid)
            if not train.num_tokens:
                raise UserError(f"--valid_fraction {fraction} leaves none of {dataset.prefix} to train on. {_ADVICE}")
        if not valid.num_tokens:
            count = sum(dataset.num_documents for dataset in datasets)
            raise UserError(f"--valid_fraction {fraction} holds out none of the {count} documents. {_ADVICE}")
        # Files exist once they are finalized, so a refusal leaves none.
        for dataset, writer in zip((*datasets, datasets[0]), (*trains, valid), strict=True):
            meta = {name: value for name, value in dataset.meta.items() if name not in _OF_THE_WHOLE}
            writer.finalize(meta or None)


def _divide(
    block: tuple[np.ndarray, ...], fraction: float, train: IndexedDatasetWriter, valid: IndexedDatasetWriter
) -> None:
    """Write each document of a block (see `IndexedDataset.blocks`) to one of two files."""
    ids, lengths, num_sequences = block
    ends = np.insert(np.cumsum(lengths), 0, 0)[np.cumsum(num_sequences)]
    documents = np.split(ids.astype("<i8"), ends[:-1])
    digests = (hashlib.blake2b(document.tobytes(), digest_size=8).digest() for document in documents)
    is_held_out = np.array([int.from_bytes(digest, "big") < fraction * 2**64 for digest in digests])
    for writer, chosen in ((train, ~is_held_out), (valid, is_held_out)):
        of_tokens = np.repeat(chosen, np.diff(ends, prepend=0))
        of_sequences = np.repeat(chosen, num_sequences)
        writer.add_documents(ids[of_tokens], lengths[of_sequences], num_sequences[chosen])
