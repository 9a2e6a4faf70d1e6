"""--streaming: each document once an epoch, one order for any number of workers and speed, resume at any sample."""

import json
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from lm_experiments_tools import files
from lm_experiments_tools.backends.backend import LocalBackend
from lm_experiments_tools.checkpoint.train_state import TrainState
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.data.objectives.token_rows import TokensInMemory
from lm_experiments_tools.data.streaming import stream as streaming
from lm_experiments_tools.data.streaming import text as stream_text
from lm_experiments_tools.data.streaming.stream import streams_of
from lm_experiments_tools.data.text import records
from lm_experiments_tools.data.text.records import read_shard
from lm_experiments_tools.data.text.sentencepiece_tokenizer import SentencePieceTokenizer
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.recipes.t5_data import build_objective, streaming_data
from lm_experiments_tools.training.batches import BatchStream
from tests.helpers.token_toys import make_texts, write_jsonl, write_tokens

TEXTS = make_texts(4000)
FIRST_CHUNK = 5000


class InProcess:
    """Stands for a worker process: the same work in the thread that asks, after `before(request)`."""

    before = staticmethod(lambda request: None)

    def __init__(self, prepare, settings):
        self.answer = prepare(settings)

    def kill(self):
        pass

    close = kill

    def ask(self, request):
        self.before(request)
        return self.answer(request)


class OneOfMany(LocalBackend):
    """A worker of several that meets the others nowhere: each takes itself for the first."""

    is_main = True

    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size


@pytest.fixture
def in_process(monkeypatch):
    """Workers in threads, and small chunks."""
    monkeypatch.setattr(stream_text, "FIRST_CHUNK", FIRST_CHUNK)
    monkeypatch.setattr(stream_text, "LARGEST_CHUNK", 4 * FIRST_CHUNK)
    monkeypatch.setattr(stream_text, "_BATCH_BYTES", 1 << 12)
    monkeypatch.setattr(streaming, "Worker", InProcess)
    return monkeypatch


@pytest.fixture
def start(data, tmp_path, monkeypatch):
    """start(rank, world_size, cache=..., **changes of arguments) -> loader; all are closed at the end."""
    loaders = []

    def start(rank=0, world_size=1, cache="cache", **changes):
        (tmp_path / cache).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / cache)
        settings = {
            "data_path": (str(data / "text"),), "vocab": str(data / "v.model"), "streaming": True, "streams": 4,
            "input_seq_len": 128, "target_seq_len": 128, "batch_size": 8 // world_size, "lr": 1e-3, "iters": 1,
            "model_cfg": "t5-micro", "data_n_workers": 2,
        }  # fmt: skip
        args = T5PretrainingArgs(**(settings | changes))
        backend = OneOfMany(rank, world_size)
        vocabulary = Tokenizer.load(args.vocab)
        objective = build_objective(args, vocabulary, "encoder-decoder")
        loader, _ = streaming_data(args, backend, vocabulary, objective)
        loaders.append(loader)
        return loader

    yield start
    for loader in loaders:
        loader.close()


