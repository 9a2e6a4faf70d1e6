"""The training side of seqio: rows, positions, failures and ends, with a worker process that needs no TensorFlow.

The process is the real one, except that examples are made by a few lines of numpy (fake_worker.py): example g is
[g, g + 1] -> [g]. What TensorFlow makes of real tasks is tested in tests/parity and
tests/distributed.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import psutil
import pytest

from lm_experiments_tools.backends import get_backend
from lm_experiments_tools.config.pretraining import T5PretrainingArgs
from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.seqio import client as module
from lm_experiments_tools.data.seqio.client import SeqioExamples, SeqioWorker, to_batch
from lm_experiments_tools.data.seqio.job import Job
from lm_experiments_tools.data.text.tokenizer import Tokenizer
from lm_experiments_tools.errors import RunError, UserError
from lm_experiments_tools.recipes.t5_data import seqio_data
from tests.distributed.launch import environment
from tests.helpers.vocabulary_toys import numbered_words_vocabulary
from tests.unit.data.seqio import fake_worker

LENGTHS = (4, 2)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a fake worker; all are ended after the test."""
    monkeypatch.setattr(module, "prepare", fake_worker.prepare)
    started = []

    def start(**changed):
        job = Job(
            task="tasks:numbers", vocab_path="", inputs_length=LENGTHS[0], targets_length=LENGTHS[1], seed=1,
            validation=False, valid_samples=None, threads=1,
        )  # fmt: skip
        started.append(SeqioWorker(replace(job, **changed), tmp_path / "worker.log"))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def loader(worker, rank=0, world_size=1, rows=3):
    return TrainLoader(SeqioExamples(worker, rank, world_size, 0), rows, rank, world_size)


def numbers(source, count):
    """Example numbers of `count` batches, int64[count, rows]."""
    return np.stack([batch["labels"][:, 0].numpy() for batch in islice(source, count)])


