"""Prefix LM (Raffel et al., 2020, section 3.1.4): the beginning of a row is the input, the rest is the target.

Example with a prefix of 3 tokens and EOS 1:

    tokens     10 11 12 13 14
    inputs     10 11 12  1
    targets    13 14  1

Given the same prefix lengths, examples equal those of the `t5` package.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.errors import UserError


class PrefixLM(Objective):
    """Prefix LM, with rows of `input_length - 1` tokens. UL2's S-denoiser is of this kind.

    The prefix length is uniform on [shortest, tokens - 1]. A smaller `target_length` makes prefixes longer.

    Args:
        noise_density: average fraction of tokens in the target, in (0, 0.5].
        first_ids: UL2's mode token.

    Raises:
        UserError: `input_length` is below 3, or `target_length` below 2.
    """

    def __init__(self, noise_density: float = 0.5, first_ids: tuple[int, ...] = ()) -> None:
        self.noise_density, self.first_ids = noise_density, first_ids

    def prepare(self) -> None:
        if self.row_length < 2 or self.target_length < 2:
            raise UserError(
                f"prefix LM needs at least 3 inputs and 2 targets, but --input_seq_len is {self.input_length} and "
                f"--target_seq_len {self.target_length}."
            )
        self.max_targets = self.target_length
        self.target_length = self.row_length - self.shortest(self.row_length) + 1

    def shortest(self, num_tokens: int) -> int:
        """Return the minimum prefix length of a row, which follows t5's `random_prefix_noise_mask`."""
        longest = num_tokens - 1
        by_density = int(np.rint(np.float32(1 - 2 * self.noise_density) * np.float32(longest)))  # t5 rounds in float32
        return min(longest, max(1, by_density, num_tokens + 1 - self.max_targets))

    def example(self, tokens: np.ndarray, rng: Generator) -> dict[str, np.ndarray]:
        prefix = int(rng.integers(self.shortest(len(tokens)), len(tokens)))
        return {"input_ids": tokens[:prefix], "labels": tokens[prefix:]}

    def describe(self) -> str:
        shortest = self.shortest(self.row_length)
        return f"prefix LM, {self.row_length} tokens -> a prefix of {shortest} to {self.row_length - 1} and the rest"
