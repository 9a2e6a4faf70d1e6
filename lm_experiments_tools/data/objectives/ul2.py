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

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_experiments_tools.config.objectives import DenoiserSpec
from lm_experiments_tools.data.mixture import blending_order
from lm_experiments_tools.data.objectives.denoising import (
    Denoiser,
    DenoisingDataset,
    SpanCounts,
    SpanDenoiser,
    count_spans,
    random_spans_lengths,
)
from lm_experiments_tools.data.objectives.prefix_lm import PrefixDenoiser
from lm_experiments_tools.data.objectives.token_stream import TokenSource
from lm_experiments_tools.data.text.vocabulary import Vocabulary
from lm_experiments_tools.errors import UserError

if TYPE_CHECKING:
    from lm_experiments_tools.data.objectives.registry import ObjectiveContext

logger = logging.getLogger(__name__)

MODE_PIECES = {"R": "[NLU]", "X": "[NLG]", "S": "[S2S]"}
_LONGEST_SCHEDULE = 10_000  # rows


def build(context: ObjectiveContext, tokens: TokenSource | Sequence[TokenSource]) -> UL2Dataset:
    """Build the dataset of `--task ul2`. Sentinel tokens that serve as UL2's mode tokens are not used for spans."""
    args, vocabulary = context.args, context.vocabulary
    modes = mode_ids(vocabulary) if args.mode_tokens else {}
    return UL2Dataset(
        tokens,
        args.input_seq_len,
        args.target_seq_len,
        args.denoiser_specs(),
        modes=modes,
        sentinel_ids=[index for index in vocabulary.sentinel_ids.tolist() if index not in modes.values()],
        eos_id=vocabulary.eos_id,
        quiet=context.quiet,
        **context.stream_options(),
    )


