"""The interface of training objectives: one function makes an example from one row of tokens.

Example of an objective with the row 10 11 12, EOS 1, padding 0 and rows padded to 5 tokens:

    example(tokens, rng)      {"input_ids": [12, 10, 11], "labels": [10, 11, 12]}
    the loader's batch        input_ids 12 10 11 1 0    attention_mask 1 1 1 1 0    labels 10 11 12 1 -100

docs/new_objective.md shows an objective in a file of a user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.random import Generator

from lm_experiments_tools.data.text.tokenizer import MASK_PIECES
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

    from lm_experiments_tools.config.objectives import ModelKind
    from lm_experiments_tools.data.text.tokenizer import Tokenizer

IdRows = np.ndarray | Sequence[np.ndarray]  # an entry of some examples, of one or of different lengths


@dataclass(frozen=True)
class TokenIds:
    """Ids of special tokens that objectives use, for one without a `Tokenizer`."""

    size: int
    pad_id: int = 0
    eos_id: int = 1
    mask_id: int | None = None
    sentinel_ids: Sequence[int] | np.ndarray = ()
    special_ids: Sequence[int] | np.ndarray = ()


class Objective:
    """A training objective: makes an example from a row of tokens. Subclasses define `example`.

    A row is a segment of the token stream, which is the tokens of all documents. `TokenRows` appends EOS, pads,
    makes attention masks and batches. An objective's arguments are those of its `__init__`.

    Attributes:
        models: kinds of model that can be trained with it.
        reads: optional flags that it uses, see `config.objectives.ObjectiveFacts`.
        vocabulary: ids of special tokens.
        input_length, target_length: maximum tokens of `input_ids` and `labels`, EOS included.
        model_kind: "encoder-decoder", "decoder" or "encoder".
        row_length: tokens per row; by default as many as fit the inputs.
        overlap: number of tokens at the beginning of a row that are also the end of the row before.
        first_ids: tokens at the beginning of `input_ids`, such as UL2's mode token; none by default.
        with_eos: entries of an example to which EOS is appended; by default both sides of an encoder-decoder's.
        members, schedule: objectives that make the rows in turn, and the index of the member of each row, repeated
            after the last one; by default only this objective.
        options: arguments of the class.
    """

    models: ClassVar[tuple[ModelKind, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    overlap = 0
    first_ids: tuple[int, ...] = ()
    vocabulary: TokenIds | Tokenizer
    input_length: int
    target_length: int
    model_kind: ModelKind
    row_length: int
    with_eos: tuple[str, ...]
    members: Sequence[Objective]
    schedule: np.ndarray
    options: Mapping[str, Any]

    def example(self, tokens: np.ndarray, rng: Generator) -> Mapping[str, np.ndarray | Sequence[int]]:
        """Make an example from a row.

        Args:
            tokens: int64, the tokens of the row; fewer than `row_length` in the last row of an epoch.
            rng: random numbers of this row, a function of (seed, epoch, row).

        Returns:
            `input_ids` and `labels` without `first_ids`, EOS and padding, and any other inputs of the model but
            `attention_mask`, which are padded with 0 (also in the place of EOS).
        """
        raise NotImplementedError

    def examples(self, rows: np.ndarray, rngs: Iterator[Generator]) -> Mapping[str, IdRows]:
        """Make examples from rows int64[n, length], each entry with n elements; equal to `example` row by row.

        Args:
            rngs: random numbers of each row. A generator must not be used after the next one is taken.
        """
        made = [self.example(row, rng) for row, rng in zip(rows, rngs, strict=True)]
        if wrong := [example for example in made if not isinstance(example, Mapping)]:
            raise UserError(f"an example of --task is a {type(wrong[0]).__name__}: return a dict of its entries.")
        if other := next((example for example in made if example.keys() != made[0].keys()), None):
            raise UserError(f"Some examples of --task have {', '.join(made[0])}, others {', '.join(other)}.")
        try:
            return {name: [np.asarray(example[name]) for example in made] for name in made[0]}
        except ValueError as error:
            raise UserError(
                f"an example of --task has lists of lists ({error}): return one row of integers."
            ) from None

    def lengths(self, rows: np.ndarray, rngs: Iterator[Generator]) -> tuple[Any, Any]:
        """Return the numbers of `input_ids` and of `labels` in the examples of rows: for each row, or one for all."""
        made = self.examples(rows, rngs)
        return tuple(np.array([len(row) for row in made[name]]) for name in ("input_ids", "labels"))

    def prepare(self) -> None:
        """Compute what depends on the vocabulary and the lengths, such as `row_length`. Raises UserError."""

    @property
    def mask_id(self) -> int:
        """Id of the vocabulary's mask token, or of its first sentinel. Raises UserError if it has neither."""
        if self.vocabulary.mask_id is not None:
            return self.vocabulary.mask_id
        if len(self.vocabulary.sentinel_ids) == 0:
            raise UserError(
                "The objective needs a token that hides others, but the vocabulary has neither "
                f"{' nor '.join(MASK_PIECES)} nor a sentinel: add a mask_token, or train another by `lmtools vocab`."
            )
        return int(self.vocabulary.sentinel_ids[0])

    def describe(self) -> str:
        """Describe the objective and its lengths, for the log."""
        options = "".join(f", {name} {value}" for name, value in self.options.items())
        return f"{type(self).__name__}, rows of {self.row_length} tokens{options}"

    def settings(self) -> dict[str, Any]:
        """Return everything but the data and the seed that determines examples, as JSON values, for a fingerprint."""
        ids = self.vocabulary
        special = [np.asarray(values).tolist() for values in (ids.sentinel_ids, ids.special_ids)]
        return {
            "objective": f"{type(self).__module__}:{type(self).__qualname__}",
            "options": dict(self.options),
            "lengths": [self.row_length, self.overlap, self.input_length, self.target_length],
            "model_kind": self.model_kind,
            "ids": [ids.size, ids.eos_id, ids.pad_id, ids.mask_id, *special],
        }

    @classmethod
    def create(
        cls,
        vocabulary: TokenIds | Tokenizer,
        input_length: int,
        target_length: int | None = None,
        model_kind: ModelKind = "encoder-decoder",
        **options: Any,
    ) -> Self:
        """Make an objective for a vocabulary and maximum lengths; see the class for the arguments.

        Raises UserError: the objective refuses the settings.
        """
        made, has_targets = cls(**options), model_kind == "encoder-decoder"
        made.vocabulary, made.model_kind, made.options = vocabulary, model_kind, options
        made.input_length, made.target_length = input_length, (target_length if has_targets else None) or input_length
        made.with_eos = ("input_ids", "labels") if has_targets else ()
        made.row_length = input_length - has_targets - len(made.first_ids)
        made.members, made.schedule = [made], np.zeros(1, np.int64)
        made.prepare()
        if made.members == [made] and (cls.example, cls.examples) == (Objective.example, Objective.examples):
            raise UserError(f"{cls.__name__} is an Objective without `example`: docs/new_objective.md shows one.")
        if not isinstance(made.row_length, (int, np.integer)) or made.row_length <= made.overlap:
            raise UserError(
                f"rows of {made.row_length} tokens cannot be made for --input_seq_len {input_length}: raise it, or "
                "set row_length to a positive integer in `prepare`."
            )
        made.row_length = int(made.row_length)  # numpy's integers are no JSON
        return made
