"""Save, restore and seed the global random number generators of Python, numpy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Read the states of the global random generators of Python, numpy and torch (CPU and this worker's GPU)."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        **gpu,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the global random generators to the states that `random_state` has returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(*key: int) -> None:
    """Seed the global random generators of Python, numpy and torch with a hash of the integers `key`."""
    first, second, third, fourth = np.random.SeedSequence(key).generate_state(4).tolist()
    torch.manual_seed(first << 32 | second)  # GPUs too
    np.random.seed(third)
    random.seed(fourth)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Context that restores the global random states at its end."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
