"""Measures of quality on public data. Those of text are in `dpexp.metrics.text`."""

from dpexp.metrics.classification import METRICS, accuracy, check_metric, f1

__all__ = ["METRICS", "accuracy", "check_metric", "f1"]
