"""Shards of a job array, merged: the bytes of one run; and every way in which files do not belong together."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.text.train_vocabulary import train_vocab
from lm_experiments_tools.data.tokens import indexed
from lm_experiments_tools.data.tokens.files import dataset_exists, token_prefix
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter
from lm_experiments_tools.data.tokens.merge import merge_datasets
from lm_experiments_tools.data.tokens.pipeline import shard_prefix
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools import main
from tests.helpers.token_toys import files, make_texts, write_jsonl, write_tokens

SHARDS = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with 1,500 documents and two bad lines, and a vocabulary."""
    folder = tmp_path_factory.mktemp("text")
    texts = make_texts(1500)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    lines[10] = lines[1400] = "{}\n"
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_text("".join(lines[:1100]))
    (folder / "in" / "b.jsonl").write_text("".join(lines[1100:]))
    train_vocab([write_jsonl(folder / "v.jsonl", texts[:500])], 190, folder / "v.model")
    return folder


@pytest.fixture(scope="module")
def shards(text):
    """Prefix of three shards, tokenized by the command in the wrong order."""
    command = ["tokenize", "--input", str(text / "in"), "--vocab", str(text / "v.model"), "--output", str(text / "t")]
    for number in reversed(range(SHARDS)):
        assert main.main([*command, "--workers", "1", "--shard", f"{number}/{SHARDS}"]) == 0
    return str(text / "t")


@pytest.fixture(scope="module")
def whole(text):
    tokenize_corpus([str(text / "in")], text / "v.model", text / "whole", workers=1)
    return str(text / "whole")


def each(prefix):
    return [shard_prefix(prefix, number, SHARDS) for number in range(SHARDS)]


def test_tokens_of_a_vocabulary_and_of_its_copy_are_merged(text, tmp_path):
    """A run saves its vocabulary in another form, which gives the same ids."""
    Tokenizer.load(text / "v.model").save(tmp_path / "copy")
    made = {}
    for name, vocab in (("a", text / "v.model"), ("b", tmp_path / "copy"), ("c", text / "v.model")):
        data = write_jsonl(tmp_path / f"{name}.jsonl", make_texts(300, seed=len(made)))
        made[name] = tokenize_corpus([data], vocab, tmp_path / name, workers=1)
    merged = merge_datasets([str(tmp_path / name) for name in made], tmp_path / "m")
    assert merged["num_documents"] == 900 and merged["vocab_sha256"] == made["a"]["vocab_sha256"]
    assert merged["vocab_sha256"] == made["b"]["vocab_sha256"] and made["a"]["vocab_file"] != made["b"]["vocab_file"]
    tokenize_corpus([str(tmp_path / "a.jsonl")], tmp_path / "copy" / "spiece.model", tmp_path / "a", workers=1)
    of_other_vocabulary(tmp_path / "b")
    with pytest.raises(UserError, match="differ in the vocabulary"):
        merge_datasets([str(tmp_path / name) for name in ("c", "b")], tmp_path / "n")


def test_merged_shards_are_byte_for_byte_one_run(shards, whole, tmp_path, monkeypatch, capsys):
    assert all(IndexedDataset(prefix).num_documents > 300 for prefix in each(shards))
    assert main.main(["merge", "--input", shards, "--output", str(tmp_path / "m")]) == 0
    assert "1,498 documents" in capsys.readouterr().out
    assert files(tmp_path / "m") == files(whole)
    bad_lines = (tmp_path / "m.bad_lines.jsonl").read_text()
    assert bad_lines == Path(f"{whole}.bad_lines.jsonl").read_text() and bad_lines.count("\n") == 2
    # in any order, by their files, and with an index that is written in many blocks
    monkeypatch.setattr(indexed, "_CHECK_BLOCK", 64)
    names = [f"{prefix}{suffix}" for prefix in reversed(each(shards)) for suffix in (".bin", ".idx", ".json")]
    merge_datasets(names, tmp_path / "n")
    assert files(tmp_path / "n") == files(whole)
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.stem == "n") == [".bin", ".idx", ".json"]


@pytest.mark.parametrize("count", [7, 20])
def test_shards_tile_the_text_however_many_there_are(text, whole, tmp_path, count):
    for number in range(count):
        tokenize_corpus([str(text / "in")], text / "v.model", tmp_path / "t", workers=1, shard=(number, count))
    assert merge_datasets([str(tmp_path / "t")], tmp_path / "m")["num_documents"] == 1498
    assert files(tmp_path / "m") == files(whole)
    if count == 20:  # more than there are shards of 64 KB: some are empty
        assert len(plan_shards([str(text / "in")], 1 << 16)) < 20


