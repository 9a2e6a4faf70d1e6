"""Warnings about the text of a BERT run."""

from types import SimpleNamespace

from lm_experiments_tools.recipes.bert_data import _warn_of_data


def test_validation_text_in_the_training_data_and_too_few_rows_are_warned_of(tmp_path, caplog):
    text, other = tmp_path / "text", tmp_path / "text2.txt"
    args = SimpleNamespace(data_path=(f"{text}/",), valid_data_path=str(text / "a.txt"), batch_size=2)
    _warn_of_data(args, [0])
    seen, few = caplog.messages
    assert args.valid_data_path in seen and f"{text}/" in seen and "fewer than --batch_size 2" in few
    caplog.clear()
    args.valid_data_path = str(other)
    _warn_of_data(args, [0, 1])
    assert not caplog.messages
