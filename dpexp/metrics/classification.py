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


def check_metric(name: str, classes: int | None = None) -> None:
    """Refuse a `task.metric` that could not be computed, before anything is trained.

    Args:
        name: as in the configuration.
        classes: how many there are; None: not known yet.

    Raises:
        UserError: an unknown metric, or F1 for another number of classes than two.
    """
    if name not in METRICS:
        raise UserError(f"task.metric={name} is unknown: choose one of {', '.join(METRICS)}")
    if name == "f1" and classes not in (None, 2):
        raise UserError(
            f"task.metric=f1 is of two classes, and there are {classes}: use task.metric=accuracy"
        )


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"accuracy": accuracy, "f1": f1}
"""What `task.metric` may name."""
