"""Tokenization: ids against sentencepiece itself; the same bytes for any number of workers and any interruption."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sentencepiece

from lm_experiments_tools.data.text.sentencepiece_tokenizer import SentencePieceTokenizer
from lm_experiments_tools.data.text.sources import plan_shards
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.data.tokens import tokenize
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, dataset_exists
from lm_experiments_tools.data.tokens.tokenize import tokenize_corpus
from lm_experiments_tools.data.workers import Worker
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.tools.main import main
from lm_experiments_tools.tools.train_vocabulary import train_vocab
from tests.helpers import ROOT
from tests.helpers.token_toys import files, make_texts, write_jsonl


def sequences(prefix):
    dataset = IndexedDataset(prefix)
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_ids_are_those_of_sentencepiece(tmp_path, vocab, monkeypatch):
    texts = make_texts(300)
    data = write_jsonl(tmp_path / "d.jsonl", texts)
    processor = sentencepiece.SentencePieceProcessor(model_file=vocab)
    by_line = [[i for line in text.split("\n") for i in processor.encode(line)] for text in texts]
    whole = [processor.encode(text) for text in texts]
    for encode_by, expected in (("line", by_line), ("document", whole)):
        monkeypatch.setattr(SentencePieceTokenizer, "encode_by", encode_by)
        for append_eos in (False, True):
            meta = tokenize_corpus([data], vocab, tmp_path / "t", workers=1, append_eos=append_eos)
            assert sequences(tmp_path / "t") == [ids + [1] * append_eos for ids in expected]
            assert meta["num_tokens"] == sum(map(len, expected)) + append_eos * len(texts)
            assert meta == IndexedDataset(tmp_path / "t").meta
    assert meta["num_documents"] == 300 and meta["num_bytes"] == sum(len(text.encode()) for text in texts)
    assert (meta["dtype"], meta["vocab_size"], meta["bad_lines"]) == ("uint16", 190, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl", "t.bin", "t.idx", "t.json"]


def test_same_bytes_for_any_number_of_workers_and_cutting(tmp_path, vocab, monkeypatch):
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", make_texts(300, 1))
    (folder / "b.txt").write_text("\n\n".join(make_texts(300, 2)))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a model of memory"}\n' * 50))
    results = []
    for workers, shard_bytes in ((1, 1 << 30), (1, 3000), (3, 7777)):
        monkeypatch.setattr(
            tokenize, "plan_shards", lambda inputs, size=shard_bytes, **options: plan_shards(inputs, size, **options)
        )
        tokenize_corpus([str(folder)], vocab, tmp_path / "t", workers=workers)
        results.append(files(tmp_path / "t"))
    assert results[1:] == results[:1] * 2
    assert len(results[0][0]) > 7000


def test_shards_of_another_text_are_removed_and_other_folders_left_alone(tmp_path, vocab):
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(3))
    for name in ("t.shards", "t.shards-0123456789abcdef"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    tokenize_corpus([data], vocab, tmp_path / "t", workers=1)
    assert len(sequences(tmp_path / "t")) == 3
    assert [path.name for path in tmp_path.glob("t.shards*")] == ["t.shards"]


SCRIPT = """
import sys
from lm_experiments_tools.data.tokens import tokenize
from lm_experiments_tools.data.text.sources import plan_shards
tokenize.plan_shards = lambda inputs, **options: plan_shards(inputs, 20_000, **options)
data, vocab, prefix = sys.argv[1:]
tokenize.tokenize_corpus([data], vocab, prefix, workers=2)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def start(tmp_path, data, vocab, prefix):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, data, vocab, str(prefix)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def group_members(group):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == group and (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left-over processes in /proc")
def test_sigkill_leaves_no_worker_behind_and_the_next_run_gives_the_same_bytes(tmp_path, vocab):
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(6000))
    tokenize_corpus([data], vocab, tmp_path / "whole", workers=1)
    process = start(tmp_path, data, vocab, tmp_path / "t")
    while not list(tmp_path.glob("t.shards-*/*.idx")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while group_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(process.pid) == []
    finished = len(list(tmp_path.glob("t.shards-*/*.idx")))
    assert 0 < finished < len(plan_shards([data], 20_000))
    process = start(tmp_path, data, vocab, tmp_path / "t")
    assert process.wait() == 0, process.stderr.read()
    assert files(tmp_path / "t") == files(tmp_path / "whole")


def test_a_dead_worker_is_one_sentence(tmp_path, vocab, small_shards, monkeypatch):
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(400))
    start = Worker.__init__

    def start_and_kill(worker, *args):
        start(worker, *args)
        worker.kill()
        worker.process.wait()

    monkeypatch.setattr(Worker, "__init__", start_and_kill)
    with pytest.raises(UserError, match=r"exit code -9 .*fewer workers"):
        tokenize_corpus([data], vocab, tmp_path / "t", workers=2)


