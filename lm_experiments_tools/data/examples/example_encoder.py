"""Tokenize fine-tuning examples with a Hugging Face tokenizer, and count what is truncated.

transformers' warning for texts longer than `model_max_length` is silenced, because truncation is reported here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from lm_experiments_tools.data.text.records import RejectedRecords, records
from lm_experiments_tools.data.text.tokenizer import warn_of_unknown
from lm_experiments_tools.errors import UserError

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # documents tokenized by one call


class TokenCounts:
    """Counts the truncated and unknown tokens of texts, to report them in the log."""

    def __init__(self, tokenizer: Any, limit: int = 0) -> None:
        self.limit = limit
        self.texts = self.num_truncated = self.longest = self.lost = self.tokens_of_truncated = 0
        self.tokens = self.unknown = 0
        others = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.sep_token)
        # GPT-2's unknown token is its end of text
        self._unknown_id = None if tokenizer.unk_token in (None, *others) else tokenizer.unk_token_id

    def add(self, rows: Sequence[Sequence[int]], lengths: Sequence[tuple[int, int]] = ()) -> None:
        self.tokens += sum(map(len, rows))
        self.unknown += sum(row.count(self._unknown_id) for row in rows)
        self.texts += len(lengths)
        for before, after in lengths:
            self.longest = max(self.longest, before)
            if after < before:
                self.num_truncated += 1
                self.tokens_of_truncated += before
                self.lost += before - after

    def describe(self, what: str, flag: str) -> str:
        if not self.num_truncated:
            return f"no {what[:-1]} is longer than {flag} {self.limit} (the longest has {self.longest:,} tokens)"
        part, lost = self.num_truncated / self.texts, self.lost / self.tokens_of_truncated
        return (
            f"{self.num_truncated:,} of {self.texts:,} {what} ({part:.1%}) are longer than {flag} {self.limit} and "
            f"lost {lost:.0%} of their tokens (the longest has {self.longest:,})"
        )

    def warn_of_unknown(self, what: str) -> None:
        remedy = "is it the tokenizer of these weights and this language?"
        warn_of_unknown(self.unknown, self.tokens, what, remedy)


def tokenize_text(inputs: Sequence[str], tokenizer: Any, bad: RejectedRecords) -> np.ndarray:
    """Tokenize documents into one array int32[number of tokens], each followed by the end-of-text token.

    Raises UserError: there is no text.
    """
    end = end_id(tokenizer)
    tokens = [np.empty(0, np.int32)]
    documents, unknown = records(inputs, "text", bad), TokenCounts(tokenizer)
    while some := [document.value for document in islice(documents, _AT_ONCE)]:
        ids = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        tokens.append(np.fromiter(chain.from_iterable([*row, end] for row in ids), np.int32))
        unknown.add(ids)
    if bad.count > 1:
        logger.warning("%s", bad)
    unknown.warn_of_unknown(", ".join(inputs))
    if len(tokens) == 1:
        raise UserError(f"there is no text in {', '.join(inputs)} ({bad.count} bad lines).")
    return np.concatenate(tokens)


class ExampleEncoder:
    """Tokenizes sources and targets for fine-tuning, as the tokenizer itself does with `truncation=True`.

    Args:
        source_limit, target_limit: maximum tokens with special tokens; `target_limit` is None without targets.
        decoder: True if the target continues the source, so that no special tokens separate them.

    Raises:
        UserError: the tokenizer has no end-of-text token, or `source_limit` is too small.
    """

    def __init__(
        self, tokenizer: Any, source_limit: int, target_limit: int | None, *, decoder: bool = False, suffix: str = ""
    ) -> None:
        self.tokenizer, self.decoder = tokenizer, decoder
        self.sources = TokenCounts(tokenizer, source_limit)
        self.targets = TokenCounts(tokenizer, target_limit or 0)
        ends = added_end(tokenizer)
        suffix_ids = tokenizer(suffix, add_special_tokens=False, verbose=False)["input_ids"] if suffix else []
        self._cut = len(ends) if decoder or suffix_ids else 0  # tokens at the end of a source that are replaced ...
        self._put = suffix_ids + ([] if decoder else ends) if self._cut or suffix_ids else []  # ... by these
        added = tokenizer.num_special_tokens_to_add(pair=target_limit is None)
        if source_limit <= added + len(suffix_ids):
            raise UserError(f"a source needs more than {added + len(suffix_ids)} tokens: raise --input_seq_len.")
        end = [end_id(tokenizer)] if target_limit else []
        self._target_end = [] if not decoder and {*end} & {*added_end(tokenizer, "text_target")} else end

    def encode_sources(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> dict[str, list[list[int]]]:
        """Tokenize and truncate source texts.

        Returns:
            `input_ids` and, if the tokenizer returns them, `token_type_ids`: a list of ids per source.
        """
        drop = self._cut - len(self._put)
        inputs = {"text": texts} if pairs is None else {"text": texts, "text_pair": pairs}
        entries = self._call(inputs, self.sources, drop)
        for name, rows in entries.items() if self._cut or self._put else ():
            put = self._put if name == "input_ids" else [0] * len(self._put)
            entries[name] = [row[: len(row) - self._cut] + put for row in rows]
        return entries

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize and truncate target texts. The ids of each target end with the end-of-text token."""
        drop = -len(self._target_end)
        entries = self._call({"text_target": texts}, self.targets, drop, add_special_tokens=not self.decoder)
        return [row + self._target_end for row in entries["input_ids"]]

    def _call(
        self, inputs: Mapping[str, Sequence[str]], counts: TokenCounts, drop: int, **options: bool
    ) -> dict[str, list[list[int]]]:
        """The tokenizer's lists of ids of texts, where `drop` ids more than the limit are allowed."""
        options |= {"return_attention_mask": False, "verbose": False}
        entries, limit = dict(self.tokenizer(**inputs, **options)), counts.limit + drop
        before = [len(row) for row in entries["input_ids"]]
        if long := [number for number, length in enumerate(before) if length > limit]:
            some = {name: [texts[number] for number in long] for name, texts in inputs.items()}
            for name, rows in self.tokenizer(**some, **options, truncation=True, max_length=limit).items():
                for number, row in zip(long, rows, strict=True):
                    entries[name][number] = row
        rows = entries["input_ids"]
        counts.add(rows, [(length - drop, len(row) - drop) for length, row in zip(before, rows, strict=True)])
        return entries

    def num_tokens(self, source: str) -> int:
        """Return the number of tokens of a source without truncation."""
        return len(self.tokenizer(source, verbose=False)["input_ids"]) - self._cut + len(self._put)


