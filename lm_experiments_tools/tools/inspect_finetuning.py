"""Describe the data of run_finetuning.py: sizes, labels, lengths and encoded examples of each split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.checkpoint.source import ModelFiles
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.models.tokenizers import load_tokenizer
from lm_experiments_tools.recipes.finetuning import with_new_tokens
from lm_experiments_tools.recipes.finetuning_data import EvalSplit, FinetuningData, finetuning_data
from lm_experiments_tools.recipes.finetuning_summary import counted, label_text, summary
from lm_experiments_tools.tools.inspect_samples import Rendering, Samples, render_sample
from lm_experiments_tools.tools.inspect_tokens import Facts

Section = tuple[str, Facts, Samples]


def sections(args: Any) -> Iterator[Section]:
    """Describe the training, validation and test data, as far as the run has them: title, facts, samples."""
    if not args.data_path and args.measures_nothing():
        raise UserError("there is nothing to inspect: give --data_path, --valid_data_path or --test_data_path.")
    # One worker reads the rows of all: the same global batches.
    args = replace(
        args,
        batch_size=args.batch_size * args.world_size,
        fp16_allreduce=False,
        model_path=None,
        validate_only=not args.data_path,
    )
    backend, files = LocalBackend.from_args(args), ModelFiles(args)
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
    samples = _samples(args, data.train.dataset, min(args.samples, epoch), data.label_names, tokenizer)
    return "training", [("data", data.objective), ("an epoch", steps)], samples


def _evaluation(args: Any, split: EvalSplit, label_names: Sequence[str], tokenizer: Any) -> Section:
    dataset = split.loader.dataset
    facts = [("data", dataset.describe())]
    if split.examples:
        counts: dict[int, int] = {}
        for _ in counted(split.examples if label_names else (), counts):
            pass
        names = label_names if counts.keys() - {None} else ()
        facts += [("", line) for line in summary(dataset.members[0].encoded, names, counts)]
    return split.name, facts, _samples(args, dataset, min(args.samples, len(dataset)), label_names, tokenizer)


def _samples(args: Any, dataset: Any, number: int, label_names: Sequence[str], tokenizer: Any) -> Samples:
    special = {tokenizer.pad_token_id: tokenizer.pad_token, tokenizer.eos_token_id: tokenizer.eos_token}
    rendering, samples = Rendering(tokenizer.decode, {i: token for i, token in special.items() if token}), []
    for sample in range(number):  # one at a time, so that no row is padded to the length of another
        row = {name: rows[0] for name, rows in dataset.batch(np.array([sample])).items()}
        label = _label(row, label_names) if args.model_type == "encoder" else None
        samples.append((f"sample {sample}", render_sample(row, rendering, label)))
    return samples


def _label(row: Mapping[str, np.ndarray], names: Sequence[str]) -> str:
    """The label of a row of an encoder; of a packed row those of its examples."""
    labels = row["labels"] if "segment_ids" in row else [row["labels"]]
    texts = [
        f"{np.array2string(label)} = {label_text(label, names)}" for label in labels if np.min(label) != IGNORED_LABEL
    ]
    return "; ".join(texts) or "none"
