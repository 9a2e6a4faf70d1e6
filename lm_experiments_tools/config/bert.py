"""Arguments of run_bert_pretraining.py: data of megatron/preprocess_data.py, objective. Standard library only."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lm_experiments_tools.config.flags import (
    COUNT,
    FRACTION,
    HARMLESS,
    NOT_NEGATIVE,
    PART,
    Ignored,
    at_least,
    check_conflict,
    given_flags,
    needs,
)
from lm_experiments_tools.config.objectives import MlmPositions
from lm_experiments_tools.config.phases import PhaseArgs
from lm_experiments_tools.config.pretraining import MixtureArgs
from lm_experiments_tools.config.training import VALIDATION, ExperimentArgs
from lm_experiments_tools.errors import UserError

_WITHOUT_EFFECT = Ignored(lambda args: False, "")  # accepted for scripts of t5-experiments, and reported
_NO_TEXT = Ignored(lambda args: True, "is for models that write text")


@dataclass(frozen=True, kw_only=True)
class BertDataArgs:
    """Where sentences and tokenizer come from."""

    data_path: tuple[str, ...]
    """Prefix of the .bin and .idx files that megatron/preprocess_data.py wrote; several are mixed."""
    valid_data_path: Annotated[str | None, HARMLESS] = None
    """Prefix of the validation data."""
    valid_samples: Annotated[int | None, HARMLESS, COUNT] = None
    """Validation samples to use, the same random ones each time. None: all."""
    tokenizer: str | None = None
    """Folder or name of the Hugging Face tokenizer that made the data."""
    vocab_file: str | None = None
    """vocab.txt that made the data, one WordPiece a line; instead of --tokenizer."""
    lower_case: bool = True
    """--vocab_file: BERT's uncased tokenizer; --no_lower_case is the cased one."""
    data_name: str = ""
    """Folder below .cache/bert_samples for the sample mappings, which are kept there from one start to the next."""
    data_n_epochs: Annotated[int | None, COUNT] = None
    """Passes over the documents, each with its own short samples, that make one epoch. None: 1."""
    data_n_samples: Annotated[int | None, COUNT] = None
    """Samples after which no further pass is added to an epoch. None: no limit."""
    data_impl: Literal["mmap", "lazy", "cached"] = "mmap"
    """Of the data files; mmap is the only one left."""
    data_skip_warmup: Annotated[bool, _WITHOUT_EFFECT] = False
    """For scripts of the ancestor, without effect: the data is never read ahead to warm it up."""
    data_n_workers: Annotated[int | None, HARMLESS, NOT_NEGATIVE, _WITHOUT_EFFECT] = None
    """For scripts of the ancestor, without effect: a thread makes batches faster than training uses them."""

    def check(self) -> None:
        check_conflict(self, "tokenizer", "vocab_file", "both name the tokenizer")
        if self.tokenizer is None and self.vocab_file is None:
            raise UserError("no tokenizer is named: give the one that made the data, by --vocab_file or --tokenizer.")
        if not self.lower_case and self.vocab_file is None:
            raise UserError("--no_lower_case is about --vocab_file; a --tokenizer knows its own case.")
        if self.data_impl != "mmap":
            raise UserError(f"--data_impl {self.data_impl} does not exist any more: files are memory-mapped.")

    def without_effect(self) -> list[str]:
        """Names of the flags in use that change nothing."""
        return given_flags(self, _WITHOUT_EFFECT)


@dataclass(frozen=True, kw_only=True)
class BertObjectiveArgs:
    """The training objective."""

    input_seq_len: Annotated[int, at_least(5)] = 128
    """Length of a sample, in tokens, [CLS] and [SEP] included."""
    mlm_prob: Annotated[float, PART] = 0.15
    """Fraction of tokens to predict: 80 % of them become [MASK], 10 % another token, 10 % stay."""
    short_seq_prob: Annotated[float, FRACTION] = 0.1
    """Fraction of samples that are shorter than --input_seq_len."""
    max_sentence_length: Annotated[int | None, COUNT] = None
    """Leave out documents with a longer sentence, in tokens (Megatron's rule: 512). None: the sentence is cut to the
    sample."""
    max_unread: Annotated[float, FRACTION] = 0.75
    """Part of the tokens that samples may have no room for, as where documents are not split in sentences, before the
    data is refused; 1 allows all. `lmtools inspect pretrain-bert` prints it."""
    use_nsp: bool = True
    """Also tell right pairs of sentences from wrong ones; --use_nsp 0 masks only."""
    nsp: Annotated[Literal["swap", "random"], needs("use_nsp")] = "swap"
    """A wrong pair: swap exchanges its sides (Megatron's), random takes the second from another document (BERT's)."""
    mlm_positions: MlmPositions = None
    """Tokens whose words are scored, only those with a label or all. None: those with a label, unless the model's head
    needs all."""
    whole_word: bool = True
    """Mask all pieces of a word; --no_whole_word masks pieces."""
    max_ngram: Annotated[int, COUNT] = 3
    """Most words in a row that are masked together."""

    def most_predictions(self) -> int:
        """Tokens that are predicted of one sample, at most."""
        return max(1, round(self.mlm_prob * self.input_seq_len))


@dataclass(frozen=True, kw_only=True)
class BertPretrainingArgs(PhaseArgs, ExperimentArgs, BertObjectiveArgs, MixtureArgs, BertDataArgs):
    """All arguments of run_bert_pretraining.py."""

    model_cls: str = "transformers:BertForPreTraining"
    use_generate_on_valid: Annotated[bool, _NO_TEXT] = False
    report: Annotated[bool, VALIDATION] = False

    def tokens_per_row(self) -> int:
        return self.input_seq_len

    def lacks_validation(self) -> bool:
        return self.valid_data_path is None