def added_end(tokenizer: Any, side: str = "text") -> list[int]:
    """Return the ids that a tokenizer appends to every text, such as eos (T5) or sep (BERT); see `frame_of`."""
    return frame_of(tokenizer, side)[1]


def framing_ids(tokenizer: Any) -> set[int]:
    """Return the ids that no text contains: padding, begin, end, unknown, and what is added around a target."""
    named = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    return {token_id for ids in (named, *frame_of(tokenizer, "text_target")) for token_id in ids} - {None}


def frame_of(tokenizer: Any, side: str) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and after every text, such as eos or the code of a language.

    Args:
        side: "text" for sources, "text_target" for targets, which may be in another language.
    """
    text = tokenizer(**{side: "a"}, add_special_tokens=False, verbose=False)["input_ids"]
    whole = tokenizer(**{side: "a"}, verbose=False)["input_ids"]
    before = next((n for n in range(len(whole)) if whole[n : n + len(text)] == text), 0)
    return whole[:before], whole[before + len(text) :]


def end_id(tokenizer: Any) -> int:
    """Return a tokenizer's end-of-text id: that of its eos token, or of its sep token if it has no eos (BERT)."""
    for token_id in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token_id is not None:
            return token_id
    raise UserError("the tokenizer has neither an eos nor a sep token: set eos_token in its tokenizer_config.json.")


def pad_id(tokenizer: Any) -> int:
    """Return a tokenizer's padding id: that of its pad token, or else of its end-of-text token (GPT-2)."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_id(tokenizer)
