"""Arguments of run_bert_pretraining.py: Megatron's sentences or plain text, objective. Standard library only."""

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
from lm_experiments_tools.config.pretraining import (
    DistillationArgs,
    EpochArgs,
    FromPretrainedArgs,
    HoldOutArgs,
    MixtureArgs,
)
from lm_experiments_tools.config.training import VALIDATION, ExperimentArgs
from lm_experiments_tools.errors import UserError

SENTENCES = "sentences"  # the --packing of Megatron's samples
_WITHOUT_EFFECT = Ignored(lambda args: False, "")  # accepted for scripts of t5-experiments, and reported
_NO_TEXT = Ignored(lambda args: True, "is for models that write text")
_OF_PACKING = Ignored(lambda args: args.packing == SENTENCES, "needs --packing documents, none or stream")
_OF_DOCUMENTS = needs("packing", "documents", "none", reason="needs --packing documents or none")
_OF_SENTENCES = Ignored(lambda args: args.packing != SENTENCES, "is about Megatron's samples, not --packing {packing}")


@dataclass(frozen=True, kw_only=True)
class BertDataArgs:
    """Where sentences and tokenizer come from."""

    data_path: Annotated[tuple[str, ...], HARMLESS] = ()  # the data's fingerprint is compared
    """Prefix of the .bin and .idx files that megatron/preprocess_data.py wrote; several are mixed. With --packing also
    text (.jsonl, .txt, compressed or not, a folder), a Hugging Face dataset (name[:config][:split]), or a prefix of
    `lmtools tokenize`. Needed unless --validate_only is given."""
    valid_data_path: Annotated[str | None, HARMLESS] = None
    """Validation data, in any form --data_path takes."""
    valid_samples: Annotated[int | None, HARMLESS, COUNT] = None
    """Validation samples to use, the same random ones each time. None: 512, or all with --validate_only."""
    tokenizer: Annotated[str | None, HARMLESS] = None
    """Folder, file or name of the Hugging Face tokenizer that made the data."""
    vocab_file: Annotated[str | None, HARMLESS] = None
    """vocab.txt that made the data, one WordPiece a line; instead of --tokenizer."""
    lower_case: bool = True
    """--vocab_file: BERT's uncased tokenizer; --no_lower_case is the cased one."""
    text_key: Annotated[str, _OF_PACKING] = "text"
    """--packing: key of a .jsonl line that holds the text; meta.text: the key text of the object meta."""
    document_per_line: Annotated[bool, _OF_PACKING] = False
    """--packing: each line of a .txt file is a document. Default: documents are between blank lines."""
    max_bad_lines: Annotated[int, HARMLESS, NOT_NEGATIVE, _OF_PACKING] = 100
    """--packing: unreadable lines of text to set aside before the run refuses to go on."""
    data_name: Annotated[str, _OF_SENTENCES] = ""
    """Folder below .cache/bert_samples for the sample mappings, which are kept there from one start to the next."""
    data_n_epochs: Annotated[int | None, COUNT, _OF_SENTENCES] = None
    """Passes over the documents, each with its own short samples, that make one epoch. None: 1."""
    data_n_samples: Annotated[int | None, COUNT, _OF_SENTENCES] = None
    """Samples after which no further pass is added to an epoch. None: no limit."""
    data_impl: Literal["mmap", "lazy", "cached"] = "mmap"
    """Of the data files; mmap is the only one left."""
    data_skip_warmup: Annotated[bool, _WITHOUT_EFFECT, _OF_SENTENCES] = False
    """For scripts of the ancestor, without effect: the data is never read ahead to warm it up."""
    data_n_workers: Annotated[int | None, HARMLESS, NOT_NEGATIVE, _WITHOUT_EFFECT] = None
    """--packing: processes that tokenize text; None: one per core. Otherwise without effect, for scripts of the
    ancestor."""

    def check(self) -> None:
        if not self.data_path and not getattr(self, "validate_only", False):
            raise UserError("--data_path is missing: --help says what it takes.")
        check_conflict(self, "tokenizer", "vocab_file", "both name the tokenizer")
        if self.tokenizer is None and self.vocab_file is None and getattr(self, "from_pretrained", None) is None:
            raise UserError("no tokenizer is named: give the one that made the data, by --vocab_file or --tokenizer.")
        if not self.lower_case and self.vocab_file is None:
            raise UserError("--no_lower_case is about --vocab_file; a --tokenizer knows its own case.")
        if self.data_impl != "mmap":
            raise UserError(f"--data_impl {self.data_impl} does not exist any more: files are memory-mapped.")

    def without_effect(self) -> list[str]:
        """List the given flags that have no effect with this data."""
        return given_flags(self, _WITHOUT_EFFECT)


