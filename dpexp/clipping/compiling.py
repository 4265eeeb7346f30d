"""Where `torch.compile` cuts its graph. Its compiler is told with the first clipper: to import it takes two seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
CUT = (
    "a clipper is attached, which records in Python: leave fullgraph=True out, and the graph is cut where parameters are used. "
    "torch.cond, while_loop, scan and flex_attention cannot be cut: give them no parameter of the model, or write an if or a "
    "loop of Python, or scaled_dot_product_attention"
)
# what is done to each place with the first clipper
_untold: list[Callable[[], None]] = []


def tell_compiler() -> None:
    """Tell the compiler of all places, before a model with a clipper can be compiled."""
    while _untold:
        _untold.pop()()


class _Cut:
    """A method, until its class has its name."""

    def __init__(self, method: Callable[..., Any]):
        self.method = method

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self.method)
        _untold.append(lambda: setattr(owner, name, torch.compiler.disable(self.method, reason=CUT)))


def cut(method: F) -> F:
    """Have a compiler cut its graph at a method."""
    return cast(F, _Cut(method))


def uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """Have a compiler cut its graph at a function, without a price where nothing is compiled."""
    place = function

    def tell() -> None:
        nonlocal place
        place = torch.compiler.disable(function, reason=CUT)

    def either(*args: Any, **kwargs: Any) -> T:
        return (place if torch.compiler.is_dynamo_compiling() else function)(*args, **kwargs)

    _untold.append(tell)
    return either
