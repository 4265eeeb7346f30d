"""Accuracy and F1."""

import math

import numpy as np
import pytest

from dpexp.errors import UserError
from dpexp.metrics import METRICS, accuracy, f1


def test_by_hand():
    predicted, labels = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 1, 0, 1])
    assert accuracy(predicted, labels) == 0.6
    assert f1(predicted, labels) == pytest.approx(2 / 3)  # 2 hits of 3 marked and 3 wanted
    assert set(METRICS) == {"accuracy", "f1"}


def test_edges():
    none = np.array([], np.int64)
    assert math.isnan(accuracy(none, none))
    assert math.isnan(f1(none, none))
    assert f1(np.zeros(3, np.int64), np.zeros(3, np.int64)) == 0.0
    with pytest.raises(UserError, match="two classes"):
        f1(np.array([0, 1]), np.array([2, 1]))
