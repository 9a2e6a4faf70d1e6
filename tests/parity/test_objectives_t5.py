"""Span corruption and prefix LM equal the `t5` package token for token, given the same noise mask.

The oracle runs in a process of its own: TensorFlow must not be imported beside torch and triton. It writes what t5
made of masks that this test drew, and masks and lengths that t5 drew.
"""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.prefix_lm import PrefixLM
from lm_experiments_tools.data.objectives.span_corruption import (
    count_spans,
    noise_mask,
    random_spans_lengths,
    replace_spans,
)
from lm_experiments_tools.errors import UserError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("t5") is None or importlib.util.find_spec("tensorflow") is None,
        reason="the oracle needs the packages t5 and tensorflow",
    ),
]

VOCAB_SIZE = 32_100
SENTINELS = np.arange(VOCAB_SIZE - 1, VOCAB_SIZE - 1001, -1)  # as t5, without a bound on their number
# with UL2's denoisers
SETTINGS = [(0.15, 3.0), (0.3, 8.0), (0.5, 3.0), (0.15, 1.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0)]
EXAMPLES_PER_SETTING = 180
PREFIX_LENGTHS = [1, 2, 3, 5, 8, 33, 127, 128, 510, 511]
PREFIX_DENSITIES = [0.5, 0.25, 0.1]
PREFIX_DRAWS = 60  # of a length and density

ORACLE = """
import sys
import numpy as np
import tensorflow as tf
from t5.data import preprocessors as t5

given, output = np.load(sys.argv[1]), {}
vocabulary = type("Vocabulary", (), {"vocab_size": int(given["vocab_size"])})()
seeds = tf.constant([[0, 1], [2, 3]])

@tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.bool)])
def corrupt(tokens, mask):
    return (t5.noise_span_to_unique_sentinel(tokens, mask, vocabulary, seeds),
            t5.nonnoise_span_to_unique_sentinel(tokens, mask, vocabulary, seeds))

bounds = np.concatenate([[0], np.cumsum(given["lengths"])])
made = [corrupt(given["tokens"][a:b], given["masks"][a:b]) for a, b in zip(bounds[:-1], bounds[1:])]
for k, name in enumerate(["inputs", "targets"]):
    output[name] = np.concatenate([pair[k] for pair in made])
    output[name + "_lengths"] = np.array([len(pair[k]) for pair in made])

output["helper"] = np.array([
    t5.random_spans_helper(int(length), density, mean, 1, 1) for length, density, mean in given["grid"]])

def mask_function(density, mean):  # t5 wants these as Python numbers
    signature = [tf.TensorSpec([], tf.int32), tf.TensorSpec([2, 2], tf.int32)]
    return tf.function(lambda length, seeds: t5.random_spans_noise_mask(length, density, seeds, mean), signature)

functions = {}

def draw(length, density, mean, k):
    setting = float(density), float(mean)
    if setting not in functions:
        functions[setting] = mask_function(*setting)
    return functions[setting](int(length), np.array([[k, 1], [k, 2]], np.int32)).numpy()

counts = []
for k, (length, density, mean) in enumerate(given["count_grid"]):
    mask = draw(length, density, mean, k)
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    counts.append((mask.sum(), starts.sum()))
output["counts"] = np.array(counts)

@tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.bool)])
def cut(tokens, mask):
    return t5.drop_nonnoise_tokens(tokens, mask, None, seeds), t5.drop_noise_tokens(tokens, mask, None, seeds)

prefixes, cuts = [], {"inputs": [], "targets": []}
for density in given["prefix_densities"]:
    signature = [tf.TensorSpec([], tf.int32), tf.TensorSpec([2, 2], tf.int32)]
    draw_prefix = tf.function(
        lambda length, seeds: t5.random_prefix_noise_mask(length, float(density), seeds), signature)
    for length in given["prefix_lengths"]:
        for k in range(int(given["prefix_draws"])):
            mask = draw_prefix(int(length), np.array([[k, 3], [k, 4]], np.int32))
            prefixes.append(int(mask.numpy().sum()))
            if k < 5:
                made = cut(given["tokens"][:length], mask)
                for name, tokens in zip(("inputs", "targets"), made):
                    cuts[name].append(tokens.numpy())
output["prefixes"] = np.array(prefixes)
for name, rows in cuts.items():
    output["prefix_" + name] = np.concatenate(rows)
    output["prefix_" + name + "_lengths"] = np.array([len(row) for row in rows])

np.savez(sys.argv[2], **output)
"""


def drawn_masks(counts, number, key):
    """Noise masks bool[number, length] of our random spans."""
    return noise_mask(counts, np.random.default_rng(key).random((number, counts.num_gaps)))


