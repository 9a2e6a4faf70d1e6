"""Span corruption against literals, t5's published lengths, and the closed forms of its distribution."""

from math import comb

import numpy as np
import pytest

from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.span_corruption import (
    SpanCorruption,
    count_spans,
    noise_mask,
    plan_spans,
    random_spans_lengths,
    replace_spans,
)
from lm_experiments_tools.errors import UserError

SENTINELS = np.arange(99, 89, -1)


def draw(counts, num_rows):
    """Noise masks bool[num_rows, tokens]."""
    return noise_mask(counts, np.random.default_rng(1).random((num_rows, counts.num_gaps)))


def span_lengths(masks):
    """Lengths of non-noise and noise spans, int64[rows, spans, 2]."""
    changes = np.diff(masks.astype(np.int8), axis=1, prepend=1, append=0) != 0
    changes[:, -1] = True
    return np.diff(np.nonzero(changes)[1].reshape(len(masks), -1)).reshape(len(masks), -1, 2)


def test_worked_example_of_the_docstring():
    tokens, mask = np.arange(10, 20), np.array([0, 0, 0, 1, 1, 0, 0, 0, 0, 1], bool)
    assert replace_spans(tokens, mask, SENTINELS).tolist() == [10, 11, 12, 99, 15, 16, 17, 18, 98]
    assert replace_spans(tokens, ~mask, SENTINELS).tolist() == [99, 13, 14, 98, 19]
    counts = count_spans(10, 0.3, 1.5)
    assert (counts.num_noise_tokens, counts.num_spans, counts.num_gaps) == (3, 2, 8)
    # The third gap of seven non-noise tokens, and the second of three noise tokens, have the smallest numbers.
    assert noise_mask(counts, np.array([5, 6, 1, 4, 9, 8, 3, 2.0])).tolist() == mask.tolist()


@pytest.mark.parametrize(
    ("inputs_length", "noise_density", "mean_length", "expected"),
    [  # printed by t5 0.9.4
        (512, 0.15, 3.0, (568, 114, 28)),
        (512, 0.15, 8.0, (588, 100, 11)),
        (512, 0.15, 32.0, (598, 94, 3)),
        (512, 0.15, 64.0, (600, 92, 1)),
        (512, 0.5, 3.0, (766, 512, 128)),
        (512, 0.5, 8.0, (908, 512, 57)),
        (512, 0.5, 64.0, (1006, 512, 8)),
        (1024, 0.15, 3.0, (1137, 229, 57)),
        (2048, 0.15, 3.0, (2274, 456, 114)),
        (4096, 0.15, 3.0, (4550, 910, 227)),
    ],
)
def test_segment_lengths_are_those_of_t5(inputs_length, noise_density, mean_length, expected):
    lengths = random_spans_lengths(inputs_length, noise_density, mean_length)
    assert (*lengths, count_spans(lengths[0], noise_density, mean_length).num_spans) == expected


def test_number_of_noise_tokens_rounds_in_float32():
    # 0.15 is a little more than 0.15 in float32: 350 x 0.15 = 52.500002 rounds up, where float64 rounds 52.5 to even.
    assert round(350 * 0.15) == 52
    assert count_spans(350, 0.15, 3.0).num_noise_tokens == 53


@pytest.mark.parametrize("mean_length", [1.5, 2.5, 3.0, 10.0])
@pytest.mark.parametrize("noise_density", [0.1, 0.15, 0.3, 0.5])
def test_planned_segments_always_fit_and_never_waste_more_than_one_place(noise_density, mean_length):
    for inputs_length in range(8, 700, 5):
        counts = plan_spans(inputs_length, noise_density, mean_length)
        assert inputs_length - 1 <= counts.inputs_length <= inputs_length


def test_spans_have_the_promised_counts():
    for length in [2, 3, 7, 14, 50, 568]:
        counts = count_spans(length, 0.15, 3.0)
        spans = span_lengths(draw(counts, 100))
        assert spans.shape == (100, counts.num_spans, 2) and spans.min() >= 1
        assert (spans.sum(axis=1) == [counts.num_nonnoise_tokens, counts.num_noise_tokens]).all()


def test_a_lone_token_is_an_input_without_noise_as_in_t5():
    mask = draw(count_spans(1, 0.15, 3.0), 2)
    tokens = np.array([[7], [8]])
    assert replace_spans(tokens, mask, SENTINELS).tolist() == [[7], [8]]
    assert replace_spans(tokens, ~mask, SENTINELS).tolist() == [[99], [99]]


def test_every_composition_is_equally_likely():
    counts = count_spans(10, 0.4, 2.0)  # 4 noise tokens in 2 spans, 6 others in 2: 3 x 5 masks
    assert (counts.num_noise_tokens, counts.num_spans) == (4, 2)
    num_rows = 30_000
    _, seen = np.unique(draw(counts, num_rows), axis=0, return_counts=True)
    expected = num_rows / (comb(3, 1) * comb(5, 1))
    assert seen.size == 15
    assert ((seen - expected) ** 2 / expected).sum() < 36.1  # chi-square, 14 degrees of freedom, p = 0.001


def test_span_lengths_follow_the_closed_form():
    """P(a span of k) = C(n-k-1, s-2) / C(n-1, s-1) in a random composition of n into s positive parts."""
    counts, num_rows = count_spans(568, 0.15, 3.0), 4000
    lengths = span_lengths(draw(counts, num_rows))
    s = counts.num_spans
    for total, spans in ((counts.num_noise_tokens, lengths[..., 1]), (counts.num_nonnoise_tokens, lengths[..., 0])):
        assert spans.shape == (num_rows, s) and (spans.sum(axis=1) == total).all()
        for k in range(1, 9):
            exact = comb(total - k - 1, s - 2) / comb(total - 1, s - 1)
            # Parts of one row are exchangeable and negatively correlated, so that independent errors bound the spread.
            error = (exact * (1 - exact) / spans.size) ** 0.5
            assert abs((spans == k).mean() - exact) < 4.5 * error, k
        for place in (0, s // 2, s - 1):  # first, middle and last spans are alike
            exact = comb(total - 2, s - 2) / comb(total - 1, s - 1)
            assert abs((spans[:, place] == 1).mean() - exact) < 4.5 * (exact * (1 - exact) / num_rows) ** 0.5


def test_more_spans_than_sentinels_is_refused_with_the_numbers():
    assert plan_spans(1024, 0.15, 3.0).num_spans == 57
    ids = TokenIds(10_000, sentinel_ids=np.arange(9_999, 9_899, -1))
    with pytest.raises(UserError, match=r"2048 inputs hold 114 noise spans .* 100 sentinels.* --extra_ids"):
        SpanCorruption.create(ids, 2048)
    with pytest.raises(UserError, match="128 noise spans"):
        SpanCorruption.create(ids, 512, noise_density=0.5)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match="cannot be separated"):
        random_spans_lengths(512, 0.6, 1.0)
    for density in (0.0, 1.0, -0.1, 15.0, float("nan")):
        with pytest.raises(UserError, match="noise_density"):
            random_spans_lengths(512, density, 3.0)
    with pytest.raises(UserError, match="mean_noise_span_length"):
        random_spans_lengths(512, 0.15, 0.5)
    with pytest.raises(UserError, match="inputs_length"):
        random_spans_lengths(2, 0.15, 3.0)
