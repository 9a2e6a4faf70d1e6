"""The stream of seqio's examples is `seqio.get_dataset`'s own, token for token, and any place in it can be found.

Everything that needs TensorFlow happens once, in `seqio_oracle.py`, a process of its own.
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lm_experiments_tools.data.examples.examples import LabelFields, label_examples
from lm_experiments_tools.data.mixture import mixing_rates
from lm_experiments_tools.data.objectives.span_corruption import replace_spans
from lm_experiments_tools.data.text.records import RejectedRecords
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from tests.distributed.launch import environment, missing
from tests.helpers.finetuning_toys import write_json
from tests.helpers.vocabulary_toys import train_vocabulary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        missing("t5", "seqio", "tensorflow", "tensorflow_datasets") is not None,
        reason="the oracle needs the packages t5, seqio, tensorflow and tensorflow_datasets",
    ),
]

ROWS = 8
TASKS = """
import functools, json
from pathlib import Path
import seqio, t5.data
import tensorflow as tf
import tensorflow_datasets as tfds

folder = Path(__file__).parent
vocabulary = seqio.SentencePieceVocabulary(str(folder / "vocab.model"), extra_ids=100)
feature = seqio.Feature(vocabulary, add_eos=True)
features = {"inputs": feature, "targets": feature}
files = sorted(map(str, (folder / "lines").glob("*.txt")))

def halves(dataset):
    def split(line):
        words = tf.strings.split(line)
        half = tf.size(words) // 2
        join = functools.partial(tf.strings.reduce_join, separator=" ")
        return {"inputs": join(words[:half]), "targets": join(words[half:])}
    return dataset.map(split)

steps = [halves, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim]
add = functools.partial(seqio.TaskRegistry.add, output_features=features, preprocessors=steps,
                        shuffle_buffer_size=100)
lines = seqio.TextLineDataSource({"train": files[2:], "validation": files[:2]})
add("lines", source=lines)
add("ordered", source=lines, shuffle_buffer_size=None)
add("nothing", source=lines, preprocessors=[lambda dataset: dataset.filter(lambda line: False), *steps])
add("only_targets", source=lines, output_features={"targets": feature})
other = seqio.Feature(seqio.SentencePieceVocabulary(str(folder / "other.model"), extra_ids=100))
add("strangers", source=lines, output_features={"inputs": other, "targets": other})

def old_fashioned(split, shuffle_files):  # as t5's first tasks: no seed, and noise from a global generator
    dataset = tf.data.TextLineDataset(files).shuffle(100)
    def noise(line):
        letters = tf.random.uniform([9, 1], 97, 123, tf.int32)
        return {"inputs": tf.strings.reduce_join(tf.strings.unicode_encode(letters, "UTF-8")), "targets": line}
    return dataset.map(noise, 4)

t5.data.TaskRegistry.add("old", t5.data.Task, dataset_fn=old_fashioned, splits=["train"], text_preprocessor=[],
                         output_features=features, shuffle_buffer_size=100)

class TinyText(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)
    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}
    def _generate_examples(self):
        for k, document in enumerate(json.loads((folder / "docs.json").read_text())):
            yield k, {"text": document}

TinyText(data_dir=folder / "tfds").download_and_prepare()
named = [lambda dataset: dataset.map(lambda example: example["text"]), *steps]
add("tfds", source=seqio.TfdsDataSource("tiny_text:1.0.0", tfds_data_dir=str(folder / "tfds")), preprocessors=named)
seqio.MixtureRegistry.add("mix", [("lines", 0.25), ("tfds", 0.75)])
add("unprepared", source=seqio.TfdsDataSource("tiny_text:1.0.0", tfds_data_dir=str(folder / "elsewhere")),
    preprocessors=named)
