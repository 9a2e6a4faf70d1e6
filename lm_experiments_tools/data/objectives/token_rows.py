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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lm_experiments_tools.data.arrangement import MixedSteps
from lm_experiments_tools.data.dataset import Dataset, joined
from lm_experiments_tools.data.objectives.objective import Objective, Rows
from lm_experiments_tools.data.order import epoch_shift, row_generators, stream_key
from lm_experiments_tools.data.parallel import ParallelDataset
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.names import is_own

if TYPE_CHECKING:
    from lm_experiments_tools.config.pretraining import T5PretrainingArgs

logger = logging.getLogger(__name__)

CHECKED_AT_START = 1 << 20  # tokens of each source compared with the vocabulary before the first step
_EXAMPLES_AT_ONCE = 256  # rows per call of an objective, which spreads the cost of numpy's calls
_ORDER_VERSION = 1  # of the mapping (seed, epoch, row) -> tokens; part of the fingerprint
_VERSION = 2  # of the mapping (seed, epoch, row) -> example; part of the fingerprint


class TokenSource(Protocol):
    """Interface of tokenized text: an array of the token ids of all documents, such as an `IndexedDataset`."""

    tokens: np.ndarray
    fingerprint: str


@dataclass(frozen=True)
class TokensInMemory:
    """Tokenized text in memory: a `TokenSource` whose token ids are a NumPy array."""

    tokens: np.ndarray
    fingerprint: str = ""


