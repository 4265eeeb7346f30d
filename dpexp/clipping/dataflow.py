"""Which tensors of a forward pass are computed from the model's inputs.

Followed in the first steps only, until every layout is proven. Where a layer's gradient mixes examples, this tells a table of
positions or a prompt network (computed from parameters alone: the per-example loop is exact) from examples that influence each
other (refused).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class DataFlow(TorchFunctionMode):
    """While active, every torch function with an input among the followed tensors adds its outputs to them."""

    def __init__(self, inputs: Iterable[Tensor]):
        super().__init__()
        self._followed = WeakIdKeyDictionary()
        for tensor in inputs:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        self._followed[tensor] = True

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._followed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and leaf in self._followed for leaf in tree_leaves((args, kwargs))):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.add(leaf)
            name = getattr(func, "__name__", "")
            if args and isinstance(args[0], Tensor) and (name == "__setitem__" or _in_place(name)):
                self.add(args[0])
        return result


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name.endswith("__")
    )


def inside_reentrant_checkpoint() -> bool:
    """Whether the caller runs in the gradient-free first forward of reentrant activation checkpointing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
