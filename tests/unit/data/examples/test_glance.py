"""What the log shows of training data before the first step."""

import logging

import pytest

from tests.helpers.finetuning_toys import read, word_tokenizer, write_json

ENCODER = {"model_type": "encoder", "task": "classification"}
WRITTEN = {"task": "classification", "label_words": ("w7", "w8")}


def log_of(caplog, path, **flags):
    with caplog.at_level(logging.INFO):
        read(word_tokenizer(), data_path=(path,), **flags)
    return caplog.text


@pytest.mark.parametrize("flags", [ENCODER, WRITTEN], ids=["encoder", "encoder-decoder"])
def test_labels_are_shown_with_their_counts_and_the_first_example_as_tokens(flags, tmp_path, caplog):
    rows = [{"text": "w1 w2", "label": "good" if number % 4 else "bad"} for number in range(8)]
    text = log_of(caplog, write_json(tmp_path / "a.jsonl", rows), **flags)
    assert "train: 2 labels: good 6 (75.0%), bad 2 (25.0%)" in text
    shown = "w1 w2 </s> -> bad" if flags is ENCODER else "<unk> w1 w2 </s> -> w7 </s>"  # "text:" is no word of the toy
    assert f"train: the first example: {shown}\n" in text


def test_lengths_are_shown_by_percentiles_as_they_are_read_and_a_long_example_in_part(tmp_path, caplog):
    rows = [{"source": " ".join(["w1"] * length), "target": "w2"} for length in range(100, 0, -1)]
    text = log_of(caplog, write_json(tmp_path / "a.jsonl", rows), input_seq_len=98)
    assert f"the first example: {'w1 ' * 48}... (98 in all) -> w2 </s>\n" in text
    assert "train: tokens at 50 / 90 / 99 / 100 %: sources 52 / 92 / 98 / 98, targets 2 / 2 / 2 / 2\n" in text