def mode_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ids of UL2's mode tokens, which name the denoiser R, X or S at the start of the input.

    These are [NLU], [NLG] and [S2S] if the vocabulary has them, or else the last three sentinels.

    Raises:
        UserError: the vocabulary has neither these tokens nor four sentinels.
    """
    found = {mode: vocabulary.find(piece) for mode, piece in MODE_PIECES.items()}
    if all(index is not None for index in found.values()):
        return found
    if vocabulary.num_sentinels <= len(found):
        raise UserError(
            f"The vocabulary {vocabulary.path} has neither {', '.join(MODE_PIECES.values())} nor more than "
            f"{len(found)} sentinels for mode tokens: train one with more extra ids, or give --no_mode_tokens."
        )
    return dict(zip(found, vocabulary.sentinel_ids[: -len(found) - 1 : -1].tolist(), strict=True))


def build_schedule(weights: Sequence[Any]) -> np.ndarray:
    """Assign UL2's denoisers to rows in proportion to their weights, evenly spread.

    Args:
        weights: weight of each denoiser, as fractions.

    Returns:
        The index of the denoiser of each row, int64[number of rows until the schedule repeats]: 0 1 2 0 1 for the
        weights (1, 1, 1/2).

    Raises:
        UserError: the schedule repeats only after more than 10,000 rows.
    """
    common = lcm(*(weight.denominator for weight in weights))
    counts = np.array([int(weight * common) for weight in weights], np.int64)
    counts //= gcd(*counts.tolist())
    total = int(counts.sum())
    if total > _LONGEST_SCHEDULE:
        raise UserError(f"--denoisers: the weights repeat only after {total} rows: give rounder ones.")
    return blending_order(counts / total, total, counts).astype(np.int64)


def fit_span_denoiser(
    name: str, inputs_length: int, targets_length: int, denoiser: SpanDenoiser, *, quiet: bool = False
) -> SpanDenoiser:
    """Return a span denoiser for the longest rows whose inputs and targets fit into their maximum lengths.

    Inputs and targets are counted with EOS and mode token. The denoiser must have a sentinel for each span.

    Args:
        name: name of the denoiser, for messages.
        inputs_length, targets_length: maximum tokens per input and per target.
        denoiser: the denoiser with its noise settings, for rows of any length.
        quiet: True to omit the log line about the resulting lengths.

    Raises:
        UserError: even a row of 2 tokens does not fit.
    """
    available, sentinels = inputs_length - (denoiser.mode_id is not None), len(denoiser.sentinel_ids)
    noise = denoiser.noise_density, denoiser.mean_noise_span_length
    longest = random_spans_lengths(available, *noise)[0]
    for length in range(longest, 1, -1):
        counts = count_spans(length, *noise)
        if (
            counts.inputs_length <= available
            and counts.targets_length <= targets_length
            and counts.num_spans <= sentinels
        ):
            if length < longest - 1 and counts.num_spans == sentinels and not quiet:
                logger.info("denoiser %s reads rows of %d tokens, not %d: few sentinels", name, length, longest)
            return replace(denoiser, counts=counts)
    raise UserError(f"denoiser {name} needs a larger --input_seq_len or --target_seq_len.")


class UL2Dataset(DenoisingDataset):
    """UL2 pre-training examples, made by a weighted mixture of denoisers.

    Args:
        tokens, vocab_size, seed: see `TokenStreamDataset`.
        inputs_length, targets_length: maximum tokens per input and target, with EOS and mode token.
        specs: the denoisers with their weights.
        modes: id of the mode token of "R", "X" and "S", the three kinds of denoisers; empty for no mode tokens.
        sentinel_ids: ids of <extra_id_0>, <extra_id_1>, ..., without mode tokens.
        eos_id: appended to inputs and targets.
        pad_id: padding of the inputs; labels are padded with -100.
        quiet: True to omit the log lines about lengths that follow from the settings.
    """

    def __init__(
        self,
        tokens: TokenSource | Sequence[TokenSource],
        inputs_length: int,
        targets_length: int,
        specs: Sequence[DenoiserSpec],
        *,
        modes: Mapping[str, int],
        sentinel_ids: np.ndarray,
        eos_id: int,
        pad_id: int,
        vocab_size: int,
        seed: int = 0,
        quiet: bool = False,
    ) -> None:
        self.specs, self.modes = list(specs), dict(modes)
        self.sentinel_ids, self.eos_id = np.asarray(sentinel_ids, np.int64), eos_id
        denoisers = [self._denoiser(spec, inputs_length, targets_length, pad_id, quiet) for spec in specs]
        schedule = build_schedule([spec.weight for spec in specs])
        super().__init__(tokens, denoisers, schedule, pad_id=pad_id, vocab_size=vocab_size, seed=seed)

    def _denoiser(
        self, spec: DenoiserSpec, inputs_length: int, targets_length: int, pad_id: int, quiet: bool
    ) -> Denoiser:
        mode = self.modes.get(spec.mode)
        available = inputs_length - (mode is not None)
        if available < 3 or targets_length < 2:
            raise UserError(
                f"ul2 needs at least {inputs_length - available + 3} inputs and 2 targets, but --input_seq_len is "
                f"{inputs_length} and --target_seq_len {targets_length}."
            )
        if spec.mean_noise_span_length is None:
            return PrefixDenoiser(available - 1, spec.noise_density, targets_length, self.eos_id, pad_id, mode)
        noise = spec.noise_density, spec.mean_noise_span_length
        denoiser = SpanDenoiser(SpanCounts(0, 0, 0), *noise, self.sentinel_ids, self.eos_id, pad_id, mode)
        return fit_span_denoiser(str(spec), inputs_length, targets_length, denoiser, quiet=quiet)

    def describe(self) -> str:
        """Describe the denoisers, their fractions of the rows, and the size of the data, for the log."""
        shares = np.bincount(self._schedule, minlength=len(self.specs)) / len(self._schedule)
        members = [
            f"{spec} {share:.1%} of {denoiser.tokens_length} tokens -> up to {denoiser.inputs_length} + "
            f"{denoiser.targets_length}"
            for spec, share, denoiser in zip(self.specs, shares.tolist(), self.denoisers, strict=True)
        ]
        return f"ul2, {'; '.join(members)}; {self.num_tokens:,} training tokens"

    def settings(self) -> dict[str, Any]:
        return {
            "task": "ul2",
            "denoisers": [
                [str(spec), d.tokens_length, d.targets_length]
                for spec, d in zip(self.specs, self.denoisers, strict=True)
            ],
            "turn": self._schedule.tolist(),
            "modes": self.modes,
            "ids": [self.sentinel_ids.tolist(), self.eos_id, self.pad_id],
        }
