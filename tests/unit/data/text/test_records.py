"""Readers of raw text: what a document is, what a bad line is, that neither is lost, that shards tile a file."""

import csv
import gzip
import json
import os
import random
import re
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from lm_experiments_tools.data.text import records as module
from lm_experiments_tools.data.text import sources
from lm_experiments_tools.data.text.hf_datasets import load_streaming
from lm_experiments_tools.data.text.records import (
    BadRecord,
    Record,
    RejectedRecords,
    locate,
    read_shard,
    records,
    text_of,
)
from lm_experiments_tools.data.text.sources import Shard, file_stamp, plan_shards
from lm_experiments_tools.errors import UserError

# (line of a .jsonl file, the reason it is bad; None: its text is "fine")
LINES = [
    (b'{"text": "fine"}', None),
    (b'{"id": 3, "text": "fine", "meta": {"text": 1}}', None),
    (b'  {"text": "fine"}\r', None),
    (b'{"text": "fine"', "not valid JSON"),
    (b"[" * 100_000, "nested too deeply|not valid JSON"),
    (b'{"text": 1%s}' % (b"0" * 5000), "not valid JSON"),
    (b'["fine"]', "a JSON list, not an object: write one object a line"),
    (b"[", "a JSON list, not an object: write one object a line"),
    (b"{", "a JSON object over several lines: write each object on one line"),
    (b'{"content": "fine", "id": 1}', r"no key 'text' \(there is 'content', 'id'\)"),
    (b'{"text": 12}', "of type int"),
    (b'{"text": "a\\u0000b"}', "NUL"),
    (b'{"text": "a\\ud800b"}', "surrogate"),
    (b'{"text": "caf\xe9"}', "not UTF-8 at byte 13"),
    ('{"text": "fine"}'.encode("utf-16"), "not UTF-8 at byte 0"),
]


def read(tmp_path, inputs, **options):
    options = {"max_bad_lines": sys.maxsize, "text_key": "text", **options}
    with closing(RejectedRecords(options["max_bad_lines"], tmp_path / "bad.jsonl")) as rejected:
        return list(records([str(item) for item in inputs], options["text_key"], rejected))


def quarantined(tmp_path):
    path = tmp_path / "bad.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_kind_of_line_is_kept_or_quarantined_with_file_line_and_reason(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_bytes(b"\n".join(line for line, _ in LINES) + b"\n")
    documents = read(tmp_path, [data])
    assert [d.value for d in documents] == ["fine"] * 3
    assert [f"{d.path}:{d.line}" for d in documents] == [f"{data}:{n}" for n in (1, 2, 3)]
    bad = quarantined(tmp_path)
    assert [entry["line"] for entry in bad] == list(range(4, len(LINES) + 1))
    for entry, (_, reason) in zip(bad, LINES[3:], strict=True):
        assert re.search(reason, entry["reason"]), entry
        assert entry["file"] == str(data)
    assert bad[0]["content"] == '{"text": "fine"'


@pytest.mark.parametrize(
    ("content", "key", "texts"),
    [
        (b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}', "text", ["one", "two"]),
        ('{"text": "a\u2028b\u0085c\\u000bd"}\n'.encode(), "text", ["a\u2028b\u0085c\x0bd"]),  # no ends of lines
        (b'{"content": "yes", "text": 5}\n', "content", ["yes"]),
    ],
)
def test_blank_lines_and_a_byte_order_mark_are_no_data(tmp_path, content, key, texts):
    (tmp_path / "data.jsonl").write_bytes(content)
    assert [d.value for d in read(tmp_path, [tmp_path / "data.jsonl"], text_key=key)] == texts
    assert not (tmp_path / "bad.jsonl").exists()


def test_documents_of_a_text_file_are_separated_by_blank_lines(tmp_path):
    data = tmp_path / "data.txt"
    data.write_bytes(b"\n\nfirst\r\nof two lines\n \t\nsecond\n\n\nca\xe9 bad\nthird")
    documents = read(tmp_path, [data])
    assert [d.value for d in documents] == ["first\nof two lines", "second", "third"]
    assert [f"{d.path}:{d.line}" for d in documents] == [f"{data}:{n}" for n in (3, 6, 10)]
    assert [(b["line"], b["reason"]) for b in quarantined(tmp_path)] == [(9, "not UTF-8 at byte 2")]