"""


SENTENCES = {"sentence1": "One text.", "sentence2": "Another."}
GLUE = {
    "cola": {"sentence": "One text.", "label": 1},
    "sst2": {"sentence": "One text.", "label": 0},
    "mrpc": {**SENTENCES, "label": 1},
    "qqp": {"question1": "Who?", "question2": "What?", "label": 0},
    "stsb": {**SENTENCES, "label": 2.7},
    "mnli": {"premise": "One text.", "hypothesis": "Another.", "label": 0},
    "qnli": {"question": "Who?", "sentence": "He.", "label": 1},
    "rte": {**SENTENCES, "label": 0},
    "wnli": {**SENTENCES, "label": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents as text lines and as JSON lines with some that are broken; a vocabulary; the user's tasks.py."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("seqio")
    text = " ".join(topics[name] for name in sorted(topics))
    words = re.sub("[^A-Za-z,. ]+", " ", text).split()  # in runs of signs, versions of sentencepiece break ties apart
    edges = np.cumsum(np.random.default_rng(0).integers(3, 90, 340))
    documents = [" ".join(words[a:b]) for a, b in itertools.pairwise(edges)]
    (folder / "docs.json").write_text(json.dumps(documents))
    train_vocabulary(folder / "vocab.model", documents, 600)
    train_vocabulary(folder / "other.model", documents, 500)
    (folder / "tasks.py").write_text(TASKS)
    (folder / "raises.py").write_text("import seqio\n\nNUMBERS = {}\nNUMBERS['absent']\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit('not here')\n")
    (folder / "lines").mkdir()
    for part in range(20):
        chosen = documents[part::20]
        (folder / "lines" / f"part_{part:02}.txt").write_text("\n".join(chosen) + "\n")
    (folder / "glue.json").write_text(json.dumps(GLUE))
    return folder


@pytest.fixture(scope="module")
def oracle(folder):
    """(arrays, sentences) that the oracle left."""
    command = [sys.executable, str(Path(__file__).with_name("seqio_oracle.py")), str(folder)]
    extra = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command, env=environment(**extra), cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(folder / "made.npz")), json.loads((folder / "said.json").read_text())


def zero_padded(rows):
    return np.where(rows == -100, 0, rows)


@pytest.mark.parametrize("name", ["lines", "mix", "tfds", "ordered", "validation"])
def test_examples_are_those_of_get_dataset_token_for_token(oracle, name):
    made, _ = oracle
    ours, theirs = made[f"ours_{name}"], made[f"theirs_{name}"]
    np.testing.assert_array_equal(zero_padded(ours), theirs)
    assert len(np.unique(theirs, axis=0)) > 0.15 * len(theirs)


@pytest.mark.parametrize("task", GLUE)
def test_the_text_of_a_row_of_glue_is_t5s(oracle, folder, task):
    fields = LabelFields(prefix=f"{task} ", as_text=True)
    labels = {} if task == "stsb" else {"names": ("0", "1"), "words": ("no", "yes")}
    path = write_json(folder / f"{task}.jsonl", [GLUE[task]])
    example = next(label_examples(path, fields, RejectedRecords(0), **{"words": (), **labels}))
    assert [example.source, *example.targets] == oracle[1]["glue"][task]


def test_any_position_is_found_again_whatever_the_batch_and_the_threads(oracle):
    made, _ = oracle
    np.testing.assert_array_equal(made["from_100_rows_of_12"], made["ours_lines"][100:220])


def test_a_task_without_seeds_is_given_one(oracle):
    made, _ = oracle
    np.testing.assert_array_equal(made["old_from_80"], made["old"][80:160])
    assert len(np.unique(made["old"], axis=0)) == len(made["old"])  # its noise is another in each epoch


def test_native_corruption_of_the_same_tokens_and_mask_gives_the_same_rows(oracle, folder):
    """Tokens and masks are read back out of seqio's examples; `replace_spans` must then give these examples."""
    vocabulary = Tokenizer.load(folder / "vocab.model")
    sentinels = vocabulary.sentinel_ids
    seen = 0
    for row in oracle[0]["theirs_span_corruption"]:
        inputs, targets = (part[part != 0] for part in (row[:64], row[64:]))
        kept = np.split(inputs[:-1], np.flatnonzero(np.isin(inputs, sentinels)))
        noise = np.split(targets[:-1], np.flatnonzero(np.isin(targets, sentinels)))[1:]
        # every piece but the first of the inputs, and each of the targets, opens with its sentinel
        kept = [kept[0], *(piece[1:] for piece in kept[1:-1])]
        noise = [piece[1:] for piece in noise]
        tokens = np.concatenate([np.concatenate(pair) for pair in zip(kept, noise, strict=True)])
        lengths = [len(piece) for pair in zip(kept, noise, strict=True) for piece in pair]
        mask = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        for part, spans in ((inputs, mask), (targets, ~mask)):
            np.testing.assert_array_equal(replace_spans(tokens.astype(np.int64), spans, sentinels), part[:-1])
            assert part[-1] == vocabulary.eos_id
        seen += 1
    assert seen == 480


