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

import torch._functorch.config

from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError

_config: Any = torch._functorch.config


def donating(on: bool) -> bool:
    """Say whether graphs are compiled to be used once from here on. Returns what was said before."""
    before, _config.donated_buffer = _config.donated_buffer, on
    return before


@contextmanager
def used_again(roots: Roots) -> Iterator[None]:
    """Around a back-propagation that is not the last one.

    torch refuses it for every graph that was compiled with donated buffers, and for those that were compiled without while the
    setting is on. So the setting goes off, but only where no graph behind the losses has any.

    Raises:
        UserError: a graph has donated buffers.
    """
    compiling = "torch._functorch._aot_autograd.runtime_wrappers" in sys.modules
    off = compiling and not any(map(_is_donated, roots.graph()))
    before = donating(False) if off else None
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
        if before is not None:
            donating(before)


def _is_donated(node: Any) -> bool:
    """Whether a node is a compiled graph that overwrites what its forward saved."""
    metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
    return bool(getattr(metadata, "bw_donated_idxs", None))
