"""Read and tokenize the data of a fine-tuning run.

Data is tokenized once at the start. Every worker reads all of it and uses its own rows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.backends.collective import on_all
from lm_experiments_tools.checkpoint.source import ModelFiles
from lm_experiments_tools.config.finetuning import LABEL_TASKS
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.examples.dataset import EncodedExamples, ExampleRows, encode_examples
from lm_experiments_tools.data.examples.example_encoder import ExampleEncoder, end_id, pad_id, tokenize_text
from lm_experiments_tools.data.examples.examples import (
    LABEL_FIELDS,
    TARGET_FIELDS,
    Example,
    LabelFields,
    TextFields,
    found_labels,
    in_order,
    label_examples,
    plain_number,
    text_examples,
)
from lm_experiments_tools.data.examples.instructions import (
    TK_INSTRUCT,
    PromptParts,
    instruction_examples,
)
from lm_experiments_tools.data.loader import TrainLoader, ValidLoader
from lm_experiments_tools.data.objectives.causal_lm import CausalLM
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.token_rows import TokenRows, TokensInMemory
from lm_experiments_tools.data.order import Buckets, LongestFirst, permute
from lm_experiments_tools.data.text.records import Record, RejectedRecords, rows
from lm_experiments_tools.data.text.sources import file_of_split, text_of_split
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.recipes.finetuning_summary import counted, first_example, summary

if TYPE_CHECKING:
    from lm_experiments_tools.backends.backend import Backend
    from lm_experiments_tools.config.finetuning import FinetuningArgs

logger = logging.getLogger(__name__)

TARGET_STEP = 16  # SciTLDR, batches of 8 out of 64: 6 % padding; 16 % with 1, 9 % by lengths of inputs alone
WINDOW = 2048  # rows sorted together; SciTLDR, batches of 8: 6 % padding, 14 % with the 256 rows of 32 batches
_NO_ROWS = "no row, where the first line of a table is its header (--table_columns names columns of one without)"
FIXED_SEED = 0  # of choices that are the same whatever --seed is: which examples, and the order of evaluation


@dataclass
class EvalSplit:
    """The validation or test data of a fine-tuning run.

    Attributes:
        loader: batches of this worker; together the workers read each example once.
        examples: all examples; "example" in a batch holds indices into them. Empty for causal_lm.
    """

    name: str
    loader: ValidLoader
    examples: list[Example]


@dataclass
class FinetuningData:
    """Data of a fine-tuning run.

    Attributes:
        train: endless batches of this worker; None with `--validate_only`.
        splits: "valid" and "test", if they have data.
        label_words: text that an encoder-decoder generates for each label.
        sentence_names: names of the sentences' fields; an encoder-decoder reads them before the sentences.
    """

    train: TrainLoader | None
    splits: dict[str, EvalSplit] = field(default_factory=dict)
    label_names: tuple[str, ...] = ()
    label_words: tuple[str, ...] = ()
    sentence_names: tuple[str, ...] = ()
    objective: str = ""


def finetuning_data(
    args: FinetuningArgs, backend: Backend, tokenizer: Any, files: ModelFiles | None = None
) -> FinetuningData:
    """Read and tokenize the data of a run. Every worker must call it. Raises UserError."""
    return on_all(backend, lambda: _Reader(args, backend, tokenizer, files or ModelFiles(args)).read())


class _Reader:
    """The steps of `finetuning_data`, none of which talks to another worker."""

    def __init__(self, args: FinetuningArgs, backend: Backend, tokenizer: Any, files: ModelFiles) -> None:
        self.args, self.backend, self.tokenizer, self.files = args, backend, tokenizer, files
        self.label_fields = LabelFields(
            args.text_fields,
            args.label_field,
            args.prefix,
            args.id_field,
            as_text=args.model_type == "encoder-decoder",
            several=args.task == "multi_label",
            columns=args.table_columns,
        )
        if not args.data_path and not args.text_fields:  # else those of the training data
            self.label_fields.names = tuple(files.task.get("sentence_names", ()))
            self.label_fields.where = str(args.from_pretrained)
        self.label_names, self.label_words = self._labels()

    def read(self) -> FinetuningData:
        args = self.args
        data = FinetuningData(None, label_names=self.label_names, label_words=self.label_words)
        if not args.validate_only:
            dataset = self._train_dataset()
            where = (self.backend.rank, self.backend.world_size)
            data.train = TrainLoader(dataset, args.rows_on_worker(self.backend.world_size), *where)
            data.objective = dataset.describe()
        for split, path, limit in (
            ("valid", args.valid_data_path, args.valid_samples),
            ("test", args.test_data_path, args.test_samples),
        ):
            if path is not None:
                data.splits[split] = self._eval_split(split, path, limit)
        if args.task == "instructions" and args.valid_data_path and args.valid_data_path == args.test_data_path:
            logger.warning(
                "validation and test are the same tasks of %s: test is no held-out data", args.valid_data_path
            )
        data.sentence_names = self.label_fields.names
        data.objective = data.objective or f"{args.task}, validation only"
        return data

    def _labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        args = self.args
        if args.task not in LABEL_TASKS:
            return (), ()
        names = _plain(args.label_names) or self._found_labels()
        words = args.label_words or self._saved_words(names) or names
        if len(words) != len(names):
            raise UserError(f"--label_words has {len(words)} words for the {len(names)} labels {', '.join(names)}.")
        if len(set(names)) < len(names):
            raise UserError(f"--label_names {', '.join(names)} names a label twice: name each once.")
        if len({word.strip().lower() for word in words}) < len(words) and args.model_type == "encoder-decoder":
            raise UserError(f"the label words {', '.join(words)} do not differ: give --label_words that do.")
        if args.model_type == "encoder-decoder":
            self._check_words(words)
        return names, words

    def _saved_words(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The label words that the loaded weights were trained with."""
        saved = self.files.task
        return tuple(saved.get("label_words", ())) if _plain(saved.get("label_names", ())) == names else ()

    def _check_words(self, words: Sequence[str]) -> None:
        """Refuse words with the same tokens."""
        targets = example_encoder(self.args, self.tokenizer).encode_targets(words)
        known: dict[tuple[int, ...], str] = {}
        for word, ids in zip(words, targets, strict=True):
            other = known.setdefault(tuple(ids), word)
            if other != word:
                tokens = " ".join(self.tokenizer.convert_ids_to_tokens(ids))
                raise UserError(
                    f"the label words {other} and {word} are the same tokens to the model ({tokens}, within "
                    f"--target_seq_len {self.args.target_seq_len}): give --label_words that differ."
                )

    def _found_labels(self) -> tuple[str, ...]:
        """Labels of the training data, in the order of a trained head if there is one."""
        args = self.args
        saved = _plain(self.files.label_names)
        if not args.data_path:
            if not saved:
                raise UserError("the labels are unknown: give --data_path or --label_names.")
            return saved
        # The training data is read twice: all labels must be known before the first example is encoded.
        rejected = RejectedRecords(args.max_bad_lines, of_rows=True, quiet=True)
        sources = (file_of_split(path, "train") for path in args.data_path)
        found = set().union(*(found_labels(path, self.label_fields, rejected) for path in sources))
        if not found:
            raise UserError(
                f"no example in {', '.join(args.data_path)} has a label: check --label_field, and that a table has "
                "rows below its header."
            )
        if args.task == "multi_label" and found <= {"0", "1"}:
            raise UserError("the only labels are 0 and 1: write the names of the labels that apply to each row.")
        return saved if set(saved) == found else in_order(found)

    def _examples(self, paths: Sequence[str], split: str, encoder: ExampleEncoder) -> Iterator[Example]:
        """All examples in files, in their order. Raises UserError for bad rows, or if there is no example."""
        rejected = RejectedRecords(self.args.max_bad_lines, of_rows=True)
        example = None
        for example in chain.from_iterable(self._read(path, rejected, split, encoder) for path in paths):
            yield example
        if rejected.count > 1:
            logger.warning("%s", rejected)
        if example is None:
            reason = f"{rejected.count} bad rows, the first is {rejected.first}" if rejected.count else _NO_ROWS
            raise UserError(f"there is no example in {', '.join(paths)}: {reason}.")

    def _read(self, path: str, rejected: RejectedRecords, split: str, encoder: ExampleEncoder) -> Iterator[Example]:
        args, training = self.args, split == "train"
        if args.task == "instructions":
            limit = args.max_instances_per_task if training else args.max_instances_per_eval_task
            chosen_parts = PromptParts(**{flag.name: getattr(args, flag.name) for flag in fields(PromptParts)})
            parts = TK_INSTRUCT if args.tk_instruct and training else (chosen_parts,)
            listing = Path(path) / "splits" / args.sni_split / f"{'train' if training else 'test'}_tasks.txt"
            return instruction_examples(listing, limit, parts, rejected, encoder.num_tokens, encoder.sources.limit)
        path = file_of_split(path, split)
        if args.task == "text_to_text":
            named = TextFields(args.source_id, args.target_id, args.prefix, args.id_field, args.table_columns)
            what = f"target ({args.target_id or ', '.join(TARGET_FIELDS)})"
            there = split != "test" or self._is_labelled(path, named.has_target, what)
            return text_examples(path, named, rejected, merge=not training, with_targets=there)
        words = self.label_words if args.model_type == "encoder-decoder" else None
        named, names = self.label_fields, self.label_names
        what = f"label ({args.label_field or ', '.join(LABEL_FIELDS)}; -1 is none)"
        there = split != "test" or self._is_labelled(path, partial(named.has_label, names=names), what)
        return label_examples(path, named, rejected, names=names, words=words, with_labels=there)

    def _is_labelled(self, path: str, has_label: Callable[[Record], bool], what: str) -> bool:
        """True if a row of the test data has a label; if none has, all are only predicted. Raises UserError."""
        found = rows(path, RejectedRecords(self.args.max_bad_lines, of_rows=True, quiet=True), self.args.table_columns)
        if any(map(has_label, found)):
            return True
        reason = f"no row of the test data {path} has a {what}"
        if not self.args.metric_names():
            raise UserError(f"{reason}, and --metrics none predicts nothing: leave one of the two out.")
        if self.backend.is_main:
            logger.warning("%s: it is predicted, and only what needs none is measured", reason)
        return False

    def _blocks(self, paths: Sequence[str], limit: int | None, seed: int) -> Dataset:
        """Blocks of text; with a limit only of as much of it, from the beginning on."""
        args = self.args
        tokens = tokenize_text(paths, self.tokenizer, RejectedRecords(args.max_bad_lines, of_rows=True))
        fingerprint = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
        if limit is not None:
            tokens = tokens[: limit * (args.input_seq_len - 1)]
            fingerprint += f"/{len(tokens)}"
        ids = TokenIds(len(self.tokenizer), pad_id(self.tokenizer), end_id(self.tokenizer))
        objective = CausalLM.create(ids, args.input_seq_len, model_kind="decoder")
        return Dataset(TokenRows(TokensInMemory(tokens, fingerprint), objective, seed))

    def _train_dataset(self) -> Dataset:
        args = self.args
        if args.task == "causal_lm":
            return self._blocks(args.data_path, args.max_train_samples, args.seed)
        encoder = example_encoder(args, self.tokenizer)
        examples: Iterable[Example] = self._examples(args.data_path, "train", encoder)
        if args.max_train_samples is not None:
            examples = chosen(list(examples), args.max_train_samples)
        rows = self._rows(examples, "train", encoder)
        if args.packing:
            return Dataset(rows)
        # By default all rows of a step: it then holds the same samples however it is split.
        size = args.bucket_rows or args.global_batch_size(self.backend.world_size)
        dataset, window = Dataset(rows), WINDOW if size > 1 else 0
        return dataset.arranged(Buckets(dataset.lengths, len(rows), size, args.seed, TARGET_STEP, window))

    def _eval_split(self, split: str, path: str, limit: int | None) -> EvalSplit:
        where = self.backend.rank, self.backend.world_size
        rows = self.args.valid_batch_size() * self.args.shares(self.backend.world_size)
        if self.args.task == "causal_lm":
            path = text_of_split(path, split)
            return EvalSplit(split, ValidLoader(self._blocks([path], None, FIXED_SEED), rows, *where, limit), [])
        encoder = example_encoder(self.args, self.tokenizer)
        examples = chosen(list(self._examples([path], split, encoder)), limit)
        dataset = Dataset(self._rows(examples, split, encoder))
        arrangement = LongestFirst(dataset.lengths, len(dataset), TARGET_STEP)
        loader = ValidLoader(dataset.arranged(arrangement), rows, *where)
        return EvalSplit(split, loader, examples)

    def _rows(self, examples: Iterable[Example], split: str, encoder: ExampleEncoder) -> ExampleRows:
        args, training = self.args, split == "train"
        counts: dict[int, int] = {}
        examples = counted(examples, counts) if self.label_names else examples
        encoded = encode_examples(
            examples,
            encoder,
            args.model_type,
            all_targets=training and args.task == "instructions",
            num_labels=len(self.label_names) if args.task == "multi_label" else 0,
        )
        self._report(split, encoder)
        lines = summary(encoded, self.label_names, counts)
        for line in [*lines, first_example(encoded, self.tokenizer, self.label_names)] if training else ():
            logger.log(logging.INFO if self.backend.is_main else logging.DEBUG, "%s: %s", split, line)
        return example_rows(args, encoded, self.tokenizer, training=training)

    def _report(self, split: str, encoder: ExampleEncoder) -> None:
        """One line on what was cut off, or that nothing was."""
        flag = "--input_seq_len - --target_seq_len =" if self.args.model_type == "decoder" else "--input_seq_len"
        parts = [encoder.sources.describe("sources", flag)]
        if encoder.targets.texts:
            parts.append(encoder.targets.describe("targets", "--target_seq_len"))
        if self.backend.is_main:
            loses = encoder.sources.num_truncated or encoder.targets.num_truncated
            logger.log(logging.WARNING if loses else logging.INFO, "%s: %s", split, "; ".join(parts))
            for what, counts in (("sources", encoder.sources), ("targets", encoder.targets)):
                counts.warn_of_unknown(f"{what} of {split}")


