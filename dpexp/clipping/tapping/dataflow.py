"""Which tensors of a forward pass are computed from the model's inputs.

Followed in the first steps only, until every layout is proven. Where a layer's gradient mixes examples, this tells a table of
positions or a prompt network (computed from parameters alone: the per-example loop is exact) from examples that influence each
other (refused).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import TorchFunctionMetadataMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.compiling import uncompiled
from dpexp.clipping.refusals import refuse_lookup

# Operators that write to their first argument.
WRITING = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__ipow__", "__imod__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
}  # fmt: skip
# Operations that put rows back to where they were, with the place of these rows among their arguments.
RETURNING = dict(
    __setitem__=2, index_add=3, index_copy=3, index_put=2, index_reduce=3, masked_scatter=2, scatter=3, scatter_add=3,
    scatter_reduce=3, select_scatter=1, slice_scatter=1,
)  # fmt: skip
# What numpy calls arguments: torch takes these names, too.
NUMPY = dict(x="input", a="input", x1="input", x2="other", axis="dim")
# Operations that pick some rows along a dimension, with its place; and those that do so along the last one where none is given.
PICKING = dict(index_select=1, take_along_dim=2, gather=1, sort=1, argsort=1, topk=2, roll=2, flip=1)
ALONG_THE_LAST = ("sort", "argsort", "topk")
# Products with a matrix, which may put rows in another order, with how many tensors stand before the matrices.
PRODUCTS = dict(
    matmul=0, __matmul__=0, __rmatmul__=0, mm=0, bmm=0, mv=0, inner=0, linear=0, sparse_mm=0, _sparse_mm=0, smm=0, hspmm=0,
    tensordot=0, linalg_matmul=0, linalg_multi_dot=0, chain_matmul=0, addmm=1, addmv=1, addbmm=1, baddbmm=1, _sparse_addmm=1,
)  # fmt: skip
# Operations that pick or order rows by their values or lengths, whatever else they are given.
ORDERING = {"masked_select", "take", "msort", "_pack_padded_sequence", "unique", "unique_consecutive"}
# Operations that take the rows of a tensor apart, with the place of the dimension among their arguments; those that know the
# dimension; and operations that put tensors together to rows, in an order that Python may have made, with the dimension along
# which they do where none is given.
CUTTING = dict(unbind=1, select=1, narrow=1, split=2, split_with_sizes=2, chunk=2, tensor_split=2)
CUTTING_ALONG = dict(vsplit=0, hsplit=1)
JOINING = dict(
    cat=0, concat=0, concatenate=0, stack=0, vstack=0, row_stack=0, pad_sequence=0, hstack=1, column_stack=1, dstack=1
)  # fmt: skip
# of their second argument they read what kind of numbers it has, or its shape, and nothing else
KINDS = (Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as)
# Operations that take nothing of a tensor but its shape.
BLANK = {f"new_{kind}" for kind in ("zeros", "ones", "empty", "full")} | {
    f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn")
}
# Operations after which a row may be that of several examples, each of which reads it alone.
SHARING = {"unique", "unique_consecutive"}
# rows that a shuffle leaves in their order once in 40,000 times
FEW = 8
# Of dimensions along which rows may have been picked, their sizes; the first one of a tensor, where several rows may be one
# example's, counts whatever its size.
Sizes = frozenset[int]
FIRST, NONE = Sizes({0}), Sizes()
# beside them, where a row may be that of several examples
SHARED_ROWS = Sizes({-1})


class DataFlow(TorchFunctionMetadataMode):
    """While active, every torch function with an input among the followed tensors adds its outputs to them.

    A followed tensor is *routed* where its rows were picked by index, or put together one by one, so that their order may be
    another one with the next batch: unpadding, sorting by length, a mixture of experts. Which dimension is the batch is known
    in the backward pass alone.

    It is of a kind that torch takes off while control flow and flexible attention compile themselves, and puts back around them.

    Args:
        inputs: what is followed from the beginning.
        of_examples: those of them that have a row for each example.
    """

    def __init__(self, inputs: Iterable[Tensor], of_examples: Iterable[Tensor]):
        # it has no tracer
        TorchFunctionMode.__init__(self)
        # tensor -> along which sizes it is routed
        self._followed = WeakIdKeyDictionary()
        # what was computed from rows of examples
        self._of_examples = WeakIdKeyDictionary(dict.fromkeys(of_examples))
        # of what is followed, what was computed from shapes alone
        self._blank = WeakIdKeyDictionary()
        # along which sizes anything with a gradient was picked, which may have met others there
        self.picked = NONE
        # what was made of some rows of a tensor -> how many that had
        self._cut = WeakIdKeyDictionary()
        # 0, 1, 2, …, made by torch.arange; a shuffle of few rows may look like it by chance
        self._counting = WeakIdKeyDictionary()
        for tensor in inputs:
            self.add(tensor)

    def add(self, tensor: Tensor, routed: Sizes = NONE) -> None:
        self._followed[tensor] = routed

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._followed

    def of_batch(self, tensors: Iterable[Tensor]) -> bool:
        """Tell whether any of the tensors holds something of the inputs, and not of their shapes alone."""
        # what a view shows may have been written to its base
        return any(
            t in self._followed and not (t in self._blank and (t._base is None or t._base in self._blank))
            for t in tensors
        )

    def of_examples(self, tensors: Iterable[Tensor]) -> bool:
        """Tell whether any of the tensors was computed from an input with a row for each example."""
        return any(tensor in self._of_examples for tensor in tensors)

    def _is_of_parameters(self, tensor: Tensor) -> bool:
        """Tell whether a tensor was computed from tapped copies of parameters alone: its rows are whose they are given to."""
        return type(tensor) is Tensor and tensor.requires_grad and not self.of_batch([tensor])

    def _has_rows(self, tensor: Any) -> bool:
        """Tell whether rows of a tensor may be those of examples."""
        return isinstance(tensor, Tensor) and (tensor in self._followed or self._is_of_parameters(tensor))

    def routed(self, *tensors: Tensor) -> Sizes:
        """The sizes of the dimensions along which rows of any of the tensors may have been picked."""
        return NONE.union(*(self._followed.get(tensor, NONE) for tensor in tensors))

    @uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_lookup(func, args, kwargs)
        result = func(*args, **kwargs)
        args, kwargs = in_order(args, kwargs)
        tensors, made = (
            [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            for value in ((args, kwargs), result)
        )
        tensors = tensors[:1] if func in KINDS else tensors
        if func is torch.arange or (tensors and all(tensor in self._counting for tensor in tensors)):
            self._counting.update(dict.fromkeys(made))
        if any(tensor in self._followed for tensor in tensors):
            name = _name(func)
            base = args[0] if args and isinstance(args[0], Tensor) else None
            cut = next((self._cut[tensor] for tensor in tensors if tensor in self._cut), None)
            if base is not None and name in RETURNING:
                # rows that were picked go back to their places; others are sent to places
                routed, picked = self.routed(base), self._sent(name, args, kwargs)
                cut = None
            else:
                routed, picked = self.routed(*tensors), self._picked(name, args, kwargs, tensors)
            if (joined := _joined(name, args, kwargs, tensors, cut)) is not None:
                picked, cut = picked | joined, None
            elif base is not None and base in self._followed and (size := _cut_along(name, args, kwargs)):
                cut = size
            routed |= picked | (SHARED_ROWS if name in SHARING else NONE)
            if any(tensor.requires_grad for tensor in tensors):
                self.picked |= picked
            if routed and any(map(self._is_of_parameters, tensors)):
                # copies of a parameter, one for each row that was picked
                self.picked |= routed
            blank = (name in BLANK and len(tensors) == 1) or not self.of_batch(tensors)
            of_examples = self.of_examples(tensors) and name not in SHARING and not blank
            if base is not None and in_place(func, kwargs):
                made.append(base)
                whole = base._base
                if whole is not None and not blank:
                    self._blank.pop(whole, None)
                if whole is not None and whole.dim() and base.shape[:1] != whole.shape[:1]:
                    # it was written to through a view of some of its rows
                    self.add(whole, self.routed(whole) | routed | (NONE if cut is None else FIRST))
            for leaf in made:
                self.add(leaf, routed)
                if blank:
                    self._blank[leaf] = None
                else:
                    self._blank.pop(leaf, None)
                if of_examples:
                    self._of_examples[leaf] = None
                if cut is not None:
                    self._cut[leaf] = cut
        return result

    def _picked(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Sizes:
        """Along which dimensions an operation picks or orders rows by the values of a tensor, or by a list."""
        base = args[0] if args else None
        other = args[1] if len(args) > 1 else None
        if name in ("embedding", "embedding_bag") and isinstance(other, Tensor) and other in self._followed:
            # the rows of a table are picked
            return FIRST
        if name in PRODUCTS:
            matrices = pairwise(tensors[PRODUCTS[name] :])
            return NONE.union(*(self._multiplied(name, a, b) for a, b in matrices))
        if name == "einsum" and isinstance(base, str):
            return self._summed(base.replace(" ", ""), tree_leaves(args[1:]))
        if not isinstance(base, Tensor) or not self._has_rows(base):
            return NONE
        if name in ORDERING:
            return FIRST
        if name in PICKING:
            dims = _dims(args, kwargs, PICKING[name], -1 if name in ALONG_THE_LAST else 0)
            return NONE.union(*(_size(base, dim) for dim in dims))
        if name == "repeat_interleave":
            repeats = kwargs.get("repeats", other)
            return FIRST if isinstance(repeats, Tensor) else NONE
        return self.indexed(base, other) if name == "__getitem__" else NONE

    def _multiplied(self, name: str, base: Tensor, other: Tensor) -> Sizes:
        """Along which dimension a product with one matrix for all, which may be that of a permutation, orders rows."""
        found = NONE
        if isinstance(base, nn.Parameter) or isinstance(other, nn.Parameter):
            # frozen weights, which are the same for every batch
            return NONE
        if self._has_rows(other) and not base.requires_grad:
            if other.dim() <= 2 or name == "tensordot":
                found = FIRST
            elif base.shape[:-2].numel() == 1:
                found = Sizes({other.shape[-2]})
        if self._has_rows(base) and not other.requires_grad and other.dim() > 1:
            found |= Sizes({base.shape[-1]}) if other.shape[:-2].numel() == 1 else NONE
        return found

    def _summed(self, equation: str, operands: list[Tensor]) -> Sizes:
        """Along which dimensions `torch.einsum` sums an operand with one matrix for all, as it sends tokens to experts."""
        terms, arrow, result = equation.partition("->")
        if not arrow:
            result = "".join(x for x in terms if terms.count(x) == 1)
        given = list(zip(terms.split(","), operands, strict=False))
        found = NONE
        for term, tensor in given:
            for other, matrix in given:
                apart = matrix is not tensor and not set(term) & set(other) & set(result)
                if self._has_rows(tensor) and apart and not matrix.requires_grad:
                    found |= NONE.union(*(_size(tensor, dim) for dim, x in _letters(term) if x not in result))
        return found

    def indexed(self, base: Tensor, index: Any) -> Sizes:
        """Return along which dimensions an index picks or orders rows."""
        (place, first), *rest = _parts(base, index) or [(0, None)]
        if not _is_list_of_rows(first) or place:
            return NONE.union(
                *(_size(base, dim) for dim, part in ((place, first), *rest) if _is_list_of_rows(part))
            )
        first = torch.as_tensor(first)
        rows = base.shape[0]
        counted = (
            first.dtype != torch.bool
            and first.numel() == first.shape[0] == rows
            and first not in self._followed
            # an order alone, as from a list, is there to change the order, though not in this batch
            and (first in self._counting or (rows >= FEW and len(rest) > 0))
        )
        same = counted and bool((first.flatten() == torch.arange(rows, device=first.device)).all())
        return NONE if same else FIRST

    def _sent(self, name: str, args: Any, kwargs: Any) -> Sizes:
        """Along which dimension an operation writes rows, which were not picked before, to places that it is told."""
        named = (kwargs[key] for key in ("src", "source", "values") if key in kwargs)
        source = args[RETURNING[name]] if len(args) > RETURNING[name] else next(named, None)
        if not isinstance(source, Tensor) or not self._has_rows(source) or self.routed(source):
            return NONE
        if name == "__setitem__":
            parts = _parts(args[0], args[1])
            told = (dim for dim, part in parts if type(part) is int or _is_list_of_rows(part))
            return NONE.union(*(_size(args[0], dim) for dim in told))
        return _size(args[0], _dims(args, kwargs, 1, 0)[0])


def by_torch_names(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by the names that torch's documents have for them."""
    return {NUMPY.get(name, name): item for name, item in kwargs.items()}


