"""The sample of text that a vocabulary is trained on."""

import gzip
import json
import random
import time

from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.tools.main import main as lmtools
from lm_experiments_tools.tools.train_vocabulary import _short_lines, train_vocab, train_wordpiece
from tests.helpers.token_toys import make_texts, write_jsonl


def test_a_large_text_is_cut_into_no_more_shards_than_asked_for(tmp_path):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", make_texts(900)[i::3]) for i in range(3)]
    shards = plan_shards(paths, 2000, max_shards=20)
    assert 15 < len(shards) <= 23 and [shard.path for shard in shards if not shard.start] == paths
    assert plan_shards(paths, 2000, max_shards=10_000) == plan_shards(paths, 2000)


def test_the_sample_is_from_all_over_a_large_text(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_experiments_tools.tools.train_vocabulary._MAX_SHARDS", 8)
    monkeypatch.setattr("lm_experiments_tools.tools.train_vocabulary._SHARD_BYTES", 2000)
    letters = "abcdefghij"
    texts = [f"{letter * 3} {text}" for letter in letters for text in make_texts(100)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "QQQ " * 100}) + "\n")
    summary = train_vocab([str(tmp_path)], 60, tmp_path / "v.model", extra_ids=10, sample_bytes=20_000)
    assert summary.size == 60 and 18_000 < summary.sample_bytes < 21_000
    content = (tmp_path / "v.model").read_bytes()
    assert b"Q" in content


def test_a_long_line_is_cut_in_time_proportional_to_its_length():
    def seconds(length):
        line, start = "word " * (length // 5), time.process_time()
        parts = list(_short_lines(line))
        assert "".join(parts) == line and max(map(len, parts)) <= 4000
        return time.process_time() - start

    assert seconds(8_000_000) < 20 * max(seconds(800_000), 0.01)
    parts = list(_short_lines("\u4e2d" * 5000 + " " + "x" * 5000))
    assert "".join(parts) == "\u4e2d" * 5000 + " " + "x" * 5000
    assert max(len(part.encode()) for part in parts) <= 4000


def test_wordpiece_has_as_many_ideographs_as_fit_and_the_share_of_unknown_tokens_is_said(tmp_path, capsys, caplog):
    rng, characters = random.Random(0), [chr(0x4E00 + 5 * k) for k in range(1500)]
    weights = [1 / (k + 10) for k in range(len(characters))]
    texts = ["".join(rng.choices(characters, weights, k=100)) + "\u3002" for _ in range(400)]
    path = write_jsonl(tmp_path / "zh.jsonl", texts)
    counts = {character: sum(text.count(character) for text in texts) for character in {*"".join(texts)}}
    frequent = sorted((n for n in counts.values() if n > 1), reverse=True)
    for size in (len(frequent) + 5, 1015, 205):
        expected = 1 - sum(frequent[: size - 5]) / sum(counts.values())
        caplog.clear()
        summary = train_wordpiece([path], size, tmp_path / f"{size}.txt")
        assert summary.size == size == len((tmp_path / f"{size}.txt").read_text().splitlines())
        assert abs(summary.unknown - expected) < 0.002
        assert ("unknown tokens: give a larger --size" in caplog.text) == (expected >= 0.01)
    command = ["vocab", "--type", "wordpiece", "--input", path, "--output", str(tmp_path / "v.txt"), "--size"]
    assert lmtools([*command, "8000"]) == 2
    assert f"give --size at most {len(frequent) + 5}" in capsys.readouterr().err
    assert lmtools([*command, "205"]) == 0
    assert f"unknown tokens in it: {summary.unknown:.2%}" in capsys.readouterr().out
