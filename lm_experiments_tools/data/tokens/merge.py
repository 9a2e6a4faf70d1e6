"""Merge token files into one: the outputs of a job array in their order, or any files of one vocabulary.

The merged outputs of a job array are byte for byte equal to the output of one run over the whole text. Memory use is
constant.
"""

import glob
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_experiments_tools.data.tokens.files import check_replaceable, remove_unfinished, token_prefix
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import locked, replacing

_SUFFIX = re.compile(r"\.(bin|idx|json|bad_lines\.jsonl)$")
_SHARD = "-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].idx"
_SUMMED = ("num_documents", "num_sequences", "num_tokens", "num_bytes", "bad_lines", "empty_documents")
_MAY_DIFFER = (*_SUMMED, "bin_sha256", "shard", "vocab_file", "input")


def merge_datasets(
    inputs: Sequence[str], output_prefix: str | os.PathLike, *, overwrite: bool = False
) -> dict[str, Any]:
    """Merge token files into OUTPUT.bin, .idx and .json, and lists of rejected records into OUTPUT.bad_lines.jsonl.

    Args:
        inputs: prefixes of token files, or the common prefix of the outputs of a job array, in any order.
        output_prefix: OUTPUT.
        overwrite: replace token files of another text or vocabulary.

    Returns:
        The content of OUTPUT.json.

    Raises:
        UserError: an output of the job array is missing or given twice, files are damaged, or their settings differ.
    """
    output = os.fspath(output_prefix)
    prefixes = _prefixes(inputs)
    if os.path.realpath(output) in map(os.path.realpath, prefixes):
        raise UserError(f"{output} is an input too, which would be overwritten: choose another output")
    datasets = _in_order([IndexedDataset(prefix) for prefix in prefixes])
    _check_same_kind(datasets)
    if not any(dataset.num_documents for dataset in datasets):
        raise UserError(f"there is no document in {', '.join(prefixes)}: nothing to merge; look at the text's path")
    with locked(Path(f"{output}.lock")):
        if not overwrite:
            meta = datasets[0].meta
            vocab_file, vocab_sha256 = (meta.get(name) or "unknown" for name in ("vocab_file", "vocab_sha256"))
            check_replaceable(output, _texts(datasets), vocab_file, vocab_sha256)
        remove_unfinished(output)
        return _write(datasets, output)


def _prefixes(inputs: Sequence[str]) -> list[str]:
    """Token prefixes, each named once; the .bin, .idx and .json of one, as a shell's wildcard names them, are one."""
    names = dict.fromkeys(_SUFFIX.sub("", item) for item in inputs)
    prefixes = [prefix for name in names for prefix in _found(name)]
    paths = [os.path.realpath(prefix) for prefix in prefixes]
    for given in (inputs, paths):
        for name, count in Counter(given).items():
            if count > 1:
                raise UserError(f"{name} is named {count} times: name each input once")
    return prefixes


def _found(item: str) -> list[str]:
    if item and token_prefix(item) is not None:
        return [item]
    shards = sorted(path.removesuffix(".idx") for path in glob.glob(glob.escape(item) + _SHARD)) if item else []
    if not shards:
        raise UserError(f"--input {item!r} is no token prefix ({item}.bin and .idx), nor are there shards of it")
    return shards


def _in_order(datasets: list[IndexedDataset]) -> list[IndexedDataset]:
    """Shards by number, all of them once; other files as given."""
    shards = [dataset.meta.get("shard") for dataset in datasets]
    if all(shard is None for shard in shards):
        return datasets
    if None in shards:
        raise UserError(f"{datasets[shards.index(None)].prefix} is no shard but others are: merge the shards first")
    first, by_number = shards[0], {}
    for dataset, shard in zip(datasets, shards, strict=True):
        number, of = shard.get("number"), shard.get("of")
        if not (isinstance(number, int) and isinstance(of, int) and 0 <= number < of < 100_000):
            raise UserError(f"{dataset.meta_path} records shard {number} of {of}, which cannot be; tokenize it again")
        if (of, shard.get("source")) != (first.get("of"), first.get("source")):
            raise UserError(
                f"{dataset.prefix} and {datasets[0].prefix} were not cut from the same text with the same settings"
            )
        other = by_number.setdefault(number, dataset)
        if other is not dataset:
            raise UserError(f"{other.prefix} and {dataset.prefix} are the same shard: name one of them")
    if missing := [number for number in range(first["of"]) if number not in by_number]:
        listed = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise UserError(
            f"{len(missing)} of {first['of']} shards are missing ({listed}): make them with --shard "
            f"{missing[0]}/{first['of']} and the flags of the others, or name their prefixes too"
        )
    return [by_number[number] for number in range(first["of"])]


def _check_same_kind(datasets: list[IndexedDataset]) -> None:
    """Refuse files of different vocabularies or settings."""
    first = datasets[0]
    for dataset in datasets[1:]:
        names = (first.meta.keys() | dataset.meta.keys()) - set(_MAY_DIFFER)
        differing = [name for name in names if first.meta.get(name) != dataset.meta.get(name)]
        differing += ["dtype"] if dataset.dtype != first.dtype else []
        for name in sorted(differing, key=lambda name: (not name.startswith("vocab"), name != "dtype", name)):
            what = "the vocabulary" if name.startswith("vocab") else name
            raise UserError(f"{dataset.prefix} and {first.prefix} differ in {what}: tokenize one of them again")


def _write(datasets: list[IndexedDataset], output: str) -> dict[str, Any]:
    with IndexedDatasetWriter(output, datasets[0].dtype) as writer:
        for dataset in datasets:
            sha256 = writer.add_dataset(dataset)
            if sha256 != (recorded := dataset.meta.get("bin_sha256", sha256)):
                raise UserError(
                    f"{dataset.bin_path} is damaged: its sha256 is {sha256[:12]}, not {recorded[:12]} as recorded"
                )
        meta = {name: value for name, value in datasets[0].meta.items() if name not in ("shard", "input")}
        for name in _SUMMED:
            if any(name in dataset.meta for dataset in datasets):
                meta[name] = sum(dataset.meta.get(name, 0) for dataset in datasets)
        meta.setdefault("num_documents", sum(dataset.num_documents for dataset in datasets))
        meta.setdefault("num_tokens", writer.num_tokens)
        meta["bin_sha256"] = writer.bin_sha256
        if texts := _texts(datasets):
            meta["input"] = texts
        meta = {name: meta[name] for name in dict.fromkeys([*datasets[0].meta, *meta]) if name in meta}
        writer.finalize(meta)
    _join_bad_lines(datasets, Path(f"{output}.bad_lines.jsonl"))
    return meta


def _texts(datasets: list[IndexedDataset]) -> list[str]:
    """The inputs that the tokens were made of; [] where not all files record them."""
    if not all("input" in dataset.meta for dataset in datasets):
        return []
    return list(dict.fromkeys(item for dataset in datasets for item in dataset.meta["input"]))


def _join_bad_lines(datasets: list[IndexedDataset], output: Path) -> None:
    lists = [path for dataset in datasets if os.path.exists(path := f"{dataset.prefix}.bad_lines.jsonl")]
    if not lists:
        output.unlink(missing_ok=True)
        return
    with replacing(output) as joined:
        for path in lists:
            with open(path, "rb") as file:
                shutil.copyfileobj(file, joined)
