"""The .bin/.idx writer and reader: the documented example byte for byte, round trips, and every kind of damage."""

import hashlib
import struct

import numpy as np
import pytest

from lm_experiments_tools.data.tokens.indexed import IndexedDataset, IndexedDatasetWriter, dataset_exists, token_dtype
from lm_experiments_tools.errors import UserError
from tests.helpers.token_toys import read_documents, token_data, write_tokens

EXAMPLE = [[[5, 6], [7]], [[8, 9]]]


def test_documented_example_byte_for_byte(tmp_path):
    write_tokens(tmp_path / "x", EXAMPLE)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<5H", 5, 6, 7, 8, 9)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ3i3q3q", 1, 8, 3, 3, 2, 1, 2, 0, 4, 6, 0, 2, 3)
    assert (tmp_path / "x.idx").read_bytes() == index
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_attributes_and_meta(tmp_path):
    dataset = token_data(tmp_path / "x", EXAMPLE, meta={"vocab_size": 10})
    assert dataset.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (len(dataset), dataset.num_tokens, dataset.num_documents) == (3, 5, 2)
    assert dataset.dtype == np.uint16
    facts = {"num_documents": 2, "num_sequences": 3, "num_tokens": 5, "dtype": "uint16"}
    digest = hashlib.sha256(struct.pack("<5H", 5, 6, 7, 8, 9)).hexdigest()
    assert dataset.meta == {"vocab_size": 10, **facts, "bin_sha256": digest}
    assert dataset[-1].tolist() == [8, 9]
    with pytest.raises(IndexError):
        dataset[3]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_round_trip_of_random_documents(tmp_path, dtype):
    rng = np.random.default_rng(0)
    limit = min(np.iinfo(dtype).max, 1 << 40)
    documents = [
        [rng.integers(0, limit, rng.integers(0, 9), endpoint=True).tolist() for _ in range(rng.integers(0, 4))]
        for _ in range(50)
    ]
    assert read_documents(write_tokens(tmp_path / "x", documents, dtype)) == documents


def test_adding_documents_in_parts_equals_adding_all(tmp_path):
    documents = [[[1], [2, 3]], [], [[], [4, 5, 6]]]
    write_tokens(tmp_path / "one_by_one", documents * 2)
    with IndexedDatasetWriter(tmp_path / "at_once", np.uint16) as writer:
        for _ in range(2):
            writer.add_documents(np.arange(1, 7), np.array([1, 2, 0, 3]), np.array([2, 0, 2]))
        writer.add_documents(*(np.empty(0, np.int64) for _ in range(3)))
        with pytest.raises(ValueError, match="lengths do not sum"):
            writer.add_documents(np.arange(3), np.array([2]), np.array([1]))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"at_once{suffix}").read_bytes() == (tmp_path / f"one_by_one{suffix}").read_bytes()


def test_nothing_is_visible_before_finalize_or_after_an_exception(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_documents(np.ones(1, int), np.ones(1, int), np.ones(1, int))
        assert not dataset_exists(tmp_path / "x")
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_ids_that_do_not_fit_are_refused(tmp_path):
    for bad in (65536, -1):
        with pytest.raises(ValueError, match="fit"):
            write_tokens(tmp_path / "x", [[[bad]]])
    assert read_documents(write_tokens(tmp_path / "x", [[[65535]]])) == [[[65535]]]


def test_dtype_by_vocabulary_size():
    assert token_dtype(65535) == np.uint16
    assert token_dtype(65536) == np.int32


def test_missing_files_and_bad_sidecar_are_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.idx does not exist"):
        IndexedDataset(tmp_path / "nothing")
    write_tokens(tmp_path / "x", EXAMPLE)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match=r"x\.json is not valid JSON"):
        IndexedDataset(tmp_path / "x")
