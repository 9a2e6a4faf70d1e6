"""docs/new_objective.md: its code, in a file of a user's, trains by `--task module:Class`."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.objectives import MASS, TextInfilling
from lm_experiments_tools.config.objectives import OBJECTIVE
from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.objectives.objective import Objective, TokenIds
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.names import source_imports
from run_t5_pretraining import main
from tests.helpers import ROOT
from tests.helpers.runs import TINY, records, tiny_run, words

(CODE,) = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "new_objective.md").read_text(encoding="utf-8"), re.DOTALL
)
TASK, WINDOW = "deshuffling:Deshuffling", "deshuffling:Windowed"
# The page's class with an argument: shuffles groups of `window` tokens.
WINDOWED = """

class Windowed(Deshuffling):
    def __init__(self, window: int | None = None):
        self.window = window

    def example(self, tokens, rng):
        size = self.window or len(tokens)
        groups = [rng.permutation(tokens[k : k + size]) for k in range(0, len(tokens), size)]
        return {"input_ids": [token for group in groups for token in group], "labels": tokens}


class Wide(Deshuffling):
    def example(self, tokens, rng):
        return {"input_ids": [*tokens, *tokens], "labels": tokens}


NO_OBJECTIVE = dict
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a run in a folder with the page's file."""
    flags = tiny_run(tmp_path, {**TINY, "dropout_rate": 0.1}, backend="local", input_seq_len=16, task=TASK)
    (tmp_path / "deshuffling.py").write_text(CODE + WINDOWED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda **changed: main(words(**{**flags, **changed}))


def test_it_trains_and_a_restart_changes_no_bit(start, tmp_path):
    flags = {"task": "deshuffling:Windowed", "task_options": "window=4"}
    start(**flags, iters=1, model_path="streamed", streaming=True)
    start(**flags, iters=4, model_path="whole")
    for iters in (2, 4):
        start(**flags, iters=iters, model_path="run", data_n_workers=2)  # the second time of a cached text
    assert records("run") and [line["loss"] for line in records("run")] == [line["loss"] for line in records("whole")]
    ours, whole = (load_file(f"{run}/last/model.safetensors") for run in ("run", "whole"))
    assert ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in whole)
    with pytest.raises(UserError, match=r"other settings: .*task_options"):
        start(**flags | {"task_options": "window=5"}, iters=4, model_path="run")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"task": "deshuffling:Deshufling"}, "--task deshuffling:Deshufling: .*did you mean 'Deshuffling'"),
        ({"task": "deshufling:Deshuffling"}, "its file must import Objective from lm_experiments_tools"),
        ({"task": "deshuffling:NO_OBJECTIVE"}, "--task deshuffling:NO_OBJECTIVE is no Objective"),
        ({"task_options": "window=4"}, f"--task {TASK} has no option 'window'; it takes none"),
        ({"task": WINDOW, "task_options": "windw=4"}, f"--task {WINDOW} has no option 'windw'; did you mean 'window'"),
        ({"task": "deshuffling:Wide"}, "an example of --task has 31 input_ids, EOS included, but --input_seq_len is"),
        ({"task": "ul2", "task_options": "window=4"}, "--task_options is not read by --task ul2 but by module:Class"),
        ({"target_seq_len": 4}, f"--target_seq_len is not read by --task {TASK} but by"),
        ({"model_cls": "transformers:GPT2LMHeadModel", "model_cfg": "gpt2.json"}, f"--task {TASK} is for encoder-dec"),
    ],
)
def test_what_it_does_not_read_or_train_is_refused(start, tmp_path, flags, sentence):
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8}))
    with pytest.raises(UserError, match=sentence):
        start(**{**flags, "iters": 1, "model_path": "refused"})


def made(objective, tokens, num_samples=None):
    """(input ids, labels) of each example of an epoch or more, without padding."""
    data = dataset(objective, SimpleNamespace(tokens=np.asarray(tokens, np.uint16), fingerprint="x"))
    batch = data.batch(np.arange(num_samples or len(data)))
    assert (batch["attention_mask"] == (batch["input_ids"] != 0)).all()
    pairs = zip(batch["input_ids"], batch["labels"], strict=True)
    return [(ids[ids != 0].tolist(), labels[labels != -100].tolist()) for ids, labels in pairs]


def test_examples_of_the_page_are_the_text_in_random_order_and_the_text():
    names = {}
    exec(CODE, names)
    examples = made(names["Deshuffling"].create(TokenIds(100), 6), np.arange(10, 42), 5000)
    assert ([13, 10, 12, 14, 11, 1], [10, 11, 12, 13, 14, 1]) in examples
    assert all(sorted(inputs) == sorted(labels) and labels[-1] == inputs[-1] == 1 for inputs, labels in examples)
    first = [inputs[0] - labels[0] for inputs, labels in examples if labels[:-1] == [*range(labels[0], labels[0] + 5)]]
    counts = np.bincount(first, minlength=5)
    assert counts.sum() > 3000 and ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 18.5  # 4 d.o.f., p = 0.001


