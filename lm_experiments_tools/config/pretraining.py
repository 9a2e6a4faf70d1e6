"""Arguments of run_t5_pretraining.py: the data. Standard library only."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lm_experiments_tools.config.flags import (
    COUNT,
    FRACTION,
    HARMLESS,
    NOT_NEGATIVE,
    POSITIVE,
    Ignored,
    Range,
    check_conflict,
    is_given,
    needs,
)
from lm_experiments_tools.config.objectives import ObjectiveArgs
from lm_experiments_tools.config.phases import PhaseArgs
from lm_experiments_tools.config.training import VALIDATION, ExperimentArgs
from lm_experiments_tools.errors import UserError

# Settings that follow from --from_pretrained, if they are not given.
INHERITED = (
    "base_model", "init_checkpoint", "reset_optimizer", "reset_lr", "reset_iteration", "model_cls",
    "vocab", "tokenizer",
)  # fmt: skip
_MIXES = Ignored(
    lambda args: len(args.data_path) < 2 or getattr(args, "streaming", False),
    "needs several --data_path, and they cannot be mixed by --streaming: tokenize them first (lmtools tokenize)",
)
_HELD_OUT = Range(lambda value: 0 < value < 1, "it must be above 0 and below 1, for example 0.01")
_STREAMED = Ignored(
    lambda args: getattr(args, "streaming", False),
    "needs all documents before training, and --streaming reads them while it trains: name --valid_data_path, or "
    "leave --streaming out",
)
_UNCOUNTED = Ignored(_STREAMED.when, "needs the number of rows, which --streaming does not know: give --iters")
_OF_SIZES = needs("data_blending", "proportional")


@dataclass(frozen=True, kw_only=True)
class MixtureArgs:
    """How several --data_path are mixed."""

    data_weights: Annotated[tuple[float, ...], _MIXES] = ()
    """Weight of each --data_path. Empty: 1 for each."""
    data_blending: Annotated[Literal["proportional", "megatron"], _MIXES] = "proportional"
    """proportional: weight 2 takes each sample of a source twice an epoch; megatron: weights are shares of it."""
    data_maximum: Annotated[int | None, COUNT, _MIXES, _OF_SIZES] = None
    """proportional: most examples of a source, weighted, that count (T5's artificial limit). None: all."""
    data_temperature: Annotated[float, POSITIVE, _MIXES, _OF_SIZES] = 1.0
    """proportional: shares are sizes, weighted, to the power of 1 / temperature: 1 as they are, 100 nearly equal."""

    def check(self) -> None:
        if self.data_weights and len(self.data_weights) != len(self.data_path):
            raise UserError(
                f"--data_weights has {len(self.data_weights)} numbers for {len(self.data_path)} of --data_path: "
                "give one for each."
            )
        if any(not 0.0 < weight < float("inf") for weight in self.data_weights):
            raise UserError(f"--data_weights {self.data_weights}: each must be above 0 and finite.")

    def mixing(self) -> dict[str, Any]:
        """Keyword arguments for the class `data.mixture.Mixture`, but for the sizes of the data sets."""
        limits = {"maximum": self.data_maximum, "temperature": self.data_temperature}
        return {"weights": self.data_weights or None, "blending": self.data_blending, **limits}


@dataclass(frozen=True, kw_only=True)
class EpochArgs:
    """The length of a run in epochs."""

    epochs: Annotated[float | None, HARMLESS, POSITIVE, _UNCOUNTED] = None
    """Passes over the training data, instead of --iters."""

    def check(self) -> None:
        if self.epochs is not None and (is_given(self, "iters") or getattr(self, "phases", ())):
            other = "phases" if getattr(self, "phases", ()) else "iters"
            raise UserError(f"--{other} and --epochs exclude each other: both say how long to train.")


@dataclass(frozen=True, kw_only=True)
class HoldOutArgs:
    """Validation data out of the training data."""

    valid_fraction: Annotated[float | None, _HELD_OUT, _STREAMED] = None
    """Fraction of the documents of --data_path to hold out for validation, instead of --valid_data_path: by a hash of
    the document, so the same ones at each start. The tokens are copied once, to .cache/tokens."""

    def check(self) -> None:
        check_conflict(self, "valid_fraction", "valid_data_path", "both say what validation data is")
        if self.valid_fraction is not None and not self.data_path:
            raise UserError("--valid_fraction holds out documents of --data_path: give that too.")


@dataclass(frozen=True, kw_only=True)
class FromPretrainedArgs:
    """A pre-trained model to continue."""

    from_pretrained: str | None = None
    """Folder (of a run: its best checkpoint, else its last) or Hugging Face name whose weights, configuration, class
    and tokenizer are used; other flags for these win."""


@dataclass(frozen=True, kw_only=True)
class DistillationArgs:
    """Learning from another model's predictions."""

    distill_from: str | None = None
    """Teacher: folder, run or Hugging Face name of a model of the same vocabulary, a decoder or of the model's own
    kind. Every worker holds it; lmtools plan does not count it."""
    distill_weight: Annotated[float, FRACTION, needs("distill_from")] = 0.5
    """Weight of the KL divergence from the teacher's predictions; the rest is that of the loss on labels."""

    def check(self) -> None:
        if self.distill_from is not None and getattr(self, "mlm_positions", None) == "labels":
            raise UserError("--distill_from needs the words of all positions: leave --mlm_positions labels out.")
        if self.distill_from is not None and getattr(self, "packing", None) == "documents":
            raise UserError("--distill_from reads rows of one document: give --packing none.")


_COMPARES_TARGETS = Ignored(
    lambda args: not args.objective().has_targets, "compares with targets, and --task {task} has none of its own"
)


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """Where text and vocabulary come from."""

    data_path: Annotated[tuple[str, ...], HARMLESS] = ()  # the data's fingerprint is compared
    """Token prefix of `lmtools tokenize`, text (.jsonl, .txt, compressed or not, a folder) or a Hugging Face dataset
    (name[:config][:split]); several are mixed. Not needed with --validate_only or a --task with data of its own."""
    valid_data_path: Annotated[str | None, HARMLESS] = None
    """Validation data, in any form --data_path takes."""
    vocab: Annotated[str | None, HARMLESS] = None
    """SentencePiece .model file, folder or Hub name of a Hugging Face tokenizer, tokenizer.json, or bytes (as ByT5).
    None: the one recorded beside a token prefix, else vocabs/sentencepiece.model if it is there."""
    streaming: bool = False
    """Tokenize while training, from the first document on, instead of before it."""
    streams: Annotated[int, COUNT] = 16
    """With --streaming: streams that the text is dealt to, at most; part of its order. As many workers, or fewer that
    divide them, read disjoint parts."""
    text_key: str = "text"
    """Key of a .jsonl line that holds the text; meta.text: the key text of the object meta."""
    document_per_line: bool = False
    """Each line of a .txt file is a document. Default: documents are between blank lines."""
    max_bad_lines: Annotated[int, HARMLESS, NOT_NEGATIVE] = 100
    """Unreadable lines of raw text to set aside (file and line are reported) before the run refuses to go on. With
    --streaming: in what each worker reads, counted the first time it is read."""
    data_n_workers: Annotated[int | None, HARMLESS, COUNT] = None
    """Processes that tokenize raw text (None: one per core). With --task module:Class on token files also processes,
    of each worker, that make examples (None: a thread of the training process makes them)."""
    valid_samples: Annotated[int | None, HARMLESS, COUNT] = None
    """Validation examples to use, the same random ones each time. None: 512, or all with --validate_only."""

    def check(self) -> None:
        brings_data = isinstance(self, ObjectiveArgs) and self.is_registered_task()
        if not self.data_path and not brings_data and not getattr(self, "validate_only", False):
            raise UserError("--data_path is missing: --help says what it takes.")


@dataclass(frozen=True, kw_only=True)
class T5PretrainingArgs(
    PhaseArgs,
    ExperimentArgs,
    FromPretrainedArgs,
    ObjectiveArgs,
    DistillationArgs,
    MixtureArgs,
    EpochArgs,
    HoldOutArgs,
    DataArgs,
):
    """All arguments of run_t5_pretraining.py."""

    pad_to_multiple_of: int | None = 8
    use_generate_on_valid: Annotated[bool, VALIDATION, _COMPARES_TARGETS] = False
    report: Annotated[bool, VALIDATION] = False

    def trim_to(self) -> int | None:
        """Multiple (in tokens) to which the width of a micro-batch is rounded up when columns of padding are cut off.

        None for objectives with rows of fixed length.
        """
        return super().trim_to() if self.objective().varies_in_length or self.is_registered_task() else None

    def tokens_per_row(self) -> int:
        return self.input_seq_len

    def lacks_validation(self) -> bool:
        return self.valid_data_path is None and self.valid_fraction is None and not self.is_registered_task()

    def check(self) -> None:
        """Check the flags against each other, for example a seqio task against `--data_path`. Raises UserError."""
        if not self.is_registered_task():
            return
        for flag, is_used in (
            ("streaming", self.streaming),
            ("data_path", self.data_path),
            ("valid_data_path", self.valid_data_path),
            ("valid_fraction", self.valid_fraction),
            ("epochs", self.epochs),
        ):
            if is_used:
                raise UserError(
                    f"--{flag} is not for --task {self.task}, which seqio reads from its own data. If it is an "
                    "objective of yours, its file must import Objective from lm_experiments_tools."
                )
        if not self.vocab:
            raise UserError(f"--task {self.task} needs --vocab: the vocabulary of its features.")
