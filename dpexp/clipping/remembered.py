"""What is remembered of norm methods between backward passes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from dpexp.clipping.choice import choose
from dpexp.clipping.gradients import PerExampleGradient, Scratch
from dpexp.clipping.gradients.pages import give_back_freed_memory


class ByRepr(dict[Any, str]):
    """A dictionary whose keys are kept by their ``repr``, so that it can be written to a file and read again."""

    def __getitem__(self, key: object) -> str:
        return super().__getitem__(repr(key))

    def __setitem__(self, key: object, value: str) -> None:
        super().__setitem__(repr(key), value)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(repr(key))

    def get(self, key: object, default: Any = None) -> Any:
        """Return the value of a key, or ``default``."""
        return super().get(repr(key), default)


class Methods:
    """Which norm method is taken for which per-example gradients.

    Args:
        cap_bytes: most memory that one instantiated per-example gradient may take.

    Attributes:
        measured: choices by coarse shapes, see `choice.choose`.
        of_parameter: the method that was last taken for a parameter.
    """

    LARGEST = 1 << 12

    def __init__(self, cap_bytes: int):
        self.cap_bytes = cap_bytes
        self.scratch = Scratch(cap_bytes)
        self.measured = ByRepr()
        self.of_parameter: dict[str, str] = {}
        # by exact shapes: to ask `choose` costs as much as a small layer
        self._recent: dict[Hashable, str] = {}

    def choose(self, gradient: PerExampleGradient, mode: str, fused: bool) -> str:
        """Return the norm method for a per-example gradient; see `choice.choose`."""
        key = (gradient.signature(), gradient.shape, fused)
        method = self._recent.get(key)
        if method is None:
            known = len(self.measured)
            method = choose(gradient, mode, self.cap_bytes, self.measured, fused, self.scratch)
            if len(self.measured) > known:
                give_back_freed_memory()
            if len(self._recent) >= self.LARGEST:
                self._recent.clear()
            self._recent[key] = method
        return method

    def state(self) -> dict[str, Any]:
        """Return what was measured, as JSON."""
        return {"choices": dict(self.measured.items())}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what another process has measured."""
        dict.update(self.measured, state.get("choices", {}))
        self._recent.clear()