@dataclass(frozen=True, kw_only=True)
class BertObjectiveArgs:
    """The training objective."""

    packing: Literal["sentences", "documents", "none", "stream"] = SENTENCES
    """sentences: samples of Megatron's data. Of plain text, with masked tokens only: documents cut to --input_seq_len,
    between [CLS] and [SEP], packed so that none sees another (documents) or one a row (none); stream: blocks of a
    stream without special tokens."""
    min_document_length: Annotated[int, COUNT, _OF_DOCUMENTS] = 1
    """Leave out documents of fewer tokens."""
    input_seq_len: Annotated[int, at_least(5)] = 128
    """Length of a sample, in tokens, [CLS] and [SEP] included."""
    mlm_prob: Annotated[float, PART] = 0.15
    """Fraction of tokens to predict: 80 % of them become [MASK], 10 % another token, 10 % stay."""
    valid_mlm_prob: Annotated[float | None, HARMLESS, PART, _OF_PACKING, VALIDATION] = None
    """Fraction of tokens to predict in validation. None: --mlm_prob."""
    mask_replace: Annotated[tuple[float, ...], _OF_PACKING] = (0.8, 0.1, 0.1)
    """Parts of the tokens to predict that become [MASK], become another token, and stay; they sum to 1."""
    short_seq_prob: Annotated[float, FRACTION, _OF_SENTENCES] = 0.1
    """Fraction of samples that are shorter than --input_seq_len."""
    max_sentence_length: Annotated[int | None, COUNT, _OF_SENTENCES] = None
    """Leave out documents with a longer sentence, in tokens (Megatron's rule: 512). None: the sentence is cut to the
    sample."""
    max_unread: Annotated[float, FRACTION, _OF_SENTENCES] = 0.75
    """Part of the tokens that samples may have no room for, as where documents are not split in sentences, before the
    data is refused; 1 allows all. `lmtools inspect pretrain-bert` prints it."""
    use_nsp: bool = True
    """Also tell right pairs of sentences from wrong ones; --use_nsp 0, and by default with plain text, masks only."""
    nsp: Annotated[Literal["swap", "random"], needs("use_nsp")] = "swap"
    """A wrong pair: swap exchanges its sides (Megatron's), random takes the second from another document (BERT's)."""
    mlm_positions: MlmPositions = None
    """Tokens whose words are scored, only those with a label or all. None: those with a label, in our BERT
    and ModernBERT."""
    whole_word: bool = True
    """Mask all pieces of a word; --no_whole_word, and by default with plain text, masks pieces."""
    max_ngram: Annotated[int, COUNT, _OF_SENTENCES] = 3
    """Most words in a row that are masked together."""

    def check(self) -> None:
        parts = self.mask_replace
        if len(parts) != 3 or not all(part >= 0 for part in parts) or abs(sum(parts) - 1) > 1e-6:
            raise UserError(
                f"--mask_replace {' '.join(map(str, parts))} must be three parts that sum to 1: 0.8 0.1 0.1."
            )

    def most_predictions(self) -> int:
        """Maximum number of tokens to predict in a sample of Megatron's data."""
        return max(1, round(self.mlm_prob * self.input_seq_len))

    def highest_rate(self) -> float:
        """Upper bound of the fraction of tokens to predict. It is higher for whole-word masking."""
        rate = max(filter(None, (self.mlm_prob, self.valid_mlm_prob)))
        return min(1.0, rate * (1.5 if self.whole_word else 1.0))


@dataclass(frozen=True, kw_only=True)
class BertPretrainingArgs(
    PhaseArgs,
    ExperimentArgs,
    FromPretrainedArgs,
    BertObjectiveArgs,
    DistillationArgs,
    MixtureArgs,
    EpochArgs,
    HoldOutArgs,
    BertDataArgs,
):
    """All arguments of run_bert_pretraining.py."""

    model_cls: str = "transformers:BertForPreTraining"
    use_generate_on_valid: Annotated[bool, _NO_TEXT] = False
    report: Annotated[bool, VALIDATION] = False

    def tokens_per_row(self) -> int:
        return self.input_seq_len

    def lacks_validation(self) -> bool:
        return self.valid_data_path is None and self.valid_fraction is None
