"""Compiled graphs that can be back-propagated more than once.

A compiled backward overwrites what its forward saved ("donated buffers"), unless it was compiled with this turned off. Proofs of layouts
and engines of two passes need a second back-propagation, so graphs are compiled without it while a clipper says so. Graphs that exist
already are untouched: torch refuses to back-propagate them twice.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch._functorch.config

_config: Any = torch._functorch.config
_holders: WeakSet[Any] = WeakSet()
_before: bool | None = None


def keep_buffers(holder: Any) -> None:
    """From here on, until the last holder gives up, graphs are compiled to be used more than once."""
    global _before
    if not hasattr(_config, "donated_buffer"):
        return
    if not _holders and _before is None:
        _before = _config.donated_buffer
    _holders.add(holder)
    _config.donated_buffer = False


def release_buffers(holder: Any) -> None:
    """The counterpart of `keep_buffers`."""
    global _before
    _holders.discard(holder)
    if not _holders and _before is not None:
        _config.donated_buffer, _before = _before, None
