"""What a layer kind is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from dpexp.clipping.contributions.base import Contribution
from dpexp.errors import UserError


class LayerKind(Protocol):
    """How one kind of module uses its parameters. Stateless; one small file each, listed in
    `dpexp.clipping.layers.KINDS`.

    Attributes:
        name: shown in the coverage table.
        parameters: names of the parameters that such a module may own directly. A module with others is not
            of this kind.
    """

    name: str
    parameters: frozenset[str]

    def refusal(self, module: nn.Module) -> str | None:
        """Why the module cannot be clipped at all, frozen or not, and the way out; None where it can."""
        ...

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        """Per-example gradients from one call.

        Args:
            module: the layer.
            x: the tensors that its forward received, with R = num_examples * m rows, those of an example
                adjacent.
            gy: gradient of the sum of losses with respect to its output, with the same rows.
            num_examples: B; may be 0.
            names: which of `parameters` are wanted.

        Returns:
            One contribution for each of ``names``.
        """
        ...


WEIGHT_AND_BIAS = frozenset({"weight", "bias"})


def check_rank(layer: str, x: Tensor, rank: int) -> None:
    """Refuse an input without a batch dimension, of which torch's spatial layers would make one image."""
    if x.dim() != rank:
        raise UserError(
            f"{layer} got an input of shape {tuple(x.shape)}, but per-example gradients need {rank} dimensions "
            "with the examples first: call the layer with a batch"
        )
