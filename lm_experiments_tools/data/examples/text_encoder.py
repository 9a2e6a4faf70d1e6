"""Texts of examples -> ids, by a Hugging Face tokenizer, with what is cut off counted.

transformers warns once of a text longer than `model_max_length`, "will result in indexing errors": for T5 that number
is 512, the length it was pre-trained on, but its positions are relative and there is nothing to index. What is too
long here is longer than --input_seq_len and is cut, so the warning is silenced (`verbose=False`) and what is lost is
reported in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_experiments_tools.errors import UserError

MANY_UNKNOWN = 0.05  # of the tokens; SciTLDR has 0.009 in an English vocabulary of 32,000 pieces, Chinese 0.33


@dataclass
class UnknownTokens:
    """How many tokens stand for what a tokenizer does not know.

    Attributes:
        mark: the token, such as "<unk>"; None where none is of this meaning alone (GPT-2's is its end of text).
        token_id: of `mark`.
        tokens, unknown: in total, and those that are the mark.
    """

    mark: str | None
    token_id: int | None = None
    tokens: int = 0
    unknown: int = 0

    @classmethod
    def of(cls, tokenizer: Any) -> UnknownTokens:
        """A count that begins, of what this tokenizer does not know."""
        others = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.sep_token)
        mark = tokenizer.unk_token
        return cls(None) if mark is None or mark in others else cls(mark, tokenizer.unk_token_id)

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        """Ids of some texts."""
        if self.mark is not None:
            self.tokens += sum(map(len, rows))
            self.unknown += sum(row.count(self.token_id) for row in rows)

    @property
    def are_many(self) -> bool:
        """More than one in twenty, where vocabulary and text hardly belong together."""
        return self.unknown > MANY_UNKNOWN * self.tokens

    def describe(self, what: str) -> str:
        """A clause of the report; `what` has the tokens: "sources" or "targets". Empty where all are known."""
        if not self.unknown:
            return ""
        advice = "; does the tokenizer belong to these weights, and know this language?" if self.are_many else ""
        return f"{self.unknown / self.tokens:.2%} of the tokens of {what} are {self.mark}, unknown{advice}"


@dataclass
class Truncation:
    """How much of some texts did not fit.

    Attributes:
        limit: tokens that fit.
        texts, long: texts in total, and those that did not fit.
        tokens, lost: tokens of those that did not fit, and how many of these were cut off.
        longest: tokens of the longest text.
        unknown: share of the tokens that are kept.
    """

    limit: int
    texts: int = 0
    long: int = 0
    tokens: int = 0
    lost: int = 0
    longest: int = 0
    unknown: UnknownTokens = field(default_factory=lambda: UnknownTokens(None))

    def add(self, before: int, after: int) -> None:
        """One text, which had `before` tokens and keeps `after`."""
        self.texts += 1
        self.longest = max(self.longest, before)
        if after < before:
            self.long += 1
            self.tokens += before
            self.lost += before - after

    def describe(self, what: str, flag: str) -> str:
        """Clauses of the report: `what` are "sources" or "targets"."""
        unknown = self.unknown.describe(what)
        return self._describe_lengths(what, flag) + (f", {unknown}" if unknown else "")

    def _describe_lengths(self, what: str, flag: str) -> str:
        if not self.long:
            return f"no {what[:-1]} is longer than {flag} {self.limit} (the longest has {self.longest:,} tokens)"
        return (
            f"{self.long:,} of {self.texts:,} {what} ({self.long / self.texts:.1%}) are longer than {flag} "
            f"{self.limit} and lost {self.lost / self.tokens:.0%} of their tokens (the longest has {self.longest:,})"
        )

    def loses(self) -> bool:
        """True if the model reads notably less than is there."""
        return self.long > 0 or self.unknown.are_many


class TextEncoder:
    """Sources and targets as ids, as the tokenizer's own call with `truncation=True` gives them.

    Args:
        tokenizer: a Hugging Face tokenizer.
        source_limit, target_limit: most tokens, those that the tokenizer adds included; without targets None.
        decoder: sources are what a target continues, so nothing that the tokenizer adds stands between them.
        suffix: text after every source, which is cut before it; tokenized by itself.

    Raises:
        UserError: targets are asked for and the tokenizer has no token that ends a text; or sources have no room
            beside the tokens that it adds.
    """

    def __init__(
        self, tokenizer: Any, source_limit: int, target_limit: int | None, *, decoder: bool = False, suffix: str = ""
    ) -> None:
        self.tokenizer, self.decoder = tokenizer, decoder
        self.sources = Truncation(source_limit, unknown=UnknownTokens.of(tokenizer))
        self.targets = Truncation(target_limit or 0, unknown=UnknownTokens.of(tokenizer))
        ends = added_end(tokenizer)
        own = tokenizer(suffix, add_special_tokens=False, verbose=False)["input_ids"] if suffix else []
        self._cut = len(ends) if decoder or own else 0  # tokens at the end of a source in whose place ...
        self._put = own + ([] if decoder else ends) if self._cut or own else []  # ... these stand
        added = tokenizer.num_special_tokens_to_add(pair=target_limit is None)
        if source_limit <= added + len(own):
            suffixed = f" after {len(own)} of --suffix" if own else ""
            raise UserError(
                f"a source may have {source_limit} tokens, and the tokenizer adds up to {added} to it{suffixed}: "
                "raise --input_seq_len."
            )
        end = [end_id(tokenizer)] if target_limit else []
        self._target_end = [] if ends[-1:] == end and not decoder else end

    def encode_sources(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> dict[str, list[list[int]]]:
        """Entries of the tokenizer without the mask: `input_ids`, and `token_type_ids` where it gives them."""
        drop = self._cut - len(self._put)
        entries = self._call(texts, pairs, self.sources.limit + drop, self.sources, drop=drop)
        for name, rows in entries.items() if self._cut or self._put else ():
            put = self._put if name == "input_ids" else [0] * len(self._put)
            entries[name] = [row[: len(row) - self._cut] + put for row in rows]
        return entries

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids that end in the token that ends a text."""
        added = len(self._target_end)
        options = {"add_special_tokens": not self.decoder}
        rows = self._call(texts, None, self.targets.limit - added, self.targets, drop=-added, target=True, **options)
        return [row + self._target_end for row in rows["input_ids"]]

    def _call(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        limit: int,
        count: Truncation,
        *,
        drop: int,
        target: bool = False,
        **options: bool,
    ) -> dict[str, list[list[int]]]:
        """The tokenizer's entries for texts; those longer than `limit` are encoded again, cut by the tokenizer itself.

        Args:
            drop: tokens that are taken off afterwards, negative where they are added; for the count.
        """
        names = ("text_target", "text_pair_target") if target else ("text", "text_pair")
        common = {"return_attention_mask": False, "verbose": False, **options}

        def call(numbers: Sequence[int], **more: Any) -> dict[str, list[list[int]]]:
            some = {names[0]: [texts[n] for n in numbers]}
            if pairs is not None:
                some[names[1]] = [pairs[n] for n in numbers]
            return dict(self.tokenizer(**some, **common, **more))

        entries = call(range(len(texts)))
        before = [len(row) for row in entries["input_ids"]]
        long = [number for number, length in enumerate(before) if length > limit]
        if long:
            cut = call(long, truncation=True, max_length=limit)
            for name, rows in cut.items():
                for number, row in zip(long, rows, strict=True):
                    entries[name][number] = row
        for length, row in zip(before, entries["input_ids"], strict=True):
            count.add(length - drop, len(row) - drop)
        count.unknown.add(entries["input_ids"])
        return entries

    def num_tokens(self, source: str) -> int:
        """Of a source that is not cut."""
        return len(self.tokenizer(source, verbose=False)["input_ids"]) - self._cut + len(self._put)

    def check_prefix(self, prefix: str, what: str) -> None:
        """Refuse a prefix that leaves no room for a source."""
        length = self.num_tokens(prefix)
        if length >= self.sources.limit:
            raise UserError(
                f"{what} is {length} tokens long and leaves no room for a source within {self.sources.limit} tokens: "
                "shorten it, or raise --input_seq_len."
            )


def added_end(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer appends to a text, such as eos (T5) or sep (BERT)."""
    text = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    whole = tokenizer("a", verbose=False)["input_ids"]
    before = next((n for n in range(len(whole)) if whole[n : n + len(text)] == text), 0)
    return whole[before + len(text) :]


def end_id(tokenizer: Any) -> int:
    """The token that ends a text: eos, else sep (BERT)."""
    for token_id in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token_id is not None:
            return token_id
    raise UserError(
        "the tokenizer has neither an eos nor a sep token to end a text with: set eos_token in its "
        "tokenizer_config.json."
    )


def pad_id(tokenizer: Any) -> int:
    """Id that fills short rows: pad, else the end of a text (GPT-2), which the mask hides all the same."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_id(tokenizer)
