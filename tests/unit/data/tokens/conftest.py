"""A vocabulary of made-up text, and small shards of it."""

import pytest

from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.tokens import tokenize as module
from lm_experiments_tools.tools.train_vocabulary import train_vocab
from tests.helpers.token_toys import make_texts, write_jsonl


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocab")
    train_vocab([write_jsonl(folder / "v.jsonl", make_texts(500))], 190, folder / "v.model")
    return str(folder / "v.model")


@pytest.fixture
def small_shards(monkeypatch):
    """Cut even a small file into shards (in this process, which makes the plan)."""
    monkeypatch.setattr(module, "plan_shards", lambda inputs, **options: plan_shards(inputs, 20_000, **options))
