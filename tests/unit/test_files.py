"""Files that are written whole or not at all."""

import errno
import fcntl
import os
import pwd
import stat

import pytest

from lm_experiments_tools import files
from lm_experiments_tools.errors import os_sentence
from lm_experiments_tools.files import fsync_path, locked, user_cache, write_atomic


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


def test_file_systems_without_locks_and_flushes_of_folders_are_written_to(tmp_path, monkeypatch, caplog):
    """As SMB, FUSE and Lustre without flock answer."""
    fsync = os.fsync

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    def of_files_alone(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "fsync", of_files_alone)
    with locked(tmp_path / "a.lock"):
        write_atomic(tmp_path / "a", "content")
    assert os.listdir(tmp_path) == ["a"] and "a.lock cannot be locked" in caplog.text
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):  # an error of the disk
        fsync_path(tmp_path)


def test_a_user_without_a_home_has_no_cache_and_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "lm_experiments_tools"
    monkeypatch.setenv("HOME", "/proc/nohome")
    assert user_cache() is None
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}[0])  # `docker run --user 4242`
    assert user_cache() is None and os.listdir(tmp_path) == [".cache"]
