"""Which tensors of a forward pass are computed from the model's inputs.

Followed in the first steps only, until every layout is proven. Where a layer's gradient mixes examples, this tells a table of
positions or a prompt network (computed from parameters alone: the per-example loop is exact) from examples that influence each
other (refused).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.refusals import refuse_lookup

# Operators that write to their first argument.
WRITING = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__ipow__", "__imod__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
}  # fmt: skip
# Operations that put rows back to where they were, with the place of these rows among their arguments, and operations that pick
# some along a dimension.
RETURNING = {
    "__setitem__": 2,
    "index_add": 3,
    "index_copy": 3,
    "index_put": 2,
    "masked_scatter": 2,
    "scatter": 3,
    "scatter_add": 3,
    "scatter_reduce": 3,
}
PICKING = {"index_select", "take_along_dim", "gather", "sort", "argsort", "topk"}
# Operations that pick or order rows by their values or lengths, whatever else they are given.
ORDERING = {"masked_select", "take", "msort", "_pack_padded_sequence"}
# Operations that take the rows of a tensor apart, with the place of the dimension among their arguments, and operations that put
# tensors together to rows, in an order that Python may have made.
CUTTING = {
    "unbind": 1,
    "select": 1,
    "narrow": 1,
    "split": 2,
    "split_with_sizes": 2,
    "chunk": 2,
    "tensor_split": 2,
}
JOINING = {"cat", "concat", "concatenate", "stack", "vstack", "row_stack", "pad_sequence"}
# rows that a shuffle leaves in their order once in 40,000 times
FEW = 8


class DataFlow(TorchFunctionMode):
    """While active, every torch function with an input among the followed tensors adds its outputs to them.

    A followed tensor is *routed* where its rows were picked by index, or put together one by one, so that their order may be
    another one with the next batch: unpadding, sorting by length, a mixture of experts.

    Args:
        inputs: what is followed from the beginning.
        rows: of the batch, as far as they are known.
    """

    def __init__(self, inputs: Iterable[Tensor], rows: int | None = None):
        super().__init__()
        self.rows = rows
        # tensor -> whether it is routed
        self._followed = WeakIdKeyDictionary()
        # what was made of some rows of a tensor -> how many that had
        self._cut = WeakIdKeyDictionary()
        # 0, 1, 2, …, made by torch.arange; a shuffle of few rows may look like it by chance
        self._counting = WeakIdKeyDictionary()
        for tensor in inputs:
            self.add(tensor)

    def add(self, tensor: Tensor, routed: bool = False) -> None:
        self._followed[tensor] = routed

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._followed

    def routed(self, tensor: Tensor) -> bool:
        return bool(self._followed.get(tensor, False))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_lookup(func, args, kwargs)
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.arange or (tensors and all(tensor in self._counting for tensor in tensors)):
            self._counting.update({leaf: None for leaf in tree_leaves(result) if isinstance(leaf, Tensor)})
        if any(tensor in self._followed for tensor in tensors):
            name = _name(func)
            base = args[0] if args and isinstance(args[0], Tensor) else None
            cut = next((self._cut[tensor] for tensor in tensors if tensor in self._cut), None)
            if base is not None and name in RETURNING:
                # rows that were picked go back to their places; others are sent to places
                routed = self.routed(base) or self._sends_rows(name, args, kwargs)
                cut = None
            else:
                routed = any(self.routed(tensor) for tensor in tensors) or (
                    base is not None and base in self._followed and self._picks_rows(name, args, kwargs)
                )
            if _joins_rows(name, args, kwargs, tensors):
                # of a loop over positions neither is as many as the examples
                routed = routed or (cut is not None and self.rows in (None, cut, len(tensors)))
                cut = None
            elif base is not None and base in self._followed and _cuts_rows(name, args, kwargs):
                cut = base.shape[0]
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.add(leaf, routed)
                    if cut is not None:
                        self._cut[leaf] = cut
            if base is not None and in_place(func):
                self.add(base, routed)
        return result

    def _picks_rows(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether an operation picks or orders rows (dimension 0) by the values of a tensor."""
        if name in ORDERING:
            return True
        if name in PICKING:
            return _dim(args, kwargs, -1) % max(args[0].dim(), 1) == 0
        if name == "repeat_interleave":
            return isinstance(kwargs.get("repeats", args[1] if len(args) > 1 else None), Tensor)
        if name != "__getitem__":
            return False
        index, first = _index(args[1])
        if isinstance(first, list) or hasattr(first, "__array__"):
            first = torch.as_tensor(first)
        if not isinstance(first, Tensor) or first.dim() == 0:
            return False
        rows = args[0].shape[0]
        counted = (
            first.dtype != torch.bool
            and first.numel() == first.shape[0] == rows
            and first not in self._followed
            # an order alone, as from a list, is there to change the order, though not in this batch
            and (first in self._counting or (rows >= FEW and len(index) > 1))
        )
        return not (counted and bool((first.flatten() == torch.arange(rows, device=first.device)).all()))

    def _sends_rows(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether an operation writes rows, which were not picked before, to places that a number or a tensor tells."""
        named = (kwargs[key] for key in ("src", "source", "values") if key in kwargs)
        source = args[RETURNING[name]] if len(args) > RETURNING[name] else next(named, None)
        if not isinstance(source, Tensor) or source not in self._followed or self.routed(source):
            return False
        if name == "__setitem__":
            first = _index(args[1])[1]
            return isinstance(first, int | list | Tensor) and not isinstance(first, bool)
        if name in ("masked_scatter", "index_put"):
            return True
        return _dim(args, kwargs, -1) % max(args[0].dim(), 1) == 0


def _name(func: Any) -> str:
    """Return the name of a function, without the underscore of those that write to their argument."""
    name: str = getattr(func, "__name__", "")
    return name if name.startswith("__") else name.rstrip("_")


def _index(index: Any) -> tuple[tuple[Any, ...], Any]:
    """Return an index as a tuple, and what it says of the rows."""
    parts = index if isinstance(index, tuple) else (index,)
    return parts, next((part for part in parts if part is not None), None)


def _dim(args: Any, kwargs: Any, default: int) -> int:
    """Return the dimension that an operation is given."""
    given = kwargs.get("dim", next((a for a in args[1:] if isinstance(a, int)), default))
    return given if isinstance(given, int) else default


def _cuts_rows(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation takes the rows of a tensor apart."""
    if name == "__getitem__":
        first = _index(args[1])[1]
        return isinstance(first, int) or (isinstance(first, slice) and first != slice(None))
    if name not in CUTTING:
        return False
    given = kwargs.get("dim", args[CUTTING[name]] if len(args) > CUTTING[name] else 0)
    return isinstance(given, int) and args[0].dim() > 0 and given % args[0].dim() == 0


def _joins_rows(name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    """Whether an operation puts several tensors together to the rows of one."""
    if name not in JOINING or len(tensors) < 2:
        return False
    last = tensors[0].dim() + (name == "stack")
    return name == "pad_sequence" or _dim(args, kwargs, 0) % max(1, last) == 0


def in_place(func: Any) -> bool:
    """Tell whether a function writes to its first argument."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        # an operator of the dispatcher, whose name ends in that of its overload
        return bool(schema.is_mutable)
    name = getattr(func, "__name__", "")
    return name in WRITING or (name[-1:] == "_" and name[-2:] != "__")


def tensors_in(value: Any, depth: int = 2) -> list[Tensor]:
    """The tensors among the arguments of a forward pass, also inside mappings, dataclasses and objects like a batch of graphs.

    Args:
        value: anything.
        depth: how many objects deep to look.
    """
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(dict(leaf), depth)
        elif depth:
            found += tensors_in(list(attributes_of(leaf).values()), depth - 1)
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds, a dataclass or one of another class; nothing of numbers, functions and modules."""
    if isinstance(
        value, str | int | float | Tensor | nn.Module | type | FunctionType | MethodType | ModuleType
    ):
        return {}
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for given in slots for name in ((given,) if isinstance(given, str) else given)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | dict(
        getattr(value, "__dict__", {})
    )


def entered(value: Any) -> tuple[list[Tensor], tuple[torch.Size, ...], int]:
    """The tensors among the arguments of a forward pass, and where the size of the batch may stand.

    Returns:
        tensors; the lengths of lists of tensors, then the first two dimensions of every tensor that has any (one of these
        numbers is the size of the batch); the index of the first tensor among these shapes.
    """
    tensors = tensors_in(value)
    lists = [leaf for leaf in tree_leaves(value, is_leaf=_is_list) if _is_list(leaf)]
    shapes = [tensor.shape[:2] for tensor in tensors if tensor.dim()]
    return tensors, (*(torch.Size([len(items)]) for items in lists), *shapes), len(lists) if shapes else 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Tensor) for item in value)


def inside_reentrant_checkpoint() -> bool:
    """Whether the caller runs in the gradient-free first forward of reentrant activation checkpointing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
