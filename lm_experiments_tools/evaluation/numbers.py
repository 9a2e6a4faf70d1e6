"""Metrics of predicted numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

logger = logging.getLogger(__name__)


def mse(predictions: np.ndarray, references: np.ndarray) -> float:
    """Mean squared difference."""
    return float(np.mean((predictions - references) ** 2))


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation of two float64[n]; nan, with a warning, where one of them is constant."""
    sides = []
    for name, values in (("predictions", predictions), ("references", references)):
        if len(values) < 2 or np.all(values == values[0]):
            logger.warning(
                "all %d %s are equal: their correlation with anything is undefined (nan)", len(values), name
            )
            return math.nan
        centred = values - values.mean()
        largest = np.abs(centred).max()  # so that squares neither overflow nor vanish
        sides.append(centred / (largest * np.linalg.norm(centred / largest)))
    return float(np.clip(sides[0] @ sides[1], -1.0, 1.0))


def ranks(values: np.ndarray) -> np.ndarray:
    """float64[n] ranks from 1; equal values share the mean of their ranks."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return (last - (sizes - 1) / 2)[group]


def spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation of the ranks; nan where a number is nan, as scipy."""
    if np.isnan(predictions).any() or np.isnan(references).any():
        return math.nan
    return pearson(ranks(predictions), ranks(references))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mse": mse,
    "pearson": pearson,
    "spearman": spearman,
}


def number_metrics(
    names: Sequence[str], predictions: Sequence[float], references: Sequence[float]
) -> dict[str, float]:
    """The metrics `names` of mse, pearson and spearman."""
    given, right = np.asarray(predictions, dtype=np.float64), np.asarray(references, dtype=np.float64)
    return {name: METRICS[name](given, right) for name in names}
