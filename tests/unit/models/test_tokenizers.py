"""Tokenizers that would read words as unknown are refused or named."""

import logging

import pytest
from transformers import GPT2Config

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.tokenizers import load_tokenizer
from tests.helpers.finetuning_toys import pairs, read, word_tokenizer, write_json
from tests.helpers.pretrained_toys import t5_config, toy_args

CONFIGURATIONS = {
    "t5": t5_config(),
    "gpt2": GPT2Config(vocab_size=64),
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_folder_of_weights_alone_has_no_vocabulary(kind, tmp_path):
    """transformers makes a tokenizer of nothing but special tokens out of config.json."""
    CONFIGURATIONS[kind].save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"--from_pretrained {tmp_path}: there is no vocabulary .*--tokenizer"):
        load_tokenizer(toy_args(tmp_path))


def test_a_tokenizer_of_bytes_needs_no_file_of_words(tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    t5_config().save_pretrained(tmp_path)
    assert len(load_tokenizer(toy_args(tmp_path))("abc")["input_ids"]) == 4


@pytest.mark.parametrize("number", [0, 9])
def test_a_large_share_of_unknown_tokens_is_a_warning(number, tmp_path, caplog):
    rows = [{"source": "w1 w2 w3 w4", "target": "w1"} for _ in range(20)]
    for row in rows[:number]:
        row["source"] = "w1 w2 w3 слово"
    with caplog.at_level(logging.INFO):
        read(word_tokenizer(), data_path=(write_json(tmp_path / "a.jsonl", rows),)).train.close()
    found = [record.message for record in caplog.records if "unknown tokens" in record.message]
    assert len(found) == bool(number)
    if found:
        assert f"{number:.1f} % of the tokens of sources of " in found[0]  # 5 a source


def test_a_mark_that_is_also_the_end_of_text_is_not_counted(tmp_path, caplog):
    tokenizer = word_tokenizer()
    tokenizer.unk_token = "</s>"  # as GPT-2's
    with caplog.at_level(logging.INFO):
        read(tokenizer, data_path=(write_json(tmp_path / "a.jsonl", pairs(3)),)).train.close()
    assert "unknown" not in caplog.text
