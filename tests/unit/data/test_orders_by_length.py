"""Samples of like length next to each other: one of each length in every step, whatever its split; nothing is lost."""

from types import SimpleNamespace

import numpy as np
import pytest

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.prefix_lm import PrefixLM
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.data.objectives.ul2 import UL2
from lm_experiments_tools.data.order import Buckets, MixedSteps, permute
from tests.helpers.padding import padding

IDS = TokenIds(10_000, sentinel_ids=np.arange(9_999, 9_899, -1))


class Sized:
    """A dataset of nothing but lengths, evenly spread over 1 to `longest`."""

    fingerprint = "x"

    def __init__(self, num_samples=0, longest=1000, seed=0, of=None):
        self.of = np.random.default_rng(seed).integers(1, longest + 1, num_samples) if of is None else np.array(of)

    def __len__(self):
        return len(self.of)

    def lengths(self, samples):
        return np.stack([self.of[samples % len(self.of)]] * 2)


def source(num_tokens):
    return SimpleNamespace(tokens=np.full(num_tokens, 20, np.uint16), fingerprint="x")


def ul2(num_tokens=2_000_000, length=256):
    return Dataset(TokenRows(source(num_tokens), UL2.create(IDS, length, length, mode_tokens=False)))


def order(kind, data, rows, seed=0):
    return kind(data.lengths, len(data), rows, seed)


def test_worked_example_of_buckets():
    lengths = Sized(of=[5, 9, 2, 7, 1, 8, 3, 6])
    found = {tuple(order(Buckets, lengths, 2, seed)(np.arange(8)).tolist()) for seed in range(400)}
    assert (7, 3, 4, 2, 5, 1, 6, 0) in found and len(found) == 24
    pairs = {(4, 2), (6, 0), (7, 3), (5, 1)}
    assert all(set(zip(one[::2], one[1::2], strict=True)) == pairs for one in found)


@pytest.mark.parametrize("kind", [Buckets, MixedSteps])
@pytest.mark.parametrize("rows", [1, 8, 20, 32])
@pytest.mark.parametrize("num_samples", [5, 100, 777])
def test_each_sample_is_kept_once_an_epoch(kind, rows, num_samples):
    arranged = order(kind, Sized(num_samples), rows)
    for epoch in range(3):
        samples = arranged(np.arange(num_samples) + epoch * num_samples)
        assert sorted(samples.tolist()) == list(range(epoch * num_samples, (epoch + 1) * num_samples))


def test_a_step_has_a_bucket_of_each_eighth_of_the_lengths_in_their_order():
    data = Sized(64 * 400)
    lengths = data.lengths(order(MixedSteps, data, 64)(np.arange(64 * 400)))[0].reshape(400, 8, 8)
    expected = (np.arange(8) + 0.5) * 125
    assert np.abs(lengths.mean(axis=2) - expected).max() < 125
    np.testing.assert_allclose(lengths.mean(axis=(0, 2)), expected, rtol=0.15, atol=10)  # drawn over the whole eighth
    assert np.ptp(lengths, axis=2).mean() < 1000 / 32  # a bucket is of one length, nearly
    assert not (lengths[:16, 0].mean(axis=1) == np.sort(lengths[:16, 0].mean(axis=1))).all()


def test_steps_of_ul2_hold_its_denoisers_in_their_shares():
    """Of a step of 64 rows by chance no less; buckets of a step's rows would be of one denoiser."""
    data = ul2()
    schedule = data.members[0].objective.schedule
    made = {"mixed": order(MixedSteps, data, 64), "buckets": order(Buckets, data, 64)}
    spread = {}
    for name, arranged in {**made, "random": order(Buckets, data, 1)}.items():
        samples = arranged(np.arange(64 * 80))
        rows = permute(samples, len(data), 0, np.zeros_like(samples))
        kinds = schedule[rows % len(schedule)].reshape(80, 64)
        shares = np.stack([(kinds == k).mean(axis=1) for k in range(7)])
        targets = data.lengths(samples)[1].reshape(80, 64).sum(axis=1)
        assert shares.mean(axis=1) == pytest.approx([1 / 7.5] * 6 + [1.5 / 7.5], abs=0.03)
        spread[name] = shares.max(), targets.max() / targets.min()
    assert spread["mixed"][0] <= 0.5 and spread["mixed"][1] < 2
    assert spread["buckets"][0] == 1.0 and spread["buckets"][1] > 10
    assert spread["random"][0] <= 0.5 and spread["random"][1] < 2


@pytest.mark.parametrize("make", ["ul2", "prefix_lm"])
def test_padding_falls_with_the_micro_batches_of_a_step(make):
    data = ul2() if make == "ul2" else Dataset(TokenRows(source(900_000), PrefixLM.create(IDS, 256)))
    numbers = np.arange(64 * 100)
    mixed, buckets = (order(kind, data, 64)(numbers) for kind in (MixedSteps, Buckets))
    found = [padding(data, 64 // parts, mixed) for parts in (1, 2, 4, 8, 16)]
    assert found == sorted(found, reverse=True) and found[3] < 0.07
    assert found[0] <= padding(data, 64, numbers) + 0.01
    assert found[3] < padding(data, 64, buckets) + 0.01  # of one length a step


def test_the_fingerprint_tells_how_rows_are_put_together():
    data = ul2(10_000)
    found = [data.arranged(order(kind, data, rows)).fingerprint for kind in (MixedSteps, Buckets) for rows in (8, 16)]
    names = ["mix_rows=8", "mix_rows=16", "bucket_rows=8", "bucket_rows=16"]
    assert found == [f"{data.fingerprint}/{name}" for name in names]
