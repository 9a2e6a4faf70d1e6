"""Files that are written whole or not at all."""

import os

import pytest

from lm_experiments_tools import files
from lm_experiments_tools.errors import os_sentence
from lm_experiments_tools.files import write_atomic


def test_two_writers_of_one_file_do_not_meet(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    fsync = os.fsync

    def another_writes_meanwhile(descriptor):
        monkeypatch.setattr(files.os, "fsync", fsync)
        write_atomic(path, "of another, and longer")
        assert path.read_text() == "of another, and longer"
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", another_writes_meanwhile)
    write_atomic(path, "mine")
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch, call):
    path = tmp_path / "plan.json"
    write_atomic(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomic(path, b"new")
    assert os_sentence(error.value).startswith(f"{path}: No space left on device: free some space")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["plan.json"]
