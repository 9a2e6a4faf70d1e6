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
_OF_THE_WHOLE = ("num_bytes", "num_sentences", "bad_lines", "empty_documents")
_DOCUMENTS = 1 << 12  # divided at a time


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
    if (count := sum(dataset.num_documents for dataset in datasets)) == 1:
        raise UserError(
            f"--valid_fraction divides documents, and {datasets[0].prefix} is one: give --document_per_line if each "
            "line of a .txt file is a document, or name --valid_data_path."
        )
    with ExitStack() as writers:
        widest = max((dataset.dtype for dataset in datasets), key=lambda dtype: dtype.itemsize)
        valid = writers.enter_context(IndexedDatasetWriter(held_out, widest))
        trains = [
            writers.enter_context(IndexedDatasetWriter(prefix, dataset.dtype))
            for dataset, prefix in zip(datasets, prefixes, strict=True)
        ]
        for dataset, train in zip(datasets, trains, strict=True):
            for first in range(0, dataset.num_documents, _DOCUMENTS):
                _divide(dataset, dataset.document_indices[first : first + _DOCUMENTS + 1], fraction, train, valid)
            if not train.num_tokens:
                raise UserError(f"--valid_fraction {fraction} leaves no document of {dataset.prefix} to train on.")
        if not valid.num_tokens:
            raise UserError(
                f"--valid_fraction {fraction} holds out none of the {count} documents: raise it, or name "
                "--valid_data_path."
            )
        # Files exist once they are finalized, so a refusal leaves none.
        for dataset, writer in zip((*datasets, datasets[0]), (*trains, valid), strict=True):
            _finalize(writer, dataset)


def _divide(
    dataset: IndexedDataset,
    bounds: np.ndarray,
    fraction: float,
    train: IndexedDatasetWriter,
    valid: IndexedDatasetWriter,
) -> None:
    """Write some documents, from bounds[i] to bounds[i + 1] in sequences, to one of two files each."""
    starts, num_sequences = dataset.offsets(bounds), np.diff(bounds)
    ids, lengths = dataset.tokens[starts[0] : starts[-1]], dataset.sequence_lengths[bounds[0] : bounds[-1]]
    documents = np.split(ids.astype("<i8"), starts[1:-1] - starts[0])
    digests = (hashlib.blake2b(document.tobytes(), digest_size=8).digest() for document in documents)
    is_held_out = np.array([int.from_bytes(digest, "big") < fraction * 2**64 for digest in digests])
    for writer, chosen in ((train, ~is_held_out), (valid, is_held_out)):
        of_tokens, of_sequences = np.repeat(chosen, np.diff(starts)), np.repeat(chosen, num_sequences)
        writer.add_documents(ids[of_tokens], lengths[of_sequences], num_sequences[chosen])


def _finalize(writer: IndexedDatasetWriter, source: IndexedDataset) -> None:
    """Write the record of a file whose documents are some of another one's."""
    meta = {name: value for name, value in source.meta.items() if name not in _OF_THE_WHOLE}
    counts = {"num_documents": writer.num_documents, "num_tokens": writer.num_tokens}
    counts |= {"num_sequences": writer.num_sequences} if "num_sequences" in meta else {}
    writer.finalize({**meta, **counts, "dtype": writer.dtype.name, "bin_sha256": writer.bin_sha256} if meta else None)
