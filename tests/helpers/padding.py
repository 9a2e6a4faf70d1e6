"""Padding of micro-batches, from the lengths of their samples."""

import numpy as np

from lm_experiments_tools.data.dataset import Dataset


def padding(dataset: Dataset, rows: int, samples: np.ndarray) -> float:
    """The fraction of padding in micro-batches of `rows` of the samples, cut to multiples of 8."""
    lengths = dataset.lengths(samples)
    widths = -(-lengths.reshape(2, -1, rows).max(axis=2) // 8) * 8
    return 1.0 - lengths.sum() / (widths.sum() * rows)
