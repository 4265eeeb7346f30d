"""Tensors that lie where others do, and that no call is seen to make: ``Variable(x)``, ``torch.Tensor(x)``, ``t.set_(x)``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.errors import UntoldError
from dpexp.training.watching.lines import address_of

MISSING = object()


class Aliases:
    """What is known of the tensors of a trace, by where they lie.

    Args:
        facts: of tensors; what is known of one is true of each other tensor in its place.
    """

    def __init__(self, facts: Sequence[WeakIdKeyDictionary]) -> None:
        self._facts = facts
        # place -> what is known there; the storages are kept here from giving their numbers to others
        self._there: dict[Hashable, list[tuple[WeakIdKeyDictionary, Any]]] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        # those that nothing but values of the batch stands in
        self._whole: set[int] = set()

    def add(self, tensor: Tensor, whole: bool = True) -> None:
        """Remember what is known of a tensor; ``whole``: whether all that lies there was made of the batch."""
        if not address_of(tensor):
            return
        storage = StorageWeakRef(tensor.untyped_storage())
        self._storages.setdefault(storage.cdata, storage)
        if whole and tensor._base is None:
            self._whole.add(storage.cdata)
        found = [(fact, fact.get(tensor, MISSING)) for fact in self._facts]
        self._there[_place(tensor)] = [(fact, value) for fact, value in found if value is not MISSING]

    def adopt(self, tensor: Tensor) -> None:
        """Let a tensor of which nothing is known be what another one in its place is.

        Raises:
            UntoldError: it is an unknown part of what was made of the batch.
        """
        if not self._storages or not address_of(tensor):
            return
        for fact, value in self._there.get(_place(tensor), ()):
            fact[tensor] = value
        if tensor.untyped_storage()._cdata in self._whole and _place(tensor) not in self._there:
            raise UntoldError(
                "a tensor lies where values of the batch are, and no call of torch has put it there"
            )


def _place(tensor: Tensor) -> Hashable:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
