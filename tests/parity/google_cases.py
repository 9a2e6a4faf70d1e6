"""Run as a script, in a process of its own: Google's own tests of t5 and seqio, with our functions in place of theirs.

python google_cases.py RESULT.json

The test modules come with the two packages. A function under test is replaced, in the module that the test calls, by
an adapter that asks ours; what it adds of its own is said at each adapter. RESULT holds for each test method
{"error": its traceback or null, "calls": how often it came to our functions}.
"""

import functools
import json
import sys
import unittest
from types import SimpleNamespace
from unittest import mock

import numpy as np

from lm_experiments_tools.data.seqio.job import PADDING
from lm_experiments_tools.data.seqio.worker import import_triton

import_triton()  # TensorFlow first, and the process would abort

import seqio  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import flags  # noqa: E402
from seqio import feature_converters, feature_converters_test  # noqa: E402
from t5.data import preprocessors, preprocessors_test  # noqa: E402
from transformers.models.t5.modeling_t5 import T5PreTrainedModel  # noqa: E402

from lm_experiments_tools.data.objectives.causal_lm import CausalLM  # noqa: E402
from lm_experiments_tools.data.objectives.objective import TokenIds  # noqa: E402
from lm_experiments_tools.data.objectives.prefix_lm import PrefixLM  # noqa: E402
from lm_experiments_tools.data.objectives.span_corruption import (  # noqa: E402
    count_spans,
    noise_mask,
    random_spans_lengths,
    replace_spans,
)
from lm_experiments_tools.data.objectives.token_rows import TokenRows  # noqa: E402
from lm_experiments_tools.data.order import epoch_shift, row_generators, stream_key  # noqa: E402
from lm_experiments_tools.data.seqio.client import to_batch  # noqa: E402
from lm_experiments_tools.data.seqio.tasks import TaskExamples  # noqa: E402

IDS = TokenIds(1000)
T5_CASES = {
    "random_spans_helper": ["test_random_spans_helper"],
    "random_spans_noise_mask": ["test_random_spans_noise_mask"],
    "noise_span_to_unique_sentinel": ["test_noise_span_to_unique_sentinel"],
    "denoise": ["test_denoise"],
    "span_corruption": ["test_span_corruption", "test_span_corruption_passthrough"],
    "random_prefix_noise_mask": ["test_random_prefix_noise_mask"],
    "prefix_lm": ["test_prefix_lm"],
    "split_tokens": ["test_split_tokens", "test_split_padding_tokens"],
}
SEQIO_CASES = ["test_encoder_decoder_unpacked", "test_encoder_decoder_targets_max_length"]
calls = 0


def counted(function):
    """Count the calls of an adapter, also those from within a tf.data graph."""

    @functools.wraps(function)
    def called(*args, **named):
        global calls
        calls += 1
        return function(*args, **named)

    return called


def in_graph(function, arguments, kind):
    """`function` of numpy arrays as an operation with a vector for a result."""
    made = tf.numpy_function(counted(function), arguments, kind)
    made.set_shape([None])
    return made


# ---- t5.data.preprocessors


@counted
def random_spans_helper(
    inputs_length,
    noise_density,
    mean_noise_span_length,
    extra_tokens_per_span_inputs,
    extra_tokens_per_span_targets,
    verbose=False,
):
    assert extra_tokens_per_span_inputs == extra_tokens_per_span_targets == 1  # a sentinel, as ours always counts
    return random_spans_lengths(inputs_length, noise_density, mean_noise_span_length)[:2]


def gaps_of_t5(num_items, num_segments, seed):
    """Numbers of the gaps between items: smaller where t5 shuffles one of its `num_segments - 1` cuts to."""
    return 1.0 - seqio.stateless_shuffle(tf.cast(tf.range(num_items - 1) < num_segments - 1, tf.float64), seed).numpy()


def random_spans_noise_mask(length, noise_density, seeds, mean_noise_span_length=3.0, random_roll=False):
    """The random choice of the gaps is t5's, by its seeds; how many spans of what sum, and where, is ours."""
    assert not random_roll

    def draw(length, seeds):
        counts = count_spans(int(length), noise_density, mean_noise_span_length)
        parts = zip((counts.num_nonnoise_tokens, counts.num_noise_tokens), seeds[::-1], strict=True)
        return noise_mask(counts, np.concatenate([gaps_of_t5(part, counts.num_spans, seed) for part, seed in parts]))

    mask = tf.py_function(counted(lambda n, seeds: draw(n.numpy(), seeds.numpy())), [length, seeds], tf.bool)
    mask.set_shape([None])
    return mask


def noise_span_to_unique_sentinel(tokens, mask, vocabulary, seeds):
    sentinels = vocabulary.vocab_size - 1 - np.arange(vocabulary.vocab_size)
    return in_graph(lambda *row: replace_spans(*row, sentinels.astype(row[0].dtype)), [tokens, mask], tokens.dtype)


def nonnoise_span_to_unique_sentinel(tokens, mask, vocabulary, seeds):
    return noise_span_to_unique_sentinel(tokens, tf.logical_not(mask), vocabulary, seeds)


