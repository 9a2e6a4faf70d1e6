"""Data larger than memory: read at random without what lies around, and asked for before it is needed."""

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.loader import TrainLoader
from lm_experiments_tools.data.mixture import Mixture
from lm_experiments_tools.data.objectives.objective import TokenIds
from lm_experiments_tools.data.objectives.span_corruption import SpanCorruption
from lm_experiments_tools.data.objectives.token_rows import TokenRows
from lm_experiments_tools.data.tokens import cold
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.bert_dataset import BertDataset
from megatron.tokenizers import build_tokenizer
from tests.helpers.bert_toys import make_bert_data

needs_advice = pytest.mark.skipif(
    not hasattr(mmap, "MADV_RANDOM") or not Path("/proc/self/smaps").is_file(),
    reason="this system has no advice on memory maps, or does not tell which it was given",
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """A token file of 4 MB, which is on the disk."""
    prefix = tmp_path_factory.mktemp("cold") / "tokens"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(4):
            writer.add_sequence(np.random.default_rng(0).integers(0, 90, 1 << 19))
            writer.end_document()
    return prefix


def span_corruption(tokens, seed=0):
    objective = SpanCorruption.create(TokenIds(200, sentinel_ids=np.arange(199, 99, -1)), 128)
    return TokenRows(tokens, objective, seed)


def advised(path):
    """Of each map of a file in this process: whether the system reads without its surroundings ("rr")."""
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return ["rr" in re.search("VmFlags:(.*)", text)[1].split() for text in maps if str(path) in text.split("\n")[0]]


@needs_advice
@pytest.mark.parametrize("part", [0.5, 2.0])
def test_files_are_advised_where_together_they_are_larger_than_memory(prefix, monkeypatch, part):
    tokens = [IndexedDataset(prefix), IndexedDataset(prefix)]
    size = os.path.getsize(f"{prefix}.bin")
    monkeypatch.setattr(cold, "available_memory", lambda: int(size / part))
    assert cold.read_at_random(tokens) is (part > 1)
    for ending in (".bin", ".idx"):
        assert advised(f"{prefix}{ending}") == [part > 1] * 2


def test_memory_is_what_the_group_of_the_process_may_have(tmp_path, monkeypatch):
    whole = cold.available_memory()
    assert 0 < whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(cold, "_CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert cold.available_memory() > 1 << 20
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("123456\n")
        assert cold.available_memory() == 123456
        (tmp_path / name).unlink()


def resident(array):
    """bool for each page of an array's map: whether it is in memory; reading it here would bring it there."""
    libc = pytest.importorskip("ctypes").CDLL(None, use_errno=True)
    address, length = array.__array_interface__["data"][0], array.nbytes
    found = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    pointer = pytest.importorskip("ctypes").c_void_p
    if libc.mincore(pointer(address), pointer(length), pointer(found.ctypes.data)):
        pytest.skip("this system does not tell which pages are in memory")
    return found & 1 == 1


def dropped(prefix):
    """The token file, with nothing of its tokens in memory."""
    with open(f"{prefix}.bin", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tokens = IndexedDataset(prefix)
    cold.advise_random(tokens.tokens)
    if resident(tokens.tokens).any():
        pytest.skip("this file system keeps files in memory")
    return tokens


@needs_advice
def test_a_cold_example_costs_its_own_pages(prefix):
    tokens = dropped(prefix)
    for start in (50_000, 700_000, 2_000_000):
        assert len(np.array(tokens.tokens[start : start + 146])) == 146
    assert resident(tokens.tokens).sum() <= 6


@needs_advice
def test_what_is_needed_is_read_before_it_is_asked_for_and_nothing_else(prefix):
    tokens = dropped(prefix)
    begins = np.array([0, 50_000, 50_000, 1_000_000])
    tokens.will_need(begins, begins + 146)
    pages = {start * 2 // mmap.PAGESIZE for start in begins.tolist()}
    for _ in range(100):
        found = resident(tokens.tokens)
        if found[list(pages)].all():
            break
        os.sched_yield()
    assert found[list(pages)].all() and found.sum() <= 2 * len(pages)


class Asked(IndexedDataset):
    """Remembers which tokens were announced."""

    def __init__(self, prefix):
        super().__init__(prefix)
        self.announced = np.zeros(self.num_tokens, bool)

    def will_need(self, begins, ends):
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            self.announced[begin:end] = True


@pytest.mark.parametrize("kind", ["one", "mixture"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_announces_the_rows_it_will_read_and_no_others(prefix, kind, world_size):
    tokens = Asked(prefix)
    members = [span_corruption(tokens, seed) for seed in range(2)]
    mixture = Mixture([len(member) for member in members]) if kind == "mixture" else None
    dataset = Dataset(members, mixture)
    read = []
    for member in members:
        read_rows = member.read

        def reading(starts, length, read_rows=read_rows):
            read.append((starts, length))
            return read_rows(starts, length)

        member.read = reading
    loader = TrainLoader(dataset, 8, 0, world_size, prefetch=False, ahead=True)
    for steps in (1, 70, 3):
        for _ in range(steps):
            next(loader)
            for starts, length in read:
                assert all(tokens.announced[start : start + length].all() for start in starts.tolist())
            read.clear()
        loader.seek(loader.consumed_samples + 4000)  # as a run that goes on
    # 71 steps of 8 rows, the rest of their last call, and as many rows beyond: no more than was announced once
    assert tokens.announced.sum() < 146 * (71 * 8 + 2 * 256 + 8 + 3 * (8 + 256))
    plain = TrainLoader(dataset, 8, 0, world_size, prefetch=False)
    before = tokens.announced.sum()
    next(plain)
    assert tokens.announced.sum() == before


@pytest.mark.parametrize("nsp", ["swap", "random"])
def test_samples_of_bert_are_announced_too(tmp_path, nsp):
    data = make_bert_data(tmp_path)
    tokens = Asked(data / "train")
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=str(data / "vocab.txt"))
    rows = BertDataset(tokens, tokenizer, max_seq_length=64, nsp=nsp, cache_dir=tmp_path)
    dataset = Dataset(rows)
    samples = np.arange(0, 3 * len(dataset), 7)
    dataset.will_need(samples)
    assert 0 < tokens.announced.sum() <= 64 * len(samples)
    read = []
    segments = rows._segments
    rows._segments = lambda *where: read.append(segments(*where)) or read[-1]
    dataset.batch(samples)
    for a_start, a_length, b_start, b_length, _ in (row for part in read for row in zip(*part, strict=True)):
        assert tokens.announced[a_start : a_start + a_length].all()
        assert tokens.announced[b_start : b_start + b_length].all()
    assert {Path(array.filename).suffix for array in rows.maps()} == {".bin", ".idx", ".npy"}
