"""A disk that fails at the k-th thing it is asked: every call of the system that Python makes below one folder."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from safetensors import SafetensorError

FAULTS = ("ENOSPC", "EIO", "EDQUOT", "short write")
_CALLS = ("mkdir", "open", "fsync", "rename", "replace", "symlink", "unlink", "rmdir", "scandir", "listdir")
_CALLS += ("stat", "lstat", "readlink", "chmod", "write")


class FaultyDisk:
    """Counts what is asked of the files below `root` while `active`; the `at`-th (from 1, None: none) fails.

    A fault is an error's name: writing stores half of what it was given and then raises that, as a disk that fills up.
    A "short write" stores half and says so, which is no error: the other half is to be written again.

    Args:
        lasting: all that writes fails from then on, instead of that one call.
    """

    def __init__(self, root: Path, fault: str, at: int | None, *, lasting: bool = False) -> None:
        self.root, self.fault, self.at, self.lasting = str(root), fault, at, lasting
        self.active = False
        self.calls: list[str] = []
        self.descriptors: set[int] = set()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in _CALLS:
            if name != "write":
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(builtins, "open", self._open_counted(open))
        patch.setattr(io, "open", builtins.open)
        patch.setattr(shutil, "disk_usage", self._counted("statvfs", shutil.disk_usage))
        patch.setattr("lm_experiments_tools.checkpoint.tree.save_file", self._save_tensors)

    def reached(self, name: str, path: object) -> bool:
        """Note a call; True if it is to fail."""
        if not self.active or not self._is_here(path):
            return False
        self.calls.append(f"{name} {os.path.relpath(path, self.root) if isinstance(path, (str, Path)) else path}")
        here = len(self.calls)
        if self.at is None or (self.fault == "short write" and name != "write"):
            return False
        return here == self.at or (self.lasting and here > self.at and name in ("write", "mkdir", "fsync", "symlink"))

    def error(self, path: object = None) -> OSError:
        number = getattr(errno, self.fault)
        return OSError(number, os.strerror(number), *([str(path)] if isinstance(path, (str, Path)) else []))

    def _is_here(self, path: object) -> bool:
        return path in self.descriptors if isinstance(path, int) else str(path).startswith(self.root)

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            here = args[0] if name == "symlink" else path
            if options.get("dir_fd") in self.descriptors and options.get("dir_fd") is not None:
                here = options["dir_fd"]
            if self.reached(name, here):
                raise self.error(here)
            result = original(path, *args, **options)
            if name == "open":
                self.descriptors.discard(result)  # the system gives numbers of closed files out again
                if self._is_here(here):
                    self.descriptors.add(result)
            return result

        return call

    def _open_counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not isinstance(file, (str, Path)) or not self._is_here(file):
                return original(file, mode, *args, **options)
            if self.reached("open", file):
                raise self.error(file)
            raw = _FaultyFile(self, str(file), mode.replace("b", "").replace("t", ""))
            if "b" in mode:
                return io.BufferedReader(raw) if mode.startswith("r") and "+" not in mode else io.BufferedWriter(raw)
            buffered = io.BufferedReader(raw) if mode.startswith("r") else io.BufferedWriter(raw)
            return io.TextIOWrapper(buffered, encoding=options.get("encoding"))

        return opened

    def _save_tensors(self, tensors: Any, file: Any, metadata: dict[str, str] | None = None) -> None:
        """safetensors' own, whose calls Python does not see, with the same bytes, name on the way and words."""
        temporary = Path(file).with_name(f".tmp{Path(file).name}")
        try:
            with open(temporary, "wb") as out:
                out.write(safetensors.torch.save(tensors, metadata))
            os.rename(temporary, file)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            said = f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
            raise SafetensorError(said) from None


class _FaultyFile(io.FileIO):
    def __init__(self, disk: FaultyDisk, name: str, mode: str) -> None:
        super().__init__(name, mode)
        self.disk = disk
        disk.descriptors.discard(self.fileno())
        disk.descriptors.add(self.fileno())

    def write(self, content: Any) -> int:
        if not self.disk.reached("write", self.name):
            return super().write(content)
        stored = super().write(bytes(content)[: len(content) // 2])
        if self.disk.fault == "short write":
            return stored
        raise self.disk.error()