def in_order(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a function with the first one in front, also where it is given by its name."""
    named = by_torch_names(kwargs)
    return (args, named) if args or "input" not in named else ((named.pop("input"),), named)


def _name(func: Any) -> str:
    """Return the name of a function, without the underscore of those that write to their argument."""
    name: str = getattr(func, "__name__", "")
    return name if name.startswith("__") else name.rstrip("_")


def _parts(base: Tensor, index: Any) -> list[tuple[int, Any]]:
    """Return the parts of an index, each with the dimension that it says something of."""
    parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not None]
    # a mask stands for as many dimensions as it has
    taken = [
        p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else int(p is not Ellipsis) for p in parts
    ]
    found, dim = [], 0
    for i, part in enumerate(parts):
        if part is Ellipsis:
            dim = base.dim() - sum(taken[i:])
            continue
        found.append((dim, part))
        dim += taken[i]
    return found


def _is_list_of_rows(part: Any) -> bool:
    """Whether a part of an index says row by row what it picks."""
    return isinstance(part, list | range) or (hasattr(part, "__array__") and part.ndim > 0)


def _letters(term: str) -> list[tuple[int, str]]:
    """The letters of an operand of `torch.einsum`, each with its dimension, from the back behind an ellipsis."""
    head, _, tail = term.partition("...")
    return [*enumerate(head), *((dim - len(tail), letter) for dim, letter in enumerate(tail))]


def _size(tensor: Tensor, dim: int) -> Sizes:
    """The size of a dimension along which rows are picked."""
    dim %= max(tensor.dim(), 1)
    return Sizes({tensor.shape[dim]}) if dim else FIRST


def _dims(args: Any, kwargs: Any, place: int, default: int) -> list[int]:
    """The dimensions that an operation is given by name, or among its arguments from a place on."""
    given = next((kwargs[name] for name in ("dim", "dims") if name in kwargs), args[place:])
    return [leaf for leaf in tree_leaves(given) if type(leaf) is int] or [default]


def _cut_along(name: str, args: Any, kwargs: Any) -> int | None:
    """The size of the dimension, one of the first two, along which an operation takes the rows of a tensor apart."""
    dim = None
    if name == "__getitem__":
        whole = slice(None)
        parts = _parts(args[0], args[1])
        cut = (d for d, part in parts if type(part) is int or (isinstance(part, slice) and part != whole))
        dim = next(cut, None)
    elif name in CUTTING and args[0].dim():
        dim = _dims(args, kwargs, CUTTING[name], 0)[0] % args[0].dim()
    elif name in CUTTING_ALONG:
        # of a single dimension that one
        dim = min(CUTTING_ALONG[name], args[0].dim() - 1)
    # a nested tensor of the strided layout knows its sizes, and has no shape
    return args[0].size(dim) if dim in (0, 1) else None


def _joined(name: str, args: Any, kwargs: Any, tensors: list[Tensor], cut: int | None) -> Sizes | None:
    """How many rows were taken apart that an operation puts together again, along the second dimension all; None of another one.

    Of a loop over positions neither these nor the tensors are as many as the examples.
    """
    if name not in JOINING or len(tensors) < 2:
        return None
    last = tensors[0].dim() + (name == "stack")
    dim = _dims(args[:2], kwargs, 1, JOINING[name])[0] % max(1, last)
    if dim > 1:
        return None
    return NONE if cut is None or (dim and cut != len(tensors)) else Sizes({cut, len(tensors)})


def in_place(func: Any, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Tell whether a function, called with these keywords, writes to its first argument."""
    if kwargs and kwargs.get("inplace") is True:
        # nn.ReLU(inplace=True) and its like call one function for both
        return True
    schema = getattr(func, "_schema", None)
    if schema is not None:
        # an operator of the dispatcher, whose name ends in that of its overload
        return bool(schema.is_mutable)
    name = getattr(func, "__name__", "")
    return name in WRITING or (name[-1:] == "_" and name[-2:] != "__")
