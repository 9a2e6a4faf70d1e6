"""Tokenization of text as it is found: changed meanwhile, beside the output, full of empty texts or of newlines."""

import os
from pathlib import Path

import pytest

from lm_experiments_tools.data.text import hf_datasets
from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens import tokenize
from lm_experiments_tools.data.tokens import tokenize as module
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter, dataset_exists
from lm_experiments_tools.data.tokens.tokenize import report_unknown, tokenize_corpus
from lm_experiments_tools.data.workers import available_cores
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.main import main
from tests.helpers.token_toys import make_texts, write_jsonl
from tests.helpers.vocabulary_toys import numbered_words_vocabulary, train_vocabulary


def files(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def sequences(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("changed", [0, 1, -1])
def test_text_that_changes_while_it_is_tokenized_gives_no_tokens(tmp_path, vocab, small_shards, monkeypatch, changed):
    """One line in front moves all others over the bounds of the shards; after the last shard nothing would read it."""
    data = tmp_path / "d.jsonl"
    write_jsonl(data, make_texts(1500))
    number = range(len(plan_shards([str(data)], 20_000)))[changed]
    real = tokenize.encode_shard

    def tokenize_and_change(shard, prefix, *rest):
        count = real(shard, prefix, *rest)
        if prefix.endswith(f"{number:06d}"):
            data.write_text('{"text": "a new line"}\n' + data.read_text())
        return count

    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "encode_shard", tokenize_and_change)
        with pytest.raises(UserError, match=r"d\.jsonl was changed while it was being read"):
            tokenize_corpus([str(data)], vocab, tmp_path / "t", workers=1)
    assert not dataset_exists(tmp_path / "t")
    tokenize_corpus([str(data)], vocab, tmp_path / "t", workers=1)
    assert len(IndexedDataset(tmp_path / "t")) == 1501


def test_a_local_dataset_that_changes_while_it_is_tokenized_gives_no_tokens(tmp_path, vocab, monkeypatch):
    pytest.importorskip("datasets")
    write_table = pytest.importorskip("pyarrow.parquet").write_table
    table = pytest.importorskip("pyarrow").table
    folder, real = tmp_path / "parquet", tokenize.encode_shard
    folder.mkdir()
    write_table(table({"text": ["the a of model"]}), folder / "train-00000-of-00001.parquet")

    def tokenize_and_change(shard, *rest):
        count = real(shard, *rest)
        write_table(table({"text": ["the a of token"] * 9}), folder / "train-00000-of-00001.parquet")
        return count

    monkeypatch.setattr(tokenize, "encode_shard", tokenize_and_change)
    with pytest.raises(UserError, match="files of the datasets were changed"):
        tokenize_corpus([str(folder)], vocab, tmp_path / "t", workers=1)
    assert not dataset_exists(tmp_path / "t")


def test_an_output_in_the_folder_of_its_text_is_no_input_and_a_stopped_run_goes_on(
    tmp_path, vocab, small_shards, monkeypatch
):
    folder, done, real = tmp_path / "in", [], tokenize.encode_shard
    folder.mkdir()
    write_jsonl(folder / "d.jsonl", make_texts(1500) + ["\0"])  # the last one a bad line
    tokenize_corpus([str(folder)], vocab, tmp_path / "whole", workers=1)

    def stop(shard, *rest):
        done.append(shard)
        if len(done) == 3:
            raise KeyboardInterrupt
        return real(shard, *rest)

    monkeypatch.setattr(tokenize, "encode_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        tokenize_corpus([str(folder)], vocab, folder / "t", workers=1)
    left = IndexedDatasetWriter(folder / "t", "uint16"), IndexedDatasetWriter(folder / "other", "uint16")  # of a kill
    (folder / "t.bin.tmpl").touch()  # not a name that a writer gives
    (damaged,) = folder.glob("t.shards-*/000001-0.bin")  # by a power cut, which left the size without the content
    damaged.write_bytes(bytes(damaged.stat().st_size))
    tokenize_corpus([str(folder)], vocab, folder / "t", workers=1)
    shards = len(plan_shards([str(folder)], 20_000))
    assert shards > 4 and len(done) == 3 + shards - 1, "the other finished shard was thrown away"
    assert files(folder / "t") == files(tmp_path / "whole")
    assert {path.name[:13] for path in folder.glob("*.tmp*")} == {"other.bin.tmp", "t.bin.tmpl"}
    assert not list(folder.glob("t.shards*"))
    tokenize_corpus([str(folder)], vocab, folder / "t", workers=1)  # the same again beside its own output
    assert files(folder / "t") == files(tmp_path / "whole")
    for writer in left:
        writer.abort()


def test_the_number_of_cores_is_known_where_the_system_has_no_affinity(tmp_path, vocab, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert available_cores() == os.cpu_count()
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(3))
    assert tokenize_corpus([data], vocab, tmp_path / "t")["num_documents"] == 3


NEWLINE_VOCABULARIES = {  # options of the trainer, and the way its documents are encoded
    "t5": ({}, "line"),
    "piece": ({"user_defined_symbols": ["\n"]}, "document"),
    "bytes": ({"byte_fallback": True, "normalization_rule_name": "identity"}, "document"),
    "neither": ({"normalization_rule_name": "identity"}, "line"),
}


@pytest.mark.parametrize("kind", NEWLINE_VOCABULARIES)
def test_newlines_are_kept_wherever_the_vocabulary_has_them(tmp_path, kind, caplog):
    options, way = NEWLINE_VOCABULARIES[kind]
    model = train_vocabulary(tmp_path / "v.model", "\n".join(make_texts(500)).split("\n"), 500, **options)
    vocabulary = Tokenizer.load(model)
    assert vocabulary.encode_by == way
    texts = ["model token\nlanguage file", "zero\n\nlines open"]
    data = write_jsonl(tmp_path / "d.jsonl", texts)
    made = tokenize_corpus([data], model, tmp_path / "t", workers=1)
    cached = module.ensure_tokenized(data, vocabulary, tmp_path / "cache", workers=1)
    assert made["encode_by"] == way and sequences(tmp_path / "t") == sequences(cached)
    kept = texts if way == "document" else [text.replace("\n\n", "\n").replace("\n", " ") for text in texts]
    assert [vocabulary.decode(ids) for ids in sequences(cached)] == kept
    assert not caplog.messages


def test_empty_texts_are_counted_and_no_limit_counts_them(tmp_path, vocab, capsys):
    """365 million web documents have more than 100 of them."""
    texts = [text for document in make_texts(200) for text in (document, "")]
    one, two = (write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("one", texts), ("two", texts[::2])))
    without = tokenize_corpus([two], vocab, tmp_path / "without", workers=1)
    assert without["empty_documents"] == 0
    made = tokenize_corpus([one], vocab, tmp_path / "t", workers=1, max_bad_lines=0)
    assert (made["num_documents"], made["empty_documents"], made["bad_lines"]) == (200, 200, 0)
    assert files(tmp_path / "t") == files(tmp_path / "without")
    assert not (tmp_path / "t.bad_lines.jsonl").exists()
    command = ["tokenize", "--input", one, two, "--vocab", vocab, "--output", str(tmp_path / "u"), "--workers", "1"]
    assert main(command) == 0 and "0 bad lines, 200 empty texts, in" in capsys.readouterr().out


def test_an_edit_in_the_middle_of_a_dataset_file_is_noticed(tmp_path):
    """Its size and its ends stay; the modification time is that of the edit."""
    file = tmp_path / "a.arrow"
    file.write_bytes(bytes(1 << 20))
    before = [hf_datasets._file_identity(str(file), with_times) for with_times in (True, False)]
    with file.open("r+b") as edited:
        edited.seek(1 << 19)
        edited.write(b"edited")
    os.utime(file, ns=(1, 1))
    after = [hf_datasets._file_identity(str(file), with_times) for with_times in (True, False)]
    assert before[0] != after[0] and before[1] == after[1]


def test_the_share_of_unknown_tokens_is_that_of_the_file_and_is_warned_of(tmp_path, capsys, caplog):
    import sentencepiece

    vocab = numbered_words_vocabulary(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(vocab))
    texts = ["word3 number21"] * 3000 + ["word3 \u4e2d \u5929"] * 300  # sorted: of the beginning alone it is 0
    data = write_jsonl(tmp_path / "t.jsonl", texts)
    command = ["tokenize", "--input", data, "--vocab", str(vocab), "--output", str(tmp_path / "t"), "--workers", "1"]
    assert main(command) == 0
    ids = [index for text in texts for index in processor.encode(text)]
    share = ids.count(processor.unk_id()) / len(ids)
    assert f"{share:.2%} of them unknown" in capsys.readouterr().out and 0.01 < share < 0.1
    assert f"{100 * share:.1f} % of the tokens of {tmp_path}/t are unknown tokens" in caplog.text
    tokens = IndexedDataset(tmp_path / "t")
    assert report_unknown(tokens, processor.unk_id()) == pytest.approx(share) and report_unknown(tokens, None) == 0
