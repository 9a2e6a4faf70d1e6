"""The sample of text that a vocabulary is trained on."""

import gzip
import json

from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.text.train_vocabulary import train_vocab
from tests.helpers.token_toys import make_texts, write_jsonl


def test_a_large_text_is_cut_into_no_more_shards_than_asked_for(tmp_path):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", make_texts(900)[i::3]) for i in range(3)]
    shards = plan_shards(paths, 2000, max_shards=20)
    assert 15 < len(shards) <= 23 and [shard.path for shard in shards if not shard.start] == paths
    assert plan_shards(paths, 2000, max_shards=10_000) == plan_shards(paths, 2000)


def test_the_sample_is_from_all_over_a_large_text(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_experiments_tools.data.text.train_vocabulary._MAX_SHARDS", 8)
    monkeypatch.setattr("lm_experiments_tools.data.text.train_vocabulary._SHARD_BYTES", 2000)
    letters = "abcdefghij"
    texts = [f"{letter * 3} {text}" for letter in letters for text in make_texts(100)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "QQQ " * 100}) + "\n")
    summary = train_vocab([str(tmp_path)], 60, tmp_path / "v.model", extra_ids=10, sample_bytes=20_000)
    assert summary.size == 60 and 18_000 < summary.sample_bytes < 21_000
    content = (tmp_path / "v.model").read_bytes()
    assert b"Q" in content
