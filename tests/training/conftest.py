"""The sources may be edited while a test runs; what is tested here is not that."""

import pytest

from dpexp import provenance


@pytest.fixture(autouse=True)
def settled_code(monkeypatch):
    monkeypatch.setattr(provenance, "code_hash", lambda: "c0de")
