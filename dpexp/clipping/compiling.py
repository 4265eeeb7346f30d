"""Where `torch.compile` cuts its graph. Its compiler is told with the first clipper: to import it takes two seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

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


def uncompiled(function: F) -> F:
    """Have a compiler cut its graph at a function, or a method, without a price where nothing is compiled."""
    place: Callable[..., Any] = function

    def tell() -> None:
        nonlocal place
        place = torch.compiler.disable(function, reason=CUT)
        # where a graph was cut, `either` is called by itself: the compiler would compile it for each kind of arguments,
        # and warn that there are too many
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(either.__code__, dynamo._FrameExecStrategy(skip, skip))

    def either(*args: Any, **kwargs: Any) -> Any:
        return (place if torch.compiler.is_dynamo_compiling() else function)(*args, **kwargs)

    _untold.append(tell)
    return cast(F, functools.wraps(function)(either))
