"""Where a mode stands among those that torch functions go through, and what stands behind a tensor within `torch.func`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C import _functorch
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode


@contextmanager
def put_below(mode: Any) -> Iterator[None]:
    """Inside, a mode is below those that the loop has entered, for who leaves one takes the topmost off."""
    _stack([mode, *_unstacked()])
    try:
        yield
    finally:
        _stack([other for other in _unstacked() if other is not mode])


def unwrapped(tensor: Tensor) -> Tensor:
    """What stands behind a tensor within a transform of `torch.func`."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _unstacked() -> list[Any]:
    """Take all modes off their stack, and return them as they stood."""
    found: list[Any] = []
    while (mode := _get_current_function_mode()) is not None:
        found.insert(0, mode)
        _pop_mode()
    return found


def _stack(modes: Iterable[Any]) -> None:
    for mode in modes:
        _push_mode(mode)
