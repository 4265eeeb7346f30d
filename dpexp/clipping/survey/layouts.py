"""Layouts: which rows of a layer's input belong to which example.

A layer is told nothing about the batch. From the shapes we propose a layout and then *prove* it on the real graph: weight the
losses and back-propagate again. A row that belongs to example i alone must have its gradient multiplied by exactly the weight
of i. Rows that several examples share (a position table looked up once, a batch statistic)
fail the proof. Of rows that the model picked by index, as experts get theirs, the weights themselves tell whose each is
(`Owned`), for this batch. Proposals that fail leave the layer to the per-example loop, which needs no layout, or are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpexp.clipping.gradients import PerExampleGradient
from dpexp.clipping.gradients.numerics import along
from dpexp.clipping.loop import finite
from dpexp.clipping.tapping.uses import Arrival, Use

ROWS, SECOND, BLOCKED, STRIDED, LOOP = "rows", "second", "blocked", "strided", "loop"
# tokens of all examples in the second dimension, behind experts or positions
SECOND_BLOCKED = "second, blocked"
TURNED = (SECOND, SECOND_BLOCKED)
# several rows for each example, which may as well be a chance; and in any dimension
BLOCKS = (BLOCKED, STRIDED)
SEVERAL = (*BLOCKS, SECOND_BLOCKED)
# whose examples come one after the other
IN_ORDER = (ROWS, BLOCKED)
# of `weights`; none is 1 or -1, so that the largest gradient of a batch is another one, and what goes by it shows
LEVELS = (2.0, -2.0, 0.5, -0.5, 0.25, -0.25)
# and where rows tell whose they are, which takes fewer back-propagations with more of them; in float16 these would overflow
MANY_LEVELS = tuple(sign * 2.0**power for power in range(1, 9) for sign in (1, -1))
# no proposal, and no gradient has arrived so far
UNSEEN = "unseen"
# no row, or rows without any gradient: they add nothing to this batch, and no formula is asked
NOBODY = "nobody"


@dataclass(frozen=True, eq=False)
class Owned:
    """A layout of one batch: the rows of each example, wherever they lie, and as many for each as for the one that has most.

    Attributes:
        owners: ``[R]``, whose each row is; -1 of a row without a gradient.
        places: ``[B, m]``, the rows of each example; its first one again in the place of those that it lacks.
        real: ``[B, m]`` bool, False where an example lacks a row.
    """

    owners: Tensor
    places: Tensor
    real: Tensor

    @staticmethod
    def of(owners: Tensor, num_examples: int) -> Owned:
        """Put the rows of each example side by side; ``owners``: ``[R]``."""
        rows = (owners >= 0).nonzero().squeeze(1)
        rows = rows[owners[rows].argsort(stable=True)]
        own = owners[rows]
        counts = torch.bincount(own, minlength=num_examples)
        numbers = torch.arange(len(rows), device=own.device) - (counts.cumsum(0) - counts)[own]
        most = max(1, int(counts.max()))
        places = owners.new_zeros(num_examples, most)
        real = torch.zeros_like(places, dtype=torch.bool)
        places[own, numbers], real[own, numbers] = rows, True
        places = torch.where(real, places, places[:, :1])
        return Owned(owners, places, real)

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return the rows ``[B * m, …]`` of a tensor ``[R, …]``; those that an example lacks hold any finite numbers."""
        if not len(tensor):
            return tensor.new_zeros(self.places.numel(), *tensor.shape[1:])
        found = tensor[self.places.flatten()]
        # an example without any row is not to lose its gradient by a row of another one
        clean = finite(found)
        return found if clean is found else torch.where(along(self.real, found), found, clean)

    def gradients(self, gy: Tensor) -> Tensor:
        """Return the rows ``[B * m, …]`` of gradients ``[R, …]``; zeros where an example lacks one."""
        found = self.gathered(gy)
        return found.masked_fill_(~along(self.real, found), 0)

    def weighted(self, tensor: Tensor, by_row: Tensor) -> Tensor:
        """Multiply each row of a tensor ``[R, …]`` by the weight of its example, of which each has as many in ``by_row``.

        One without an owner becomes zero.
        """
        own = by_row.to(tensor)[self.owners.clamp(min=0) * (len(by_row) // len(self.places))]
        return tensor * along(own.masked_fill(self.owners < 0, 0), tensor)


# which rows are whose: a name, or what was found of one batch
Layout = str | Owned


def candidates(input_shape: torch.Size | None, output_shape: torch.Size, rows: int) -> list[str]:
    """Layouts that the shapes allow, the surest first. ``rows`` = examples × rows per example."""
    shape = output_shape if input_shape is None else input_shape
    if not output_shape or not shape or shape[0] != output_shape[0]:
        return []
    found = [ROWS] if shape[0] == rows else []
    if shape[0] != rows and rows > 0 and shape[0] % rows == 0:
        found += [BLOCKED, STRIDED]
    # Last: where gradients tell too little, what is first is taken, and it must be possible. Of rows that are mapped one by one,
    # the only dimension behind the first has features: as many as examples by chance.
    if len(shape) >= 2 and len(output_shape) >= 2 + (len(shape) == 2 and input_shape is not None):
        found += [SECOND] if shape[1] == output_shape[1] == rows else []
    if min(len(shape), len(output_shape)) > 2 and 0 < rows < shape[1] == output_shape[1]:
        found += [SECOND_BLOCKED] if shape[1] % rows == 0 else []
    return found


def surplus(layout: str, shape: torch.Size, rows: int, columns: Iterable[int]) -> int | None:
    """How many more rows than the closest input has columns each example has at an operation; None where they are no blocks.

    It is the same for texts of every length. Where it changes, rows may be a multiple of the batch by chance: a model may leave
    padding out as soon as a batch has some.
    """
    if layout not in SEVERAL:
        return None
    of_each = shape[layout in TURNED] // rows
    return min((of_each - entered for entered in columns), key=abs, default=of_each)


def _is_turned(tensor: Tensor, layout: str, rows: int) -> bool:
    """Tell whether the rows of a tensor stand in its second dimension."""
    if layout not in TURNED or tensor.dim() < 2:
        return False
    return tensor.shape[1] == rows if layout == SECOND else tensor.shape[1] % rows == 0


def example_major(tensor: Tensor, layout: str, rows: int) -> Tensor:
    """Rearrange so that the leading dimension is ``rows * m`` with the m rows of one example adjacent."""
    if _is_turned(tensor, layout, rows):
        return tensor.transpose(0, 1)
    if layout == STRIDED:
        return tensor.unflatten(0, (-1, rows)).transpose(0, 1).flatten(0, 1)
    return tensor


def per_example(
    use: Use,
    saved: tuple[Tensor, ...],
    gy: Tensor,
    layout: Layout,
    rows: int,
    num_examples: int,
    names: set[str],
) -> dict[str, PerExampleGradient]:
    """Find the per-example gradients of a use whose layout is known; ``rows``: of all examples."""
    if isinstance(layout, Owned):
        arranged, gradient, places = layout.gathered, layout.gradients(gy), layout.places.flatten()
    else:
        arranged = partial(example_major, layout=layout, rows=rows)
        gradient, places = arranged(gy), None
        if use.formula.by_place:
            places = arranged(torch.arange(len(gy), device=gy.device))
    own = tuple(arranged(s) if b else s for s, b in zip(saved, use.batched, strict=True))
    turned = layout in TURNED and gy.dim() >= 2
    return Arrival(use, own, gradient, num_examples, turned, places).per_example(names)


def due(number: int) -> bool:
    """Tell whether the backward pass of this number proves again what was proven: the 16th, the 64th, the 256th and so on.

    A model may begin to mix examples after its first step (an augmentation that starts late, a flag). To look now and then is
    cheap insurance, not a proof.
    """
    return number > 4 and number.bit_count() == 1 and number.bit_length() % 2 == 1


def due_for_rows(number: int) -> bool:
    """Tell whether the backward pass of this number proves again whose rows are whose: those of the first batch may have been in
    order by chance, and put in order by something that nobody watches."""
    return number == 2 or due(number)


def fixed_order(num_examples: int, turn: int = 0) -> Tensor:
    """Return ``[B]`` a random order, the same for a turn, in which neighbours, mirror images and other partners are apart."""
    return torch.randperm(
        num_examples, generator=torch.Generator().manual_seed(20221201 + turn), device="cpu"
    )


def weights(num_examples: int, digit: int = 0, levels: Sequence[float] = LEVELS) -> Tensor:
    """``[B]`` weights of the losses in a proof: ``levels`` in equal parts, in a fixed random order.

    More than two levels, because examples of the same weight can exchange their gradients unseen: signs alone happen to read the
    same from either end for some B, and mixing each example with its mirror image is a usual augmentation. Powers of two,
    because multiplying by them rounds nothing, also in 16 bits. Other ``digit``s give other weights, see `all_weights`.
    """
    numbers = fixed_order(num_examples) // len(levels) ** digit % len(levels)
    return torch.tensor(levels, device="cpu")[numbers]


def all_weights(num_examples: int, levels: Sequence[float]) -> list[Tensor]:
    """As many `weights` as it takes that no two examples have the same in all: where rows are put in order, any two may change
    places."""
    digits = 1
    while len(levels) ** digits < num_examples:
        digits += 1
    return [weights(num_examples, digit, levels) for digit in range(digits)]


def weighted_rows(tensor: Tensor, layout: Layout, rows: int, by_row: Tensor) -> Tensor:
    """Multiply the rows of each example by the example's weight; ``by_row`` is ``[rows]``, the layout stays."""
    if isinstance(layout, Owned):
        return layout.weighted(tensor, by_row)
    if _is_turned(tensor, layout, rows):
        return weighted_rows(tensor.transpose(0, 1), BLOCKED, rows, by_row).transpose(0, 1)
    times = len(tensor) // rows
    weights = by_row.repeat(times) if layout == STRIDED else by_row.repeat_interleave(times)
    return tensor * along(weights.to(tensor), tensor)
