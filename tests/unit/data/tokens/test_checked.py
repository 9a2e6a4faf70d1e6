"""A token file is checked once a machine: not by each worker, not at each start, but again where it has changed."""

import threading

import numpy as np
import pytest

from lm_experiments_tools.data.tokens import checked
from lm_experiments_tools.data.tokens.checked import open_checked
from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.errors import UserError
from tests.helpers.token_toys import read_documents, write_tokens

DOCUMENTS = [[[5, 6], [7]], [[8, 9]]]


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """The files whose index was read whole, in order; the cache is in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checked, "SMALL", 0)
    found, check = [], IndexedDataset._check_index
    monkeypatch.setattr(IndexedDataset, "_check_index", lambda self: (found.append(self.prefix), check(self)))
    return found


def test_a_file_is_checked_once_and_again_where_it_has_changed(tmp_path, checks):
    prefix = write_tokens(tmp_path / "tokens", DOCUMENTS)
    first = IndexedDataset(prefix)
    checks.clear()
    for _ in range(3):
        tokens = open_checked(prefix)
        assert tokens.fingerprint == first.fingerprint and len(checks) == 1
        assert (tokens.num_tokens, tokens.num_documents, len(tokens)) == (5, 2, 3)
        np.testing.assert_array_equal(tokens.tokens, first.tokens)
    write_tokens(prefix, DOCUMENTS[::-1])
    assert open_checked(prefix).fingerprint != first.fingerprint and len(checks) == 2
    (record,) = tmp_path.glob(".cache/checked/*.json")
    for damaged in ("{", "[]", "{}"):
        record.write_text(damaged)
        assert open_checked(prefix).fingerprint == IndexedDataset(prefix).fingerprint
    assert read_documents(prefix) == DOCUMENTS[::-1] and not list(tmp_path.rglob("*.lock"))


def test_of_a_small_file_nothing_is_kept(tmp_path, checks, monkeypatch):
    monkeypatch.setattr(checked, "SMALL", 8 * 2**20)
    prefix = write_tokens(tmp_path / "tokens", DOCUMENTS)
    for number in (1, 2):
        assert open_checked(prefix).num_tokens == 5 and len(checks) == number
    assert not (tmp_path / ".cache").exists()


def test_damage_after_a_check_is_found(tmp_path, checks):
    prefix = write_tokens(tmp_path / "tokens", DOCUMENTS)
    open_checked(prefix)
    index = (tmp_path / "tokens.idx").read_bytes()
    (tmp_path / "tokens.idx").write_bytes(index[:34] + b"\3" + index[35:])
    with pytest.raises(UserError, match=r"tokens.idx is damaged: sequence 1 should start at byte 6"):
        open_checked(prefix)


def test_tokens_that_are_not_those_of_the_record_are_found_by_the_check(tmp_path, checks):
    prefix = write_tokens(tmp_path / "tokens", DOCUMENTS, meta={"bin_sha256": "0" * 64})
    (tmp_path / "tokens.bin").write_bytes((tmp_path / "tokens.bin").read_bytes())  # newer than its record now
    with pytest.raises(UserError, match="was changed after it was written"):
        open_checked(prefix)
    assert not list(tmp_path.glob(".cache/checked/*.json"))


def test_of_workers_that_open_a_file_at_once_one_checks_it_and_the_others_wait(tmp_path, checks):
    prefix = write_tokens(tmp_path / "tokens", DOCUMENTS)
    found = []
    workers = [threading.Thread(target=lambda: found.append(open_checked(prefix).fingerprint)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(checks) == 1


def test_another_machine_checks_for_itself(tmp_path, checks, monkeypatch):
    prefix = write_tokens(tmp_path / "tokens", DOCUMENTS)
    open_checked(prefix)
    monkeypatch.setattr(checked.platform, "node", lambda: "another")
    open_checked(prefix)
    assert len(checks) == 2
    assert len(list(tmp_path.glob(".cache/checked/*.json"))) == 2


def test_where_nothing_can_be_kept_each_start_checks(tmp_path, checks, caplog):
    prefix = write_tokens(tmp_path / "tokens", DOCUMENTS)
    (tmp_path / ".cache").write_text("a file")
    for number in (1, 2):
        assert open_checked(prefix).num_tokens == 5 and len(checks) == number
    assert "cannot be written" in caplog.text
