"""A vocabulary of made-up text, and small pieces of it."""

import pytest

from lm_experiments_tools.data.text.documents import plan_pieces
from lm_experiments_tools.data.text.train_vocabulary import train_vocab
from lm_experiments_tools.data.tokens import tokenize as module
from tests.helpers.token_toys import make_texts, write_jsonl


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocab")
    train_vocab([write_jsonl(folder / "v.jsonl", make_texts(500))], 190, folder / "v.model")
    return str(folder / "v.model")


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut even a small file into pieces (in this process, which makes the plan)."""
    monkeypatch.setattr(module, "plan_pieces", lambda inputs: plan_pieces(inputs, 20_000))
