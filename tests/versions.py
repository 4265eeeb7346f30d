"""Which tests an older torch cannot run: those of what it is refused for (dpexp/torch_versions.py)."""

import pytest
import torch

INSTALLED = tuple(map(int, torch.__version__.split(".")[:2]))


def needs_torch(*lowest: int) -> pytest.MarkDecorator:
    """Skip a test where torch is older; by number, so that nothing is skipped on a torch that has lost what is needed."""
    return pytest.mark.skipif(lowest > INSTALLED, reason="needs torch " + ".".join(map(str, lowest)))