def test_a_later_clean_run_removes_the_quarantine_file(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "ok"}\n{"text": 1}\n')
    read(tmp_path, [data])
    data.write_text('{"text": "ok"}\n')
    read(tmp_path, [data])
    assert not (tmp_path / "bad.jsonl").exists()


@pytest.mark.parametrize("content", [b"", b"\n\n \n", b'{"text": ""}\n'])
def test_input_without_documents_is_an_error_at_once(tmp_path, content):
    data = tmp_path / "empty.jsonl"
    data.write_bytes(content)
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        read(tmp_path, [data])


def test_inputs_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "data.xml").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.xml").write_text("x")
    for item, message in [
        ("data.xml", r"data\.xml is no file of \.jsonl"),
        ("folder", r"folder .*folder has no \.jsonl.* \(1 others\)"),
        ("nothing.jsonl", r"nothing\.jsonl does not exist"),
        ("no/such/path", r"no/such/path does not exist"),
    ]:
        with pytest.raises(UserError, match=message):
            read(tmp_path, [tmp_path / item])
    with pytest.raises(UserError, match="an empty list of inputs"):
        read(tmp_path, [])


@pytest.fixture
def no_dataset_remembered():
    load_streaming.cache_clear()
    yield
    load_streaming.cache_clear()


@pytest.mark.usefixtures("no_dataset_remembered")
def test_hugging_face_datasets_by_name_config_and_split(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset_builder(name, config):
        def as_streaming_dataset(split):
            asked.append((name, config, split))
            rows = [{"text": f"row {i}"} for i in range(5)] + [{"text": "\0"}, {"text": None}]
            return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)

        return SimpleNamespace(config=None, as_streaming_dataset=as_streaming_dataset)

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    monkeypatch.chdir(tmp_path)
    assert [d.value for d in read(tmp_path, ["owner/name:config:test"])] == [f"row {i}" for i in range(5)]
    assert set(asked) == {("owner/name", "config", "test")}
    assert ["NUL" in entry["reason"] for entry in quarantined(tmp_path)] == [True]
    read(tmp_path, ["name"])
    assert asked[-1] == ("name", None, "train")


