"""From `--data_path` and `--valid_data_path` to the loaders of a T5 pre-training run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_experiments_tools.batches import IGNORED_LABEL
from lm_experiments_tools.data.dataset import SpanCorruptionDataset
from lm_experiments_tools.data.indexed import IndexedDataset
from lm_experiments_tools.data.loader import TrainLoader, ValidLoader
from lm_experiments_tools.data.tokenize import ensure_tokenized
from lm_experiments_tools.data.vocabulary import Vocabulary
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.state import on_all, on_main

if TYPE_CHECKING:
    from lm_experiments_tools.args import T5PretrainingArgs
    from lm_experiments_tools.backends.backend import Backend

logger = logging.getLogger(__name__)

CACHE = Path(".cache") / "tokens"  # below the working directory


@dataclass
class PretrainingData:
    """What a run reads.

    Attributes:
        train: this worker's endless batches.
        valid, valid_tokens: this worker's part of the validation examples, and the documents they are cut from; None
            without `--valid_data_path`.
        tokenizer_dir: Hugging Face tokenizer files of the vocabulary; None for a run that saves nothing.
    """

    vocabulary: Vocabulary
    train: TrainLoader
    valid: ValidLoader | None
    valid_tokens: IndexedDataset | None
    tokenizer_dir: Path | None

    def describe(self) -> str:
        """The objective and the size of the data, for the log."""
        dataset = self.train.dataset
        return (
            f"span corruption, {dataset.tokens_length} tokens -> {dataset.inputs_length} inputs + "
            f"{dataset.targets_length} targets; {dataset.num_tokens:,} training tokens, "
            f"vocabulary {self.vocabulary.size:,}"
        )


def span_corruption_metrics(batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """A `batch_metrics_fn`: the loss and, with `--use_generate_on_valid`, the part of target tokens generated rightly.

    `generation_accuracy` compares position by position, so one token too many makes all that follow wrong.
    """
    values: dict[str, Any] = {"loss": outputs["loss"]}
    if "generation_outputs" in outputs:
        labels, generated = batch["labels"], outputs["generation_outputs"][:, 1:]  # without the start token
        width = min(labels.shape[1], generated.shape[1])
        right = (generated[:, :width] == labels[:, :width]).sum()
        values["generation_accuracy"] = (right, (labels != IGNORED_LABEL).sum())
    return values


def span_corruption_data(args: T5PretrainingArgs, backend: Backend) -> PretrainingData:
    """Open (and where it is raw text, first tokenize) training and validation data.

    Every worker calls it; text is tokenized once, by the first of each machine, while the others wait.

    Raises:
        UserError: data or vocabulary that is missing, empty, damaged or of another vocabulary.
    """
    vocab_path = _vocab_path(args)
    vocabulary = Vocabulary.load(vocab_path)

    def open_tokens(path: str) -> IndexedDataset:
        prefix = ensure_tokenized(
            path,
            vocab_path,
            CACHE,
            workers=args.data_n_workers,
            text_key=args.text_key,
            max_bad_lines=args.max_bad_lines,
        )
        tokens = IndexedDataset(prefix)
        bad_lines = tokens.meta.get("bad_lines", 0)
        if str(prefix) != str(path) and bad_lines > args.max_bad_lines:  # tokenized earlier, with more patience
            raise UserError(
                f"{path} has {bad_lines} bad lines, listed in {prefix}.bad_lines.jsonl, more than --max_bad_lines "
                f"{args.max_bad_lines} allows; mend them, or raise the limit"
            )
        return tokens

    def dataset(tokens: IndexedDataset) -> SpanCorruptionDataset:
        return SpanCorruptionDataset(
            tokens,
            args.input_seq_len,
            args.target_seq_len,
            sentinel_ids=vocabulary.sentinel_ids,
            eos_id=vocabulary.eos_id,
            pad_id=vocabulary.pad_id,
            vocab_size=vocabulary.size,
            noise_density=args.noise_density,
            mean_noise_span_length=args.mean_noise_span_length,
            seed=args.seed,
        )

    where = (backend.rank, backend.world_size)
    train = on_all(backend, lambda: TrainLoader(dataset(open_tokens(args.data_path)), args.rows_per_worker(), *where))
    valid = valid_tokens = None
    if args.valid_data_path is not None:
        valid_tokens = on_all(backend, lambda: open_tokens(args.valid_data_path))
        valid = ValidLoader(dataset(valid_tokens), args.rows_per_worker(), *where, num_samples=args.valid_samples)
    tokenizer_dir = Path(args.model_path) / "tokenizer" if args.model_path else None
    if tokenizer_dir is not None:
        on_main(backend, lambda: vocabulary.save_tokenizer(tokenizer_dir))
    return PretrainingData(vocabulary, train, valid, valid_tokens, tokenizer_dir)


def _vocab_path(args: T5PretrainingArgs) -> Path:
    """`--vocab`, or the file that made the token prefix `--data_path`."""
    if args.vocab is not None:
        return Path(args.vocab)
    sidecar = Path(f"{args.data_path}.json")
    if not sidecar.is_file() and not Path(args.data_path).exists() and not Path(f"{args.data_path}.idx").exists():
        raise UserError(
            f"--data_path {args.data_path}: there is neither a token prefix (.idx, .bin) nor text of this name"
        )
    if not sidecar.is_file():
        raise UserError(
            f"--vocab is missing, and {args.data_path} is not a token prefix that records one ({sidecar} does not "
            "exist); give a SentencePiece .model file, for example one trained by `lmtools vocab`"
        )
    try:
        recorded = json.loads(sidecar.read_text(encoding="utf-8"))["vocab_file"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{sidecar} is damaged ({error}), so the vocabulary is not known; give --vocab") from error
    candidates = [Path(recorded), sidecar.parent / Path(recorded).name] if recorded else []
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"--vocab is missing, and the vocabulary that {sidecar} names ({recorded}) is not there; give --vocab"
    )
