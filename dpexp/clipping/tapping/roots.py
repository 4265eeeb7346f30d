"""Where a back-propagation begins: at the losses, or at what a stage of a pipeline handed on and the gradients that came back.

A schedule drives back-propagation stage by stage: a stage is given the gradients of its outputs, ``[B, …]`` with one row per
example, and owes the gradients of its inputs. One loss per example is the special case ``[B]`` with gradients of one. Everything
that the engine does, it does by weighting examples: a stage weights the rows of the gradients that arrive as one process weights
its losses, so each stage proves its own rows, and the proof of a chain of stages is the chain of their proofs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpexp.clipping.gradients.numerics import along
from dpexp.clipping.tapping.forwards import ForwardPass
from dpexp.errors import UserError

# of an output in autograd's graph: the number of the node that made it, and its number there
NodeKey = tuple[int, int]
# what a node says of the dimensions along which it goes
ALONG = ("_saved_dim", "_saved_dim0", "_saved_dim1", "_saved_dims", "_saved_dimension", "_saved_shifts")


def node_key(node: Any, output: int) -> NodeKey:
    """Name an output without keeping its graph alive; unique among those that one thread has made."""
    return node._sequence_nr(), output


@dataclass(frozen=True, eq=False)
class Roots:
    """What is differentiated, and with what.

    Attributes:
        tensors: losses ``[B]`` or outputs ``[rows, …]``, with a graph (or their edges in it).
        gradients: one of the shape of each tensor; row i belongs to the example of row i.
        num_examples: B.
        inputs: leaves whose gradients the stage before wants.
        owner: the forward that made the tensors, where several wait for their backward; None lets the engine find it.
        values: what tells whether an example is finite, ``[rows, …]``: the losses, or the gradients that arrived.
    """

    tensors: tuple[Tensor | GradientEdge, ...]
    gradients: tuple[Tensor, ...]
    num_examples: int
    inputs: tuple[Tensor, ...]
    owner: ForwardPass | None
    values: tuple[Tensor, ...]

    @classmethod
    def of_losses(
        cls,
        losses: Tensor,
        scale: float = 1.0,
        inputs: Sequence[Tensor] = (),
        owner: ForwardPass | None = None,
    ) -> Roots:
        """Begin at one loss per example, ``[B]``; ``scale`` multiplies them (fp16)."""
        ones = torch.full_like(losses.detach(), scale)
        return cls((losses,), (ones,), len(losses), _leaves(inputs), owner, (losses.detach(),))

    @classmethod
    def of_outputs(
        cls,
        outputs: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor] = (),
        owner: ForwardPass | None = None,
        rows_per_example: int = 1,
    ) -> Roots:
        """Begin at the outputs of a stage, ``[rows, …]``, with the gradients that the next stage has sent.

        Raises:
            UserError: a gradient has no row for every example, or none arrived.
        """
        pairs = [
            (out, g)
            for out, g in zip(outputs, gradients, strict=True)
            if g is not None and (isinstance(out, GradientEdge) or out.requires_grad)
        ]
        if not pairs:
            raise UserError("no gradient arrived at this stage's outputs: the losses do not depend on them")
        tensors, arrived = zip(*pairs, strict=True)
        rows = {g.shape[0] if g.dim() else 0 for g in arrived}
        if len(rows) != 1 or min(rows) % rows_per_example:
            raise UserError(
                f"the gradients that arrived have the shapes {[list(g.shape) for g in arrived]}; the first dimension of all "
                f"that a stage hands on must be the batch, {rows_per_example} rows per example"
            )
        return cls(tensors, arrived, min(rows) // rows_per_example, _leaves(inputs), owner, arrived)

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.gradients[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The widest of the gradients' dtypes."""
        return reduce(torch.promote_types, (gradient.dtype for gradient in self.gradients))

    def edges(self) -> list[tuple[Any, int]]:
        """Return the nodes of the graph that made these roots, each with the number of its output."""
        found = [t if isinstance(t, GradientEdge) else (t.grad_fn, t.output_nr) for t in self.tensors]
        return [(edge[0], edge[1]) for edge in found if edge[0] is not None]

    def graph(self) -> Iterator[Any]:
        """Yield every node of the graph behind these roots."""
        return nodes_behind([node for node, _ in self.edges()])

    def made_of(self, outputs: Collection[NodeKey]) -> dict[NodeKey, GradientEdge]:
        """Return those of some outputs that these roots were computed from, as edges of their graph."""
        nodes = {node._sequence_nr(): node for node in self.graph()} if outputs else {}
        return {key: GradientEdge(nodes[key[0]], key[1]) for key in outputs if key[0] in nodes}

    @property
    def in_16_bits(self) -> bool:
        """Tell whether any gradient behind these roots has 16 bits."""
        return any(map(has_16_bits, self.graph()))

    def weighted(self, weights: Tensor | None) -> list[Tensor]:
        """The gradients with the rows of each example multiplied by its weight, ``[B]``; of weight 0 nothing is left, NaN
        included."""
        if weights is None:
            return list(self.gradients)
        found = []
        for gradient in self.gradients:
            by_row = weights.to(gradient).repeat_interleave(gradient.shape[0] // self.num_examples)
            by_row = along(by_row, gradient)
            found.append(torch.where(by_row == 0, 0.0, gradient * by_row).to(gradient.dtype))
        return found

    def finite(self) -> Tensor:
        """Tell, ``[B]``, whether the loss of each example, or the gradient that arrived for it, is finite."""
        each = [
            value.unflatten(0, (self.num_examples, -1)).flatten(1).isfinite().all(1) for value in self.values
        ]
        return torch.stack(each).all(0)


def nodes_behind(nodes: Iterable[Any], without: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield these nodes of an autograd graph and all that their gradients go on to, each once, but not by way of ``without``."""
    waiting, seen = list(nodes), set(without)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)


def has_16_bits(node: Any) -> bool:
    """Tell whether a number that arrives at a node of an autograd graph has 16 bits, or fewer."""
    return any(meta.dtype.itemsize < 4 for meta in node._input_metadata)


def kind_of(node: Any, numbers: Set[int]) -> tuple[Any, ...]:
    """Return what a node of an autograd graph does to rows: its function, which dimensions of its outputs have one of these
    numbers of entries, and along which dimensions it goes. What was turned before it had a gradient shows in these alone."""
    try:
        shapes = [tuple(map(numbers.__contains__, meta.shape)) for meta in node._input_metadata]
    except RuntimeError:
        # a nested tensor of the strided layout has no shape
        shapes = []
    return node.name(), *shapes, *[getattr(node, name) for name in _dimensions(node.__class__)]


@lru_cache(1024)
def _dimensions(kind: type) -> tuple[str, ...]:
    """Which attributes of a node name dimensions."""
    return tuple(name for name in ALONG if hasattr(kind, name))


def _leaves(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t for t in inputs if isinstance(t, Tensor) and t.requires_grad)
