"""Data larger than memory: what is read at random places comes from the disk, and no more of it than is asked for.

A page that is not in memory is read with its surroundings, up to 128 KB or 8 MB of them (`read_ahead_kb` of the disk),
which pays where the surroundings are used before they have to make room. Of data larger than memory they are not: an
example of 1.1 KB then costs as much as a hundred or a thousand. So such files are advised to be read at random, and
what the next examples need is asked for beforehand, all of it at once, which disks are good at. Numbers are in
benchmarks/cold_reads.md. Where the system knows no advice nothing changes.
"""

import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from lm_experiments_tools.files import human_bytes

logger = logging.getLogger(__name__)

_CGROUPS = Path("/sys/fs/cgroup")  # of this container; of a process elsewhere, below
_PART_OF_MEMORY = 0.8  # the rest is the processes'; see the table in benchmarks/cold_reads.md


class MappedData(Protocol):
    """A dataset whose arrays are maps of files."""

    def maps(self) -> Sequence[np.ndarray]: ...


def read_at_random(datasets: Iterable[MappedData]) -> bool:
    """Advise the files of a run, read at random from here on, if together they are larger than memory has room for.

    Returns:
        True if they are, so that it pays to ask for examples beforehand (`TrainLoader`).
    """
    maps = [array for dataset in datasets for array in dataset.maps() if _map_of(array) is not None]
    size = sum(os.path.getsize(name) for name in {array.filename for array in maps})
    memory = available_memory()
    if size <= _PART_OF_MEMORY * memory:
        return False
    logger.info(
        "%s of data and %s of free memory: the data is read from the disk at random, without what lies around",
        human_bytes(size),
        human_bytes(memory),
    )
    for array in maps:
        advise_random(array)
    return True


def available_memory() -> int:
    """Bytes that this machine has free or can free, no more than the limit of this process's group (container)."""
    return min([psutil.virtual_memory().available, *_limits()])


def _limits() -> Iterator[int]:
    groups = [line.partition(":")[2].partition(":") for line in _read(Path("/proc/self/cgroup")).splitlines()]
    for controllers, _, path in [("", "", "/"), ("memory", "", "/"), *groups]:
        if controllers in ("", "memory"):
            folder = _CGROUPS / controllers / path.lstrip("/")
            for name in ("memory.max", "memory.limit_in_bytes"):
                if (limit := _read(folder / name).strip()).isdigit():
                    yield int(limit)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or another version of its groups
        return ""


def _map_of(array: np.ndarray) -> Any:
    """The memory map that an array is a view of; None for one in memory."""
    return getattr(array, "_mmap", None)


def advise_random(array: np.ndarray) -> None:
    """Have the whole map that `array` is a view of read without its surroundings from here on."""
    mapped = _map_of(array)
    if mapped is not None and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


def will_need(array: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
    """Have elements begins[i] up to ends[i] read into memory, all ranges at once, without waiting for them.

    By the file and not by the map: only that lets other threads run where the disk has no room for more requests.
    """
    mapped = _map_of(array)
    if mapped is None or not hasattr(os, "posix_fadvise"):
        return
    start = array.__array_interface__["data"][0] - np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    start += array.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY  # where the map begins
    size = array.itemsize * int(np.prod(array.shape[1:]))
    with open(array.filename, "rb") as file:
        for begin, end in _merged(begins, ends):
            os.posix_fadvise(file.fileno(), start + size * begin, size * (end - begin), os.POSIX_FADV_WILLNEED)


def _merged(begins: np.ndarray, ends: np.ndarray) -> Iterable[tuple[int, int]]:
    """The ranges without those that are there twice."""
    return dict.fromkeys(zip(begins.tolist(), ends.tolist(), strict=True))
