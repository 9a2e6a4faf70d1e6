"""Random reads of data that is larger than memory.

The operating system reads up to 8 MB around each page (`read_ahead_kb`), which is wasted if the page cache is too
small. See benchmarks/cold_reads.md.
"""

import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from lm_experiments_tools.files import human_bytes
from lm_experiments_tools.modules.devices import available_memory

logger = logging.getLogger(__name__)

_PART_OF_MEMORY = 0.8  # the rest is the processes'; see the table in benchmarks/cold_reads.md


class MappedData(Protocol):
    """Interface of datasets that read from memory-mapped files, which their method `maps` returns as arrays."""

    def maps(self) -> Sequence[np.ndarray]: ...


def read_at_random(datasets: Iterable[MappedData]) -> None:
    """Disable the operating system's read-ahead for a run's data files if together they do not fit in memory.

    It does nothing on systems without this call.
    """
    # Arrays in memory have no map.
    maps = [array for dataset in datasets for array in dataset.maps() if getattr(array, "_mmap", None) is not None]
    size = sum(os.path.getsize(name) for name in {array.filename for array in maps})
    memory = available_memory()
    if size <= _PART_OF_MEMORY * memory or not hasattr(mmap, "MADV_RANDOM"):
        return
    logger.info(
        "%s of data and %s of free memory: the data is read from the disk at random, without read-ahead",
        human_bytes(size),
        human_bytes(memory),
    )
    for array in maps:
        array._mmap.madvise(mmap.MADV_RANDOM)
