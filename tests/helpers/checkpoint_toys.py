"""A small checkpoint, and how to damage it: for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from lm_experiments_tools.checkpoint.writer import CheckpointWriter, save_tree


def write(root: Path, step: int, *, keep: int | None = None, best: bool = False, seed: int | None = None) -> Path:
    """A small committed checkpoint with a nested file."""
    writer = CheckpointWriter(root, keep)
    directory = writer.begin(step)
    generator = torch.Generator().manual_seed(step if seed is None else seed)
    save_tree(directory / "trainer_state", {"step": step, "weights": torch.randn(50, generator=generator)})
    (directory / "rng").mkdir()
    save_tree(directory / "rng" / "rank0", {"torch": torch.arange(8, dtype=torch.uint8)})
    return writer.commit(step, is_best=best, extra_manifest={"world_size": 2})


def flip(name: str, where: float) -> Callable[[Path], None]:
    """Changes one bit of a file of a checkpoint, at a fraction of its size."""

    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int((len(content) - 1) * where)] ^= 4
        (path / name).write_bytes(content)

    return damage
