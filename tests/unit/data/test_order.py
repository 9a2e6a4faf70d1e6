"""The keyed permutation and the counter-based random integers."""

from math import factorial, sqrt

import numpy as np
import pytest
from numpy.random import Generator, Philox

from lm_experiments_tools.data.order import (
    draw_integers,
    epoch_shift,
    permute,
    philox_4x32,
    row_generators,
    stream_key,
)


def chi_square_z(observed, num_cells):
    """Deviation of counts from uniform, in standard deviations of the chi-square statistic."""
    observed = np.pad(observed, (0, num_cells - len(observed)))
    expected = observed.sum() / num_cells
    statistic = ((observed - expected) ** 2 / expected).sum()
    return (statistic - (num_cells - 1)) / sqrt(2 * (num_cells - 1))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers published with Random123, file kat_vectors, "philox4x32 10"
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0_A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox_4x32(tuple(np.array([word], np.uint64) for word in counter), key)
    assert words[:, 0].tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 97, 100, 997, 1000, 1024, 7919, 65_537])
def test_each_epoch_visits_every_sample_once(size):
    for seed, epoch in ((0, 0), (0, 1), (123, 5)):
        images = permute(np.arange(size), size, seed, np.full(size, epoch))
        np.testing.assert_array_equal(np.sort(images), np.arange(size))


def test_random_access_equals_the_whole_permutation():
    size = 10_007
    whole = permute(np.arange(size), size, 3, np.full(size, 2))
    some = np.array([5, 9_999, 0, 5])
    np.testing.assert_array_equal(permute(some, size, 3, np.full(4, 2)), whole[some])
    mixed = permute(np.array([7, 7, 7]), size, 3, np.array([2, 0, 2]))
    assert mixed[0] == mixed[2] == whole[7] != mixed[1]


def test_sizes_of_any_corpus_are_served():
    size = 3_000_000_019
    images = permute(np.arange(size - 1000, size), size, 0, np.zeros(1000, np.int64))
    assert len(set(images.tolist())) == 1000 and images.min() >= 0 and images.max() < size
    assert abs(images.mean() / size - 0.5) < 0.05


def test_the_order_is_pinned():
    expected = [[788, 859, 590, 455], [435, 885, 9, 524]]
    for epoch, first in zip((0, 2), expected, strict=True):
        assert permute(np.arange(4), 1000, 3, np.full(4, epoch)).tolist() == first


def test_epochs_and_seeds_give_unrelated_orders():
    size = 1000
    orders = [
        permute(np.arange(size), size, seed, np.full(size, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for i, first in enumerate(orders):
        assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.13  # 4 standard deviations
        for second in orders[:i]:
            assert (first == second).sum() < 8  # 1 fixed point is expected
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.13


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_equally_likely(size):
    num_epochs = 4000
    epochs = np.repeat(np.arange(num_epochs), size)
    orders = permute(np.tile(np.arange(size), num_epochs), size, 7, epochs).reshape(num_epochs, size)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert abs(chi_square_z(counts, factorial(size))) < 4


@pytest.mark.parametrize("size", [8, 9, 31, 64, 100, 127])
def test_places_and_pairs_are_uniform_over_epochs(size):
    epochs = np.arange(4000)
    first = permute(np.zeros(4000, np.int64), size, 7, epochs)
    second = permute(np.ones(4000, np.int64), size, 7, epochs)
    assert abs(chi_square_z(np.bincount(first), size)) < 4
    assert abs(chi_square_z(np.bincount(second), size)) < 4
    assert abs(chi_square_z(np.bincount((second - first) % size)[1:], size - 1)) < 4


def test_random_integers_of_a_sample_do_not_depend_on_the_batch():
    key = stream_key(0, "noise")
    epochs, samples = np.array([0, 3, 3, 70_000]), np.array([9, 9, 2**40 + 9, 9])
    words = draw_integers(key, epochs, samples, 54)
    assert words.shape == (54, 4)
    for column in range(4):
        alone = draw_integers(key, epochs[column : column + 1], samples[column : column + 1], 54)
        np.testing.assert_array_equal(words[:, column], alone[:, 0])
    assert len(np.unique(words)) == words.size
    np.testing.assert_array_equal(draw_integers(key, epochs, samples, 7), words[:7])


def test_shift_is_uniform_over_epochs_and_keyed_by_seed():
    shifts = [epoch_shift(0, epoch, 50) for epoch in range(4000)]
    assert abs(chi_square_z(np.bincount(shifts), 50)) < 4
    assert shifts[:20] != [epoch_shift(1, epoch, 50) for epoch in range(20)]
    assert epoch_shift(0, 3, 1) == 0


def test_uses_of_one_seed_are_separate():
    assert len({stream_key(seed, use) for seed in (0, 1, 2**70) for use in ("order", "noise", "shift")}) == 9


def test_generators_of_rows_are_those_of_new_ones():
    key = stream_key(-1, "noise")
    epochs, rows = np.array([0, 1, 3, 0]), np.array([5, 0, 2**40 - 1, 5])

    def draws(rng):  # among them numbers of 32 bits, of which a generator keeps a half
        return [rng.random(), rng.integers(7, dtype=np.int32), rng.permutation(9).tolist(), rng.poisson(3.0)]

    # A list with a number above 2**63 would become float64, and lose its last bits.
    keys = [np.array([key, e << 40 | r], np.uint64) for e, r in zip(epochs.tolist(), rows.tolist(), strict=True)]
    new = [Generator(Philox(key=each)) for each in keys]
    assert [draws(rng) for rng in row_generators(key, epochs, rows)] == [draws(rng) for rng in new]
