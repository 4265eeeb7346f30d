"""Measures of a classifier."""

from collections.abc import Callable

import numpy as np

from dpexp.errors import UserError


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The share of equal entries of two `[N]` integer arrays; NaN for N = 0."""
    return float(np.mean(predicted == labels)) if len(labels) else float("nan")


def f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1 against class 0, as GLUE reports for QQP beside accuracy; NaN for N = 0.

    Args:
        predicted, labels: `[N]` integer arrays. Without a 1 in either there is nothing to find, and the score is 0.

    Raises:
        UserError: a class other than 0 and 1.
    """
    if not len(labels):
        return float("nan")
    if max(predicted.max(), labels.max()) > 1 or min(predicted.min(), labels.min()) < 0:
        raise UserError("F1 is of two classes, 0 and 1; with more of them use task.metric=accuracy")
    hits = int(np.sum((predicted == 1) & (labels == 1)))
    marked = int(np.sum(predicted == 1)) + int(np.sum(labels == 1))
    return 2 * hits / marked if marked else 0.0


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"accuracy": accuracy, "f1": f1}
"""What `task.metric` may name."""
