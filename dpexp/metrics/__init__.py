"""Measures of quality on public data."""

from dpexp.metrics.classification import METRICS, accuracy

__all__ = ["METRICS", "accuracy"]
