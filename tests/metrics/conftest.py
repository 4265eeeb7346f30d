"""Real files, for tests of metrics on real references."""

from tests.tasks.conftest import real_data

__all__ = ["real_data"]