def test_worked_examples_of_the_literature():
    ids, period = TokenIds(100, mask_id=9), 5
    row = [11, 12, 13, 5, 21, 22, 5]
    infilling = TextInfilling.create(ids, 10, period_id=period)
    shuffled = [infilling.example(np.array(row), np.random.default_rng(k)) for k in range(2000)]
    assert all(example["labels"].tolist() == row for example in shuffled)
    assert [21, 22, 5, 9, 13, 5] in [example["input_ids"] for example in shuffled]
    mass = MASS.create(ids, 10, period_id=period)
    masked = [mass.example(np.array(row), np.random.default_rng(k)) for k in range(100)]
    assert ([11, 9, 9, 5, 9, 22, 5], [12, 13, 21]) in [(e["input_ids"].tolist(), e["labels"]) for e in masked]
    for example in masked:
        filled, found = example["input_ids"].copy(), iter(example["labels"])
        filled[filled == 9] = [*found]
        assert filled.tolist() == row


def test_text_infilling_masks_its_share_of_shuffled_sentences():
    """By closed forms: sentences in uniform order; a span of Poisson length k removes k tokens and adds one."""
    ids, period, row = TokenIds(10_000, mask_id=9), 5, []
    for sentence in range(3):
        row += [*range(1000 * (sentence + 1), 1000 * (sentence + 1) + 99), period]
    objective = TextInfilling.create(ids, 400, period_id=period)
    removed, first = [], []
    for k in range(3000):
        inputs = np.array(objective.example(np.array(row), np.random.default_rng(k))["input_ids"])
        text = inputs[(inputs != 9) & (inputs != period)]
        starts = [*dict.fromkeys((text // 1000).tolist())]  # the sentences in their order
        assert sorted(starts) == [1, 2, 3] and all((np.diff(text[text // 1000 == s]) > 0).all() for s in starts)
        first.append(starts[0])
        removed.append(300 + 30 - len(inputs))  # 30 spans
    counts = np.bincount(first)[1:]
    assert ((counts - 1000) ** 2 / 1000).sum() < 13.8  # 2 degrees of freedom, p = 0.001
    assert abs(np.mean(removed) - 90) < 4 * (90 / 3000) ** 0.5 and abs(np.var(removed) / 90 - 1) < 0.12


def test_objectives_of_the_literature_train(start):
    for name in ("TextInfilling", "MASS"):
        start(task=f"examples.objectives:{name}", task_options="period_id=5", iters=1, model_path=name)


def test_a_module_is_one_of_objectives_by_its_imports_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "ours" / "deep"  # without __init__.py
    folder.mkdir(parents=True)
    sources = {
        "mine": "from lm_experiments_tools import Objective\n1 / 0\n",
        "both": "from lm_experiments_tools import (\n    UserError,\n    Objective,\n)\n",
        "derived": "from lm_experiments_tools.data.objectives.span_corruption import SpanCorruption\n",
        "seqios": '"""from lm_experiments_tools, unlike Objective."""\nimport seqio\n',
        "other": "from lm_experiments_tools import Tokenizer\nimport Objective\n",
    }
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    found = {name: source_imports(f"ours.deep.{name}", OBJECTIVE) for name in (*sources, "none")}
    assert found == {name: name in ("mine", "both", "derived") for name in found}


TOKENS = SimpleNamespace(tokens=np.arange(100, 400, dtype=np.uint16), fingerprint="x")


def dataset(objective, tokens=TOKENS):
    return Dataset(TokenRows(tokens, objective))


class Returning(Objective):
    """An example that is what `entries` makes of a row."""

    models = ("encoder-decoder", "decoder")

    def __init__(self, entries):
        self.entries = entries

    def example(self, tokens, rng):
        return self.entries(tokens)


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
        ("encoder-decoder", lambda row: {"input_ids": row}, "has no labels: return both"),
        ("encoder-decoder", lambda row: {"input_ids": row + 10**6, "labels": row}, "but the vocabulary has"),
        ("encoder-decoder", lambda row: {"input_ids": row, "labels": row, "attention_mask": row}, "leave it out"),
        (
            "encoder-decoder",
            lambda row: {"input_ids": row, "labels": row, "decoder_input_ids": row},
            "16 decoder_input_ids and 16 labels: return 17",
        ),
        ("decoder", lambda row: {"input_ids": row, "labels": row[:-1]}, "17 input_ids and 16 labels: return 16"),
        (
            "encoder-decoder",
            lambda row: {"input_ids": row, "labels": row, **({"token_type_ids": row} if row[0] // 16 % 2 else {})},
            "Some examples of --task have",
        ),
    ],
)
def test_wrong_examples_of_a_user_are_refused_in_a_sentence(kind, entries, message):
    objective = Returning.create(TokenIds(size=1000), 17, 17, kind, entries=entries)
    with pytest.raises(UserError, match=message):
        dataset(objective).batch(np.arange(8))


def test_other_entries_are_passed_on_padded_with_zeros():
    def entries(row):
        return {"input_ids": row, "labels": row, "segment_ids": np.ones(len(row) + 1, np.int64)}

    batch = dataset(Returning.create(TokenIds(size=1000), 17, 17, entries=entries)).batch(np.arange(8))
    assert np.array_equal(batch["segment_ids"], batch["attention_mask"])
