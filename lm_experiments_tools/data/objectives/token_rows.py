"""Rows of a token stream, and the example that an objective makes of each.

The token stream is the tokens of all documents, one document after the other. It is cut into rows. Example with eight
tokens and rows of 3 tokens, in an epoch that starts at token 5 (see `epoch_shift`):

    stream   0 1 2 3 4 5 6 7 | 0 1 2 ...        continues at the beginning
    row 0    5 6 7
    row 1    0 1 2
    row 2    3 4                                the short last row is not dropped

The rows of an objective with `members` have several lengths in turn: with lengths (3, 1) they are 5 6 7, 0, 1 2 3, 4.
An example is a function of (seed, epoch, row). EOS, padding and masks of all objectives are made here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator

from lm_experiments_tools.data.dataset import joined
from lm_experiments_tools.data.objectives.objective import IdRows, Objective
from lm_experiments_tools.data.order import epoch_shift, row_generators, stream_key
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.names import is_own

if TYPE_CHECKING:
    from lm_experiments_tools.data.tokens.indexed import IndexedDataset

logger = logging.getLogger(__name__)

CHECKED_AT_START = 1 << 20  # tokens of each source compared with the vocabulary before the first step
_EXAMPLES_AT_ONCE = 256  # rows per call of an objective, which spreads the cost of numpy's calls
_ORDER_VERSION = 1  # of the mapping (seed, epoch, row) -> tokens; part of the fingerprint
_VERSION = 2  # of the mapping (seed, epoch, row) -> example; part of the fingerprint


@dataclass(frozen=True)
class TokensInMemory:
    """Token ids of all documents, with the two attributes of an `IndexedDataset` that `TokenRows` reads."""

    tokens: np.ndarray
    fingerprint: str = ""


class TokenRows:
    """Examples of an objective, made of the rows of a token stream; a `data.dataset.Rows`.

    Every token is read once per epoch. Each epoch starts at a random token, so that rows differ between epochs.

    Raises:
        UserError: there are no tokens, or a token id is outside the vocabulary.
    """

    def __init__(self, source: IndexedDataset | TokensInMemory, objective: Objective, seed: int = 0) -> None:
        self.source, self.objective, self.seed = source, objective, seed
        self.vocab_size, self.num_tokens = objective.vocabulary.size, source.tokens.size
        # A plain array: a memmap's own slicing costs more than the copy of a row.
        self._tokens = np.asarray(source.tokens)
        if not self.num_tokens:
            raise UserError("The token data is empty: check the path and the text.")
        check_ids(self._tokens[:CHECKED_AT_START], self.vocab_size)
        new_tokens = np.array([member.row_length - member.overlap for member in objective.members], np.int64)
        row_lengths = new_tokens[objective.schedule]
        self._row_ends = np.cumsum(row_lengths)  # within one round of the schedule
        self._row_begins = self._row_ends - row_lengths
        rounds, rest = divmod(self.num_tokens, int(self._row_ends[-1]))
        rows_of_rest = int(np.searchsorted(self._row_ends, rest)) + 1 if rest else 0
        self._num_rows = rounds * len(row_lengths) + rows_of_rest
        last = self._num_rows - 1
        self._last_row_length = self.num_tokens - int(self._offsets(np.array([last]))[0])
        self._last_row_is_short = self._last_row_length < row_lengths[last % len(row_lengths)]
        self._noise_key = stream_key(seed, "noise")
        if len(self) == 1 and self._last_row_is_short:
            logger.warning("the data has only %d tokens: each epoch is one padded example", self.num_tokens)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def order(self) -> str:
        """sha256 over data, row lengths and seed, which determine the tokens of each row before noise is added."""
        return json_sha256([_ORDER_VERSION, [self.source.fingerprint], self.seed, self._row_ends.tolist()])

    @property
    def fingerprint(self) -> str:
        """sha256 over data, objective and seed; equal fingerprints mean equal examples."""
        return json_sha256([_VERSION, self.order, self.objective.settings()])

    def __reduce__(self) -> tuple[Any, ...]:
        # The array of a mapped file would be pickled with its content.
        return TokenRows, (self.source, self.objective, self.seed)

    def describe(self) -> str:
        return f"{self.objective.describe()}; {self.num_tokens:,} training tokens"

    # ---- tokens ----

    def _starts(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The index int64[n] in the token stream of the first token of each row."""
        shifts = np.array([epoch_shift(self.seed, epoch, self.num_tokens) for epoch in epochs.tolist()], np.int64)
        return (shifts + self._offsets(rows)) % self.num_tokens

    def _read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens int64[n, length] from each start index on. After the last token, reading continues at the first."""
        tokens = np.empty((len(starts), length), np.int64)
        for row, start in zip(tokens, starts.tolist(), strict=True):
            filled, begin = 0, start
            while filled < length:
                chunk = self._tokens[begin : begin + length - filled]
                row[filled : filled + chunk.size] = chunk
                filled, begin = filled + chunk.size, 0
        check_ids(tokens, self.vocab_size)
        return tokens

    def _offsets(self, rows: np.ndarray) -> np.ndarray:
        rounds, positions = np.divmod(rows, len(self._row_ends))
        return rounds * self._row_ends[-1] + self._row_begins[positions]

    # ---- examples ----

    def batch(self, epochs: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Make the examples of rows int64[n] in epochs int64[n].

        Returns:
            `input_ids` and `attention_mask` int64[n, input_length], `labels` int64[n, target_length], and any other
            entries of the objective's examples.

        Raises:
            UserError: a token id is outside the vocabulary, or a user's example cannot be used.
        """
        parts = (
            (here, self._padded(member.examples(tokens, rngs), member))
            for here, member, tokens, rngs in self._groups(epochs, rows)
        )
        return joined(parts, len(rows), "examples of --task")

    def lengths(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of input and target tokens, int64[2, n], of the same examples."""
        lengths = np.empty((2, len(rows)), np.int64)
        for here, member, tokens, rngs in self._groups(epochs, rows):
            inputs, targets = member.lengths(tokens, rngs)
            lengths[0, here] = len(member.first_ids) + inputs + ("input_ids" in member.with_eos)
            lengths[1, here] = targets + ("labels" in member.with_eos)
        return lengths

    def _groups(
        self, epochs: np.ndarray, rows: np.ndarray
    ) -> Iterator[tuple[np.ndarray, Objective, np.ndarray, Iterator[Generator]]]:
        """Rows of one objective and one length, some at a time: indices into `rows`, objective, tokens, generators."""
        kinds, is_last = self.objective.schedule[rows % len(self.objective.schedule)], rows == len(self) - 1
        for kind in np.unique(kinds).tolist():
            member = self.objective.members[kind]
            for is_short, length in ((False, member.row_length), (True, self._last_row_length + member.overlap)):
                here = np.flatnonzero((kinds == kind) & ((is_last & self._last_row_is_short) == is_short))
                for begin in range(0, len(here), _EXAMPLES_AT_ONCE):
                    some = here[begin : begin + _EXAMPLES_AT_ONCE]
                    starts = self._starts(epochs[some], rows[some]) - member.overlap
                    rngs = row_generators(self._noise_key, epochs[some], rows[some])
                    yield some, member, self._read(starts % self.num_tokens, length), rngs

    def _padded(self, made: Mapping[str, IdRows], member: Objective) -> dict[str, np.ndarray]:
        """The entries of some examples as int64[n, maximum length], with first ids, EOS and `attention_mask`."""
        if not is_own(type(member)):
            _check(made, member)
        ids, padded = self.objective.vocabulary, {}
        fills = {"input_ids": ids.pad_id, "labels": IGNORED_LABEL, "decoder_input_ids": ids.pad_id}
        for name, rows in made.items():
            is_target = name == "labels" or name.startswith("decoder_")
            width = self.objective.target_length if is_target else self.objective.input_length
            first = member.first_ids if name == "input_ids" else ()
            lengths = np.array([len(row) for row in rows])
            ends = len(first) + lengths + (name in member.with_eos)
            if ends.max() > width:
                flag = "target_seq_len" if is_target and "target_seq_len" in self.objective.reads else "input_seq_len"
                raise UserError(
                    f"an example of --task has {ends.max()} {name}, EOS included, but --{flag} is {width}: raise it, "
                    "or lower the row_length of the objective."
                )
            padded[name] = np.full((len(rows), width), fills.get(name, 0), np.int64)
            padded[name][:, : len(first)] = first
            body = padded[name][:, len(first) :]
            if isinstance(rows, np.ndarray):
                body[:, : rows.shape[1]] = rows
            else:
                body[np.arange(body.shape[1]) < lengths[:, None]] = np.concatenate(rows)
            if name in member.with_eos:
                body[np.arange(len(rows)), lengths] = ids.eos_id
            if name == "input_ids":
                padded["attention_mask"] = (np.arange(width) < ends[:, None]).astype(np.int64)
        return padded


def _check(made: Mapping[str, IdRows], member: Objective) -> None:
    """Refuse a user's examples that lack an entry, have ids outside the vocabulary, or shift labels against inputs."""
    said = f"an example of --task {type(member).__module__}:{type(member).__qualname__}"
    if missing := {"input_ids", "labels"} - made.keys():
        raise UserError(f"{said} has no {' and no '.join(sorted(missing))}: return both.")
    if "attention_mask" in made:
        raise UserError(f"{said} has an attention_mask, which is made of the padding: leave it out.")
    size = max([member.vocabulary.size, *(int(number) + 1 for number in member.vocabulary.sentinel_ids)])
    for name, rows in made.items():
        for values in map(np.asarray, rows):
            if values.ndim != 1 or (values.size and values.dtype.kind not in "biu"):
                kind = f"of type {values.dtype} and shape {list(values.shape)}"
                raise UserError(f"{said} has {name} {kind}: return one row of integers.")
        values = np.concatenate(rows)
        known = values[values != IGNORED_LABEL] if name == "labels" else values
        if name in ("input_ids", "labels") and known.size and not 0 <= known.min() <= known.max() < size:
            raise UserError(
                f"{said} has {name} from {known.min()} to {known.max()}, but the vocabulary has {size} tokens."
            )
    # A decoder's inputs are the labels one place later, so the one before EOS is the last label.
    is_pair, more = member.model_kind == "encoder-decoder", "labels" in member.with_eos
    name = "decoder_input_ids" if is_pair else "input_ids"
    for row, labels in zip(made.get(name, ()), made["labels"], strict=False):
        if len(row) != len(labels) + more:
            counts = f"{len(labels) + more} {name}, or {len(row) - more} labels"
            raise UserError(f"{said} has {len(row)} {name} and {len(labels)} labels: return {counts}.")


def check_ids(tokens: np.ndarray, vocab_size: int) -> None:
    """Raise UserError if a token id is outside the vocabulary, [0, vocab_size)."""
    worst = int(tokens.max())
    if worst < vocab_size and tokens.dtype.kind == "i":
        worst = min(worst, int(tokens.min()))
    if not 0 <= worst < vocab_size:
        raise UserError(
            f"The token data holds id {worst}, but the vocabulary has ids 0 to {vocab_size - 1}: it was "
            "tokenized with another vocabulary; give that one, or tokenize again."
        )
