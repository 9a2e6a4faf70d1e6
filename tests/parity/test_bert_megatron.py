"""BERT samples against megatron-core: the packing row by row, and whole samples given the same random choices."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import megatron.bert_dataset
from megatron.bert_dataset import BertDataset, truncated_lengths
from megatron.masking import take_ngrams
from megatron.sample_mapping import MappingSettings, build_mapping
from tests.helpers.token_toys import token_data

FOLDERS = importlib.util.find_spec("megatron").submodule_search_locations
HELPERS = [path for folder in FOLDERS for path in Path(folder).glob("core/datasets/helpers_cpp*.so")]
pytestmark = pytest.mark.skipif(not HELPERS, reason="megatron-core is not installed")
CLS, SEP, MASK, PAD, VOCAB, LENGTH = 1, 2, 3, 0, 3000, 96


@pytest.fixture(scope="module")
def helpers():
    spec = importlib.util.spec_from_file_location("helpers_cpp", HELPERS[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_corpus(rng, mean_sentence):
    sentences = rng.geometric(0.1, 150) - 1
    lengths = rng.geometric(1 / mean_sentence, sentences.sum()).astype(np.int32)
    return np.concatenate([[0], np.cumsum(sentences)]), lengths


@pytest.mark.parametrize("mean_sentence", [3, 20, 150])
@pytest.mark.parametrize(("min_sentences", "passes"), [(2, 1), (1, 2)])
def test_packing_is_megatrons(helpers, mean_sentence, min_sentences, passes):
    rng = np.random.default_rng(mean_sentence)
    for max_length in (2, 61, 125, 509):
        documents, lengths = random_corpus(rng, mean_sentence)
        expected = helpers.build_mapping(
            documents, lengths, passes, 2**62, max_length, 0.0, 1234, False, min_sentences
        )  # shuffled
        settings = MappingSettings(max_length, min_sentences, 0.0, 512, num_epochs=passes)
        rows = build_mapping(documents, lengths, settings).rows
        assert rows.dtype == expected.dtype
        np.testing.assert_array_equal(
            np.sort(rows.view("u4,u4,u4"), axis=0), np.sort(expected.view("u4,u4,u4"), axis=0)
        )


def test_passes_stop_at_the_number_of_samples_as_megatrons(helpers):
    documents, lengths = random_corpus(np.random.default_rng(0), 20)
    for wanted in (1, 100, 300, 1000):
        expected = helpers.build_mapping(documents, lengths, 2**31 - 2, wanted, 61, 0.0, 1234, False, 2)
        settings = MappingSettings(61, 2, 0.0, 512, num_epochs=2**31 - 2, max_num_samples=wanted)
        assert len(build_mapping(documents, lengths, settings).rows) == len(expected)


def test_short_samples_are_as_many_as_megatrons(helpers):
    documents, lengths = random_corpus(np.random.default_rng(0), 20)
    theirs = helpers.build_mapping(documents, lengths, 20, 2**62, 125, 0.1, 1234, False, 2)
    ours = build_mapping(documents, lengths, MappingSettings(125, 2, 0.1, 512, num_epochs=20)).rows
    assert abs(len(ours) / len(theirs) - 1) < 0.01
    shares = [(rows[:, 2] < 125).mean() for rows in (ours, theirs)]
    assert abs(shares[0] - shares[1]) < 4 * np.sqrt(2 * 0.09 / len(ours))


# Runs megatron-core's dataset on PREFIX with a random generator that writes down what it drew.
MEGATRON = """
import json, sys
from types import SimpleNamespace
import numpy
import megatron.core.datasets.bert_dataset as module
from megatron.core.datasets.indexed_dataset import IndexedDataset

prefix, settings = sys.argv[1], json.loads(sys.argv[2])
RandomState = numpy.random.RandomState

class Recorder(RandomState):
    log = None
    def shuffle(self, candidates):
        super().shuffle(candidates)
        if "order" not in self.log:
            self.log["order"] = [candidate[0][0][0] for candidate in candidates]  # first token of each word
    def choice(self, values, p):
        n = int(super().choice(values, p=p))
        self.log["ngrams"].append(n)
        return n
    def geometric(self, p):
        n = int(super().geometric(p))
        self.log["ngrams"].append(n)
        return n
    def randint(self, low, high):
        value = int(super().randint(low, high))
        self.log.setdefault("pivot", value)  # the first, where there are three sentences
        return value
    def random(self):
        value = super().random()
        if "order" not in self.log:
            self.log["coins"].append(value)  # the exchange, then the side of each cut
        return value

numpy.random.RandomState = Recorder
words = set(settings["continues"])
dataset = module.BERTMaskedWordPieceDataset.__new__(module.BERTMaskedWordPieceDataset)
dataset.dataset = IndexedDataset(prefix)
dataset.sample_index = settings["rows"]
dataset.token_lookup = list(range(settings["vocab"]))
dataset._pad_token_id = 0
dataset.config = SimpleNamespace(
    random_seed=7, sequence_length=settings["length"], classification_head=True, masking_probability=0.15,
    masking_max_ngram=3, masking_do_full_word=True, masking_do_permutation=False,
    masking_use_longer_ngrams=False, masking_use_geometric_distribution=False,
    tokenizer=SimpleNamespace(cls=1, sep=2, mask=3, inv_vocab={
        i: ("##" if i in words else "") + str(i) for i in range(settings["vocab"])}))
