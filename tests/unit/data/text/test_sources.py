"""What is named as text: every file of a folder once, and nothing of it passed over without a word."""

import bz2
import gzip
import json
import logging
import lzma
import os
import random

import pytest

from lm_experiments_tools.data.text import sources
from lm_experiments_tools.data.text.records import RejectedRecords, read_shard, rows
from lm_experiments_tools.data.text.sources import file_of_split, plan_shards
from lm_experiments_tools.errors import UserError


@pytest.fixture
def folder(tmp_path):
    sources._warn_once.cache_clear()
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def texts(*items):
    """Texts of all documents of inputs."""
    return [item.value for shard in plan_shards([str(item) for item in items]) for item in read_shard(shard)]


def line(text):
    return (json.dumps({"text": text}) + "\n").encode()


def zstd(content):
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    return sink.getvalue().to_pybytes() if not content else bytes(pyarrow.compress(content, "zstd", asbytes=True))


def test_every_ending_is_read_in_capitals_and_compressed(folder):
    contents = {
        "a.ndjson": line("a"),
        "b.JSONL": line("b"),
        "c.Json.GZ": gzip.compress(line("c")),
        "d.txt.bz2": bz2.compress(b"d\n\nd2\n"),
        "e.ndjson.xz": lzma.compress(line("e")),
        "f.TXT": b"f",
    }
    for name, content in {**contents, ".hidden.txt": b"x", ".cache/x.txt": b"x", "sub/g.txt": b"g"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    assert texts(folder) == ["a", "b", "c", "d", "d2", "e", "f", "g"]
    for name in contents:
        assert texts(folder / name)[0] == name[0]


def test_zstd_is_read_where_pyarrow_is_there_and_refused_at_once_where_not(folder, monkeypatch):
    frame = zstd(line("g"))
    (folder / "g.jsonl.zst").write_bytes(frame + zstd(line("h")))
    assert texts(folder) == ["g", "h"]
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"g\.jsonl\.zst is compressed by zstd.*pip install pyarrow"):
        plan_shards([str(folder)])


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_damaged_compressed_file_is_named_with_the_line(folder, ending):
    lines = b"".join(line(str(random.Random(i).getrandbits(200))) for i in range(2000))
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}[ending]
    data = folder / f"data.jsonl{ending}"
    for content, first in ((pack(lines)[: -len(pack(lines)) // 3], r"\d+"), (lines, "0")):
        data.write_bytes(content)
        with pytest.raises(UserError, match=rf"data\.jsonl{ending} is damaged after line {first} "):
            texts(data)


def test_what_a_folder_passes_over_is_said_in_files_and_bytes(folder, caplog):
    (folder / "a.jsonl").write_bytes(line("a" * 5000))
    for name in ("b.xml", "c.pdf", "c2.PDF", "README"):
        (folder / name).write_bytes(b"x" * 1024)
    (folder / "empty.pdf").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert len(texts(folder)) == len(texts(folder)) == 1
    (said,) = caplog.messages
    assert f"folder {folder}: 4 files of 4.0 KiB are passed over, such as {folder / 'README'}; 1 are read" in said


def test_links_are_followed_and_no_file_is_read_twice(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sub").mkdir(parents=True)
    (elsewhere / "x.jsonl").write_bytes(line("x"))
    (elsewhere / "sub" / "y.jsonl").write_bytes(line("y"))
    (folder / "z").mkdir()
    (folder / "z" / "own.jsonl").write_bytes(line("own"))
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere / "sub")
    (folder / "a_loop").symlink_to(folder)
    (folder / "b.jsonl").symlink_to(folder / "z" / "own.jsonl")
    assert sorted(texts(folder)) == ["own", "x", "y"]
    (folder / "gone.jsonl").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"gone\.jsonl is a link to .*nothing, which does not exist"):
        texts(folder)


def test_a_folder_that_cannot_be_read_is_not_passed_over(folder, monkeypatch):
    (folder / "a.jsonl").write_bytes(line("a"))
    (folder / "closed").mkdir()
    scandir = os.scandir

    def refuse_closed(path):
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse_closed)
    with pytest.raises(UserError, match="closed cannot be read"):
        texts(folder)


def test_a_file_of_two_inputs_is_refused_under_any_spelling(folder, tmp_path, monkeypatch):
    (folder / "a.jsonl").write_bytes(line("a"))
    (tmp_path / "link.jsonl").symlink_to(folder / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    for one, two in [
        ("in", "in"), ("in", "in/a.jsonl"), ("in/a.jsonl", "in/../in/a.jsonl"), ("in/a.jsonl", "link.jsonl"),
        ("owner/name:en", "owner/name:en"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match="is named twice, by the inputs"):
            sources.find_files([one, two])
    assert len(sources.find_files(["owner/name:en", "owner/name:de", "in"])) == 3


def test_rows_of_examples_are_read_from_the_same_endings(folder):
    (folder / "train.tsv.xz").write_bytes(lzma.compress(b"a\tb\n1\t2\n"))
    assert file_of_split(str(folder), "train") == str(folder / "train.tsv.xz")
    (folder / "train.NDJSON").write_bytes(line("x"))
    with pytest.raises(UserError, match=r"several train files, train\.NDJSON, train\.tsv\.xz: name one of them"):
        file_of_split(str(folder), "train")
    for name, expected in (("train.tsv.xz", {"a": "1", "b": "2"}), ("train.NDJSON", {"text": "x"})):
        path = file_of_split(str(folder / name), "train")
        assert [row.value for row in rows(path, RejectedRecords(0))] == [expected]


@pytest.mark.parametrize("number, length", [(1500, 3000), (9, 20_000), (2000, 30)])
def test_a_document_a_line_is_noticed_and_read_if_declared(folder, caplog, number, length):
    lines = [f"{i} ".ljust(length, "C") for i in range(number)]
    (folder / "molecules.txt").write_text("\n".join(lines))
    (folder / "more.txt").write_text("\n".join(lines))
    assert len(texts(folder)) == 2
    (said,) = caplog.messages  # of both files
    assert "molecules.txt (2 of 2 files) is one document" in said and "--document_per_line" in said
    caplog.clear()
    shards = plan_shards([str(folder)], 20_000, document_per_line=True)
    assert [item.value for shard in shards for item in read_shard(shard)] == lines * 2
    assert len(shards) > 2 and not caplog.messages


SPLITS = ("train", "validation")


@pytest.fixture(params=["jsonl", "txt.gz", "parquet", "save_to_disk", "folders"])
def splits(request, folder):
    """A folder of two splits in one of the usual forms, with a file that datasets writes beside the data."""
    kind = request.param
    for split in SPLITS:
        if kind == "txt.gz":
            (folder / f"c4-{split}.00000-of-00001.txt.gz").write_bytes(gzip.compress(f"{split} text".encode()))
        elif kind in ("jsonl", "folders"):
            path = folder / f"{split}.jsonl" if kind == "jsonl" else folder / split / "part.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(line(f"{split} text"))
    if kind in ("parquet", "save_to_disk"):
        datasets = pytest.importorskip("datasets")
        rows = datasets.DatasetDict({s: datasets.Dataset.from_dict({"text": [f"{s} text"]}) for s in SPLITS})
        if kind == "save_to_disk":
            rows.save_to_disk(str(folder))
            saved = datasets.load_from_disk(str(folder / "train"))
            saved.map(
                lambda row: {"text": "a cache, not data"}, cache_file_name=str(folder / "train" / "cache-1.arrow")
            )
        else:
            for split in SPLITS:
                rows[split].to_parquet(str(folder / "data" / f"{split}-00000-of-00001.parquet"))
    return folder


def test_a_folder_of_splits_is_read_by_one_rule_whatever_its_format(splits, caplog):
    with caplog.at_level(logging.WARNING, logger=sources.logger.name):
        assert texts(splits) == ["train text"]
    assert f"1 files of other splits than train are left out ({splits}::validation)" in caplog.text
    for name in ("::validation", "::dev"):
        assert texts(f"{splits}{name}") == ["validation text"]
    assert texts(f"{splits}::train") == ["train text"]
    with pytest.raises(UserError, match="has no file of the split test"):
        texts(f"{splits}::test")


def test_names_of_splits_count_only_beside_a_file_of_train(folder):
    for name in ("python-dev.jsonl", "latest.jsonl", "test.example.com.jsonl"):
        (folder / name).write_bytes(line(name))
    assert len(texts(folder)) == 3
    (folder / "training_set.jsonl").write_bytes(line("train"))
    assert texts(folder) == ["latest.jsonl", "train"]


def test_paths_with_colons_and_brackets_name_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "run:1[a]:b"
    datasets.Dataset.from_dict({"text": ["one", "two"], "meta": [{"text": "m1"}, {"text": "m2"}]}).to_parquet(
        str(folder / "x.parquet")
    )
    (folder / "train.jsonl").write_bytes(line("three"))
    (folder / "dev.jsonl").write_bytes(line("four"))
    assert texts(folder / "x.parquet") == ["one", "two"]
    for name in ("x.parquet", "train.jsonl"):
        path = file_of_split(str(folder / name), "valid")
        assert [row.value["text"] for row in rows(path, RejectedRecords(0))] == texts(folder / name)
    assert file_of_split(str(folder), "valid") == str(folder / "dev.jsonl")
    (shard,) = plan_shards([str(folder / "x.parquet")])
    assert [row.value for row in read_shard(shard, "meta.text")] == ["m1", "m2"]
    (folder / "x.parquet").unlink()
    assert texts(folder) == ["three"] and texts(f"{folder}::validation") == ["four"]


@pytest.fixture
def parquet_shards(tmp_path, monkeypatch):
    """Write tables as the shards of one Parquet dataset."""
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write(*shards):
        (tmp_path / "shards").mkdir()
        for number, columns in enumerate(shards):
            table = pyarrow.table({"text": pyarrow.array(columns.pop("text"), pyarrow.string()), **columns})
            with parquet.ParquetWriter(tmp_path / "shards" / f"train-{number}.parquet", table.schema) as writer:
                writer.write_table(table)
        return tmp_path / "shards"

    return write


def test_a_parquet_shard_with_an_empty_row_group_holds_no_rows(parquet_shards):
    shards = parquet_shards({"text": ["a", "b"]}, {"text": []}, {"text": ["c"]})
    assert texts(shards) == ["a", "b", "c"]
    assert [row.value["text"] for row in rows(file_of_split(str(shards), "train"), RejectedRecords(0))] == [
        "a",
        "b",
        "c",
    ]


def test_parquet_shards_may_differ_in_columns_that_are_not_read(parquet_shards):
    assert texts(parquet_shards({"text": ["a"]}, {"text": ["b"], "url": ["u"]}, {"text": ["c"], "n": [3]})) == [
        "a", "b", "c",
    ]  # fmt: skip
