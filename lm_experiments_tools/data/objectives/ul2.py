"""UL2's mixture of denoisers (Tay et al., "UL2: Unifying Language Learning Paradigms", ICLR 2023, section 3.1).

R-denoisers corrupt short spans. X-denoisers corrupt long spans or many of them. The S-denoiser is prefix LM. A mode
token at the start of the input names the denoiser: the paper's [NLU] for R, [NLG] for X, [S2S] for S.

Example with the denoisers R:2:0.4 and S:0.5 in alternation, tokens 10 ... 18, 6 inputs and 4 targets, mode tokens 90
(R) and 92 (S), sentinel 99, EOS 1. R masks the tokens 13 14, and S has a prefix of 2 tokens:

    row 0 (R)   10 11 12 13 14     inputs 90 10 11 12 99  1     targets 99 13 14  1
    row 1 (S)   15 16 17 18        inputs 92 15 16  1  0  0     targets 17 18  1 -100

Each denoiser reads the longest rows whose inputs, targets and sentinels fit. A fixed schedule assigns denoisers to
rows, so that the weights of denoisers are exact. Every token is read once per epoch, by a denoiser that differs
between epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from typing import Any

import numpy as np

from lm_experiments_tools.config.objectives import PAPER_DENOISERS, DenoiserSpec, parse_denoisers
from lm_experiments_tools.data.mixture import blending_order
from lm_experiments_tools.data.objectives.objective import Objective
from lm_experiments_tools.data.objectives.prefix_lm import PrefixLM
from lm_experiments_tools.data.objectives.span_corruption import SpanCorruption, plan_spans
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.errors import UserError

_LONGEST_SCHEDULE = 10_000  # rows
MODE_PIECES = {"R": "[NLU]", "X": "[NLG]", "S": "[S2S]"}


def mode_ids(vocabulary: Tokenizer) -> dict[str, int]:
    """Return the ids of UL2's mode tokens: [NLU], [NLG] and [S2S] if the vocabulary has them, else its last sentinels.

    Raises UserError: the vocabulary has neither these tokens nor four sentinels.
    """
    found = {mode: vocabulary.find(piece) for mode, piece in MODE_PIECES.items()}
    if all(index is not None for index in found.values()):
        return found
    if len(vocabulary.sentinel_ids) <= len(found):
        raise UserError(
            f"The vocabulary {vocabulary.path} has neither {', '.join(MODE_PIECES.values())} nor more than "
            f"{len(found)} sentinels for mode tokens: train one with more extra ids, or give --no_mode_tokens."
        )
    return dict(zip(found, vocabulary.sentinel_ids[: -len(found) - 1 : -1].tolist(), strict=True))


def build_schedule(weights: Sequence[Any]) -> np.ndarray:
    """Assign UL2's denoisers to rows in proportion to their weights, evenly spread.

    Returns:
        The index of the denoiser of each row, int64[number of rows until the schedule repeats]: 0 1 2 0 1 for the
        weights (1, 1, 1/2).
    """
    common = lcm(*(weight.denominator for weight in weights))
    counts = np.array([int(weight * common) for weight in weights], np.int64)
    counts //= gcd(*counts.tolist())
    total = int(counts.sum())
    if total > _LONGEST_SCHEDULE:
        raise UserError(f"--denoisers: the weights repeat only after {total} rows: give rounder ones.")
    return blending_order(counts / total, total, counts).astype(np.int64)


class SpanDenoiser(SpanCorruption):
    """Span corruption of the longest rows whose inputs, targets and sentinels fit, UL2's R- and X-denoisers."""

    def __init__(self, noise: tuple[float, float], first_ids: tuple[int, ...], sentinel_ids: np.ndarray) -> None:
        super().__init__(*noise)
        self.first_ids, self.sentinel_ids = first_ids, sentinel_ids

    def prepare(self) -> None:
        available = self.input_length - len(self.first_ids)
        counts = plan_spans(available, *self.noise, self.target_length, len(self.sentinel_ids))
        self.row_length, self.target_length = counts.tokens_length, counts.targets_length
        self.input_length = counts.inputs_length + len(self.first_ids)


class UL2(Objective):
    """UL2: a weighted mixture of denoisers. Sentinel tokens that serve as mode tokens are not used for spans.

    Args:
        denoisers: texts such as "R:3:0.15@2", see `DenoiserSpec`.

    Raises:
        UserError: a denoiser does not fit the lengths, or the vocabulary has no mode tokens.
    """

    def __init__(self, denoisers: Sequence[str] = PAPER_DENOISERS, mode_tokens: bool = True) -> None:
        self.specs = parse_denoisers(denoisers)
        self.mode_tokens = mode_tokens

    def prepare(self) -> None:
        self.modes = mode_ids(self.vocabulary) if self.mode_tokens else {}
        self.members = [self._denoiser(spec) for spec in self.specs]
        self.schedule = build_schedule([spec.weight for spec in self.specs])
        self.input_length = max(member.input_length for member in self.members)
        self.target_length = max(member.target_length for member in self.members)

    def _denoiser(self, spec: DenoiserSpec) -> Objective:
        lengths = self.vocabulary, self.input_length, self.target_length
        first_ids = (self.modes[spec.mode],) if self.modes else ()
        if spec.mean_noise_span_length is None:
            return PrefixLM.create(*lengths, noise_density=spec.noise_density, first_ids=first_ids)
        sentinels = np.array([i for i in self.vocabulary.sentinel_ids if i not in self.modes.values()], np.int64)
        noise = spec.noise_density, spec.mean_noise_span_length
        return SpanDenoiser.create(*lengths, noise=noise, first_ids=first_ids, sentinel_ids=sentinels)

    def describe(self) -> str:
        shares = np.bincount(self.schedule, minlength=len(self.specs)) / len(self.schedule)
        members = [
            f"{spec} {share:.1%} of {member.row_length} tokens -> up to {member.input_length} + {member.target_length}"
            for spec, member, share in zip(self.specs, self.members, shares.tolist(), strict=True)
        ]
        return f"ul2, {'; '.join(members)}"

    def settings(self) -> dict[str, Any]:
        members = zip(self.specs, self.members, strict=True)
        rows = [[str(spec), member.row_length, member.target_length] for spec, member in members]
        return {**super().settings(), "modes": self.modes, "rows": rows, "schedule": self.schedule.tolist()}
