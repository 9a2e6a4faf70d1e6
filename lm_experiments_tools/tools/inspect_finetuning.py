"""Look before you fine-tune: sizes, labels, lengths, what is cut off or unknown, examples as the model gets them.

    lmtools inspect_finetuning --config run.yaml
    lmtools inspect_finetuning --tokenizer t5-small --data_path train.jsonl --valid_data_path valid.jsonl --samples 2

Flags and YAML files are those of run_finetuning.py; nothing is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.config.finetuning import FinetuningArgs, InstructionArgs, LengthArgs, TaskArgs
from lm_experiments_tools.config.flags import check_groups, check_minimum
from lm_experiments_tools.config.training import BatchArgs
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from lm_experiments_tools.recipes.finetuning_data import EvalSplit, FinetuningData

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleArgs:
    """Looking at data."""

    samples: int = 2
    """Examples of training and of evaluation to show, the first ones of each; with --packing, rows of training."""
    world_size: int = 1
    """Workers of the run to come: the steps of an epoch depend on it."""

    def check(self) -> None:
        check_minimum(self, 0, "samples")
        check_minimum(self, 1, "world_size")


@dataclass(frozen=True, kw_only=True)
class InspectFinetuningArgs(FinetuningArgs, SampleArgs):
    """The flags of run_finetuning.py, so that its YAML files are read as they are, and what to look at."""

    def __post_init__(self) -> None:
        # What concerns the model or its training need not be complete to look at the data.
        check_groups(self, (TaskArgs, LengthArgs, InstructionArgs, BatchArgs, SampleArgs))


def inherit(given: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    """Settings that the weights bring along, as for run_finetuning.py."""
    from lm_experiments_tools.models.inherited import inherited_settings

    return inherited_settings(given)


def run(args: InspectFinetuningArgs) -> None:
    """Print what there is to know of the data of a run."""
    from lm_experiments_tools.backends import get_backend
    from lm_experiments_tools.checkpoint.source import ModelFiles
    from lm_experiments_tools.models.tokenizers import load_tokenizer
    from lm_experiments_tools.recipes.finetuning import with_new_tokens
    from lm_experiments_tools.recipes.finetuning_data import finetuning_data

    if not args.data_path and args.measures_nothing():
        raise UserError("there is nothing to look at: give --data_path, --valid_data_path or --test_data_path.")
    # One worker with the rows of all: the same global batches. Neither is anything trained nor a folder entered.
    args = replace(
        args,
        batch_size=args.batch_size * args.world_size,
        backend="local",
        model_path=None,
        validate_only=not args.data_path,
    )
    backend, files = get_backend(args), ModelFiles(args)
    tokenizer = load_tokenizer(args, files)
    data = finetuning_data(with_new_tokens(args, tokenizer), backend, tokenizer, files)  # which logs what it finds
    if data.train is not None:
        _show_training(args, data, tokenizer)
    for split in data.splits.values():
        _show_split(args, split, data.label_names, tokenizer)
    backend.close()


def _show_training(args: InspectFinetuningArgs, data: FinetuningData, tokenizer: Any) -> None:
    epoch, rows = data.train.samples_per_epoch, args.global_batch_size(1)
    print(f"\ntraining     {data.objective}")
    epochs = f"; --epochs {args.epochs:g} = {args.epochs * epoch / rows:,.0f} steps" if args.epochs else ""
    what = "rows" if args.packing else "examples"
    print(f"an epoch     {epoch:,} {what} = {epoch / rows:,.1f} steps of {rows}{epochs}")
    _show_samples(data.train.dataset, min(args.samples, epoch), data.label_names, tokenizer)
    data.train.close()


def _show_split(args: InspectFinetuningArgs, split: EvalSplit, label_names: Sequence[str], tokenizer: Any) -> None:
    from lm_experiments_tools.data.examples.glance import counted, glance

    dataset = split.loader.dataset
    print(f"\n{split.name:<12} {dataset.describe()}")
    if split.examples:
        counts: dict[int, int] = {}
        for _ in counted(split.examples if label_names else (), counts):
            pass
        for line in glance(dataset.dataset.encoded, tokenizer, label_names if counts.keys() - {None} else (), counts):
            if not line.startswith("the first"):
                print(f"{'':<12} {line}")
    _show_samples(dataset, min(args.samples, len(dataset)), label_names, tokenizer)


def _show_samples(dataset: Any, number: int, label_names: Sequence[str], tokenizer: Any) -> None:
    import numpy as np

    for sample in range(number):  # one by one: without the padding that a batch brings
        batch = {name: rows[0] for name, rows in dataset.batch(np.array([sample])).items()}
        lines = [*_lines(batch, label_names, tokenizer)]
        print("\n" + "\n  ".join([f"sample {sample}", *lines]))


def _lines(row: Mapping[str, np.ndarray], label_names: Sequence[str], tokenizer: Any) -> Iterator[str]:
    """An example for people: ids, and what they say; of a packed row each example by itself."""
    import numpy as np

    from lm_experiments_tools.data.examples.glance import label_text
    from lm_experiments_tools.labels import IGNORED_LABEL

    ids, labels, seen = row["input_ids"], row["labels"], row.get("attention_mask")
    by_example = "segment_ids" in row and "decoder_segment_ids" not in row  # one entry each: a packed encoder's
    parts, of_labels = np.ones_like(ids) if seen is None else seen, np.ones_like(labels, np.int64)
    if "segment_ids" in row:
        parts, of_labels = row["segment_ids"], row.get("decoder_segment_ids")
    elif seen is None and "position_ids" in row:  # a packed row of a decoder; of its padding nothing is predicted
        parts = of_labels = np.cumsum(row["position_ids"] == 0)
    packed = "segment_ids" in row or "position_ids" in row
    for part in range(1, int(parts.max(initial=0)) + 1):
        chosen = ids[parts == part]
        head = f"example {part}: " if packed else ""
        label = labels[part - 1] if by_example else labels
        is_text = np.ndim(label) > 0 and np.issubdtype(label.dtype, np.integer)
        if packed and is_text and (label[of_labels == part] == IGNORED_LABEL).all():
            continue
        yield f"{head}input_ids {_ids(chosen)}"
        yield f"   {tokenizer.decode(chosen.tolist())!r}"
        if is_text:
            target = label[(of_labels == part) & (label != IGNORED_LABEL)]
            yield f"{head}labels    {_ids(target)}"
            yield f"   {tokenizer.decode(target.tolist())!r}"
        elif np.min(label) == IGNORED_LABEL:
            yield f"{head}label     none"
        else:
            yield f"{head}label     {np.array2string(label)} = {label_text(label, label_names)}"


def _ids(ids: np.ndarray) -> str:
    return f"({len(ids)}) {' '.join(map(str, ids.tolist()))}"
