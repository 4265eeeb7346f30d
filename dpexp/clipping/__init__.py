"""Per-example gradient clipping: groups × thresholds × rules × engines. Usable alone; see `attach`."""

import torch

LOWEST_TORCH = (2, 11)
"""On which the tests are run (``make test-lowest``); pip installs none below it."""


def refuse_untested(version: str) -> None:
    """Refuse a torch on which nobody has compared clipped sums with a loop over the examples.

    Raises:
        ImportError: it is older than `LOWEST_TORCH`.
    """
    if tuple(map(int, version.split(".")[:2])) < LOWEST_TORCH:
        lowest = ".".join(map(str, LOWEST_TORCH))
        raise ImportError(
            f"dpexp is tested on torch {lowest} and newer, and this is torch {version}: pip install 'torch>={lowest}'"
        )


refuse_untested(torch.__version__)

from dpexp.clipping.attach import Clipper, attach  # noqa: E402
from dpexp.clipping.reports import Report  # noqa: E402

__all__ = ["Clipper", "Report", "attach"]