def prefix_lm(length, density):
    """Prefix LM of rows of `length` tokens, with targets of any length."""
    return PrefixLM.create(TokenIds(VOCAB_SIZE), max(length, 2) + 1, noise_density=density)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """Arrays given to t5, and those that it made of them."""
    generator = np.random.default_rng(0)
    masks = []
    for key, (density, mean) in enumerate(SETTINGS):
        for _ in range(EXAMPLES_PER_SETTING):
            counts = count_spans(int(generator.integers(2, 700)), density, mean)
            masks.append(drawn_masks(counts, 1, key=1000 * key + len(masks))[0])
    for length in generator.integers(1, 60, 40):  # also spans that our own draws would not give
        masks.append(np.concatenate([[False], generator.random(length) < 0.3, [True]]))
    helper_lengths = [3, 4, 5, 8, 17, 64, 100, 127, 128, 190, 256, 350, 390, 511, 512, 513, 670, 1024, 2048]
    grid = [
        (length, density, mean)
        for length in helper_lengths
        for density in (0.1, 0.15, 0.25, 0.3, 0.5)
        for mean in (1.5, 3.0, 3.7, 8.0, 32.0, 64.0)
    ]
    # lengths where float32 and float64 disagree at 0.15 are among these
    count_grid = [(n, d, m) for n in [*range(2, 60), 190, 350, 390, 568, 670] for d, m in ((0.15, 3.0), (0.3, 2.5))]
    given = {
        "vocab_size": VOCAB_SIZE,
        "lengths": np.array([mask.size for mask in masks]),
        "masks": np.concatenate(masks),
        "tokens": generator.integers(2, 30_000, sum(mask.size for mask in masks)),
        "grid": np.array(grid),
        "count_grid": np.array(count_grid),
        "prefix_lengths": np.array(PREFIX_LENGTHS),
        "prefix_densities": np.array(PREFIX_DENSITIES),
        "prefix_draws": PREFIX_DRAWS,
    }
    folder = tmp_path_factory.mktemp("oracle")
    np.savez(folder / "given.npz", **given)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", ORACLE, str(folder / "given.npz"), str(folder / "made.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return given, dict(np.load(folder / "made.npz"))


def split(values, lengths):
    return np.split(values, np.cumsum(lengths)[:-1])


def test_inputs_and_targets_equal_t5_token_for_token(oracle):
    given, made = oracle
    tokens, masks = split(given["tokens"], given["lengths"]), split(given["masks"], given["lengths"])
    expected_inputs = split(made["inputs"], made["inputs_lengths"])
    expected_targets = split(made["targets"], made["targets_lengths"])
    assert len(tokens) == len(SETTINGS) * EXAMPLES_PER_SETTING + 40
    for row, mask, inputs, targets in zip(tokens, masks, expected_inputs, expected_targets, strict=True):
        np.testing.assert_array_equal(replace_spans(row, mask, SENTINELS), inputs)
        np.testing.assert_array_equal(replace_spans(row, ~mask, SENTINELS), targets)


def test_segment_lengths_equal_random_spans_helper(oracle):
    given, made = oracle
    refused = 0
    for (length, density, mean), expected in zip(given["grid"].tolist(), made["helper"].tolist(), strict=True):
        try:
            assert list(random_spans_lengths(int(length), density, mean)) == expected, (length, density, mean)
        except UserError:
            refused += 1
    assert refused <= 5  # tiny inputs with more spans than non-noise tokens, which t5's mask cannot make


def test_counts_of_noise_tokens_and_spans_equal_random_spans_noise_mask(oracle):
    given, made = oracle
    for (length, density, mean), expected in zip(given["count_grid"].tolist(), made["counts"].tolist(), strict=True):
        counts = count_spans(int(length), density, mean)
        assert [counts.num_noise_tokens, counts.num_spans] == expected, (length, density, mean)


def test_prefix_lm_equals_t5_token_for_token(oracle):
    given, made = oracle
    prefixes = made["prefixes"].reshape(len(PREFIX_DENSITIES), len(PREFIX_LENGTHS), PREFIX_DRAWS)[..., :5]
    expected_inputs = split(made["prefix_inputs"], made["prefix_inputs_lengths"])
    expected_targets = split(made["prefix_targets"], made["prefix_targets_lengths"])
    cases = [(n, d, p) for d, ps in zip(PREFIX_DENSITIES, prefixes, strict=True)
             for n, row in zip(PREFIX_LENGTHS, ps, strict=True) for p in row.tolist()]  # fmt: skip
    for (length, density, prefix), inputs, targets in zip(cases, expected_inputs, expected_targets, strict=True):
        rng = SimpleNamespace(integers=lambda low, high, prefix=prefix: prefix)
        example = prefix_lm(length, density).example(given["tokens"][:length], rng)
        assert example["input_ids"].tolist() == inputs.tolist() and example["labels"].tolist() == targets.tolist()


def test_prefixes_have_the_range_of_t5(oracle):
    prefixes = oracle[1]["prefixes"].reshape(len(PREFIX_DENSITIES), len(PREFIX_LENGTHS), PREFIX_DRAWS)
    for density, rows in zip(PREFIX_DENSITIES, prefixes, strict=True):
        for length, drawn in zip(PREFIX_LENGTHS, rows, strict=True):
            shortest = prefix_lm(length, density).shortest(length)
            assert shortest <= drawn.min() and drawn.max() <= max(length - 1, 0)
            if length - shortest <= 8:  # few enough that all are seen
                assert set(drawn.tolist()) == set(range(shortest, max(length, 1)))
            else:
                places = (drawn - shortest + 0.5) / (length - shortest)
                assert places.min() < 0.15 and places.max() > 0.85 and abs(places.mean() - 0.5) < 0.15