samples = []
for index in range(len(settings["rows"])):
    Recorder.log = {"ngrams": [], "coins": []}
    sample = dataset[index]
    samples.append({name: numpy.asarray(value).tolist() for name, value in sample.items()} | Recorder.log)
print("RESULT " + json.dumps(samples))
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    rng = np.random.default_rng(1)
    documents = [
        [rng.integers(5, VOCAB, length) for length in rng.integers(2, 50, rng.integers(2, 15))] for _ in range(120)
    ]
    tokens = token_data(tmp_path_factory.mktemp("data") / "data", documents)
    starts_word = rng.random(VOCAB) < 0.8
    tokenizer = SimpleNamespace(size=VOCAB, unk_id=-1, starts_word=starts_word, fingerprint="toy", path="toy")
    vars(tokenizer).update(cls_id=CLS, sep_id=SEP, mask_id=MASK, pad_id=PAD, special_ids=[PAD, CLS, SEP, MASK])
    return BertDataset(tokens, tokenizer, max_seq_length=LENGTH)


@pytest.fixture(scope="module")
def megatrons(ours):
    """Megatron's samples, of a process of its own."""
    continues = np.flatnonzero(~ours.tokenizer.starts_word).tolist()
    settings = {"rows": ours.mapping.rows.tolist(), "continues": continues, "vocab": VOCAB, "length": LENGTH}
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON, ours.tokens.prefix, json.dumps(settings)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))[7:])


@pytest.mark.slow
def test_samples_are_megatrons_given_the_same_choices(ours, megatrons, monkeypatch):
    """Segments, truncation, layout, token types and masks; only what replaces a masked token is left to chance."""
    theirs, rows = megatrons, ours.mapping.rows.astype(int)
    recorded = [segments_of(ours, row, sample) for row, sample in zip(rows, theirs, strict=True)]
    numbers = np.array([number for number, (_, whole_words) in enumerate(recorded) if whole_words])
    assert len(numbers) > 150
    segments = megatron.bert_dataset._Segments(*np.array([recorded[number][0] for number in numbers]).T)
    monkeypatch.setattr(ours, "_segments", lambda *_: segments)
    chosen = [theirs[number] for number in numbers]
    monkeypatch.setattr(
        megatron.bert_dataset, "choose_masked", lambda *given: recorded_masks(chosen, rows[numbers, 2], *given)
    )
    names = ("input_ids", "token_type_ids", "attention_mask", "labels")
    batch = {name: np.empty((len(numbers), LENGTH), np.int64) for name in names}
    batch["next_sentence_label"] = np.empty(len(numbers), np.int64)
    ours._fill(batch, np.zeros_like(numbers), numbers)
    expected = {
        name: np.array([sample[name] for sample in chosen]) for name in ("text", "types", "labels", "is_random")
    }
    masked = np.array([sample["loss_mask"] for sample in chosen]) == 1
    np.testing.assert_array_equal(batch["labels"], np.where(masked, expected["labels"], -100))
    np.testing.assert_array_equal(batch["input_ids"][~masked], expected["text"][~masked])
    np.testing.assert_array_equal(batch["token_type_ids"], expected["types"])
    np.testing.assert_array_equal(batch["attention_mask"] == 1, (batch["input_ids"] != PAD) | masked)
    np.testing.assert_array_equal(batch["next_sentence_label"], expected["is_random"])


def segments_of(ours, row, sample):
    """(Our segments for Megatron's choices, whether neither begins within a word, where ours differ on purpose)."""
    first, end, target = row
    pivot = first + (sample["pivot"] if end - first >= 3 else 1)
    a, b = (ours.tokens.offsets(np.array([first, pivot])), ours.tokens.offsets(np.array([pivot, end])))
    exchange, *sides = sample["coins"]
    if exchange < 0.5:
        a, b = b, a
    lengths = [int(a[1] - a[0]), int(b[1] - b[0])]
    kept = [int(length[0]) for length in truncated_lengths(*(np.array([x]) for x in lengths), np.array([target]))]
    front = [0, 0]
    for side in sides:  # which segment loses a token is certain, which end of it is drawn
        shorter = 0 if lengths[0] > lengths[1] else 1
        lengths[shorter] -= 1
        front[shorter] += side < 0.5
    assert lengths == kept
    starts = int(a[0]) + front[0], int(b[0]) + front[1]
    whole = all(ours.tokenizer.starts_word[ours.tokens.tokens[start]] for start in starts)
    return (starts[0], kept[0], starts[1], kept[1], int(exchange < 0.5)), whole


def recorded_masks(samples, targets, maskable, starts, num_predictions, words, probabilities):
    """`take_ngrams` with Megatron's order and n, and its limit, which is lower for some lengths."""
    order, ngrams = np.ones((2, len(samples), int(starts.sum(axis=1).max())), np.int64)
    limits = np.minimum(num_predictions, np.floor(0.15 * targets)).astype(np.int64)
    word_of = starts.cumsum(axis=1) - 1
    for row, sample in enumerate(samples):
        order[row, : len(sample["order"])] = word_of[row, sample["order"]]
        ngrams[row, : len(sample["ngrams"])] = np.minimum(sample["ngrams"], 3)  # it stopped before the other words
    return take_ngrams(maskable, starts, limits, order, ngrams, len(probabilities))
