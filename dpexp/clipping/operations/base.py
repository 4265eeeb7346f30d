"""What a formula is: the per-example gradients of one torch function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpexp.clipping.contributions import Contribution
from dpexp.clipping.uses import ValueSlot

if TYPE_CHECKING:
    from dpexp.clipping.uses import Use


class Formula:
    """How an operation's output gradient becomes the per-example gradients of the values it was given. Stateless.

    Attributes:
        label: shown in the coverage table; None for a function of which nothing is known.
        autocast: whether autocast runs the operation in 16 bits.
        names: of the operation's arguments, in their order. The first one is mapped row by row.
    """

    label: str | None = None
    autocast = False
    names: tuple[str, ...] = ()

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the given arguments by name."""
        return dict(zip(self.names, args, strict=False)) | kwargs

    def main(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the argument that is mapped row by row; None where there is none."""
        return self.bind(args, kwargs).get(self.names[0]) if self.names else None

    def applies(self, given: dict[str, Any], values: Sequence[Tensor], batched: Sequence[Tensor]) -> bool:
        """Tell whether the formula is right for these arguments."""
        return True

    def needs(self, args: Sequence[Any], kwargs: dict[str, Any], values: Sequence[Tensor]) -> set[Any] | None:
        """Return the positions and keywords of the arguments that the gradients depend on; None for all of them."""
        given = self.bind(args, kwargs)
        wanted = self.reads({name for name, item in given.items() if is_one_of(item, values)})
        return {i for i, name in enumerate(self.names[: len(args)]) if name in wanted} | wanted

    def reads(self, valued: set[str]) -> set[str]:
        """Return the arguments that the gradients of the arguments ``valued`` depend on."""
        return {self.names[0]} if "weight" in valued else set()

    def per_example(
        self, use: Use, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int, wanted: set[int]
    ) -> dict[int, Contribution]:
        """Find per-example gradients.

        Args:
            use: the operation and its arguments.
            saved: what was saved of them; rows of one example are adjacent.
            gy: gradient of the sum of losses with respect to the output, with the same rows.
            num_examples: B; may be 0.
            wanted: which of the use's values.

        Returns:
            By index of the value.
        """
        given = use.template.given
        found: dict[int, Contribution] = {}
        for name, item in given.items():
            if isinstance(item, ValueSlot) and int(item) in wanted:
                found[int(item)] = self.gradient(name, use, given, saved, gy, num_examples)
        return found

    def gradient(
        self,
        name: str,
        use: Use,
        given: dict[str, Any],
        saved: tuple[Tensor, ...],
        gy: Tensor,
        num_examples: int,
    ) -> Contribution:
        """Find the per-example gradients of the argument ``name``; see `per_example`."""
        raise NotImplementedError

    def repeat(self, use: Use, values: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Tensor:
        """Compute the tapped tensor again, from other values."""
        return use.call(values, saved)


def is_one_of(item: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether ``item`` is, not equals, one of the tensors."""
    return any(item is t for t in tensors)


def in_autocast(x: Tensor) -> Tensor:
    """Return ``x`` as autocast hands it to a matrix product, which leaves float64 as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))