def lines_of(folder, first=0):
    files = sorted((folder / "lines").glob("*.txt"))
    return [line for file in files[first:] for line in file.read_text().splitlines()]


def test_prefix_and_rest_are_the_documents_as_the_native_vocabulary_encodes_them(oracle, folder):
    vocabulary = Tokenizer.load(folder / "vocab.model")
    encoded = map(vocabulary.encode, lines_of(folder))
    pieces = {tuple(ids[k : k + 47]) for ids in encoded for k in range(0, len(ids), 47)}
    found = set()
    for row in oracle[0]["theirs_prefix_lm"]:
        inputs, targets = (part[part != 0].tolist() for part in (row[:48], row[48:]))
        assert inputs[-1] == targets[-1] == vocabulary.eos_id
        found.add((*inputs[:-1], *targets[:-1]))
    assert found <= pieces and len(found) > 400


def test_every_epoch_reads_all_data(oracle, folder):
    number, rows = len(lines_of(folder, first=2)), oracle[0]["ours_ordered"]
    assert number < 400 and len(np.unique(rows[:number], axis=0)) == number
    np.testing.assert_array_equal(rows[number:], rows[: len(rows) - number])


def test_each_fingerprint_is_its_own(oracle):
    prints = [text for name, text in oracle[1].items() if name.startswith("fingerprint")]
    assert len(prints) == len(set(prints)) == 4
    name, *bound = oracle[1]["bound"]
    assert "refusal" in name and bound == ["0='a'", "noise=0.5", "steps=[1]"]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("no_module", "importing the module nowhere fails with ModuleNotFoundError: No module named .nowhere."),
        ("raises", r"importing the module raises fails with KeyError: 'absent' \(.*raises\.py line 4\)"),
        ("leaves", r"importing the module leaves fails with SystemExit: not here \(.*leaves\.py line 2\)"),
        ("no_name", "tasks registers no seqio Task or Mixture 'lanes'; there is .*lines"),
        ("nothing", "gives no example"),
        ("only_targets", "has no feature .inputs."),
        ("strangers", r"other\.model.*--vocab"),
        ("unprepared", "gives no examples: .*tiny_text:1.0.0 must lie prepared in .*elsewhere"),
        ("no_split", "no split 'validation'"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(oracle, case, sentence):
    assert re.search(sentence, oracle[1][case]) and "\n" not in oracle[1][case], oracle[1][case]


def test_rates_of_a_mixture_are_seqios(oracle):
    sizes, cases = oracle[1]["mixing_rates"]
    for options, expected in cases:
        weights = [options["scale"]] * len(sizes)
        rates = mixing_rates(sizes, weights, options["maximum"], options["temperature"])
        np.testing.assert_allclose(rates / rates.sum(), np.divide(expected, sum(expected)), rtol=1e-13)


def test_validation_takes_its_first_examples(oracle):
    made, _ = oracle
    np.testing.assert_array_equal(made["few_validation"], made["ours_validation"][:7])
