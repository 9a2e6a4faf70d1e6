"""The sample that a vocabulary is trained on, from texts too large to be cut into pieces."""

import gzip
import json
import time

from lm_experiments_tools.data.text.documents import plan_pieces, read_piece, sample_places, whole_lines
from lm_experiments_tools.data.text.train_vocabulary import train_vocab
from tests.helpers.token_toys import make_texts, write_jsonl


def test_a_terabyte_is_sampled_by_position_within_a_second(tmp_path):
    path = tmp_path / "huge.jsonl"
    with open(path, "w") as file:
        file.write(json.dumps({"text": "a first line"}) + "\n")
        file.truncate(10**12)
    start = time.process_time()
    places = sample_places([str(path)], 1 << 18, 4096)
    assert len(places) == 4096 and time.process_time() - start < 1
    assert places[0].start == 0 and places == sample_places([str(path)], 1 << 18, 4096)
    assert all(b.start - a.end >= 0 for a, b in zip(places, places[1:], strict=False))
    assert places[-1].start > 0.999 * 10**12
    assert whole_lines(places[1]) is None  # a hole has no lines, and is not searched for any


def test_places_are_whole_lines_from_all_over_the_files(tmp_path):
    texts = make_texts(3000)
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", texts[i::3]) for i in range(3)]
    places = [place for place in map(whole_lines, sample_places(paths, 2000, 20)) if place is not None]
    assert len(places) > 15 and len({place.path for place in places}) == 3
    found = [item.text for place in places for item in read_piece(place)]
    assert set(found) <= set(texts) and len(set(found)) > 100


def test_a_text_of_no_more_pieces_is_sampled_as_before(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(500))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "compressed"}) + "\n")
    pieces = plan_pieces([str(tmp_path)], 4000)
    assert sample_places([str(tmp_path)], 4000, 100) == pieces == list(map(whole_lines, pieces))
    few = sample_places([str(tmp_path)], 4000, 3)
    assert [place.path for place in few] == [str(tmp_path / "b.jsonl.gz"), path, path, path]


def test_a_vocabulary_of_a_terabyte_is_trained_on_what_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_experiments_tools.data.text.train_vocabulary._MOST_PIECES", 8)
    monkeypatch.setattr("lm_experiments_tools.data.text.train_vocabulary._PIECE_BYTES", 1 << 16)
    path = tmp_path / "huge.jsonl"
    with open(path, "w") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in make_texts(2000)))
        assert file.tell() > 1 << 16
        file.truncate(10**12)
    summary = train_vocab([str(path)], 70, tmp_path / "v.model", extra_ids=10, sample_bytes=30_000)
    assert summary.size == 70 and summary.sample_bytes >= 30_000
