"""A folder with a vocabulary and a place for text."""

import pytest

from megatron.tokenizers import build_tokenizer
from tests.helpers.preprocessing import PIECES


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    (tmp_path / "in").mkdir()
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return build_tokenizer("BertWordPieceLowerCase", vocab_file=folder)
