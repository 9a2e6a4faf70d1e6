"""`lmtools inspect`: what it counts is what is there, what it shows is what the model gets."""

import json
import re

import numpy as np
import pytest
import sentencepiece

from lm_experiments_tools.data.indexed import IndexedDataset, IndexedDatasetWriter
from lm_experiments_tools.data.samples import render_ids, render_predictions, render_sample
from lm_experiments_tools.data.statistics import token_statistics
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.main import main

LETTERS = "abcdefghij"


def letters(ids: list[int]) -> str:
    return " ".join(LETTERS[i] for i in ids)


@pytest.fixture
def tokens(tmp_path):
    """The worked example of `token_statistics`: documents of several sequences, one of them empty."""
    with IndexedDatasetWriter(tmp_path / "tokens", np.uint16) as writer:
        for document in ([[5, 6], [7]], [[5, 5]], []):
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    return IndexedDataset(tmp_path / "tokens")


def test_counts_of_the_worked_example(tokens):
    counts = token_statistics(tokens, vocab_size=10)
    assert counts.document_lengths.tolist() == [3, 2, 0]
    assert (counts.num_documents, counts.num_sequences, counts.num_tokens) == (3, 3, 5)
    assert counts.frequencies.tolist() == [0, 0, 0, 0, 0, 3, 1, 1, 0, 0]
    assert counts.most_frequent(2) == [(5, 3), (6, 1)] and counts.ids_in_use == 3
    assert counts.rate(5) == 0.6 and counts.rate(-1) == 0.0
    assert counts.length_percentiles()[50] == 2 and counts.length_percentiles()[100] == 3


def test_percentiles_are_those_of_a_sorted_list(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    with IndexedDatasetWriter(tmp_path / "tokens", np.uint16) as writer:
        for length in lengths:
            writer.add_sequence(np.ones(length, np.int64))
            writer.end_document()
    found = token_statistics(IndexedDataset(tmp_path / "tokens"), 2).length_percentiles()
    ordered = sorted(lengths.tolist())
    assert found == {p: ordered[max(-(-len(ordered) * p // 100), 1) - 1] for p in found}


def test_tokens_of_another_vocabulary_are_named(tokens):
    with pytest.raises(UserError, match="holds id 7, but the vocabulary has ids 0 to 6"):
        token_statistics(tokens, vocab_size=7)


def test_render_ids_worked_example():
    assert render_ids(np.array([0, 1, 9, 8, 8]), letters, {8: "<pad>", 9: "</s>"}) == "a b </s> <pad> x 2"


def test_render_predictions_worked_example():
    shown = render_predictions(np.array([4, 9, 6]), np.array([-100, 5, -100]), letters, {9: "<mask>"})
    assert shown == "e [<mask> -> f] g"


def test_a_sample_shows_every_entry_of_the_batch():
    row = {
        "input_ids": np.array([0, 1, 9, 8]), "attention_mask": np.array([1, 1, 1, 0]),
        "labels": np.array([2, 9, -100]), "token_type_ids": np.array([0, 0, 1, 0]), "next_sentence_label": np.int64(1),
    }  # fmt: skip
    assert render_sample(row, letters, {8: "<pad>", 9: "</s>"}) == [
        "input    4 tokens, 3 attended",
        "  a b </s> <pad>",
        "target   3 tokens, 2 of them predicted",
        "  c </s> (ignored)",
        "next_sentence_label: 1",
        "token_type_ids: 0 x 2, 1 x 1, 0 x 1",
    ]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocab")
    (folder / "text.txt").write_text("\n".join(f"word{i} number{i * 7 % 101} token{i % 13}" for i in range(500)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "vocab"), vocab_size=120, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return folder / "vocab.model"


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(5 + i))}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def inspect(vocab, *flags: str) -> int:
    return main(["inspect", "--data_path", "text.jsonl", "--vocab", str(vocab), "--data_pipeline", "native", *flags])


def test_the_command_shows_the_first_samples_of_the_run(vocab, text, capsys):
    from lm_experiments_tools.data.dataset import SpanCorruptionDataset
    from lm_experiments_tools.data.vocabulary import Vocabulary

    flags = [
        "--input_seq_len",
        "32",
        "--target_seq_len",
        "16",
        "--seed",
        "7",
        "--batch_size",
        "2",
        "--world_size",
        "3",
    ]
    assert inspect(vocab, *flags, "--samples", "3", "--output", "look", "--iters", "20") == 0
    printed = capsys.readouterr().out
    vocabulary = Vocabulary.load(vocab)
    (prefix,) = (text / ".cache" / "tokens").glob("*.idx")
    dataset = SpanCorruptionDataset(
        IndexedDataset(str(prefix).removesuffix(".idx")), 32, sentinel_ids=vocabulary.sentinel_ids, eos_id=1, pad_id=0,
        vocab_size=vocabulary.size, seed=7,
    )  # fmt: skip
    for row in dataset.batch(np.arange(3))["input_ids"]:
        assert f"{vocabulary.decode(row)} </s>" in printed
    assert "documents  40" in printed and f"tokens     {dataset.num_tokens:,}" in printed
    assert re.search(rf"an epoch     {len(dataset):,} examples = {len(dataset) / 6:,.1f} steps of 6 ", printed)
    (picture,) = (text / "look").iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_settings_of_a_run_are_read_as_they_are(vocab, text, capsys):
    (text / "run.yaml").write_text(
        f"data_path: text.jsonl\nvocab: {vocab}\nmodel_cfg: nowhere.json\nmodel_path: run\nlr: 1e-3\n"
        "data_pipeline: native\ninput_seq_len: 16\noptimizer: Adafactor\n"
    )
    assert main(["inspect", "--config", "run.yaml"]) == 0
    assert "16 inputs" in capsys.readouterr().out
    assert not (text / "run").exists()


def test_the_first_documents_only(vocab, text, capsys):
    assert inspect(vocab, "--documents", "4", "--samples", "0") == 0
    assert "documents  4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data_path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--vocab", "nowhere.model"], "nowhere.model"),
        (["--task", "denoise"], "--task denoise"),
        (["--documents", "0"], "--documents"),
    ],
)
def test_bad_input_is_one_sentence(vocab, text, capsys, flags, sentence):
    assert inspect(vocab, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1