def generator_of(seed):
    return next(row_generators(stream_key(int(seed), "noise"), np.array([0]), np.array([0])))


@counted
def random_prefix_noise_mask(length, noise_density, seeds):
    objective = PrefixLM.create(IDS, length + 1, noise_density=noise_density)
    return tf.constant(np.arange(length) < objective.draw_prefix(length, generator_of(np.array(seeds).reshape(-1)[0])))


def prefix_lm(dataset, sequence_length, output_features):
    """Rows of one token less than the inputs, as given; EOS is a later step of both."""

    @counted
    def ours(tokens, number):
        objective = PrefixLM.create(IDS, len(tokens) + 1, sequence_length["targets"])
        example = objective.example(tokens.astype(np.int64), generator_of(number))
        return example["input_ids"], example["labels"]

    def split(number, row):
        inputs, targets = tf.numpy_function(ours, [row["targets"], number], [tf.int64, tf.int64])
        return {"inputs": inputs, "targets": targets}

    return dataset.enumerate().map(split)


def split_tokens(dataset, unused_vocabulary, max_tokens_per_segment):
    """The rows of our token stream, in an epoch that starts at its first token, in their order."""
    rows = [row for example in dataset.as_numpy_iterator() for row in token_rows(example, max_tokens_per_segment)]
    signature = {"targets": tf.TensorSpec([None], tf.int32)}
    return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=signature)


@counted
def token_rows(example, length):
    source = SimpleNamespace(tokens=example["targets"].astype(np.uint16), fingerprint="")
    rows = TokenRows(source, CausalLM.create(IDS, length))
    epoch = next(e for e in range(100_000) if epoch_shift(rows.seed, e, rows.num_tokens) == 0)
    labels = rows.batch(np.full(len(rows), epoch), np.arange(len(rows)))["labels"]
    return [{"targets": row[row != -100]} for row in labels]


# ---- seqio.feature_converters


class EncDecFeatureConverter:
    """The padding of the worker process, and the batch that the training process makes of it."""

    TASK_FEATURES: dict = {}  # Google's tearDown looks into it

    def __init__(self, pack):
        assert not pack

    @counted
    def __call__(self, dataset, lengths):
        examples = object.__new__(TaskExamples)
        examples.job = SimpleNamespace(
            inputs_length=lengths["inputs"], targets_length=lengths["targets"], threads=1, task="", vocab_path=""
        )
        examples.vocabulary, examples._text = SimpleNamespace(size=1000), None
        rows = np.concatenate(list(examples._padded(dataset, 1)))
        batch = to_batch(rows, lengths["inputs"], pad_id=0)
        assert (batch["attention_mask"] == (rows[:, : lengths["inputs"]] != PADDING)).all()
        return tf.data.Dataset.from_tensor_slices(
            {
                "encoder_input_tokens": batch["input_ids"],
                "decoder_target_tokens": np.where(batch["labels"] == -100, 0, batch["labels"]),
                "decoder_input_tokens": shifted(batch["labels"]),
                "decoder_loss_weights": (batch["labels"] != -100).astype(np.int32),
            }
        )


def shifted(labels):
    """What T5 itself makes of labels for its decoder."""
    import torch

    model = SimpleNamespace(config=SimpleNamespace(decoder_start_token_id=0, pad_token_id=0))
    return T5PreTrainedModel._shift_right(model, torch.from_numpy(labels)).numpy()


REPLACED = {
    "random_spans_helper": random_spans_helper,
    "random_spans_noise_mask": random_spans_noise_mask,
    "noise_span_to_unique_sentinel": noise_span_to_unique_sentinel,
    "nonnoise_span_to_unique_sentinel": nonnoise_span_to_unique_sentinel,
    "random_prefix_noise_mask": random_prefix_noise_mask,
    "prefix_lm": prefix_lm,
    "split_tokens": split_tokens,
}
# left as they are, because Google's own function around ours calls them with other arguments than their tests
KEPT = {"span_corruption": {"split_tokens"}}


def result_of(case, method):
    """Run one test method; see the top."""
    global calls
    calls = 0
    outcome = unittest.TestResult()
    case(method).run(outcome)
    bad = [text for _, text in [*outcome.failures, *outcome.errors]]
    assert outcome.testsRun == 1 and not outcome.skipped
    return {"error": bad[0] if bad else None, "calls": calls}


def main(path):
    flags.FLAGS(sys.argv[:1])
    results = {}
    for group, methods in T5_CASES.items():
        replaced = {name: new for name, new in REPLACED.items() if name not in KEPT.get(group, ())}
        with mock.patch.multiple(preprocessors, **replaced):
            for method in methods:
                results[method] = result_of(preprocessors_test.PreprocessorsTest, method)
    with mock.patch.object(feature_converters, "EncDecFeatureConverter", EncDecFeatureConverter):
        for method in SEQIO_CASES:
            results[method] = result_of(feature_converters_test.EncDecFeatureConverterTest, method)
    with open(path, "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