@pytest.mark.usefixtures("no_dataset_remembered")
def test_hugging_face_datasets_that_cannot_be_loaded_are_one_sentence(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'name' on the Hub (LocalEntryNotFoundError)\nmore")

    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    with pytest.raises(UserError, match=r"dataset name cannot be loaded: Couldn't reach 'name'"):
        read(tmp_path, ["name"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        read(tmp_path, ["name"])


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_shards_tile_a_file_whatever_their_size(tmp_path, suffix):
    rng = random.Random(0)
    data = tmp_path / f"data{suffix}"
    with open(data, "w", encoding="utf-8", newline="\n") as file:
        file.write("\ufeff")
        for i in range(200):
            text = f"{i} " + "wörd " * rng.randrange(20)
            bad = rng.random() < 0.1
            if suffix == ".jsonl":
                file.write((json.dumps({"text": text}) if not bad else "{") + "\n" * rng.randrange(1, 3))
            else:
                file.write(
                    text + "\n" + ("bad\0\n" if bad else "") + "more\n" * rng.randrange(3) + "\n" * rng.randrange(1, 3)
                )
    whole = read(tmp_path, [data])
    bad = len(quarantined(tmp_path))
    assert len(whole) > 100 and bad > 5
    for shard_bytes in (1, 7, 100, 1000, 5000, 1 << 20):
        shards = plan_shards([str(data)], shard_bytes)
        assert [shard.start for shard in shards[1:]] == [shard.end for shard in shards[:-1]]
        assert (shards[0].start, shards[-1].end) == (0, data.stat().st_size)
        items = [item for shard in shards for item in read_shard(shard)]
        assert [item.value for item in items if isinstance(item, Record)] == [d.value for d in whole]
        assert sum(isinstance(item, BadRecord) for item in items) == bad
    assert len(plan_shards([str(data)], 1000)) > 5


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".jsonl.gz"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_file_that_changes_after_it_was_cut_is_an_error_at_every_shard(tmp_path, suffix, when):
    data = tmp_path / f"data{suffix}"
    lines = "".join(f"{json.dumps({'text': f'document {i}'})}\n\n" for i in range(100)).encode()

    def write(text):
        data.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)

    for changed in (b'{"text": "new"}\n\n' + lines, lines[:-20], lines.replace(b"7", b"8")):
        write(lines)
        os.utime(data, ns=(1, 1))
        for shard in plan_shards([str(data)], 500):
            if when == "before":
                write(changed)
            items = read_shard(shard)
            with pytest.raises(UserError, match=rf"{re.escape(data.name)} was changed while it was being read"):
                next(items)
                write(changed)
                list(items)
            write(lines)
            os.utime(data, ns=(1, 1))


def test_a_document_larger_than_memory_is_a_bad_line_of_which_only_the_beginning_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 40)
    long, longest = json.dumps({"text": "x" * 25}), json.dumps({"text": "y" * 5000})
    lines = ['{"text": "a"}', longest, long, '{"text": "b"}', longest]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (shard,) = plan_shards([str(tmp_path / "data.jsonl")])
    assert max(len(line) for _, line in module.read_lines(shard)) == 41
    blocks = ["one\ntwo", "three " * 5 + "\nfour\nfive\nsix", "z" * 5000 + "\nseven", "eight"]
    (tmp_path / "data.txt").write_text("\n\n".join(blocks))
    assert [d.value for d in read(tmp_path, [tmp_path / "data.jsonl"])] == ["a", "x" * 25, "b"]
    bad = quarantined(tmp_path)
    assert [entry["line"] for entry in bad] == [2, 5] and {entry["reason"] for entry in bad} == {
        "a document of more than 40 B: cut it into several"
    }
    assert [d.value for d in read(tmp_path, [tmp_path / "data.txt"])] == ["one\ntwo", "eight"]
    assert [entry["line"] for entry in quarantined(tmp_path)] == [4, 9]


@pytest.mark.parametrize("shard_bytes", [1, 7, 100, 10**9])
def test_shards_of_files_with_long_lines_hold_every_line_once(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(sources, "_SKIP_BYTES", 4)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (1, 50, 3, 200, 2)))
    (tmp_path / "b.txt").write_text("\n\n".join(["one", "x" * 100 + "\n" + " " * 20 + "y", "two\nthree", "z" * 50]))
    shards = plan_shards([str(tmp_path)], shard_bytes)
    found = [item.value for shard in shards for item in read_shard(shard)]
    whole = [item.value for shard in plan_shards([str(tmp_path)], 10**9) for item in read_shard(shard)]
    assert found == whole and len(whole) == 9


def test_null_text_is_empty_text_and_nested_keys_are_followed(tmp_path):
    empty = [{"text": None, "meta": None, "meta.text": None}, {"text": "", "meta": {"more": None}, "meta.text": ""}]
    row = {"text": "a", "meta": {"text": "b", "more": {"x": "c"}}, "meta.text": "d"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*empty * 200, row]))
    for key, expected in (("text", "a"), ("meta.more.x", "c"), ("meta.text", "d")):
        rejected = RejectedRecords(0)
        assert [record.value for record in records([str(tmp_path / "a.jsonl")], key, rejected)] == [expected]
        assert (rejected.num_empty, rejected.count) == (400, 0)
    assert text_of({"meta": {"text": "b"}}, "meta.text") == "b"


def test_tables_and_json_lists_are_text_of_a_corpus_as_json_lines_are(tmp_path):
    rows = [{"id": str(n), "text": f'text; "{n}"'} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.json").write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    with open(tmp_path / "c.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"], delimiter=";")
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "d.tsv").write_text("".join("\t".join(row) + "\n" for row in [rows[0], *map(dict.values, rows)]))
    found = [record.value for record in read(tmp_path, [tmp_path])]
    assert found == [row["text"] for row in rows] * 4
    for shard in plan_shards([str(tmp_path)], 10):
        texts = [item.value for item in read_shard(shard)]
        assert [item.value for item in read_shard(shard, skip=1)] == texts[1:]


def test_a_rejected_line_is_numbered_anew_after_the_text_was_edited(tmp_path):
    path = tmp_path / "a.jsonl"
    for number in (10, 20):  # as many lines before byte 40
        path.write_text(f"{'x' * (40 // number - 1)}\n" * 30)
        shard = Shard(str(path), "json", start=40, stamp=(file_stamp(str(path))[0], number))
        assert locate(shard, BadRecord("bad", path=str(path), line=3)).line == number + 3