def example_rows(args: FinetuningArgs, encoded: EncodedExamples, tokenizer: Any, *, training: bool) -> ExampleRows:
    """Build the rows of encoded examples that fit the model's kind and the task."""
    return ExampleRows(
        encoded,
        args.model_type,
        pad_id=pad_id(tokenizer),
        seed=args.seed if training else FIXED_SEED,
        limits=(args.input_seq_len, args.target_seq_len),
        multiple=args.trim_to(),
        with_prompts=not training,
        packed=training and args.packing,
        title=args.task,
    )


def example_encoder(args: FinetuningArgs, tokenizer: Any) -> ExampleEncoder:
    """Build the object that turns texts into token ids, by the lengths and model kind of `args`. Raises UserError."""
    decoder = args.model_type == "decoder"
    room = args.input_seq_len
    if decoder and args.task != "causal_lm":  # the same in training and in evaluation, where no target is known
        room -= args.target_seq_len
        if room < 1:
            raise UserError(
                f"--input_seq_len {args.input_seq_len} holds source and target of a decoder, and --target_seq_len "
                f"{args.target_seq_len} leaves nothing for the source: raise it."
            )
    target_limit = None if args.model_type == "encoder" else args.target_seq_len
    return ExampleEncoder(tokenizer, room, target_limit, decoder=decoder, suffix=args.suffix)


def _plain(names: Iterable[str]) -> tuple[str, ...]:
    """Label names as `label_examples` reads them."""
    return tuple(plain_number(str(name).strip()) for name in names)


def chosen(examples: list[Example], limit: int | None) -> list[Example]:
    """Draw a fixed random subset of `limit` examples (None: all), in their original order."""
    if limit is None or limit >= len(examples):
        return examples
    numbers = permute(np.arange(limit), len(examples), FIXED_SEED, np.zeros(limit, np.int64))
    return [examples[number] for number in np.sort(numbers).tolist()]