def test_shards_of_a_dataset_are_its_files(text, tmp_path):
    pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist
    rows = [{"text": line} for line in make_texts(60, seed=5)]
    (tmp_path / "data").mkdir()
    for number in range(4):
        file = tmp_path / "data" / f"train-{number:05d}-of-00004.parquet"
        parquet.write_table(table(rows[number * 15 : number * 15 + 15]), file)
    name = str(tmp_path / "data")
    for number in range(2):
        tokenize_corpus([name], text / "v.model", tmp_path / "t", workers=1, shard=(number, 2))
        assert IndexedDataset(shard_prefix(str(tmp_path / "t"), number, 2)).num_documents == 30
    merge_datasets([str(tmp_path / "t")], tmp_path / "m")
    tokenize_corpus(
        [write_jsonl(tmp_path / "d.jsonl", [row["text"] for row in rows])], text / "v.model", tmp_path / "w"
    )
    assert files(tmp_path / "m")[:2] == files(tmp_path / "w")[:2]


def test_files_that_are_no_shards_are_joined_in_the_order_given(text, tmp_path):
    texts = make_texts(40, seed=9)
    for name, part in (("a", texts[:10]), ("b", texts[10:]), ("ba", texts[10:] + texts[:10])):
        tokenize_corpus([write_jsonl(tmp_path / f"{name}.jsonl", part)], text / "v.model", tmp_path / name, workers=1)
    merge_datasets([str(tmp_path / "b"), str(tmp_path / "a")], tmp_path / "m")
    assert files(tmp_path / "m")[:2] == files(tmp_path / "ba")[:2]
    merged, whole = (json.loads(files(tmp_path / name)[2]) for name in ("m", "ba"))
    assert merged.pop("input") == [str(tmp_path / name) for name in ("b.jsonl", "a.jsonl")]
    assert merged == {key: value for key, value in whole.items() if key != "input"}
    for name in "ab":  # as another program writes them
        (tmp_path / f"{name}.json").unlink()
    assert merge_datasets([str(tmp_path / "b"), str(tmp_path / "a")], tmp_path / "n")["num_documents"] == 40
    assert files(tmp_path / "n")[:2] == files(tmp_path / "ba")[:2]


def test_tokens_of_other_text_are_replaced_only_when_told_to(text, tmp_path, capsys):
    texts = make_texts(30, seed=9)
    for name, part in (("a", texts[:10]), ("b", texts[10:20]), ("c", texts[20:])):
        tokenize_corpus([write_jsonl(tmp_path / f"{name}.jsonl", part)], text / "v.model", tmp_path / name, workers=1)
    output = str(tmp_path / "m")
    merge_datasets([str(tmp_path / "a"), str(tmp_path / "b")], output)
    before = files(output)
    merge_datasets([str(tmp_path / "a"), str(tmp_path / "b")], output)  # the same text again
    command = ["merge", "--input", str(tmp_path / "a"), str(tmp_path / "c"), "--output", output]
    assert main.main(command) == 2 and files(output) == before
    assert "b.jsonl with the vocabulary" in (said := capsys.readouterr().err) and "give --overwrite" in said
    assert main.main([*command, "--overwrite"]) == 0 and files(output) != before


def damage(prefix):
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[7] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)


def cut(prefix):
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-2])


def forget_shard(prefix):
    meta = json.loads(Path(f"{prefix}.json").read_text())
    del meta["shard"]
    Path(f"{prefix}.json").write_text(json.dumps(meta))


def of_other_vocabulary(prefix):
    meta = json.loads(Path(f"{prefix}.json").read_text())
    Path(f"{prefix}.json").write_text(json.dumps(meta | {"vocab_sha256": "0" * 64, "vocab_size": 10**5}))


