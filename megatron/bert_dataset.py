"""BERT pre-training samples from a Megatron token file of sentences.

Example: one document with the sentences [[10, 11], [12], [20, 21, 22]], max_seq_length 10, [CLS] 101, [SEP] 102,
[MASK] 103, [PAD] 0. Tokens 11, 21 and 22 continue a word. All sentences fit into one sample. It is split after the
second sentence and not swapped, and token 12 is masked (one prediction: 15 % of 9 tokens):

    input_ids            [101, 10, 11, 103, 102, 20, 21, 22, 102, 0]
    token_type_ids       [  0,  0,  0,   0,   0,  1,  1,  1,   1, 0]
    attention_mask       [  1,  1,  1,   1,   1,  1,  1,  1,   1, 0]
    labels               [-100, -100, -100, 12, -100, -100, -100, -100, -100, -100]
    next_sentence_label  0

In a swapped pair (label 1), 20 21 22 comes first. Comparison with Megatron and BERT:

    packing sentences    Megatron's, determined by the seed (sample_mapping.py). Splits, swaps, truncation and masks
                         are drawn anew in each epoch, not once in advance.
    nsp "random"         Half of the pairs get a B from another document, as in BERT. BERT first draws a document;
                         here all sentences of other documents are equally likely.
    too long pairs       As in Megatron, the longer side (B, if equal) loses its first or last token at random.
    binary_head False    One segment of max_seq_length - 2 tokens, one more than Megatron's.
    predictions          BERT's max(1, round(masked_lm_prob * tokens)), with [CLS] and [SEP] counted.
    masking              Megatron's (masking.py), but words never continue over a separator. It is no `Objective`, as
                         it depends on the sentences of a sample and not on one row of tokens.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Literal, NamedTuple

import numpy as np

from lm_experiments_tools.data.objectives.token_rows import CHECKED_AT_START, check_ids
from lm_experiments_tools.data.order import draw_integers, stream_key
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256
from lm_experiments_tools.labels import IGNORED_LABEL
from megatron.masking import choose_masked, ngram_probabilities, replace_masked, word_starts
from megatron.sample_mapping import MappingSettings, load_mapping, search_sorted
from megatron.tokenizers import check_tokenizer

logger = logging.getLogger(__name__)

_VERSION = 1  # of the mapping (seed, sample) -> example; part of the fingerprint
_UNREAD_WARNING = 0.05  # of the tokens without room in a sample: every text has a few long or lone sentences
_BLOCK = 64  # rows made at once: few enough for the caches, enough to spread the cost of numpy's calls
_32 = np.uint64(32)


class _Segments(NamedTuple):
    """Text of samples: token ranges of A and of B (empty without one) in the file, int64[n]; 1 where B is wrong."""

    a_start: np.ndarray
    a_length: np.ndarray
    b_start: np.ndarray
    b_length: np.ndarray
    label: np.ndarray


def truncated_lengths(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shorten sentence pairs to a maximum total length, and return the new lengths of both sides.

    Tokens are removed one by one from the longer side, or from side B if both are equally long.

    Args:
        a, b: int64[n], lengths of the two sides of n pairs.
        total: int64[n], maximum of a + b.
    """
    over = a + b > total
    short_a = np.minimum(a, np.maximum(total - b, (total + 1) // 2))
    return np.where(over, short_a, a), np.where(over, total - short_a, b)


class BertDataset:
    """BERT pre-training samples from a token file of sentences: masked text, by default in pairs of segments.

    A pair has a label for next-sentence prediction. Sample g is a row of epoch e = g // len(dataset). A permutation
    determined by (seed, e) selects the row, and random choices are determined by (seed, e, row). A sample is thus a
    function of (seed, g).

    Args:
        tokens: token file whose sequences are sentences (documents are enough if `binary_head` is False).
        tokenizer: the tokenizer that `tokens` were made with.
        max_seq_length: length of a sample, with special tokens.
        masked_lm_prob: fraction of the tokens to predict.
        short_seq_prob: probability of a shorter sample.
        binary_head: True for pairs with a `next_sentence_label`, False for single segments without it.
        nsp: how a wrong pair is made: "swap" exchanges its sides A and B, "random" takes B from another document.
        num_epochs, max_num_samples: how often the documents are read in one epoch of the dataset, each time with other
            short samples: `num_epochs` times, or until there are `max_num_samples`. If both are None, once.
        mask_label_id: label of tokens that are not predicted.
        whole_word: True to mask whole words, False to mask subwords independently.
        max_ngram: longest masked span, in words; see `ngram_probabilities`.
        max_sentence_length: documents with a longer sentence are left out (Megatron's 512). None keeps them, and the
            sentence is truncated to the sample.
        max_unread: maximum fraction of the tokens that fit in no sample; a larger fraction is an error.
        seed: determines packing, order and noise.
        cache_dir: folder for the cached list of samples (see sample_mapping.py); None for the folder of the data.

    Raises:
        UserError: the settings are out of range, or the data are empty, were made with another tokenizer, have no
            pairs of sentences, or mostly fit in no sample.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        tokenizer: Tokenizer,
        *,
        max_seq_length: int,
        masked_lm_prob: float = 0.15,
        short_seq_prob: float = 0.1,
        binary_head: bool = True,
        nsp: Literal["swap", "random"] = "swap",
        num_epochs: int | None = None,
        max_num_samples: int | None = None,
        mask_label_id: int = IGNORED_LABEL,
        whole_word: bool = True,
        max_ngram: int = 3,
        max_sentence_length: int | None = None,
        max_unread: float = 0.75,
        seed: int = 0,
        cache_dir: str | os.PathLike | None = None,
    ) -> None:
        self.tokens, self.tokenizer, self.seed = tokens, tokenizer, seed
        self.max_seq_length, self.masked_lm_prob = max_seq_length, masked_lm_prob
        self.binary_head, self.nsp, self.mask_label_id, self.whole_word = binary_head, nsp, mask_label_id, whole_word
        is_valid = max_seq_length >= 5 and 0 < masked_lm_prob < 1 and 0 <= short_seq_prob <= 1
        if not is_valid or any(n is not None and n < 1 for n in (max_ngram, num_epochs, max_num_samples)):
            raise UserError("max_seq_length is at least 5, probabilities are between 0 and 1, counts are positive.")
        self._check_data()
        self.ngram_probabilities = ngram_probabilities(max_ngram)
        passes = 1 if num_epochs is None and max_num_samples is None else num_epochs or np.iinfo(np.int32).max
        self.settings = MappingSettings(
            max_length=max_seq_length - 2 - binary_head,
            min_sentences=1 + binary_head,
            short_seq_prob=short_seq_prob,
            max_sentence_length=max_sentence_length,
            seed=seed,
            num_epochs=passes,
            max_num_samples=max_num_samples,
        )
        self.mapping = load_mapping(tokens, self.settings, cache_dir)
        self._check_mapping(max_unread)
        special = [*tokenizer.special_ids, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.pad_id]
        self._is_text = np.ones(tokenizer.size, bool)
        self._is_text[special] = False
        self._starts_word = tokenizer.starts_word if whole_word else np.ones(tokenizer.size, bool)
        self._keys = {purpose: stream_key(seed, f"bert {purpose}") for purpose in ("pair", "cut", "mask", "replace")}

    def _check_data(self) -> None:
        tokens, prefix = self.tokens, self.tokens.prefix
        if tokens.num_tokens == 0:
            raise UserError(f"{prefix} has no tokens: check that preprocessing found text.")
        check_tokenizer(tokens, self.tokenizer)
        check_ids(np.asarray(tokens.tokens[:CHECKED_AT_START]), self.tokenizer.size)
        if self.binary_head and all(np.diff(bounds).max() < 2 for bounds in tokens.document_bounds()):
            raise UserError(
                f"{prefix} has only documents of one sequence, so no sentence pairs: preprocess the text with "
                "--split-sentences, or set --use_nsp 0."
            )
        if self.binary_head and self.nsp == "random":
            with_text = sum(np.count_nonzero(np.diff(bounds)) for bounds in tokens.document_bounds())
            if with_text < 2:
                raise UserError(f"{prefix} holds one document, but nsp random takes sentences of another: use swap.")

    def _check_mapping(self, max_unread: float) -> None:
        counts, prefix = self.mapping.counts, self.tokens.prefix
        if len(self.mapping.rows) == 0:
            raise UserError(f"{prefix} gives no sample: {counts.describe()}; {self._unread_remedy()}.")
        logger.info("%s: %d samples; %s", prefix, len(self), counts.describe())
        unread = f"{prefix}: {counts.unread:.1%} of the tokens fit in no sample of {self.max_seq_length}"
        if counts.unread > max_unread:
            raise UserError(f"{unread}; {self._unread_remedy()}, or allow it with --max_unread 1.")
        if counts.unread > _UNREAD_WARNING:
            logger.warning("%s; %s", unread, self._unread_remedy())

    def _unread_remedy(self) -> str:
        """Remedy for tokens that are not read, by what most of them are."""
        counts, longest = self.mapping.counts, self.settings.max_sentence_length
        if self.tokens.meta.get("level") == "document":
            return "it was made without --split-sentences: preprocess the text again with it"
        if counts.long_sentence_tokens > counts.few_sentences_tokens + counts.overlong_tokens:
            return f"raise --max_sentence_length {longest} (none keeps all documents)"
        if counts.few_sentences_tokens > counts.overlong_tokens:
            return "give longer documents, or leave out sentence pairs (--use_nsp 0), which need two sentences of one"
        return f"raise --input_seq_len {self.max_seq_length}"

    def __len__(self) -> int:
        """Rows in an epoch, the same in each."""
        return len(self.mapping.rows)

    def describe(self) -> str:
        """Describe the objective and the size of the data, for the log."""
        pairs = {"swap": "B before A", "random": "B from another document"}[self.nsp]
        segments = f"sentence pairs, half of them wrong ({pairs})" if self.binary_head else "single segments"
        return (
            f"BERT, {segments}, of {self.max_seq_length} tokens, {self.masked_lm_prob:.0%} masked; "
            f"{len(self):,} samples of {self.tokens.num_tokens:,} training tokens"
        )

    @property
    def fingerprint(self) -> str:
        """sha256 over data, tokenizer and settings; equal fingerprints mean equal samples."""
        parts = {
            "version": _VERSION,
            "tokens": self.tokens.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "mapping": asdict(self.settings),
            "pairs": [self.binary_head, self.nsp],
            "masking": [self.masked_lm_prob, self.whole_word, *self.ngram_probabilities.tolist()],
            "mask_label_id": self.mask_label_id,
        }
        return json_sha256(parts)

    @property
    def order(self) -> str:
        """sha256 over everything that determines the text of a sample before tokens are masked."""
        parts = [_VERSION, self.tokens.fingerprint, asdict(self.settings), self.binary_head, self.nsp]
        return json_sha256(parts)

    def batch(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Make the BERT samples of rows int64[n] in epochs int64[n].

        Returns:
            `input_ids`, `token_type_ids`, `attention_mask` and `labels` int64[n, max_seq_length]; with `binary_head`
            also `next_sentence_label` int64[n], 1 for a wrong pair.
        """
        shape = (len(rows), self.max_seq_length)
        names = ("input_ids", "token_type_ids", "attention_mask", "labels")
        batch = {name: np.empty(shape, np.int64) for name in names}
        batch["next_sentence_label"] = np.empty(len(rows), np.int64)
        for begin in range(0, len(rows), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            self._fill({name: values[block] for name, values in batch.items()}, epochs[block], rows[block])
        if not self.binary_head:
            del batch["next_sentence_label"]
        return batch

    def _fill(self, batch: dict[str, np.ndarray], epochs: np.ndarray, rows: np.ndarray) -> None:
        """Write the examples of (epoch, row) into a block of the batch."""
        segments = self._segments(epochs, rows)
        ids = self._read(segments)
        end_a = segments.a_length[:, None] + 2
        end_b = end_a + np.where(segments.b_length > 0, segments.b_length + 1, 0)[:, None]
        column = np.arange(self.max_seq_length)
        batch["attention_mask"][:] = column < end_b
        batch["token_type_ids"][:] = batch["attention_mask"]
        batch["token_type_ids"][column < end_a] = 0
        batch["next_sentence_label"][:] = segments.label

        maskable = self._is_text[ids]
        starts = word_starts(ids, maskable, self._starts_word)
        num_predictions = np.maximum(1, np.rint(self.masked_lm_prob * end_b[:, 0]).astype(np.int64))
        most_words = int(starts.sum(axis=1).max())
        drawn = draw_integers(self._keys["mask"], epochs, rows, most_words)
        masked = choose_masked(maskable, starts, num_predictions, drawn, self.ngram_probabilities)
        batch["labels"][:] = np.where(masked, ids, self.mask_label_id)
        drawn = draw_integers(self._keys["replace"], epochs, rows, int(num_predictions.max()))
        batch["input_ids"][:] = replace_masked(ids, masked, drawn, self.tokenizer.mask_id, self.tokenizer.size)

    def _segments(self, epochs: np.ndarray, rows: np.ndarray) -> _Segments:
        first, end, target = self.mapping.rows[rows].astype(np.int64).T
        drawn = draw_integers(self._keys["pair"], epochs, rows, 4)
        if self.binary_head:
            split = first + 1 + (drawn[0] * (end - first - 1).astype(np.uint64) >> _32).astype(np.int64)
            wrong = drawn[1] < np.uint64(1 << 31)
        else:
            split, wrong = end, np.zeros(len(rows), bool)
        first_token, split_token, end_token = (self.tokens.offsets(sentence) for sentence in (first, split, end))
        starts, stops = np.stack([first_token, split_token]), np.stack([split_token, end_token])
        if self.nsp == "swap":
            starts, stops = np.where(wrong, starts[::-1], starts), np.where(wrong, stops[::-1], stops)
        elif wrong.any():
            room = np.maximum(target - (split_token - first_token), 0)[wrong]
            starts[1, wrong], stops[1, wrong] = self._elsewhere(first[wrong], room, drawn[2:, wrong])
        a, b = stops[0] - starts[0], stops[1] - starts[1]
        a_length, b_length = truncated_lengths(a, b, target)
        cut_a, cut_b = self._cuts(epochs, rows, np.stack([a - a_length, b - b_length]))
        return _Segments(starts[0] + cut_a, a_length, starts[1] + cut_b, b_length, wrong.astype(np.int64))

    def _elsewhere(self, sentence: np.ndarray, room: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ranges that start at a random sentence of another document and fill `room`, or end with it."""
        documents, num_sentences = self.tokens.document_indices, len(self.tokens)
        own = search_sorted(documents, sentence, side="right")
        others = num_sentences - (documents[own] - documents[own - 1])
        offset = (drawn[0] << _32 | drawn[1]) % others.astype(np.uint64)
        first = (documents[own] + offset.astype(np.int64)) % num_sentences
        last = documents[search_sorted(documents, first, side="right")]
        start = self.tokens.offsets(first)
        end = search_sorted(self.tokens.sequence_pointers, (start + room) * self.tokens.dtype.itemsize)
        return start, self.tokens.offsets(np.clip(end, first + 1, last))

    def _cuts(self, epochs: np.ndarray, rows: np.ndarray, removed: np.ndarray) -> np.ndarray:
        """How many of `removed` int64[2, n] tokens go from the front, by a coin each: one bit of a random integer."""
        num_drawn = -(-int(removed.max()) // 32)
        drawn = draw_integers(self._keys["cut"], epochs, rows, 2 * num_drawn).reshape(num_drawn, 2, len(rows))
        bits = np.clip(removed - 32 * np.arange(num_drawn)[:, None, None], 0, 32).astype(np.uint64)
        return np.bitwise_count(drawn & ((np.uint64(1) << bits) - np.uint64(1))).sum(axis=0, dtype=np.int64)

    def _read(self, segments: _Segments) -> np.ndarray:
        """Rows [CLS] A [SEP] B [SEP], padded: int64[n, max_seq_length]."""
        tokenizer, tokens = self.tokenizer, np.asarray(self.tokens.tokens)
        ids = np.full((len(segments.label), self.max_seq_length), tokenizer.pad_id, np.int64)
        ids[:, 0] = tokenizer.cls_id
        for row, a_start, a_length, b_start, b_length in zip(ids, *(x.tolist() for x in segments[:4]), strict=True):
            end = a_length + 1
            row[1:end] = tokens[a_start : a_start + a_length]
            row[end] = tokenizer.sep_id
            if b_length:
                row[end + 1 : end + 1 + b_length] = tokens[b_start : b_start + b_length]
                row[end + 1 + b_length] = tokenizer.sep_id
        check_ids(ids, self.tokenizer.size)
        return ids
