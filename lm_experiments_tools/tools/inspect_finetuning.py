"""Data of run_finetuning.py: sizes, labels, lengths and encoded examples of each split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.checkpoint.source import ModelFiles
from lm_experiments_tools.data.examples.summary import counted, label_text, summary
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.models.tokenizers import load_tokenizer
from lm_experiments_tools.recipes.finetuning import with_new_tokens
from lm_experiments_tools.recipes.finetuning_data import EvalSplit, FinetuningData, finetuning_data
from lm_experiments_tools.tools.inspect_samples import Samples
from lm_experiments_tools.tools.inspect_tokens import Facts

Section = tuple[str, Facts, Samples]


def sections(args: Any) -> Iterator[Section]:
    """(title, facts, samples) of each given split. Reading the data logs truncated and unknown tokens."""
    if not args.data_path and args.measures_nothing():
        raise UserError("there is nothing to inspect: give --data_path, --valid_data_path or --test_data_path.")
    # One worker reads the rows of all: the same global batches.
    args = replace(
        args,
        batch_size=args.batch_size * args.world_size,
        backend="local",
        model_path=None,
        validate_only=not args.data_path,
    )
    backend, files = get_backend(args), ModelFiles(args)
    tokenizer = load_tokenizer(args, files)
    data = finetuning_data(with_new_tokens(args, tokenizer), backend, tokenizer, files)
    if data.train is not None:
        yield _training(args, data, tokenizer)
        data.train.close()
    for split in data.splits.values():
        yield _evaluation(args, split, data.label_names, tokenizer)
    backend.close()


def _training(args: Any, data: FinetuningData, tokenizer: Any) -> Section:
    epoch, rows = data.train.samples_per_epoch, args.global_batch_size(1)
    epochs = f"; --epochs {args.epochs:g} = {args.epochs * epoch / rows:,.0f} steps" if args.epochs else ""
    what = "rows" if args.packing else "examples"
    steps = f"{epoch:,} {what} = {epoch / rows:,.1f} steps of {rows}{epochs}"
    samples = _samples(data.train.dataset, min(args.samples, epoch), data.label_names, tokenizer)
    return "training", [("data", data.objective), ("an epoch", steps)], samples


def _evaluation(args: Any, split: EvalSplit, label_names: Sequence[str], tokenizer: Any) -> Section:
    dataset = split.loader.dataset
    facts = [("data", dataset.describe())]
    if split.examples:
        counts: dict[int, int] = {}
        for _ in counted(split.examples if label_names else (), counts):
            pass
        names = label_names if counts.keys() - {None} else ()
        facts += [("", line) for line in summary(dataset.dataset.encoded, names, counts)]
    return split.name, facts, _samples(dataset, min(args.samples, len(dataset)), label_names, tokenizer)


def _samples(dataset: Any, number: int, label_names: Sequence[str], tokenizer: Any) -> Samples:
    samples = []
    for sample in range(number):  # one at a time, so that no row is padded to the length of another
        row = {name: rows[0] for name, rows in dataset.batch(np.array([sample])).items()}
        samples.append((f"sample {sample}", list(_lines(row, label_names, tokenizer))))
    return samples


def _lines(row: Mapping[str, np.ndarray], label_names: Sequence[str], tokenizer: Any) -> Iterator[str]:
    """Ids and text of the input and the label; of each example in a packed row."""
    packed = "segment_ids" in row or "position_ids" in row
    for number, (ids, label) in enumerate(_examples(row), 1):
        head = f"example {number}: " if packed else ""
        yield f"{head}input_ids {_ids(ids)}"
        yield f"   {tokenizer.decode(ids.tolist())!r}"
        if np.ndim(label) and np.issubdtype(label.dtype, np.integer):
            yield f"{head}labels    {_ids(label)}"
            yield f"   {tokenizer.decode(label.tolist())!r}"
        elif np.min(label) == IGNORED_LABEL:
            yield f"{head}label     none"
        else:
            yield f"{head}label     {np.array2string(label)} = {label_text(label, label_names)}"


def _examples(row: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(input ids, target ids or label) of each example in a row without padding; of a packed row several."""
    ids, labels = row["input_ids"], row["labels"]
    inputs, targets = row.get("attention_mask", np.ones_like(ids)), np.ones_like(labels, np.int64)
    if "segment_ids" in row:
        inputs, targets = row["segment_ids"], row.get("decoder_segment_ids")
    elif "attention_mask" not in row and "position_ids" in row:  # a packed row of a decoder
        inputs = targets = np.cumsum(row["position_ids"] == 0)
    for number in range(1, int(inputs.max(initial=0)) + 1):
        label = labels if targets is not None else labels[number - 1]  # a packed encoder: one entry an example
        if np.ndim(label) and np.issubdtype(label.dtype, np.integer):
            label = label[(targets == number) & (label != IGNORED_LABEL)]
            if not len(label) and "position_ids" in row:  # padding at the end of a packed row
                continue
        yield ids[inputs == number], label


def _ids(ids: np.ndarray) -> str:
    return f"({len(ids)}) {' '.join(map(str, ids.tolist()))}"
