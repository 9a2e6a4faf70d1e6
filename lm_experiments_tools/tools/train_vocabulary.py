"""Train a vocabulary on a sample of the text: SentencePiece for T5, or WordPiece for BERT.

SentencePiece, as T5: ids 0, 1, 2 are `<pad>`, `</s>`, `<unk>`, then unigram subwords, then sentinels with
`<extra_id_k>` = size - 1 - k. There is no bos token; nmt_nfkc normalization turns newlines into spaces; rare
characters are `<unk>`, without byte fallback. Scores are multiples of 1/1024: their sums are exact in float32, so
sentencepiece and transformers choose the same segmentation where two score the same.

WordPiece: a vocab.txt with one subword per line, beginning with `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]`, `[MASK]`.
"""

import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_experiments_tools.data.text.records import Record, RejectedRecords, locate, no_documents, read_shard
from lm_experiments_tools.data.text.sources import Shard, plan_shards
from lm_experiments_tools.data.text.tokenizer import DEFAULT_EXTRA_IDS, Tokenizer, sentinel_piece, warn_of_unknown
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import write_atomic

if TYPE_CHECKING:
    from tokenizers import BertWordPieceTokenizer

_USER_DEFINED = 4  # ModelProto.SentencePiece.Type
_LONGEST_LINE = 4000  # bytes: sentencepiece skips longer ones (its default bound is 4192)
_SCORE_STEPS = 1024  # per unit
_NUM_SPECIAL = 3
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SHARD_BYTES = 1 << 18  # of text, the sample is made of such
_MAX_SHARDS = 4096  # to choose from; those of more than 1 GB of text are larger, and their beginnings are sampled
_MIN_FREQUENCY = 2  # of a character, and of a pair of pieces to be merged
_COUNTED_BYTES = 1_000_000  # of the sample, in which unknown tokens are counted
_THREADS = 1  # a constant, because the subwords depend on it; more are not faster


@dataclass(frozen=True)
class VocabSummary:
    """Report of a vocabulary training.

    Attributes:
        unknown: share of unknown tokens in the sample, 0 to 1.
    """

    path: Path
    size: int
    sample_bytes: int
    fingerprint: str
    rejected: RejectedRecords
    unknown: float


def train_vocab(
    inputs: Sequence[str],
    size: int,
    output_model: str | os.PathLike,
    *,
    text_key: str = "text",
    extra_ids: int = DEFAULT_EXTRA_IDS,
    sample_bytes: int = 6_000_000,
    character_coverage: float = 0.9995,
) -> VocabSummary:
    """Train a SentencePiece unigram vocabulary for T5, with exactly `size` ids. The same inputs give the same file.

    Parts of the inputs are read in a fixed random order up to `sample_bytes` of text. Bad lines are skipped.

    Args:
        extra_ids: number of sentinels, which mark the spans in span corruption.
        character_coverage: fraction of the text's characters that the vocabulary must contain.

    Raises:
        UserError: there are no documents, or `size` is too small, or too large for this much text.
    """
    num_pieces = size - extra_ids
    if num_pieces < _NUM_SPECIAL + 1:
        raise UserError(f"a vocabulary of {size} ids has only {extra_ids} sentinels; give a larger size")
    sampler = _Sampler(inputs, text_key, sample_bytes)
    lines = list(sampler)
    content = _train(lines, sampler.num_bytes, num_pieces, extra_ids, character_coverage)
    output_model = Path(output_model)
    output_model.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output_model, _with_sentinels(content, extra_ids))
    tokenizer = Tokenizer.load(output_model, extra_ids)
    return _summary(tokenizer, sampler, lines, output_model, "a larger --character_coverage")


def train_wordpiece(
    inputs: Sequence[str],
    size: int,
    output: str | os.PathLike,
    *,
    text_key: str = "text",
    lowercase: bool = True,
    sample_bytes: int = 6_000_000,
) -> VocabSummary:
    """Train a WordPiece vocab.txt of exactly `size` subwords for BERT. The same inputs give the same file.

    Args:
        lowercase: convert the text to lower case and remove accents, for uncased models.

    Raises:
        UserError: see `train_vocab`.
    """
    from tokenizers import BertWordPieceTokenizer

    sampler = _Sampler(inputs, text_key, sample_bytes)
    lines = list(sampler)
    tokenizer = BertWordPieceTokenizer(lowercase=lowercase)
    alphabet, continuing = _wordpiece_characters(tokenizer, lines, size - len(WORDPIECE_SPECIAL))
    tokenizer.train_from_iterator(
        lines,
        vocab_size=size,
        min_frequency=_MIN_FREQUENCY,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        # Named here because the trainer would number them in the order of a hash table, another at every run, and ties
        # between pairs are decided by number.
        special_tokens=[*WORDPIECE_SPECIAL, *(f"##{character}" for character in continuing)],
        show_progress=False,
    )
    vocab = tokenizer.get_vocab()
    if len(vocab) != size:
        bound = "at most" if len(vocab) < size else "at least"
        raise UserError(
            f"{sampler.num_bytes} bytes of text give {len(vocab)} subwords: give --size {bound} {len(vocab)}"
        )
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{piece}\n" for piece in sorted(vocab, key=vocab.__getitem__)).encode()
    write_atomic(output, content)
    remedy = "a larger --size; text without spaces between words, such as DNA, needs --type sentencepiece"
    return _summary(Tokenizer.load(output, lowercase=lowercase), sampler, lines, output, remedy)