@pytest.mark.parametrize(
    ("change", "chosen", "message"),
    [
        (None, [0, 2], r"1 of 3 shards are missing \(1\): make them with --shard 1/3 "),
        (None, [0, 1, 1, 2], r"t-00001-of-00003 is named 2 times"),
        (damage, [0, 1, 2], r"t-00001-of-00003\.bin is damaged: its sha256 is \w{12}, not \w{12}"),
        (cut, [0, 1, 2], r"t-00001-of-00003\.bin has \d+ bytes but .* describes \d+"),
        (forget_shard, [0, 1, 2], r"t-00001-of-00003 is no shard but others are"),
        (of_other_vocabulary, [0, 1, 2], r"t-00001-of-00003 and .* differ in the vocabulary"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_one_sentence(shards, tmp_path, change, chosen, message):
    for path in Path(shards).parent.glob("t-0*"):
        os.link(path, tmp_path / path.name)
    if change:
        prefix = shard_prefix(str(tmp_path / "t"), 1, SHARDS)
        for suffix in (".bin", ".json"):
            copy = Path(f"{prefix}{suffix}").read_bytes()
            Path(f"{prefix}{suffix}").unlink()
            Path(f"{prefix}{suffix}").write_bytes(copy)
        change(prefix)
    inputs = [each(str(tmp_path / "t"))[number] for number in chosen]
    with pytest.raises(UserError, match=message):
        merge_datasets(inputs, tmp_path / "m")
    assert not list(tmp_path.glob("m.*"))


def test_shards_of_other_text_or_settings_would_overlap(text, shards, tmp_path):
    for number, options in ((1, {"append_eos": True}), (2, {})):
        inputs = [str(text / "in" / "a.jsonl")] if number == 2 else [str(text / "in")]
        shard = (number, SHARDS)
        tokenize_corpus(inputs, text / "v.model", tmp_path / "t", workers=1, shard=shard, **options)
        with pytest.raises(UserError, match="were not cut from the same text with the same settings"):
            merge_datasets([each(shards)[0], shard_prefix(str(tmp_path / "t"), *shard)], tmp_path / "m")
    with pytest.raises(UserError, match="are the same shard: name one of them"):
        os.symlink(f"{each(shards)[1]}.json", tmp_path / "u.json")
        for suffix in (".bin", ".idx"):
            Path(f"{tmp_path}/u{suffix}").write_bytes(Path(f"{each(shards)[1]}{suffix}").read_bytes())
        merge_datasets([*each(shards), str(tmp_path / "u")], tmp_path / "m")


@pytest.mark.parametrize(("kind", "end"), [("jsonl", -1), ("parquet", 0)])
def test_shards_of_a_text_and_of_its_edit_of_the_same_size_are_not_merged(tmp_path, kind, end):
    texts = make_texts(300)
    edited = list(texts)
    edited[end] = edited[end].replace("e", "E")
    data = tmp_path / "in" / f"train.{kind}"
    data.parent.mkdir()

    def write(texts):
        if kind == "jsonl":
            return write_jsonl(data, texts)
        table = pytest.importorskip("pyarrow").table({"text": texts})
        pytest.importorskip("pyarrow.parquet").write_table(table, data, compression="none", use_dictionary=False)
        return str(data)

    def shard(number):
        tokenize_corpus([write(now)], "bytes", tmp_path / "t", workers=1, shard=(number, 2))

    now = texts
    shard(0), shard(1)
    size, now = data.stat().st_size, edited
    shard(1)
    assert edited != texts and data.stat().st_size == size
    with pytest.raises(UserError, match="were not cut from the same text"):
        merge_datasets([str(tmp_path / "t")], tmp_path / "m")
    shard(0)
    os.utime(data, (0, 0))  # as a copy on another machine may have it
    tokenize_corpus([str(data)], "bytes", tmp_path / "t", workers=1, shard=(1, 2))
    assert merge_datasets([str(tmp_path / "t")], tmp_path / "m")["num_documents"] == 300


def test_flags_that_make_no_sense_are_one_sentence(text, shards, tmp_path, capsys):
    tokenize = ["tokenize", "--input", str(text / "in"), "--vocab", str(text / "v.model"), "--output", "t"]
    for command, message in [
        ([*tokenize, "--shard", "3"], "--shard 3 is not i/n"),
        ([*tokenize, "--shard", "-1/3"], "is not i/n"),
        ([*tokenize, "--shard", "3/3"], "shard 3/3 does not exist"),
        ([*tokenize, "--shard", "0/0"], "--shard 0/0 is a part of none"),
        (["merge", "--input", "", "--output", str(tmp_path / "m")], "--input needs a value"),
        (["merge", "--input", shards, "", "--output", str(tmp_path / "m")], "--input '' is no token prefix"),
        (["merge", "--input", str(tmp_path / "none"), "--output", str(tmp_path / "m")], "none' is no token prefix"),
        (["merge", "--input", shards, "--output", str(tmp_path / "m.bin")], "must be a prefix"),
        (["merge", "--input", each(shards)[0], "--output", each(shards)[0]], "is an input too"),
    ]:
        assert main.main(command) == 2
        assert message in capsys.readouterr().err, command


def test_a_full_disk_leaves_nothing_behind(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(indexed.secrets, "token_hex", lambda length: "X")
    for suffix in (".bin", ".idx", ".json"):  # the system's disk that is always full
        (tmp_path / f"m{suffix}.tmpX").symlink_to("/dev/full")
        assert main.main(["merge", "--input", shards, "--output", str(tmp_path / "m")]) == 1
        assert f"m{suffix}: No space left on device: free some space" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
    Path(tmp_path / "file").touch()
    assert main.main(["merge", "--input", shards, "--output", str(tmp_path / "file" / "m")]) == 1
    assert "file" in capsys.readouterr().err


def test_the_fingerprint_is_of_the_tokens_themselves(whole, tmp_path):
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"t{suffix}").write_bytes(Path(f"{whole}{suffix}").read_bytes())
    dataset = IndexedDataset(tmp_path / "t")
    assert dataset.fingerprint == IndexedDataset(whole).fingerprint
    assert dataset.meta["bin_sha256"] == IndexedDatasetWriter(tmp_path / "u", np.uint16).add_dataset(dataset)
    (tmp_path / "t.json").unlink()  # index and size alone
    assert IndexedDataset(tmp_path / "t").fingerprint != dataset.fingerprint
    # other tokens at the same size, and a record that is older than they are
    (tmp_path / "t.json").write_bytes(Path(f"{whole}.json").read_bytes())
    damage(tmp_path / "t")
    later = time.time() + 10
    os.utime(tmp_path / "t.bin", (later, later))
    with pytest.raises(UserError, match=r"t\.bin was changed after it was written: its sha256 is"):
        _ = IndexedDataset(tmp_path / "t").fingerprint
    # copied after its record, but whole
    (tmp_path / "t.bin").write_bytes(Path(f"{whole}.bin").read_bytes())
    os.utime(tmp_path / "t.bin", (later, later))
    assert IndexedDataset(tmp_path / "t").fingerprint == dataset.fingerprint
    assert dataset_exists(tmp_path / "t")


def test_files_of_sentences_are_merged(tmp_path):
    for number, sizes in enumerate(([2, 1], [4])):
        documents = [[[sentence, number] for sentence in range(size)] for size in sizes]
        meta = {"num_sequences": sum(sizes), "empty_documents": number}
        write_tokens(tmp_path / f"in{number}", documents, meta=meta)
    meta = merge_datasets([str(tmp_path / f"in{number}") for number in range(2)], tmp_path / "out")
    assert (meta["num_sequences"], meta["empty_documents"]) == (7, 1)
    assert IndexedDataset(tmp_path / "out").document_indices.tolist() == [0, 2, 3, 7]


@pytest.mark.parametrize("shard", [{"number": 0, "of": 10**9, "source": "a"}, {"number": "0", "of": 2}, {}])
def test_a_shard_that_cannot_be_is_named(tmp_path, shard):
    write_tokens(tmp_path / "in", [[[1]]], meta={"shard": shard})
    with pytest.raises(UserError, match="which cannot be"):
        merge_datasets([str(tmp_path / "in")], tmp_path / "out")


@pytest.mark.parametrize("key", ["input", "shard", "num_bytes", "bad_lines", "bin_sha256", "vocab_sha256"])
def test_what_is_null_is_not_recorded(tmp_path, key):
    meta = {"input": ["x"], "num_bytes": 1, "bad_lines": 0, "vocab_sha256": "a", "sentence_splitter": None} | {
        key: None
    }
    inputs = [write_tokens(tmp_path / name, [[[1]]], meta=meta) for name in "ab"]
    merged = merge_datasets(inputs, tmp_path / "m")
    assert merged["num_documents"] == 2 and merged.get(key, 0) is not None
    assert merged["sentence_splitter"] is None, "settings stay as they are written"


def token_file(prefix, dtype=np.uint16, documents=1, **meta):
    write_tokens(prefix, [[[1]]] * documents, dtype, meta or None)
    return str(prefix)


def test_files_without_a_document_are_not_merged_into_another(tmp_path, capsys):
    empty = [token_file(tmp_path / name, documents=0) for name in "ab"]
    assert main.main(["merge", "--input", *empty, "--output", str(tmp_path / "m")]) == 2
    assert "there is no document in" in capsys.readouterr().err and not dataset_exists(tmp_path / "m")
    full = token_file(tmp_path / "c")
    assert merge_datasets([*empty, full], tmp_path / "m")["num_documents"] == 1


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_half_a_token_file_is_named(tmp_path, missing):
    prefix = token_file(tmp_path / "half")
    Path(f"{prefix}{missing}").unlink()
    there = {".bin": ".idx", ".idx": ".bin"}[missing]
    for written in (prefix, f"{prefix}{there}"):
        with pytest.raises(UserError, match=rf"half{there} exists without .*half{missing}"):
            token_prefix(written)
    with pytest.raises(UserError, match="without"):
        merge_datasets([prefix], tmp_path / "m")
    (tmp_path / "half").mkdir()  # a folder of this name is text, whatever lies beside it
    assert token_prefix(prefix) is None and token_prefix(tmp_path / "none") is None


def test_a_merge_removes_what_a_killed_one_left(tmp_path):
    write_tokens(tmp_path / "a", [[[1, 2]]])
    left = IndexedDatasetWriter(tmp_path / "m", np.uint16)
    merge_datasets([str(tmp_path / "a")], tmp_path / "m")
    assert not list(tmp_path.glob("*.tmp*")) and len(IndexedDataset(tmp_path / "m")) == 1
    left.abort()
