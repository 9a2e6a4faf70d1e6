"""Random blocks of layouts: columns drawn without replacement in each row, ours and those that DeepSpeed draws."""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


def random_columns(seed: int, layer_idx: int, heads: int, num_blocks: int, count: int, past_only: bool) -> Tensor:
    """Columns drawn in each row, int64 [heads, num_blocks, count]; `num_blocks` stands for none.

    Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 1987) for all rows at once. Random bits depend
    on the row and not on the number of rows, so unidirectional layouts of two lengths agree where both exist.
    """
    bits = np.stack([_random_bits(f"{seed}/{layer_idx}/{head}", num_blocks * count) for head in range(heads)])
    bits = bits.reshape(heads, num_blocks, count)
    population = np.arange(1, num_blocks + 1) if past_only else np.full(num_blocks, num_blocks)
    drawn = np.full(bits.shape, num_blocks, dtype=np.int64)
    for step in range(count):
        last = population - count + step
        column = (bits[..., step] % np.maximum(last + 1, 1).astype(np.uint64)).astype(np.int64)
        taken = (drawn[..., :step] == column[..., None]).any(-1)
        drawn[..., step] = np.where(last < 0, num_blocks, np.where(taken, last, column))
    return torch.from_numpy(drawn)


def _random_bits(name: str, count: int) -> np.ndarray:
    """64-bit random numbers of a head; the bit stream of Philox is the same in every release of numpy."""
    digest = blake2b(f"sparse attention/{name}".encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)


def deepspeed_columns(seed: int, layer_idx: int, heads: int, num_blocks: int, count: int, past_only: bool) -> Tensor:
    """Columns that DeepSpeed draws from Python's generator: head by head, row by row, layer by layer."""
    generator = random.Random(seed)
    for _ in range(layer_idx + 1):
        columns = [
            [generator.sample(range(row + 1 if past_only else num_blocks), count) for row in range(num_blocks)]
            for _ in range(heads)
        ]
    return torch.tensor(columns, dtype=torch.int64, device="cpu").view(heads, num_blocks, count)
