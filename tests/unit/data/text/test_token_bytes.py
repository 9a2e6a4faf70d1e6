"""Bytes of tokens add up to those of the text, which Python's own `str.encode` counts."""

import json

import numpy as np
import pytest
from transformers import BertTokenizerFast, ByT5Tokenizer, PreTrainedTokenizerFast

from lm_experiments_tools.data.text.hf_tokenizer import pretrained_token_bytes
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from megatron.tokenizers import build_tokenizer
from tests.helpers.tokenizer_toys import byte_fallback_tokenizer, byte_level_tokenizer
from tests.helpers.vocabulary_toys import train_vocabulary

DOCUMENTS = [
    "Plain words, and  two   spaces.\n\n\tA tab at a line's start ",
    " naïve cafés: 你好, Привет — “quoted” 🎉 \U00013080",
    "a literal <extra_id_0> [MASK] </s> <0x41> is text",
    "ĠĠ written as characters, ▁ too\r\n",
]
LINES = [f"word{i} naïve number{i * 7 % 101}, things" for i in range(400)]


def byte_level(folder):
    return byte_level_tokenizer(folder / "tokenizer.json")


def byte_fallback(folder):
    """As Gemma's, whose tokens of bytes are no special tokens."""
    file = byte_fallback_tokenizer(folder) / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if not token["content"].startswith("<0x")]
    file.write_text(json.dumps(settings))
    return folder


def sentencepiece(folder):
    options = {"byte_fallback": True, "add_dummy_prefix": False, "remove_extra_whitespaces": False}
    options |= {"normalization_rule_name": "identity", "user_defined_symbols": ["\n", "  "]}
    return train_vocabulary(folder / "vocab.model", LINES, 400, **options)


KINDS = {
    "bytes": lambda folder: "bytes",
    "byte-level BPE": byte_level,
    "byte fallback": byte_fallback,
    "SentencePiece": sentencepiece,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_lossless_tokenizer_counts_the_bytes_of_the_document(kind, document, tmp_path):
    vocabulary = Tokenizer.load(KINDS[kind](tmp_path))
    document = document.replace("▁", "_") if kind in ("byte fallback", "SentencePiece") else document  # their space
    counts = vocabulary.token_bytes
    assert counts.shape == (vocabulary.size,)
    assert counts[list(vocabulary.encode(document))].sum() == len(document.encode())
    assert not counts[vocabulary.special_ids].any()


def test_a_space_before_each_text_counts_and_newlines_are_spaces(tmp_path):
    vocabulary = Tokenizer.load(train_vocabulary(tmp_path / "vocab.model", LINES, 300))
    counts = vocabulary.token_bytes
    assert counts[vocabulary.encode("word1 things")].sum() == 1 + len("word1 things")
    assert counts[vocabulary.encode("word1\nthings")].sum() == 1 + len("word1 things")
    assert counts[vocabulary.unk_id] == 0


def test_wordpiece_counts_the_lost_space_before_words_but_not_before_punctuation(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##s", "caf", "##é", ",", "$", "you", "##"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    tokenizer = build_tokenizer("BertWordPieceCase", vocab_file=tmp_path / "vocab.txt")
    ids = tokenizer.encode("hellos, you café $")
    assert tokenizer.token_bytes[ids].sum() == len(" hellos, you café$".encode())
    assert not tokenizer.token_bytes[:5].any()
    theirs = pretrained_token_bytes(BertTokenizerFast.from_pretrained(str(tmp_path)))
    assert np.array_equal(theirs, tokenizer.token_bytes)


def test_tokenizers_of_transformers_give_the_same_table(tmp_path):
    level = PreTrainedTokenizerFast(tokenizer_file=str(byte_level(tmp_path)), unk_token="[UNK]")
    level.add_tokens(["<new line>"])
    counts = pretrained_token_bytes(level)
    text = "one <new line>naïve"
    assert counts[level(text)["input_ids"]].sum() == len(text.encode())
    assert counts[level.convert_tokens_to_ids("[MASK]")] == 0
    assert np.array_equal(pretrained_token_bytes(ByT5Tokenizer()), Tokenizer.load("bytes").token_bytes)


def test_a_tokenizer_without_marks_of_spaces_has_no_bytes():
    from tests.helpers.finetuning_toys import word_tokenizer

    assert pretrained_token_bytes(word_tokenizer()) is None
