"""Reading a large index: its arrays are not aligned in memory, and nothing may copy them whole."""

import tracemalloc
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from lm_experiments_tools.data.dataset import Dataset
from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter
from lm_experiments_tools.tools.inspect_tokens import document_lengths
from megatron.bert_dataset import BertDataset
from megatron.sample_mapping import MappingSettings, build_mapping, load_mapping, search_sorted

DOCUMENTS, VOCABULARY = 1 << 20, 20_000  # three sentences in two documents: 8 MB of bounds, 12 MB of pointers
SPARE = 4 << 20  # bytes: half of the smallest array of the index


@contextmanager
def most_memory(limit):
    """The code inside must not hold more than `limit` bytes at once; numpy reports its arrays to tracemalloc."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    sizes = np.tile([1, 2], DOCUMENTS // 2)
    lengths = np.random.default_rng(0).integers(0, 4, sizes.sum())
    prefix = tmp_path_factory.mktemp("large") / "tokens"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_documents(np.arange(lengths.sum()) % (VOCABULARY - 5) + 5, lengths, sizes)
    return IndexedDataset(prefix)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks as small beside this index as the usual ones are beside a large one."""
    monkeypatch.setattr("lm_experiments_tools.data.tokens.indexed._CHECK_BLOCK", 1 << 14)
    monkeypatch.setattr("megatron.sample_mapping._CHUNK", 1 << 13)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_search_equals_numpys_and_copies_nothing(large, side):
    pointers = large.sequence_pointers  # empty sentences make equal ones
    assert not pointers.flags.aligned
    values = np.random.default_rng(1).integers(-9, pointers[-1] + 9, (3, 500))
    values[0, :4] = [pointers[0], pointers[-1], pointers[-1] + 1, -1]
    with most_memory(1 << 20):
        found = search_sorted(pointers, values, side)
    np.testing.assert_array_equal(found, np.searchsorted(pointers, values, side))


@pytest.mark.parametrize("length", range(9))
def test_a_search_in_a_short_array_equals_numpys(length):
    array, values = np.sort(np.random.default_rng(length).integers(0, 6, length)), np.arange(-1, 8)
    for side in ("left", "right"):
        np.testing.assert_array_equal(search_sorted(array, values, side), np.searchsorted(array, values, side))


def test_offsets_and_bounds_are_those_of_the_whole_arrays(large, small_blocks):
    ends = np.append(large.sequence_pointers // 2, large.num_tokens)
    np.testing.assert_array_equal(large.offsets(np.arange(len(ends))), ends)
    sizes = np.concatenate([np.diff(bounds) for bounds in large.document_bounds()])
    np.testing.assert_array_equal(sizes, np.diff(large.document_indices))


@pytest.mark.parametrize("nsp", ["swap", "random"])
def test_bert_samples_need_no_copy_of_the_index(large, small_blocks, nsp):
    special = {"cls_id": 1, "sep_id": 2, "mask_id": 3, "pad_id": 0, "special_ids": np.arange(4)}
    tokenizer = SimpleNamespace(
        unk_id=-1,
        size=VOCABULARY,
        starts_word=np.ones(VOCABULARY, bool),
        fingerprint="f" * 64,
        path="toy",
        **special,
    )
    with most_memory(SPARE):
        samples = Dataset(BertDataset(large, tokenizer, max_seq_length=16, nsp=nsp))
    with most_memory(SPARE):
        samples.batch(np.arange(256))


def test_the_mapping_goes_to_its_file_in_parts(large, small_blocks, tmp_path):
    settings = MappingSettings(13)
    with most_memory(SPARE):
        mapping = load_mapping(large, settings, tmp_path)
    whole = build_mapping(large.document_indices, large.sequence_lengths, settings)
    assert mapping.rows.nbytes > SPARE and mapping.counts == whole.counts
    np.save(tmp_path / "numpys.npy", whole.rows)
    assert mapping.path.read_bytes() == (tmp_path / "numpys.npy").read_bytes()


def test_statistics_need_little_more_than_they_return(large, small_blocks):
    with most_memory(2 * 8 * DOCUMENTS + SPARE):
        lengths, _ = document_lengths(large)
    ends = np.append(large.sequence_pointers // 2, large.num_tokens)
    np.testing.assert_array_equal(lengths, np.diff(ends[large.document_indices]))
