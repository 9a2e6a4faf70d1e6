"""Metrics of predicted numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_experiments_tools.metrics.metric import NUMBERS, Metric

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)


def mse(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Compute the mean squared error, as scikit-learn does."""
    import numpy as np

    return float(np.mean((np.asarray(predictions, np.float64) - np.asarray(references, np.float64)) ** 2))


def pearson(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Compute Pearson's correlation, -1 to 1, as scipy does; nan, with a warning, if one side is constant."""
    import numpy as np

    sides = []
    for name, numbers in (("predictions", predictions), ("references", references)):
        values = np.asarray(numbers, np.float64)
        if len(values) < 2 or np.all(values == values[0]):
            logger.warning(
                "all %d %s are equal: their correlation with anything is undefined (nan)", len(values), name
            )
            return math.nan
        centred = values - values.mean()
        largest = np.abs(centred).max()  # so that squares neither overflow nor vanish
        sides.append(centred / (largest * np.linalg.norm(centred / largest)))
    return float(np.clip(sides[0] @ sides[1], -1.0, 1.0))


def ranks(values: Sequence[float]) -> np.ndarray:
    """Return float64[n] ranks, starting at 1; equal values get the mean of their ranks."""
    import numpy as np

    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return (last - (sizes - 1) / 2)[group]


def spearman(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Compute Spearman's rank correlation, -1 to 1, as scipy does; nan if any number is nan."""
    if any(map(math.isnan, predictions)) or any(map(math.isnan, references)):
        return math.nan
    return pearson(ranks(predictions), ranks(references))


METRICS = {
    "pearson": Metric(function=pearson, tasks=NUMBERS, scale="-1 to 1", usual_for=NUMBERS),
    "spearman": Metric(function=spearman, tasks=NUMBERS, scale="-1 to 1", usual_for=NUMBERS),
    "mse": Metric(
        function=mse, tasks=NUMBERS, scale="unit of the label, squared", usual_for=NUMBERS, lower_is_better=True
    ),
}
