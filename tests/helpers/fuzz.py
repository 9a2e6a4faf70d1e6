"""Seeded edits of what users write, and a watch over what Python does meanwhile."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_WATCHED = ("exec", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen")
_WATCHED += ("ctypes.dlopen", "socket.connect", "shutil.rmtree", "webbrowser.open")
_GENERATED = ("<frozen", "<attrs", "<__array")
_seen: list[list[str]] = []  # of the watches that are on now
_hooked: list[bool] = []

SPLICES = [b"\r", b'"', b"\\", b"\\u0000", b"\\ud83d", b"\x00", b"\xff", b"{", b"}", b"[", b"]", b",", b":", b"null"]
SPLICES += [b"1e999", b"\xef\xbb\xbf", b"NaN", b"-Infinity", b"\xe2\x80", b'"text"', b" ", b"\t", b"\x0c", b"//", b"'"]
SPLICES += [b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\xe2\x80\xa8", b"1_000", b'"text": "twice", ', b"{}" * 3]


def edited(rng: random.Random, content: bytes, most: int = 4) -> bytes:
    """One to four edits of a line: bits, bytes, cuts, insertions, copies of a part elsewhere; no end of a line."""
    content = bytearray(content)
    for _ in range(rng.randrange(1, most + 1)):
        at, kind = rng.randrange(len(content) or 1), rng.randrange(5)
        if kind == 0 and content:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[at : at + rng.choice((1, 1, 3, 20))]
        elif kind == 2:
            content[at:at] = rng.choice(SPLICES)
        elif kind == 3:
            content[at : at + 1] = rng.choice(SPLICES)
        else:
            content[at:at] = content[: rng.randrange(30)]
    return bytes(content).replace(b"\n", b" ")


@contextmanager
def watching() -> Iterator[list[str]]:
    """Audit events of code that is run, and of processes, connections and removals, as they come."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_note)  # for the rest of the process: Python has no way to take it back
    _seen.append([])
    try:
        yield _seen[-1]
    finally:
        _seen.pop()


def _note(event: str, args: tuple[Any, ...]) -> None:
    if not _seen or not event.startswith(_WATCHED):
        return
    file = getattr(args[0], "co_filename", "") if event == "exec" and args else ""
    installed = file.startswith(("/usr", sys.prefix, sys.base_prefix, *_GENERATED)) or "lm_experiments_tools/" in file
    if not installed:  # what is installed is imported when it is first used
        _seen[-1].append(f"{event} {file or args}")