def take(loader, count):
    """`count` batches as one, rows in order."""
    batches = [next(loader) for _ in range(count)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def interleaved(parts):
    """Global rows of the rows that each worker has."""
    return {name: torch.stack([part[name] for part in parts], 1).flatten(0, 1) for name in parts[0]}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# ---- batches ----


def test_streams_of_workers():
    assert [list(streams_of(rank, 2, 4)) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [list(streams_of(rank, 3, 4)) for rank in range(3)] == [[0, 1, 2, 3]] * 3
    assert [list(streams_of(rank, 8, 4)) for rank in range(8)] == [[rank % 4] for rank in range(8)]
    for world_size in range(1, 12):
        for num_streams in range(1, 12):
            for rank in range(world_size):
                rows = {g % num_streams for g in range(rank, rank + 200 * world_size, world_size)}
                assert rows == set(streams_of(rank, world_size, num_streams))


def test_two_or_three_workers_have_the_rows_of_one(start, in_process):
    expected = take(start(cache="one"), 30)
    assert len(torch.unique(expected["input_ids"], dim=0)) > 230  # words come together by chance, rows do not
    for world_size in (2, 4):
        loaders = [start(rank, world_size, cache=f"{rank} of {world_size}") for rank in range(world_size)]
        assert_equal(interleaved([take(loader, 30) for loader in loaders]), expected)
        read = [
            {path.name for path in Path(f"../{r} of {world_size}").rglob("stream-*.jsonl")} for r in range(world_size)
        ]
        assert sum(map(len, read)) == 4 == len(set().union(*read))  # nothing is read twice
    loaders = [start(rank, 3, cache="shared", batch_size=4) for rank in range(3)]  # all read all, in one cache
    parts = interleaved([take(loader, 20) for loader in loaders])
    assert_equal(parts, {name: rows[:240] for name, rows in expected.items()})


def test_a_stream_encodes_as_suits_the_vocabulary(start, in_process, monkeypatch):
    by_line = start(cache="line")
    monkeypatch.setattr(SentencePieceTokenizer, "encode_by", "document")
    whole = start(cache="document")
    ways = [loader.dataset.settings.encoder.vocabulary.encode_by for loader in (by_line, whole)]
    assert ways == ["line", "document"] and by_line.dataset.fingerprint != whole.dataset.fingerprint


def test_speed_of_the_source_and_number_of_processes_change_nothing(start, in_process):
    expected = take(start(cache="fast", data_n_workers=1), 60)
    in_process.setattr(InProcess, "before", staticmethod(lambda _: time.sleep(random.random() * 0.1)))
    for number in range(2):
        assert_equal(take(start(cache=f"slow {number}", data_n_workers=4), 60), expected)


def test_tokens_of_a_chunk_are_in_its_examples_each_once(start, in_process, data):
    chunks = []

    in_process.setattr(streaming, "TokensInMemory", lambda tokens: chunks.append(tokens) or TokensInMemory(tokens))
    loader = start(streams=1, data_n_workers=1)
    index = next(Path(".cache/streams").iterdir()) / "stream-00000.jsonl"
    batch = take(loader, 10)
    assert [len(chunk) // FIRST_CHUNK for chunk in chunks[:2]] == [1, 2]
    rows = json.loads(index.read_text().splitlines()[1])["num_samples"]
    vocabulary = Tokenizer.load(data / "v.model")
    special = [vocabulary.pad_id, vocabulary.eos_id, -100, *vocabulary.sentinel_ids.tolist()]
    kept = [part[:rows].numpy().ravel() for part in (batch["input_ids"], batch["labels"])]
    kept = np.concatenate([part[~np.isin(part, special)] for part in kept])
    assert sorted(kept.tolist()) == sorted(chunks[0].tolist())


def test_other_workers_go_on_at_any_sample(start, in_process):
    expected = take(start(cache="one"), 20)
    loaders = [start(rank, 2, cache=f"{rank} of 2") for rank in range(2)]
    for loader in loaders:
        loader.seek(27)  # three steps of 3 workers x 3 rows: rank 0's next sample is of stream 3
    parts = interleaved([take(loader, 10) for loader in loaders])
    assert_equal(parts, {name: rows[27:107] for name, rows in expected.items()})


@pytest.mark.parametrize("left", ["all", "part of the index", "nothing"])
def test_resumed_is_uninterrupted(start, in_process, left):
    made = []
    in_process.setattr(InProcess, "before", staticmethod(lambda request: made.append(request)))
    whole = start(streams=2)
    take(whole, 50)
    expected = take(whole, 20)
    whole.close()
    folder = next(Path(".cache/streams").iterdir())
    assert Counter(request.stream for request in made).keys() == {0, 1} and len(made) >= 8
    made.clear()
    if left == "nothing":
        shutil.rmtree(folder)
    if left == "part of the index":  # killed in the middle of a line
        index = folder / "stream-00001.jsonl"
        index.write_text(index.read_text()[:150])
    again = start(streams=2)
    again.seek(50 * 8)
    first = next(again)
    assert all(len(stream.chunks) <= 3 for stream in again.dataset.streams.values())  # none that it passed
    assert_equal({name: torch.cat([first[name], rest]) for name, rest in take(again, 19).items()}, expected)
    assert again.consumed_samples == 70 * 8
    if left == "all":  # the chunks in use were made again and those after them, not those before
        for index in folder.glob("*.jsonl"):
            entries = map(json.loads, index.read_text().splitlines()[1:])
            num_samples = {record["chunk"]: record["num_samples"] for record in entries}
            ends = np.cumsum([num_samples[chunk] for chunk in sorted(num_samples)])
            in_use = np.searchsorted(ends, 50 * 8 // 2, side="right")
            assert min(r.number for r in made if r.stream == int(index.stem[-5:])) == in_use > 0
    # a seek while batches are being made, and back
    again.seek(0)
    next(again)
    again.seek(50 * 8)
    assert_equal(take(again, 20), expected)
    again.close()
    index = (folder / "stream-00001.jsonl").read_bytes()
    once_more = start(streams=2)
    once_more.seek(50 * 8)
    assert_equal(take(once_more, 20), expected)
    assert (folder / "stream-00001.jsonl").read_bytes().startswith(index)


def test_an_index_with_a_gap_is_good_up_to_the_gap(start, in_process):
    whole = start(streams=1, data_n_workers=1)
    expected = take(whole, 60)
    whole.close()
    index = next(Path(".cache/streams").iterdir()) / "stream-00000.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    assert len(lines) > 4
    index.write_text("".join([*lines[:2], lines[2][:40] + lines[2], *lines[3:]]))  # a full disk, then a restart
    assert_equal(take(start(streams=1, data_n_workers=1), 60), expected)


def test_old_chunks_are_dropped_and_made_again(start, in_process):
    loader = start(streams=1, data_n_workers=1)
    expected = take(loader, 10)
    take(loader, 100)
    numbers = sorted(loader.dataset.streams[0].chunks)
    assert numbers[0] >= 2 and len(numbers) <= 4
    loader.seek(0)
    assert_equal(take(loader, 10), expected)


def test_the_first_batch_waits_for_the_first_chunks_alone(start, in_process, tmp_path, monkeypatch):
    """However much text there is, no more of it is read than they hold."""
    read, may_go_on = Counter(), threading.Event()

    def counting(shard, text_key, skip):
        for item in read_shard(shard, text_key, skip=skip):
            read[name] += 1
            yield item

    monkeypatch.setattr(stream_text, "read_shard", counting)
    in_process.setattr(InProcess, "before", staticmethod(lambda request: request.number and may_go_on.wait()))
    for name, copies in (("small", 1), ("large", 8)):
        (tmp_path / name).mkdir()
        for number in range(copies):
            write_jsonl(tmp_path / name / f"{number}.jsonl", TEXTS)
        loader = start(cache=f"cache of {name}", data_path=(str(tmp_path / name),), data_n_workers=4)
        next(loader)
    may_go_on.set()
    assert abs(read["large"] - read["small"]) < 0.1 * read["small"] and read["large"] < 0.2 * 8 * 4000


# ---- what can go wrong ----


def test_a_real_worker_process_and_its_death(start, monkeypatch):
    expected_error = r"the streamed text stopped: the process that tokenizes ended with exit code -9 \(-9: killed"
    loader = start()
    take(loader, 3)
    processes = [worker.process for worker in loader.dataset.workers]
    assert len(processes) == 2
    modules = Path(f"/proc/{processes[0].pid}/maps").read_text() if Path("/proc").is_dir() else ""
    assert "libtorch" not in modules and "tensorflow" not in modules
    processes[0].kill()
    with pytest.raises(RunError, match=expected_error):
        take(loader, 10_000)
    loader.close()
    assert [process.poll() is not None for process in processes] == [True, True]


def test_bad_lines_are_listed_and_counted_once_however_often_the_text_is_read(start, in_process, tmp_path, caplog):
    lines = [json.dumps({"text": text}) for text in make_texts(600)]
    lines[5] = lines[400] = '{"text": 5}'
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"data_path": (str(tmp_path / "bad.jsonl"),), "streams": 1, "data_n_workers": 1}
    loader = start(max_bad_lines=2, **settings)
    take(loader, 100)
    assert sum("bad lines are left out" in record.getMessage() for record in caplog.records) == 1
    end = loader.dataset.streams[0].records[-1]["end"]
    assert end["epoch"] >= 2 and end["rejected"] == 2
    loader.close()
    listed = next(Path(".cache/streams").iterdir()) / "bad_lines.jsonl"
    listed = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [line["content"] for line in listed] == ['{"text": 5}'] * 2
    assert {(line["file"], line["line"]) for line in listed} == {(settings["data_path"][0], n) for n in (6, 401)}
    in_process.setattr(records, "_MAX_COUNTED_BYTES", 0)  # the file before a shard is too long to count its lines
    loader = start(max_bad_lines=2, cache="bytes", **settings)
    take(loader, 100)
    loader.close()
    listed = next(Path(".cache/streams").iterdir()) / "bad_lines.jsonl"
    listed = [json.loads(line) for line in listed.read_text().splitlines()]
    assert {line["line"] for line in listed if line["file"].endswith("bad.jsonl")} == {6}
    (from_byte,) = [line for line in listed if ", from byte " in line["file"]]
    start_byte = int(from_byte["file"].split(", from byte ")[1].split()[0])
    assert (tmp_path / "bad.jsonl").read_bytes()[start_byte:].splitlines()[from_byte["line"] - 1] == b'{"text": 5}'
    with pytest.raises(UserError, match=r"more than 1 bad lines.*--max_bad_lines"):
        take(start(max_bad_lines=1, cache="again", **settings), 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_path": ("nobody/nothing",)}, "dataset nobody/nothing cannot be loaded"),
        ({"data_path": ("BLANK",)}, r"no document in .*blank\.jsonl"),
        (
            {"data_path": ("NUMBERS",), "max_bad_lines": 100},
            r"more than 100 bad lines: 101 so far, the first is .*numbers.jsonl:\d+: .*not a string; they are",
        ),
        ({"data_path": ("HALF",)}, r"half\.idx exists without .*half\.bin"),
        ({"data_path": ("TOKENS",)}, "is tokenized already: leave out --streaming"),
        ({"noise_density": 0.9, "mean_noise_span_length": 1.0}, "noise_density|spans"),
    ],
)
def test_what_cannot_work_is_refused_before_training(start, in_process, tmp_path, changes, message):
    (tmp_path / "blank.jsonl").write_text("\n" * 10)
    (tmp_path / "numbers.jsonl").write_text('{"text": 5}\n' * 1000)
    write_tokens(tmp_path / "tokens", [[]])
    (tmp_path / "half.idx").write_bytes((tmp_path / "tokens.idx").read_bytes())
    names = ("tokens", "half", "blank.jsonl", "numbers.jsonl")
    names = {name.removesuffix(".jsonl").upper(): str(tmp_path / name) for name in names}
    if "data_path" in changes:
        changes = changes | {"data_path": tuple(names.get(path, path) for path in changes["data_path"])}
    with pytest.raises(UserError, match=message):
        start(**changes)


def test_a_full_disk_is_one_sentence(start, in_process):
    loader = start(data_n_workers=1)

    def write(path, line):
        raise OSError(28, "No space left on device", str(path))

    in_process.setattr(streaming, "_append_line", write)
    with pytest.raises(RunError, match=r"the streamed text stopped: .*\.jsonl: No space left on device: free some"):
        take(loader, 1000)


def test_text_that_changed_under_a_run_is_noticed(start, in_process, tmp_path):
    texts = make_texts(3000)
    in_process.setattr(files, "SAMPLED_BYTES", 100)  # the edit is not seen by the fingerprint
    settings = {"data_path": (write_jsonl(tmp_path / "d.jsonl", texts),), "streams": 1, "data_n_workers": 1}
    loader = start(**settings)
    take(loader, 30)
    loader.close()
    write_jsonl(
        tmp_path / "d.jsonl",
        [text.replace(" ", "", 1) + " " if 5 < i < 2990 else text for i, text in enumerate(texts)],
    )
    loader = start(**settings)
    loader.seek(30 * 8)
    with pytest.raises(UserError, match="the text has changed since"):
        take(loader, 1)


def test_a_copy_of_the_vocabulary_with_its_ids_goes_on_where_the_original_stopped(start, in_process, data, tmp_path):
    Tokenizer.load(data / "v.model").save(tmp_path / "copy")
    first = start()
    copied = start(vocab=str(tmp_path / "copy"), cache="copy")
    assert copied.fingerprint == first.fingerprint
    assert_equal(take(copied, 5), take(first, 5))
    (source := BatchStream(first)).seek(TrainState(consumed_samples=8, data_fingerprint=copied.fingerprint), None)
    with pytest.raises(UserError, match="are not those of the checkpoint"):
        source.seek(TrainState(consumed_samples=8, data_fingerprint="0" * 64), None)


def test_the_fingerprint_names_text_objective_and_seed_but_not_where_it_lies(start, in_process, data, tmp_path):
    shutil.copytree(data / "text", tmp_path / "copy" / "text")
    first = start().fingerprint
    assert start(data_path=(str(tmp_path / "copy" / "text"),), cache="copy").fingerprint == first
    changes = [
        {"seed": 2}, {"streams": 2}, {"input_seq_len": 64}, {"noise_density": 0.2}, {"task": "prefix_lm"},
        {"data_path": (str(data / "text" / "a.jsonl"),)}, {"task": "prefix_lm", "append_eos": False},
    ]  # fmt: skip
    prints = [start(**change).fingerprint for change in changes]
    assert len({first, *prints}) == len(changes) + 1
