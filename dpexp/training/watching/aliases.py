"""Tensors that lie where others do, and that no call is seen to make: ``Variable(x)``, ``torch.Tensor(x)``, ``t.set_(x)``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.errors import UntoldError
from dpexp.training.watching.lines import ByMemory, address_of

MISSING = object()


class Aliases:
    """What is known of the tensors of a trace, by where they lie.

    Args:
        facts: of tensors; what is known of one is true of each other tensor in its place.
    """

    def __init__(self, facts: Sequence[WeakIdKeyDictionary]) -> None:
        self._facts = facts
        # what is known of each part of it; and where nothing but values of the batch stands
        self._parts, self._whole = ByMemory(), ByMemory()

    def add(self, tensor: Tensor, whole: bool = True) -> None:
        """Remember what is known of a tensor; ``whole``: whether all that lies there was made of the batch."""
        if not address_of(tensor):
            return
        if whole and tensor._base is None:
            self._whole.setdefault(tensor, True)
        found = [(fact, fact.get(tensor, MISSING)) for fact in self._facts]
        parts = self._parts.setdefault(tensor, {})
        parts[_part(tensor)] = [(fact, value) for fact, value in found if value is not MISSING]

    def adopt(self, tensor: Tensor) -> None:
        """Let a tensor of which nothing is known be what another one in its place is.

        Raises:
            UntoldError: it is an unknown part of what was made of the batch.
        """
        if (parts := self._parts.get(tensor)) is None:
            return
        for fact, value in parts.get(_part(tensor), ()):
            fact[tensor] = value
        if self._whole.get(tensor) and _part(tensor) not in parts:
            raise UntoldError(
                "a tensor lies where values of the batch are, and no call of torch has put it there"
            )


def _part(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
