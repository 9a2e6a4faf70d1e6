"""Random reads of data that is larger than memory.

The operating system reads up to 8 MB around each page (`read_ahead_kb`), which is wasted if the page cache is too
small. For files that do not fit in memory, this module disables read-ahead and prefetches the next examples instead.
See benchmarks/cold_reads.md. It does nothing on systems without these calls.
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
    """Interface of datasets that read from memory-mapped files, which their method `maps` returns as arrays."""

    def maps(self) -> Sequence[np.ndarray]: ...


def read_at_random(datasets: Iterable[MappedData]) -> bool:
    """Disable the operating system's read-ahead for a run's data files if together they do not fit in memory.

    Returns:
        True if they do not fit; examples should then be prefetched (`TrainLoader(ahead=True)`).
    """
    maps = [array for dataset in datasets for array in dataset.maps() if _map_of(array) is not None]
    size = sum(os.path.getsize(name) for name in {array.filename for array in maps})
    memory = available_memory()
    if size <= _PART_OF_MEMORY * memory:
        return False
    logger.info(
        "%s of data and %s of free memory: the data is read from the disk at random, without read-ahead",
        human_bytes(size),
        human_bytes(memory),
    )
    for array in maps:
        advise_random(array)
    return True


def available_memory() -> int:
    """Return the bytes of main memory that are free or can be freed, at most the memory limit of the container."""
    return min([psutil.virtual_memory().available, *_limits()])


def total_memory() -> int:
    """Return the bytes of main memory, at most the memory limit of the container."""
    return min([psutil.virtual_memory().total, *_limits()])


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
    return getattr(array, "_mmap", None)  # None for an array in memory


def advise_random(array: np.ndarray) -> None:
    """Disable the operating system's read-ahead for the memory-mapped file that `array` is a view of."""
    mapped = _map_of(array)
    if mapped is not None and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


def will_need(array: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
    """Ask the operating system to read parts of a memory-mapped array from the disk, without waiting.

    Args:
        array: the memory-mapped array.
        begins, ends: int64[n]; part i has the elements begins[i] to ends[i].
    """
    mapped = _map_of(array)
    if mapped is None or not hasattr(os, "posix_fadvise"):
        return
    start = array.__array_interface__["data"][0] - np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    start += array.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY  # where the map begins
    size = array.itemsize * int(np.prod(array.shape[1:]))
    # Through the file: madvise on the map would hold the interpreter lock while the disk's queue is full.
    with open(array.filename, "rb") as file:
        for begin, end in dict.fromkeys(zip(begins.tolist(), ends.tolist(), strict=True)):
            os.posix_fadvise(file.fileno(), start + size * begin, size * (end - begin), os.POSIX_FADV_WILLNEED)