class TokenRows:
    """Examples of an objective, made of the rows of a token stream; a `data.dataset.Rows`.

    Every token is read once per epoch. Each epoch starts at a random token, so that rows differ between epochs.

    Args:
        tokens: an `IndexedDataset`, or several that are read one after the other.

    Raises:
        UserError: there are no tokens, or a token id is outside the vocabulary.
    """

    def __init__(self, tokens: TokenSource | Sequence[TokenSource], objective: Objective, seed: int = 0) -> None:
        self.sources = list(tokens) if isinstance(tokens, Sequence) else [tokens]
        self.objective, self.vocab_size, self.seed = objective, objective.vocabulary.size, seed
        # Plain arrays: a memmap's own slicing costs more than the copy of a row.
        self._arrays = [np.asarray(source.tokens) for source in self.sources if source.tokens.size]
        if not self._arrays:
            raise UserError(f"The token data is empty ({len(self.sources)} file(s)): check the path and the text.")
        self._part_ends = np.cumsum(np.array([part.size for part in self._arrays], np.int64))
        self._part_begins = self._part_ends - [part.size for part in self._arrays]
        self.num_tokens = int(self._part_ends[-1])
        for part in self._arrays:
            check_ids(part[:CHECKED_AT_START], self.vocab_size)
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
        parts = [_ORDER_VERSION, [s.fingerprint for s in self.sources], self.seed, self._row_ends.tolist()]
        return json_sha256(parts)

    @property
    def fingerprint(self) -> str:
        """sha256 over data, objective and seed; equal fingerprints mean equal examples."""
        return json_sha256([_VERSION, self.order, self.objective.settings()])

    def __reduce__(self) -> tuple[Any, ...]:
        # The arrays of mapped files would be pickled with their content.
        return TokenRows, (self.sources, self.objective, self.seed)

    def describe(self) -> str:
        return f"{self.objective.describe()}; {self.num_tokens:,} training tokens"

    # ---- tokens ----

    def starts_of(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the index int64[n] in the token stream of the first token of each row, given row numbers int64[n]."""
        shifts = np.array([epoch_shift(self.seed, epoch, self.num_tokens) for epoch in epochs.tolist()], np.int64)
        return (shifts + self._offsets(rows)) % self.num_tokens

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read `length` tokens from each start index int64[n]. After the last token, reading continues at the first.

        Returns:
            int64[n, length].

        Raises:
            UserError: a token id is outside the vocabulary.
        """
        tokens = np.empty((len(starts), length), np.int64)
        part_of = np.searchsorted(self._part_ends, starts, side="right")
        offsets = starts - self._part_begins[part_of]
        for row, part, offset in zip(tokens, part_of.tolist(), offsets.tolist(), strict=True):
            filled = 0
            while filled < length:
                chunk = self._arrays[part][offset : offset + length - filled]
                row[filled : filled + chunk.size] = chunk
                filled, part, offset = filled + chunk.size, (part + 1) % len(self._arrays), 0
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
            UserError: an example is longer than the maximum lengths.
        """
        parts = (
            (here, self._padded(self._made(member, length, epochs[here], rows[here]), member))
            for member, length, here in self._groups(rows)
        )
        return joined(parts, len(rows), "examples of --task")

    def lengths(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of input and target tokens, int64[2, n], of the same examples."""
        lengths = np.empty((2, len(rows)), np.int64)
        for member, length, here in self._groups(rows):
            found = member.lengths(length, row_generators(self._noise_key, epochs[here], rows[here]))
            if found is None:
                made = self._made(member, length, epochs[here], rows[here])
                found = tuple([len(row) for row in made[name]] for name in ("input_ids", "labels"))
            for side, name in enumerate(("input_ids", "labels")):
                lengths[side, here] = np.asarray(found[side]) + (name in member.with_eos)
            lengths[0, here] += len(member.first_ids)
        return lengths

    def _made(self, member: Objective, length: int, epochs: np.ndarray, rows: np.ndarray) -> Mapping[str, Rows]:
        """Examples of rows of one length, as the objective makes them."""
        tokens = self.read((self.starts_of(epochs, rows) - member.overlap) % self.num_tokens, length)
        made = member.examples(tokens, row_generators(self._noise_key, epochs, rows))
        if not is_own(type(member)):
            self._check(made, member)
        return made

    def _groups(self, rows: np.ndarray) -> Iterator[tuple[Objective, int, np.ndarray]]:
        """Rows of one objective and one length, some at a time: the objective, tokens per row, indices into `rows`."""
        kinds, is_last = self.objective.schedule[rows % len(self.objective.schedule)], rows == len(self) - 1
        for kind in np.unique(kinds).tolist():
            member = self.objective.members[kind]
            for is_short, length in ((False, member.row_length), (True, self._last_row_length + member.overlap)):
                here = np.flatnonzero((kinds == kind) & ((is_last & self._last_row_is_short) == is_short))
                for begin in range(0, len(here), _EXAMPLES_AT_ONCE):
                    yield member, length, here[begin : begin + _EXAMPLES_AT_ONCE]

    def _check(self, made: Mapping[str, Rows], member: Objective) -> None:
        """Refuse a user's examples that would be cut, rounded or shifted, or that no model could read."""
        said, ids = f"an example of --task {type(member).__module__}:{type(member).__qualname__}", member.vocabulary
        if missing := {"input_ids", "labels"} - made.keys():
            raise UserError(f"{said} has no {' and no '.join(sorted(missing))}: return both.")
        if "attention_mask" in made:
            raise UserError(f"{said} has an attention_mask, which is made of the padding: leave it out.")
        size = max([ids.size, *(int(number) + 1 for number in ids.sentinel_ids)])
        for name, rows in made.items():
            for values in map(np.asarray, rows):
                if values.ndim != 1 or (values.size and values.dtype.kind not in "biu"):
                    kind = f"of type {values.dtype} and shape {list(values.shape)}"
                    raise UserError(f"{said} has {name} {kind}: return one row of integers.")
                known = values[values != IGNORED_LABEL] if name == "labels" else values
                if name in ("input_ids", "labels") and known.size and not 0 <= known.min() <= known.max() < size:
                    raise UserError(
                        f"{said} has {name} from {known.min()} to {known.max()}, but the vocabulary has {size} tokens."
                    )
        # A decoder's inputs are the labels one place later, so the one before EOS is the last label.
        ends = "labels" in member.with_eos
        for row, labels in zip(made.get("decoder_input_ids", ()), made["labels"], strict=False):
            if len(row) != len(labels) + ends:
                raise UserError(
                    f"{said} has {len(row)} decoder_input_ids and {len(labels)} labels{', without EOS' * ends}: "
                    f"return {len(labels) + ends}, or leave them out."
                )
        for row, labels in zip(made["input_ids"], made["labels"], strict=True):
            if member.model_kind != "encoder-decoder" and len(row) != len(labels):
                raise UserError(
                    f"{said} has {len(row)} input_ids and {len(labels)} labels: the {member.model_kind} needs as many."
                )

    def _padded(self, made: Mapping[str, Rows], member: Objective) -> dict[str, np.ndarray]:
        """The entries of some examples as int64[n, maximum length], with first ids, EOS and `attention_mask`."""
        ids, padded = self.objective.vocabulary, {}
        fills = {"input_ids": ids.pad_id, "labels": IGNORED_LABEL, "decoder_input_ids": ids.pad_id}
        for name, rows in made.items():
            is_target = name == "labels" or name.startswith("decoder_")
            side = "labels" if is_target else "input_ids"
            width = self.objective.target_length if is_target else self.objective.input_length
            first = member.first_ids if name == "input_ids" else ()
            is_array = isinstance(rows, np.ndarray)
            lengths = np.full(len(rows), rows.shape[1]) if is_array else np.array([len(row) for row in rows])
            ends = len(first) + lengths + (name in member.with_eos)
            if ends.max() > width:
                is_flag = is_target and "target_seq_len" in self.objective.reads
                flag = "target_seq_len" if is_flag else "input_seq_len"
                advice = "name target_seq_len in `reads` and give it" if is_target and not is_flag else "raise it"
                raise UserError(
                    f"an example of --task has {ends.max()} {name}, EOS included, but --{flag} is {width}: {advice}, "
                    "or lower the row_length of the objective."
                )
            padded[name] = np.full((len(rows), width), fills.get(name, 0), np.int64)
            padded[name][:, : len(first)] = first
            body = padded[name][:, len(first) :]
            if is_array:
                body[:, : lengths[0]] = rows
            else:
                body[np.arange(body.shape[1]) < lengths[:, None]] = np.concatenate(rows)
            if name in member.with_eos:
                body[np.arange(len(rows)), lengths] = ids.eos_id
            elif name not in fills and member.with_eos:
                # A row with a value for each token goes on at EOS with the value of the last token. Each row is judged
                # alone, because an example must not depend on the others of its batch.
                here = np.flatnonzero((lengths > 0) & (lengths == [len(row) for row in made[side]]))
                body[here, lengths[here]] = body[here, lengths[here] - 1]
            if name == "input_ids":
                padded["attention_mask"] = (np.arange(width) < ends[:, None]).astype(np.int64)
        return padded


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


def pretraining_dataset(
    args: T5PretrainingArgs,
    objective: Objective,
    tokens: Sequence[TokenSource | Sequence[TokenSource]],
    world_size: int = 1,
    num_workers: int = 0,
) -> Dataset:
    """Build the dataset of an objective from one or several data sets, mixed by `--data_weights`.

    Examples that differ in length are arranged by length within each step.
    """
    dataset = Dataset.mixed(tokens, lambda source, seed: TokenRows(source, objective, seed), args.seed, args.mixing())
    if num_workers:
        dataset = ParallelDataset(dataset, num_workers)
    if not args.objective().varies_in_length:
        return dataset
    rows = args.mix_rows or args.global_batch_size(world_size)
    return dataset.arranged(MixedSteps(dataset.lengths, len(dataset), rows, args.seed))
