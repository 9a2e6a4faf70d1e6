"""Prefix LM (Raffel et al., 2020, section 3.1.4): the beginning of a row is the input, the rest is the target.

Example with a prefix of 3 tokens, EOS 1 and padding 0, without and with the mode token 98:

    tokens     10 11 12 13 14
    inputs     10 11 12  1  0          98 10 11 12  1  0
    targets    13 14  1 -100 -100      13 14  1 -100 -100

Given the same prefix lengths, examples equal those of the `t5` package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.data.objectives.denoising import DenoisingDataset
from lm_experiments_tools.data.objectives.token_stream import TokenSource
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.registry import ObjectiveContext

_32 = np.uint64(32)


def build(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> PrefixLMDataset:
    """Build the training or validation dataset of `--task prefix_lm` from tokenized text."""
    lengths = context.args.input_seq_len, context.args.target_seq_len
    return PrefixLMDataset(tokens, *lengths, eos_id=context.vocabulary.eos_id, **context.stream_options())


@dataclass(frozen=True)
class PrefixDenoiser:
    """Prefix LM as a `Denoiser`: the beginning of a row is the input, the rest is the target.

    UL2's S-denoiser is of this kind. The prefix length is uniform on [shortest, tokens_length - 1]. The minimum
    follows t5's `random_prefix_noise_mask`.

    Attributes:
        tokens_length: tokens per row.
        noise_density: average fraction of tokens in the target, in (0, 0.5]; 0.5 for prefix LM.
        max_targets: maximum tokens per target, with EOS.
        mode_id: UL2's mode token, prepended to the inputs; None for none.
    """

    tokens_length: int
    noise_density: float
    max_targets: int
    eos_id: int
    pad_id: int
    mode_id: int | None = None
    varies = True
    integers_per_sample = 1

    @property
    def shortest(self) -> int:
        """Minimum prefix length in tokens."""
        longest = self.tokens_length - 1
        by_density = int(np.rint(np.float32(1 - 2 * self.noise_density) * np.float32(longest)))  # t5 rounds in float32
        return min(longest, max(1, by_density, self.tokens_length + 1 - self.max_targets))

    @property
    def inputs_length(self) -> int:
        return self.tokens_length + (self.mode_id is not None)  # the longest prefix, and EOS

    @property
    def targets_length(self) -> int:
        return self.tokens_length - self.shortest + 1

    def for_length(self, tokens_length: int) -> PrefixDenoiser:
        return replace(self, tokens_length=tokens_length)

    def draw(self, random_integers: np.ndarray) -> np.ndarray:
        """Draw the prefix lengths int64[n] of n rows from random integers uint64[integers_per_sample, n]."""
        choices = np.uint64(self.tokens_length - self.shortest)
        return self.shortest + (random_integers[0] * choices >> _32).astype(np.int64)

    def lengths(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return drawn + 1 + (self.mode_id is not None), self.tokens_length - drawn + 1

    def write(
        self, tokens: np.ndarray, drawn: np.ndarray, input_ids: np.ndarray, mask: np.ndarray, labels: np.ndarray
    ) -> None:
        rows, (_, length), mode = np.arange(len(tokens)), tokens.shape, int(self.mode_id is not None)
        if mode:
            input_ids[:, 0] = self.mode_id
        body = input_ids[:, mode:]
        body[:, :length] = tokens
        body[rows, drawn] = self.eos_id
        mask[:] = np.arange(mask.shape[1]) <= drawn[:, None] + mode
        np.copyto(input_ids, self.pad_id, where=mask == 0)
        positions = np.arange(labels.shape[1])
        # Values past a row's end are overwritten.
        labels[:] = tokens.reshape(-1).take((rows * length + drawn)[:, None] + positions, mode="clip")
        labels[rows, length - drawn] = self.eos_id
        np.copyto(labels, IGNORED_LABEL, where=positions > (length - drawn)[:, None])


class PrefixLMDataset(DenoisingDataset):
    """Prefix LM examples from rows of `inputs_length - 1` tokens.

    Args:
        tokens, vocab_size, seed: see `TokenStreamDataset`.
        inputs_length: maximum tokens per input, with EOS; at least 3.
        targets_length: maximum tokens per target, with EOS; at least 2. A smaller maximum makes prefixes longer.
        eos_id: appended to inputs and targets.
        pad_id: padding of the inputs; labels are padded with -100.
    """

    def __init__(
        self,
        tokens: TokenSource | Sequence[TokenSource],
        inputs_length: int,
        targets_length: int,
        *,
        eos_id: int,
        pad_id: int,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        if inputs_length < 3 or targets_length < 2:
            raise UserError(
                f"prefix LM needs at least 3 inputs and 2 targets, but --input_seq_len is {inputs_length} and "
                f"--target_seq_len {targets_length}."
            )
        self.denoiser = PrefixDenoiser(inputs_length - 1, 0.5, targets_length, eos_id, pad_id)
        super().__init__(tokens, [self.denoiser], pad_id=pad_id, vocab_size=vocab_size, seed=seed)

    def describe(self) -> str:
        """Describe the objective and the size of the data, for the log."""
        longest = self.denoiser.tokens_length - 1
        return (
            f"prefix LM, {longest + 1} tokens -> a prefix of {self.denoiser.shortest} to {longest} and the rest; "
            f"{self.num_tokens:,} training tokens"
        )

    def settings(self) -> dict[str, Any]:
        denoiser = self.denoiser
        lengths, ids = [denoiser.tokens_length, denoiser.shortest], [denoiser.eos_id, self.pad_id]
        return {"task": "prefix_lm", "lengths": lengths, "ids": ids}
