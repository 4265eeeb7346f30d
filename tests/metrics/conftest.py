"""What tests of metrics share: real files, and a machine without Java."""

import pytest

from dpexp.metrics import captions
from tests.tasks.conftest import real_data

__all__ = ["real_data"]


@pytest.fixture
def no_java(monkeypatch):
    monkeypatch.setattr(captions, "java", lambda: None)
    captions._split.cache_clear()
    yield
    captions._split.cache_clear()