def test_a_row_of_the_worker_becomes_a_row_of_the_model():
    rows = np.array([[7, 0, 1, -100, 9, -100], [-100, -100, -100, -100, 0, 1]], np.int32)
    batch = to_batch(rows, 4, pad_id=0)
    assert batch["input_ids"].tolist() == [[7, 0, 1, 0], [0, 0, 0, 0]]  # a real id 0 is no padding
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[9, -100], [0, 1]]
    assert {values.dtype for values in batch.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize("world_size", [1, 4])
def test_global_batches_are_the_same_for_any_number_of_workers(start, world_size):
    sources = [loader(start(), rank, world_size, rows=12 // world_size) for rank in range(world_size)]
    stream = np.stack([numbers(source, 20) for source in sources], axis=2)
    np.testing.assert_array_equal(stream.reshape(-1), np.arange(240))
    assert {source.consumed_samples for source in sources} == {240}


def test_seek_is_as_if_all_before_had_been_yielded(start):
    source = loader(start(), rank=1, world_size=2)
    for position in (0, 100, 7, 7):
        source.seek(position)
        np.testing.assert_array_equal(numbers(source, 5).reshape(-1), position + 1 + 2 * np.arange(15))
        assert source.consumed_samples == position + 30


def test_signals_to_the_whole_job_leave_the_worker_to_its_parent(start):
    worker = start()
    source = loader(worker)
    next(source)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.worker.process.pid, number)
    assert len(list(islice(source, 300))) == 300


def test_a_killed_worker_is_a_sentence(start):
    worker = start()
    source = loader(worker)
    next(source)
    os.kill(worker.worker.process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"exit code -9 .*worker\.log"):
        list(islice(source, 10_000))


@pytest.mark.parametrize(
    ("task", "error", "sentence"),
    [
        ("tasks:refused", UserError, "^no such task$"),
        ("tasks:crashes", RunError, "exit code 1 .*worker.log says why"),
    ],
)
def test_what_the_worker_cannot_do_is_a_sentence(start, tmp_path, task, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        start(task=task)
    assert "\n" not in str(caught.value)
    assert "what a library prints" in (tmp_path / "worker.log").read_text()


def test_an_error_within_the_stream_is_that_of_all_later_batches(start):
    source = loader(start(task="tasks:ends"), rows=10)
    for position in (900, 0):
        source.seek(position)
        with pytest.raises(UserError, match="more than 3 bad lines"):
            list(islice(source, 200))


def test_the_worker_dies_with_its_parent(start, tmp_path):
    """Even where a forked child of the parent lives on, which holds the pipe open."""
    script = f"""
import os, time
from lm_experiments_tools.data.seqio import client as module
from lm_experiments_tools.data.seqio.job import Job
from tests.unit.data.seqio.fake_worker import prepare
module.prepare = prepare
fields = dict.fromkeys(Job.__dataclass_fields__, 1)
fields |= dict(task="tasks:numbers", validation=False)
worker = module.SeqioWorker(Job(**fields), module.Path({str(tmp_path / "own.log")!r}))
if os.fork() == 0:
    time.sleep(5)
    os._exit(0)
print(worker.worker.process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment())
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(4)
    assert not psutil.pid_exists(pid)
    parent.wait()
    parent.stdout.close()


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return numbered_words_vocabulary(tmp_path_factory.mktemp("vocab"))


def arguments(vocabulary, **changed):
    settings = {
        "task": "tasks:numbers", "vocab": str(vocabulary), "model_cfg": "tiny.json", "lr": 1.0, "input_seq_len": 4,
        "target_seq_len": 2, "batch_size": 3, "backend": "local", "iters": 5, **changed,
    }  # fmt: skip
    return T5PretrainingArgs(**settings)


def sources_of(args, vocab):
    return seqio_data(args, get_backend(args), Tokenizer.load(vocab))


def test_a_run_gets_its_loaders(start, vocab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, valid, objective = sources_of(arguments(vocab, valid_interval=2, seed=9), vocab)
    assert objective == "numbers, 4 inputs + 2 targets" and train.fingerprint == "seed 9"
    assert train.samples_per_epoch is None and next(train)["labels"][:, 0].tolist() == [0, 1, 2]
    for _ in range(2):  # the same at every pass
        assert [batch["labels"][:, 0].tolist() for batch in valid] == [[0, 1, 2], [3, 4, 5], [6]]
    train.close()
    assert not psutil.pid_exists(train.dataset.worker.worker.process.pid)


def test_validation_is_made_only_where_it_is_asked_for(start, vocab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, expected in (({}, None), ({"valid_samples": 5}, 5)):
        train, valid, _ = sources_of(arguments(vocab, **flags), vocab)
        train.close()
        assert (valid and valid.num_samples) == expected


@pytest.mark.parametrize("package", ["tensorflow", "seqio"])
def test_a_missing_package_is_a_sentence(monkeypatch, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(UserError, match=rf"package {package}: pip install .*\[seqio\]"):
        module.check_installed("tasks:mine")


@pytest.mark.parametrize("error", ["OSError('libcuda.so.1 is missing')", "ImportError('built for another python')"])
def test_a_broken_triton_does_not_end_the_worker(start, tmp_path, monkeypatch, error):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    assert start().title == "numbers"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data_path": ("text.txt",)}, "--data_path is not for --task tasks:numbers"),
        ({"streaming": True}, "--streaming is not for"),
        ({"vocab": None}, "needs --vocab"),
    ],
)
def test_flags_in_conflict(vocab, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        arguments(vocab, **settings)


def test_a_registered_task_may_be_validated_on_its_own_split(vocab):
    assert arguments(vocab, valid_interval=2).needs_validation()
    with pytest.raises(UserError, match="--valid_interval needs validation data"):
        arguments(vocab, task="span_corruption", data_path=("a",), valid_interval=2)
