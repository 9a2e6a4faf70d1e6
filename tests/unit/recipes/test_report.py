"""The closing report: which words are hidden, and how a generated target is read."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lm_experiments_tools.data.tokens import indexed
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter
from lm_experiments_tools.recipes import report
from lm_experiments_tools.recipes.report import filled_right, hide_words, read_guesses


class Words:
    """A vocabulary of whole words: id 3 + i is the i-th; 90 and 89 are the sentinels."""

    words = ("the", "cat", ",", "sat", "on", "a", "mat", ".")
    sentinel_ids = np.array([90, 89])
    eos_id, pad_id = 1, 0
    special_ids = (0, 1, 2, 90, 89)

    def starts_word(self, index):
        return True

    def decode(self, ids):
        return " ".join(self.words[i - 3] for i in map(int, ids))


def test_whole_words_near_a_third_and_two_thirds_are_hidden():
    window = np.array([3, 4, 5, 6, 7, 8, 9, 10])  # the cat , sat on a mat .
    inputs, spans = hide_words(window, Words())
    assert [span.tolist() for span in spans] == [[6], [9]]  # "sat" and "mat": not the comma, not the one-letter "a"
    assert inputs.tolist() == [3, 4, 5, 90, 7, 8, 89, 10]


def test_windows_begin_long_documents_evenly_whatever_the_blocks(tmp_path, monkeypatch):
    lengths = np.random.default_rng(0).integers(0, 2 * report.WINDOW, 200)
    with IndexedDatasetWriter(tmp_path / "t", np.uint16) as writer:
        for number, length in enumerate(lengths):
            for part in np.array_split(np.full(length, number), 3):  # sentences
                writer.add_sequence(part)
            writer.end_document()
    tokens = IndexedDataset(tmp_path / "t")
    long = np.flatnonzero(lengths >= report.WINDOW)
    expected = [[number] * report.WINDOW for number in (long[0], long[(len(long) - 1) // 2], long[-1])]
    for block in (7, 1 << 20):
        monkeypatch.setattr(indexed, "_CHECK_BLOCK", block)
        assert [window.tolist() for window in report._windows(tokens)] == expected
    with IndexedDatasetWriter(tmp_path / "short", np.uint16) as writer:
        writer.add_sequence([1])
        writer.end_document()
    assert report._windows(IndexedDataset(tmp_path / "short")) == []


def test_guesses_are_read_between_sentinels_up_to_eos():
    assert read_guesses([0, 90, 6, 3, 89, 1, 7], Words()) == {0: "sat the", 1: "(nothing)"}


class Answering(torch.nn.Module):
    """A model of `the cat , sat on a mat .` over and over, which `answer`s with ids, given the blank's true id."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.lengths = answer, set()

    def generate(self, input_ids, **_):
        self.lengths.add(input_ids.shape[1])
        assert ((input_ids == 90).sum(1) == 1).all() and (input_ids[:, -1] == 1).all()
        places = (input_ids == 90).int().argmax(1)
        truths = [3 + int(row[place - 1] - 3 + 1) % 8 for row, place in zip(input_ids, places, strict=True)]
        assert not {5, 10} & set(truths)  # no comma, no full stop
        return torch.tensor([[0, 90, *self.answer(truth), 1] for truth in truths])


@pytest.mark.parametrize(
    ("answer", "right"),
    [(lambda truth: [truth], 400), (lambda truth: [3, 0], None), (lambda truth: [truth, 4], 0), (lambda truth: [], 0)],
    ids=["always right", "always the", "one word too many", "nothing"],
)
def test_one_word_blanks_are_counted_where_the_answer_is_the_word_and_no_more(tmp_path, answer, right):
    with IndexedDatasetWriter(tmp_path / "t", np.uint16) as writer:
        writer.add_sequence(np.tile(np.arange(3, 11), 300))
        writer.end_document()
    model = Answering(answer)
    backend = SimpleNamespace(device="cpu", unwrap=lambda: model, shards_model=False)
    objective = SimpleNamespace(report="blanks", reads=())
    trainer = SimpleNamespace(args=SimpleNamespace(objective=lambda: objective, input_seq_len=24), backend=backend)
    data = SimpleNamespace(vocabulary=Words(), valid_tokens=IndexedDataset(tmp_path / "t"))
    line = filled_right(trainer, data)
    assert line == filled_right(trainer, data) and model.lengths == {24}
    found, commonest = int(line.split()[0]), int(line.split(" would be right in ")[1].split()[0])
    assert " of 400 one-word blanks in held-out text are filled right (" in line
    assert 400 / 6 <= commonest < 100  # six words, equally common
    assert found == right if right is not None else 50 < found <= commonest
    objective.report = "continuation"
    assert filled_right(trainer, data) is None
