"""Measures of a classifier."""

from collections.abc import Callable

import numpy as np


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The share of equal entries of two `[N]` integer arrays; NaN for N = 0."""
    return float(np.mean(predicted == labels)) if len(labels) else float("nan")


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"accuracy": accuracy}
"""What `task.metric` may name."""
