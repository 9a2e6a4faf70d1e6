"""The text of the streaming tests."""

import pytest

from lm_experiments_tools.tools.train_vocabulary import train_vocab
from tests.helpers.token_toys import make_texts, write_jsonl

TEXTS = make_texts(4000)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The texts as JSON lines in two files, as Parquet in six, and their vocabulary."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    write_jsonl(folder / "text" / "a.jsonl", TEXTS[:2500])
    write_jsonl(folder / "text" / "b.jsonl", TEXTS[2500:])
    train_vocab([str(folder / "text" / "b.jsonl")], 190, folder / "v.model")
    return folder


@pytest.fixture(scope="module")
def parquet(data):
    """The name of a local Hugging Face dataset of six shards; the datasets package streams it from disk."""
    pytest.importorskip("datasets")
    write_table = pytest.importorskip("pyarrow.parquet").write_table
    from_pylist = pytest.importorskip("pyarrow").Table.from_pylist
    (data / "parquet").mkdir()
    for number in range(6):
        rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS[number::6])]
        write_table(from_pylist(rows), data / "parquet" / f"train-{number:05d}-of-00006.parquet", row_group_size=100)
    return str(data / "parquet")
