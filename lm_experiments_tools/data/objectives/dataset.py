"""Datasets of an objective: numbered examples, made from the rows of a token stream.

An example is a function of (seed, epoch, row). Batches, EOS, padding and masks of all objectives are made here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lm_experiments_tools.data.objectives.objective import Objective, Rows
from lm_experiments_tools.data.objectives.token_stream import TokenSource, TokenStream
from lm_experiments_tools.data.order import row_generators, stream_key
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.files import json_sha256
from lm_experiments_tools.labels import IGNORED_LABEL
from lm_experiments_tools.names import is_own

logger = logging.getLogger(__name__)

_BLOCK = 256  # rows made at once, which spreads the cost of numpy's calls
_VERSION = 2  # of the mapping (seed, sample) -> example; part of the fingerprint


class ObjectiveDataset(TokenStream):
    """Examples of an objective, as a `SampleDataset` over the rows of a token stream.

    Args:
        tokens, seed: see `TokenStream`.
        objective: makes an example of each row.
    """

    def __init__(self, tokens: TokenSource | Sequence[TokenSource], objective: Objective, seed: int = 0) -> None:
        self.objective = objective
        lengths = np.array([member.row_length - member.overlap for member in objective.members])
        super().__init__(tokens, objective.vocabulary.size, lengths[objective.schedule].tolist(), seed)
        self._noise_key = stream_key(seed, "noise")
        if len(self) == 1 and self.last_row_is_short:
            logger.warning("the data has only %d tokens: each epoch is one padded example", self.num_tokens)

    @property
    def fingerprint(self) -> str:
        """sha256 over data, objective and seed; equal fingerprints mean equal samples."""
        return json_sha256([_VERSION, self.order, self.objective.settings()])

    def describe(self) -> str:
        """Describe the objective and the size of the data, for the log."""
        return f"{self.objective.describe()}; {self.num_tokens:,} training tokens"

    def batch(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Make a batch of examples from their sample numbers int64[n], which count over all epochs.

        Returns:
            `input_ids` and `attention_mask` int64[n, input_length], `labels` int64[n, target_length], and any other
            entries of the objective's examples.

        Raises:
            UserError: an example is longer than the maximum lengths.
        """
        epochs, rows = self.rows_of(samples)
        batch: dict[str, np.ndarray] = {}
        for member, length, here in self._groups(rows):
            padded = self._padded(self._made(member, length, epochs[here], rows[here]), member)
            if not batch:
                batch = {name: np.empty((len(rows), values.shape[1]), np.int64) for name, values in padded.items()}
            if padded.keys() != batch.keys():
                raise UserError(f"Some examples of --task have {', '.join(padded)}, others {', '.join(batch)}.")
            for name, values in padded.items():
                batch[name][here] = values
        return batch

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the numbers of input and target tokens, int64[2, n], of the n samples with the given numbers."""
        epochs, rows = self.rows_of(samples)
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
        kinds, short = self.objective.schedule[rows % len(self.objective.schedule)], self.is_short(rows)
        for kind in np.unique(kinds).tolist():
            member = self.objective.members[kind]
            for is_short, length in ((False, member.row_length), (True, self.last_row_length + member.overlap)):
                here = np.flatnonzero((kinds == kind) & (short == is_short))
                for begin in range(0, len(here), _BLOCK):
                    yield member, length, here[begin : begin + _BLOCK]

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
