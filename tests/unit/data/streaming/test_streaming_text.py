"""The text of --streaming: shards assigned to streams, each document once an epoch, any position found again."""

import json
import os
import time
from collections import Counter
from itertools import chain, islice, takewhile
from types import SimpleNamespace

import pytest

from lm_experiments_tools.data.streaming import text as stream_text
from lm_experiments_tools.data.streaming.text import ChunkSettings, Position, StreamPlan, StreamText
from lm_experiments_tools.data.text.records import read_shard
from lm_experiments_tools.errors import UserError
from tests.helpers.token_toys import make_texts

TEXTS = make_texts(4000)


def text_of(plan, stream=0, position=None, max_bad_lines=0):
    settings = ChunkSettings(plan, "", SimpleNamespace(key="text"), max_bad_lines)
    return StreamText(settings, stream, position or Position())


def documents_of_epoch(plan, stream, epoch):
    """Texts of a stream in one epoch, and the shards they are from."""
    text, found = text_of(plan, stream, Position(epoch=epoch)), []
    for document in text.documents:
        if text.position.epoch > epoch:
            break
        found.append((document.value, plan.shards_of(stream, epoch)[text.position.shard]))
    return found


@pytest.mark.parametrize("source", ["text", "parquet"])
def test_each_epoch_has_each_document_once_in_an_order_of_its_own(data, source, request):
    name = request.getfixturevalue("parquet") if source == "parquet" else str(data / "text")
    plan = StreamPlan.make([name], 3, seed=1)
    assert plan.num_streams == 3
    orders = []
    for epoch in range(2):
        streams = [documents_of_epoch(plan, stream, epoch) for stream in range(3)]
        assert Counter(text for text, _ in chain(*streams)) == Counter(TEXTS)
        shards = [{shard for _, shard in stream} for stream in streams]
        assert not shards[0] & shards[1] and not shards[0] & shards[2] and not shards[1] & shards[2]
        sizes = [len(stream) for stream in streams]
        assert max(sizes) < 1.2 * min(sizes)
        orders.append([text for text, _ in chain(*streams)])
    assert orders[0] != orders[1]
    assert orders[0] != [text for text, _ in documents_of_epoch(StreamPlan.make([name], 1, seed=1), 0, 0)]


def test_any_position_is_found_again(data):
    plan = StreamPlan.make([str(data / "text")], 4, seed=0)
    text, positions, texts = text_of(plan, 2), [Position()], []
    for document in islice(text.documents, 1500):  # more than an epoch
        texts.append(document.value)
        positions.append(text.position)
    assert positions[-1].epoch == 1
    for number in [0, 1, 250, 999, 1100]:
        again = islice(text_of(plan, 2, positions[number]).documents, 20)
        assert [document.value for document in again] == texts[number : number + 20]


@pytest.mark.parametrize(
    ("sizes", "most", "num_streams"),
    [
        ([1] * 1024, 16, 16), ([1] * 100, 16, 15), ([1] * 17, 16, 9), ([1] * 5, 16, 5), ([1] * 3, 2, 1),
        ([8, 1, 1], 3, 1), ([4, 2, 2], 3, 2),
    ],
)  # fmt: skip
def test_as_many_streams_as_come_out_even(monkeypatch, sizes, most, num_streams):
    shards = [stream_text.Shard("x", "json", 100 * i, 100 * i + size) for i, size in enumerate(sizes)]
    monkeypatch.setattr(stream_text, "plan_shards", lambda *_, **__: shards)
    assert StreamPlan.make(["x"], most, 0).num_streams == num_streams


def documents_of(plan, epochs, begin=None):
    """(position, document) of the epochs that are left from `begin` on."""
    text = text_of(plan, 0, begin, 10)
    found = ((text.position, item) for item in text.documents)
    return list(takewhile(lambda found: found[0].epoch < epochs, found))


def test_a_stream_of_a_text_that_changes_ends(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(300)))
    plan = StreamPlan.make([str(data)], 2, seed=3)
    os.utime(data, ns=(1, 1))
    with pytest.raises(UserError, match=r"data\.jsonl was changed while it was being read"):
        documents_of(plan, 1)


def test_empty_texts_of_a_stream_are_no_bad_lines(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", "a", " ", "b"] * 20))
    text = text_of(StreamPlan.make([str(data)], 1, seed=3))
    assert [next(text.documents).value for _ in range(60)] == ["a", "b"] * 30
    assert text.position.rejected == 0 and text.rejected == []


@pytest.mark.parametrize("number", [1, 40])  # of one shard and of several
def test_a_tiny_text_is_read_fast_and_resumed_however_many_epochs_a_chunk_takes(tmp_path, monkeypatch, number):
    lines = [json.dumps({"text": text}) for text in make_texts(number)] + ["broken"]
    (tmp_path / "tiny.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(stream_text, "_MIN_SHARD_BYTES", 1 << 10)
    plan = StreamPlan.make([str(tmp_path / "tiny.jsonl")], 1, seed=3)
    assert (len(plan.shards) == 1) == (number == 1)
    epochs = 3000 if number == 1 else 20
    began = time.process_time()
    found = documents_of(plan, epochs)
    assert len(found) == epochs * number
    if number == 1:  # each epoch drew a permutation of one shard, which took 5 ms
        assert time.process_time() - began < 3.0
    middle = found[len(found) // 2][0]
    assert documents_of(plan, epochs, middle) == found[len(found) // 2 + 1 :]


def test_a_broken_connection_is_taken_up_where_it_broke(parquet, monkeypatch):
    breaks = iter([3, 0, 600, 0, 1])
    monkeypatch.setattr(stream_text, "_WAITS", (0.0, 0.0))

    def breaking(shard, text_key, skip):
        for number, item in enumerate(read_shard(shard, text_key, skip=skip)):
            if number == next_break[0]:
                next_break[0] = next(breaks, None)
                raise ConnectionError("Server Disconnected")
            yield item

    next_break = [next(breaks)]
    monkeypatch.setattr(stream_text, "read_shard", breaking)
    plan = StreamPlan.make([parquet], 1, seed=0)
    assert Counter(text for text, _ in documents_of_epoch(plan, 0, 0)) == Counter(TEXTS)
    assert next_break == [None]
    next_break[0] = 0
    monkeypatch.setattr(stream_text, "read_shard", lambda *_, **__: (_ for _ in ()).throw(TimeoutError("timed out")))
    with pytest.raises(
        OSError, match=r"shard \d of .*parquet, after 0 documents: timed out; 2 more tries did not help"
    ):
        next(text_of(plan).documents)
