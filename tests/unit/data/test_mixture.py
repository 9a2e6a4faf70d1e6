"""Mixtures: Megatron's order of members, no sample repeated early, any position reached at once."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.mixture import Mixture, blending_order
from lm_experiments_tools.errors import UserError


class Numbers:
    """Row r of epoch e is [member, sample number], so that a sample can be recognised wherever it turns up."""

    def __init__(self, member, length, **extra):
        self.member, self.length, self.extra, self.seed = member, length, extra, member
        self.fingerprint, self.order = f"{member}/{length}/{sorted(extra)}", f"{member}/{length}"

    def __len__(self):
        return self.length

    def describe(self):
        return f"numbers of {self.member}"

    def batch(self, epochs, rows):
        return {"input_ids": np.stack([np.full_like(rows, self.member), epochs * self.length + rows], 1), **self.extra}


def mixed(members, *arguments, **settings):
    return Dataset(members, Mixture([len(member) for member in members], *arguments, **settings))


@pytest.fixture(scope="module")
def megatron_helpers():
    spec = importlib.util.find_spec("megatron")
    files = [
        path for folder in spec.submodule_search_locations for path in Path(folder).glob("core/datasets/*cpp*.so")
    ]
    if not files:
        pytest.skip("megatron-core is not installed")
    spec = importlib.util.spec_from_file_location("helpers_cpp", files[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def megatron_order(helpers, weights, size, quotas=None):
    order, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    if quotas is None:
        helpers.build_blending_indices(order, numbers, weights, len(weights), size, False)
    else:
        helpers.build_exhaustive_blending_indices(order, numbers, quotas, len(quotas))
    return order, numbers


@pytest.mark.parametrize("kind", ["random", "equal", "small integers", "one rare", "lengths"])
def test_order_is_megatrons(megatron_helpers, kind):
    rng = np.random.default_rng(len(kind))
    for members in (1, 2, 3, 5, 9, 300):
        size = int(rng.integers(1, 20_000))
        weights = {
            "random": rng.random(members),
            "equal": np.ones(members),  # ties at every turn
            "small integers": rng.integers(1, 5, members).astype(float),
            "one rare": np.append(rng.random(members - 1), 1e-3),
            "lengths": rng.integers(1, 2000, members).astype(float),
        }[kind]
        weights /= weights.sum()
        np.testing.assert_array_equal(
            blending_order(weights, size), megatron_order(megatron_helpers, weights, size)[0]
        )
        quotas = rng.integers(1, rng.choice([10, 4000 // members + 10]), members).astype(np.int64)
        quotas[0] *= rng.choice([1, 20])
        size = int(quotas.sum())
        expected, _ = megatron_order(megatron_helpers, None, size, quotas)
        np.testing.assert_array_equal(blending_order(quotas / size, size, quotas), expected)


def test_a_mixture_reads_what_megatrons_indices_say(megatron_helpers):
    mixture = Mixture([700, 300, 411], [1, 3, 0.5], "megatron")
    assert len(mixture) == 700 + 300 + 411
    order, numbers = megatron_order(megatron_helpers, np.array([1, 3, 0.5]) / 4.5, len(mixture))
    found = mixture.locate(np.arange(len(mixture)))
    np.testing.assert_array_equal(found, [order, numbers])


def test_the_worked_example():
    assert Mixture([2, 4]).locate(np.arange(6))[0].tolist() == [1, 0, 1, 0, 1, 1]
    shares = Mixture([2, 4], blending="megatron")
    assert shares.locate(np.arange(6))[0].tolist() == [0, 1, 0, 1, 0, 1]
    assert blending_order(np.array([0.6, 0.4]), 6).tolist() == [0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize("count", [255, 256, 1836])
def test_as_many_members_as_flan_has_tasks(count):
    mixture = Mixture([1 + k % 3 for k in range(count)])
    members, numbers = mixture.locate(np.arange(len(mixture)))
    assert sorted(zip(members.tolist(), numbers.tolist(), strict=True)) == [
        (member, number) for member in range(count) for number in range(1 + member % 3)
    ]


@pytest.mark.parametrize(
    ("limits", "quotas"),
    [
        ({}, [1500, 40, 333]),
        ({"weights": [0.3, 0.1, 7]}, [450, 4, 2331]),
        ({"maximum": 100}, [100, 40, 100]),
        ({"maximum": 100, "weights": [1, 2, 0.1]}, [100, 80, 34]),
        ({"temperature": 1e9}, [625, 625, 625]),  # of 1,873 in all
        ({"temperature": 2}, [1146, 188, 540]),
        ({"maximum": 360, "temperature": 2, "weights": [1, 2.25, 1]}, [319, 160, 306]),
        ({"temperature": 0.01}, [1873, 1, 1]),  # none of them is forgotten
    ],
)
def test_weights_maximum_and_temperature_decide_how_much_an_epoch_takes_of_each(limits, quotas):
    mixture = Mixture([1500, 40, 333], **limits)
    taken = mixture.taken
    assert taken.tolist() == quotas
    for epoch in range(3):  # each goes on where it stopped: nothing comes again before everything was read
        members, numbers = mixture.locate(np.arange(len(mixture)) + epoch * len(mixture))
        for member, quota in enumerate(taken.tolist()):
            assert numbers[members == member].tolist() == list(range(epoch * quota, (epoch + 1) * quota))


def test_a_sample_does_not_depend_on_its_batch():
    mixture = mixed([Numbers(0, 1000), Numbers(1, 210)], [1, 2.5])
    whole = mixture.batch(np.arange(3 * len(mixture)))["input_ids"]
    some = np.random.default_rng(0).integers(0, 3 * len(mixture), 300)
    np.testing.assert_array_equal(mixture.batch(some)["input_ids"], whole[some])


def test_every_row_of_an_epoch_is_read_once_in_another_order():
    dataset = mixed([Numbers(0, 40), Numbers(1, 30)])
    epochs = [dataset.batch(np.arange(70) + 70 * epoch)["input_ids"].tolist() for epoch in range(3)]
    for number, epoch in enumerate(epochs):
        expected = [[0, 40 * number + row] for row in range(40)] + [[1, 30 * number + row] for row in range(30)]
        assert sorted(epoch) == expected != epoch
    assert len({tuple(row % 40 for member, row in epoch if member == 0) for epoch in epochs}) == 3


def test_order_is_that_of_the_members_rows_whatever_is_made_of_them():
    def mixture(rows=("a", "b"), extra=(), **settings):
        members = [Numbers(0, 4, **dict.fromkeys(extra)), Numbers(1, 4)]
        for member, name in zip(members, rows, strict=True):
            member.order = name
        return mixed(members, **settings)

    assert mixture(extra=["masks"]).order == mixture().order != mixture().fingerprint
    assert mixture(extra=["masks"]).fingerprint != mixture().fingerprint
    assert len({mixture().order, mixture(("a", "c")).order, mixture(weights=[1, 2]).order}) == 3
    assert mixture(("a", None)).order is None


def test_fingerprint_names_members_weights_and_blending():
    def fingerprint(length=4, **settings):
        return mixed([Numbers(0, length), Numbers(1, 4)], **settings).fingerprint

    changes = [{}, {"length": 5}, {"weights": [1, 2]}, {"blending": "megatron"}, {"maximum": 4}, {"temperature": 4}]
    prints = [fingerprint(**change) for change in changes]
    assert len(set(prints)) == len(prints) and prints[0] == fingerprint(weights=[1, 1])
    described = mixed([Numbers(0, 4), Numbers(1, 4)], [1, 2]).describe()
    assert "8 of 4 samples (weight 2) of numbers of 1" in described


def test_members_with_other_entries_are_refused():
    dataset = mixed([Numbers(0, 4), Numbers(1, 4, position_ids=np.zeros((2, 2)))])
    with pytest.raises(UserError, match="others input_ids, position_ids"):
        dataset.batch(np.arange(4))