def test_bad_lines_of_all_pieces_are_listed_with_their_line_in_the_file(tmp_path, vocab, small_shards):
    lines = [json.dumps({"text": text}) for text in make_texts(500)]
    bad = [0, 240, 241, 499]
    for number in bad:
        lines[number] = '{"text": 5}'
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join(lines) + "\n")
    meta = tokenize_corpus([str(data)], vocab, tmp_path / "t", workers=2, max_bad_lines=4)
    assert meta["bad_lines"] == 4 and meta["num_documents"] == 496
    listed = [json.loads(line) for line in (tmp_path / "t.bad_lines.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in listed] == [(str(data), number + 1) for number in bad]
    with pytest.raises(UserError, match=r"more than 3 bad lines: 4 .*d\.jsonl:1: 'text' is of type int"):
        tokenize_corpus([str(data)], vocab, tmp_path / "u", workers=1, max_bad_lines=3)
    assert not dataset_exists(tmp_path / "u") and (tmp_path / "u.bad_lines.jsonl").is_file()
    tokenize_corpus([str(data)], vocab, tmp_path / "u", workers=1)
    assert files(tmp_path / "u") == files(tmp_path / "t")


def test_tokens_of_other_text_or_another_vocabulary_are_not_written_over(tmp_path, vocab, capsys):
    one, two = (write_jsonl(tmp_path / f"{name}.jsonl", make_texts(90, name)) for name in (1, 2))
    train_vocab([one], 150, tmp_path / "other.model")
    prefix = tmp_path / "t"
    tokenize_corpus([one], vocab, prefix, workers=1)
    before = files(prefix)
    command = ["tokenize", "--output", str(prefix), "--workers", "1", "--input"]
    for arguments in ([two, "--vocab", vocab], [one, "--vocab", str(tmp_path / "other.model")]):
        assert main([*command, *arguments]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {prefix}.bin and .idx exist, tokens of {one} with the vocabulary")
        assert error.endswith("or give --overwrite") and files(prefix) == before
    assert main([*command, one, "--vocab", vocab]) == 0 and files(prefix) == before
    assert main([*command, two, "--vocab", vocab, "--overwrite"]) == 0 and files(prefix) != before
    for record in (None, "{}"):  # nothing says whose tokens they are
        Path(f"{prefix}.json").unlink() if record is None else Path(f"{prefix}.json").write_text(record)
        with pytest.raises(UserError, match=r"tokens of unknown text with the vocabulary unknown.*--overwrite"):
            tokenize_corpus([two], vocab, prefix, workers=1)


@pytest.mark.parametrize("count", [9, 300])
def test_a_key_that_no_line_has_is_named_with_those_there_are_and_leaves_no_pieces(tmp_path, vocab, count, capsys):
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(count))
    command = ["tokenize", "--input", data, "--vocab", vocab, "--output", str(tmp_path / "t"), "--workers", "1"]
    assert main([*command, "--text_key", "absent"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    found = ": 9 bad lines left out (the first: " if count == 9 else ": 101 so far, the first is"
    assert found in error and "d.jsonl:1: no key 'absent' (there is 'text')" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl", "t.bad_lines.jsonl"]


def test_too_many_bad_lines_leave_the_finished_pieces_to_a_run_with_a_higher_limit(
    tmp_path, vocab, small_shards, monkeypatch
):
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(1500))
    with open(data, "a") as file:
        file.write("{}\n{}\n")
    tokenize_corpus([data], vocab, tmp_path / "whole", workers=1)
    with pytest.raises(UserError, match="more than 1 bad lines"):
        tokenize_corpus([data], vocab, tmp_path / "t", workers=1, max_bad_lines=1)
    done, real = [], tokenize.encode_shard
    monkeypatch.setattr(tokenize, "encode_shard", lambda shard, *rest: done.append(shard) or real(shard, *rest))
    tokenize_corpus([data], vocab, tmp_path / "t", workers=1)
    assert len(done) == 1 and files(tmp_path / "t") == files(tmp_path / "whole")
    assert not list(tmp_path.glob("t.shards*"))


def ensure_tokenized(path, vocab, cache, **options):
    return tokenize.ensure_tokenized(str(path), Tokenizer.load(vocab), cache, **options)


def test_ensure_tokenized_reuses_its_cache_until_text_or_options_change(tmp_path, vocab, monkeypatch):
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(20))
    cache = tmp_path / "cache"
    first = ensure_tokenized(data, vocab, cache, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "tokenize_corpus", lambda *_, **__: pytest.fail("tokenized twice"))
        assert ensure_tokenized(data, vocab, cache, workers=1) == first
    assert ensure_tokenized(data, vocab, cache, append_eos=True) != first
    write_jsonl(tmp_path / "d.jsonl", make_texts(21))
    changed = ensure_tokenized(data, vocab, cache)
    assert changed != first and len(IndexedDataset(changed)) == 21
    assert {path.suffix for path in cache.iterdir()} == {".bin", ".idx", ".json"}


def test_a_vocabulary_of_other_bytes_and_the_same_ids_is_accepted(tmp_path, vocab):
    """The spiece.model of a run lacks the sentinels, which a T5 tokenizer puts on top."""
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(90))
    meta = tokenize_corpus([data], vocab, tmp_path / "t", workers=1)
    Tokenizer.load(vocab).save(tmp_path / "saved")
    saved = Tokenizer.load(tmp_path / "saved")
    assert saved.path.read_bytes() != Path(vocab).read_bytes() and saved.fingerprint == meta["vocab_sha256"]
    tokens = IndexedDataset(tmp_path / "t")
    tokenize.check_vocabulary(tokens, saved)
    train_vocab([data], 150, tmp_path / "other.model")
    for record, words in (
        (meta, Tokenizer.load(tmp_path / "other.model")),
        (meta, Tokenizer.load(tmp_path / "saved", extra_ids=7)),
        (meta | {"vocab_sha256": "0" * 64}, saved),
    ):
        with pytest.raises(UserError, match="were made with the vocabulary"):
            tokens.meta = record
            tokenize.check_vocabulary(tokens, words)


def test_ranks_that_ask_at_once_share_one_tokenization(tmp_path, vocab, monkeypatch):
    data = write_jsonl(tmp_path / "d.jsonl", make_texts(200))
    calls = []
    real = tokenize_corpus

    def slow(*args, **options):
        calls.append(1)
        time.sleep(0.3)
        return real(*args, **options)

    monkeypatch.setattr(tokenize, "tokenize_corpus", slow)
    prefixes = []
    threads = [
        threading.Thread(target=lambda: prefixes.append(ensure_tokenized(data, vocab, tmp_path / "cache", workers=1)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(prefixes) == 4 and len(set(prefixes)) == 1