def _summary(tokenizer: Tokenizer, sampler: "_Sampler", lines: list[str], path: Path, remedy: str) -> VocabSummary:
    """The report of a training, with the share of unknown tokens in lines from all over the sample."""
    number = len(lines) * _COUNTED_BYTES // max(sum(map(len, lines)), _COUNTED_BYTES)
    ids, _ = tokenizer.encode_arrays(random.Random(0).sample(lines, max(number, 1)))
    unknown = warn_of_unknown(np.count_nonzero(ids == tokenizer.unk_id), len(ids), "the sample", f"give {remedy}")
    return VocabSummary(path, tokenizer.size, sampler.num_bytes, tokenizer.fingerprint, sampler.rejected, unknown)


def _wordpiece_characters(
    tokenizer: "BertWordPieceTokenizer", lines: list[str], room: int
) -> tuple[list[str], list[str]]:
    """(the most frequent characters, those of them that occur inside words), each sorted; `room` is of subwords."""
    words = Counter(word for line in lines for word in tokenizer.normalizer.normalize_str(line).split())
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    for word, count in words.items():
        for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word):
            inside.update(part[1:])
            for character in part:
                counts[character] += count
    frequent = []
    for character in sorted(counts, key=lambda character: (-counts[character], character)):
        cost = 2 if character in inside else 1
        if counts[character] >= _MIN_FREQUENCY and cost <= room:
            frequent.append(character)
            room -= cost
    return sorted(frequent), sorted(inside.intersection(frequent))


class _Sampler:
    """Lines of text, at most `limit` bytes: from all over plain files, from the beginning of compressed ones."""

    def __init__(self, inputs: Sequence[str], text_key: str, limit: int):
        self._inputs, self._text_key, self._limit = inputs, text_key, limit
        self.num_bytes, self.rejected = 0, RejectedRecords(sys.maxsize)

    def __iter__(self) -> Iterator[str]:
        most_shards = max(_MAX_SHARDS, 2 * self._limit // _SHARD_BYTES)
        shards = plan_shards(self._inputs, _SHARD_BYTES, most_shards, document_per_line=True)
        random.Random(0).shuffle(shards)
        # so that a large compressed file is not all of the sample
        most = max(self._limit // len(shards), _SHARD_BYTES)
        for shard in shards:
            budget = min(most, self._limit - self.num_bytes)
            if budget <= 0:
                break
            for line in self._lines_of(shard):
                self.num_bytes += len(line.encode())
                yield line
                budget -= len(line.encode())
                if budget <= 0:
                    break
        if not self.num_bytes:
            raise no_documents(self._inputs, self.rejected)

    def _lines_of(self, shard: Shard) -> Iterator[str]:
        for item in read_shard(shard, self._text_key):
            if isinstance(item, Record):
                yield from _short_lines(item.value)
                continue
            # only the first one is reported
            self.rejected.reject(item if self.rejected.count else locate(shard, item))


def _short_lines(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        start = 0
        # A character has one to four bytes, so a slice tells whether the rest of a line is too long.
        while len(line[start : start + _LONGEST_LINE + 1].encode()) > _LONGEST_LINE:
            cut = line.rfind(" ", start + 1, start + _LONGEST_LINE // 4)
            cut = cut if cut > 0 else start + _LONGEST_LINE // 4
            yield line[start:cut]
            start = cut
        if line[start:].strip():
            yield line[start:]


def _train(lines: list[str], num_bytes: int, num_pieces: int, extra_ids: int, character_coverage: float) -> bytes:
    import io

    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=num_pieces,
            character_coverage=character_coverage,
            normalization_rule_name="nmt_nfkc",
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].rpartition("] ")[2]
        if limit := re.search(r"(<=|required_chars. \d+ vs) (\d+)", reason):  # of subwords; --size has sentinels too
            reason = f"give --size at {'most' if limit[1] == '<=' else 'least'} {int(limit[2]) + extra_ids}"
        raise UserError(
            f"{num_pieces} subwords and {extra_ids} sentinels cannot be trained on {num_bytes} bytes: {reason}"
        ) from None
    return model.getvalue()


def _with_sentinels(content: bytes, extra_ids: int) -> bytes:
    """The trained model with rounded scores, and `<extra_id_{n-1}>` ... `<extra_id_0>` after its last piece."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    for piece in model.pieces:
        piece.score = round(piece.score * _SCORE_STEPS) / _SCORE_STEPS
    for k in reversed(range(extra_ids)):
        model.pieces.add(piece=sentinel_piece(k), score=0.0, type=_USER_DEFINED)
    model.trainer_spec.vocab_size = len(model.pieces)
    model.trainer_spec.user_defined_symbols.extend(sentinel_piece(k) for k in range(extra_ids))
    return model.SerializeToString(deterministic=True)
