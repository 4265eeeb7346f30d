"""Compiled graphs that can be back-propagated more than once.

A compiled backward overwrites what its forward saved ("donated buffers"), unless it was compiled with this turned off. Proofs
of layouts and engines of two passes need a second back-propagation, so graphs are compiled without donation while a clipper
says so. Graphs that were compiled otherwise are back-propagated once, and refused the second time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch._functorch.config

from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError

_config: Any = torch._functorch.config
_holders: WeakSet[Any] = WeakSet()
_before: bool | None = None


def keep_buffers(holder: Any) -> None:
    """From here on, until the last holder gives up, graphs are compiled to be used more than once."""
    global _before
    if not hasattr(_config, "donated_buffer"):
        return
    if _before is None:
        _before = _config.donated_buffer
    _holders.add(holder)
    _config.donated_buffer = False


def release_buffers(holder: Any) -> None:
    """The counterpart of `keep_buffers`."""
    global _before
    _holders.discard(holder)
    if not _holders and _before is not None:
        _config.donated_buffer, _before = _before, None


@contextmanager
def used_again(roots: Roots) -> Iterator[None]:
    """Around a back-propagation that is not the last one.

    torch refuses it for every graph that was compiled with donated buffers, and for those that were compiled without while the
    setting is on. So the setting goes off, but only where no graph behind the losses has any.

    Raises:
        UserError: a graph has donated buffers.
    """
    compiling = "torch._functorch._aot_autograd.runtime_wrappers" in sys.modules
    held = None
    if compiling and hasattr(_config, "donated_buffer") and not any(map(_is_donated, roots.graph())):
        held, _config.donated_buffer = _config.donated_buffer, False
    try:
        yield
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        raise UserError(
            "part of this model was compiled to be back-propagated once, but the clipper must do it more often (to prove the "
            "layouts of its layers, or in an engine of two passes): call torch._dynamo.reset() and compile after attach(), or "
            "set torch._functorch.config.donated_buffer=False before anything is compiled"
        ) from error
    finally:
        if held is not None:
            _config.donated_buffer = held


def _is_donated(node: Any) -> bool:
    """Whether a node is a compiled graph that overwrites what its forward saved."""
    metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
    return bool(getattr(metadata, "bw_donated_idxs", None))
