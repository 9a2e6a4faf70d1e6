"""Data larger than memory: read at random without what lies around."""

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from lm_experiments_tools.data.tokens.indexed import IndexedDataset
from lm_experiments_tools.modules import devices
from lm_experiments_tools.recipes import common
from tests.helpers.token_toys import write_tokens

needs_advice = pytest.mark.skipif(
    not hasattr(mmap, "MADV_RANDOM") or not Path("/proc/self/smaps").is_file(),
    reason="this system has no advice on memory maps, or does not tell which it was given",
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """A token file of 4 MB, which is on the disk."""
    prefix = tmp_path_factory.mktemp("cold") / "tokens"
    return write_tokens(prefix, [[np.random.default_rng(0).integers(0, 90, 1 << 19)]] * 4)


def advised(path):
    """Of each map of a file in this process: whether the system reads without its surroundings ("rr")."""
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return ["rr" in re.search("VmFlags:(.*)", text)[1].split() for text in maps if str(path) in text.split("\n")[0]]


@needs_advice
@pytest.mark.parametrize("part", [0.5, 2.0])
def test_files_are_advised_where_together_they_are_larger_than_memory(prefix, monkeypatch, part):
    tokens = [IndexedDataset(prefix), IndexedDataset(prefix)]
    size = 2 * os.path.getsize(f"{prefix}.bin")
    monkeypatch.setattr(common, "available_memory", lambda: int(size / part))
    common.read_at_random(tokens)
    assert advised(f"{prefix}.bin") == [part > 1] * 2


def test_memory_is_what_the_group_of_the_process_may_have(tmp_path, monkeypatch):
    whole = devices.available_memory()
    assert 0 < whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(devices, "_CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.available_memory() > 1 << 20
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("123456\n")
        assert devices.available_memory() == 123456
        (tmp_path / name).unlink()
