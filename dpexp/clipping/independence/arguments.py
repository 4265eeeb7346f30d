"""What enters a forward: the names of its arguments, and the arguments with leaves replaced, however they are nested."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from dpexp.clipping.tapping.forwards import attributes_of, tensors_in

Inputs = tuple[tuple, dict]
Change = Callable[[str, Any], Any]
Stop = Callable[[Any], bool]


def positional_names(model: nn.Module) -> list[str]:
    """Names of the positional arguments of a model's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind in kinds]


def copied(name: str, value: Any) -> Any:
    """Return a copy of a tensor; anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def changed(inputs: Inputs, change: Change, stop: Stop | None = None, names: Sequence[str] = ()) -> Inputs:
    """The arguments of a forward with every leaf replaced by ``change(name, leaf)``.

    Args:
        inputs: positional arguments and keyword arguments.
        stop: says of a container that it is a leaf.
        names: of the positional arguments, as far as they are known.
    """
    args, kwargs = inputs
    known = [*names, *[""] * len(args)]
    return (
        tuple(_changed(known[i], value, change, stop) for i, value in enumerate(args)),
        {name: _changed(name, value, change, stop) for name, value in kwargs.items()},
    )


def leaves(inputs: Inputs, stop: Stop | None = None, names: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """The leaves of the arguments of a forward, each with its name; arguments as for `changed`."""
    found: list[tuple[str, Any]] = []

    def note(name: str, leaf: Any) -> Any:
        found.append((name, leaf))
        return leaf

    changed(inputs, note, stop, names)
    return found


def _changed(name: str, value: Any, change: Change, stop: Stop | None, depth: int = 2) -> Any:
    """Goes through lists, tuples, mappings, dataclasses and other objects that hold tensors."""
    if stop is not None and stop(value):
        return change(name, value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind: Any = type(value)
        return kind._make(_changed(name, v, change, stop, depth) for v in value)
    if isinstance(value, list | tuple):
        return type(value)([_changed(name, v, change, stop, depth) for v in value])
    if isinstance(value, Mapping):
        if (known := SUPPORTED_NODES.get(type(value))) is not None:
            # torch was told how to take it apart: a TensorDict has a size of its own, which follows from its parts
            parts, context = known.flatten_fn(value)
            named = zip(value.keys(), parts, strict=True)
            return known.unflatten_fn([_changed(str(k), v, change, stop, depth) for k, v in named], context)
        try:
            result: Any = copy(value)
            inner = getattr(value, "data", None)
            if isinstance(inner, dict):
                # a batch of a tokenizer keeps its entries there
                result.data = dict(inner)
            for key in value:
                result[key] = _changed(str(key), value[key], change, stop, depth)
            return result
        except TypeError:
            return {key: _changed(str(key), value[key], change, stop, depth) for key in value}
    attributes = attributes_of(value) if depth else {}
    if tensors_in(list(attributes.values())):
        result = copy(value)
        for key, part in attributes.items():
            object.__setattr__(result, key, _changed(key, part, change, stop, depth - 1))
        return result
    return change(name, value)
