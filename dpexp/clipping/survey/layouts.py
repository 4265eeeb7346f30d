"""Layouts: which rows of a layer's input belong to which example.

A layer is told nothing about the batch. From the shapes we propose a layout and then *prove* it on the real graph: weight the
losses and back-propagate again. A row that belongs to example i alone must have its gradient multiplied by exactly the weight
of i. Rows that several examples share (a position table looked up once, a batch statistic)
fail the proof. Proposals that fail leave the layer to the per-example loop, which needs no layout, or are refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dpexp.clipping.gradients import PerExampleGradient
from dpexp.clipping.tapping.uses import Arrival, Use

ROWS, SECOND, BLOCKED, STRIDED, LOOP = "rows", "second", "blocked", "strided", "loop"
# several rows for each example, which may as well be a chance
BLOCKS = (BLOCKED, STRIDED)
# of `weights`; none is 1 or -1, so that the largest gradient of a batch is another one, and what goes by it shows
LEVELS = (2.0, -2.0, 0.5, -0.5, 0.25, -0.25)
# no proposal, and no gradient has arrived so far
UNSEEN = "unseen"


def candidates(input_shape: torch.Size | None, output_shape: torch.Size, rows: int) -> list[str]:
    """Layouts that the shapes allow, most likely first. ``rows`` = examples × rows per example."""
    shape = output_shape if input_shape is None else input_shape
    if not output_shape or not shape or shape[0] != output_shape[0]:
        return []
    found = []
    if shape[0] == rows:
        found.append(ROWS)
    if len(shape) >= 2 and len(output_shape) >= 2 and shape[1] == output_shape[1] == rows:
        found.append(SECOND)
    if shape[0] != rows and rows > 0 and shape[0] % rows == 0:
        found += [BLOCKED, STRIDED]
    return found


def surplus(layout: str, shape: torch.Size, rows: int, columns: Iterable[int]) -> int | None:
    """How many more rows than the closest input has columns each example has at an operation; None where they are no blocks.

    It is the same for texts of every length. Where it changes, rows may be a multiple of the batch by chance: a model may leave
    padding out as soon as a batch has some.
    """
    if layout not in BLOCKS:
        return None
    return min((shape[0] // rows - entered for entered in columns), key=abs, default=shape[0] // rows)


def example_major(tensor: Tensor, layout: str, rows: int) -> Tensor:
    """Rearrange so that the leading dimension is ``rows * m`` with the m rows of one example adjacent."""
    if layout == SECOND and tensor.dim() >= 2 and tensor.shape[1] == rows:
        return tensor.transpose(0, 1)
    if layout == STRIDED:
        return tensor.unflatten(0, (-1, rows)).transpose(0, 1).flatten(0, 1)
    return tensor


def per_example(
    use: Use,
    saved: tuple[Tensor, ...],
    gy: Tensor,
    layout: str,
    rows: int,
    num_examples: int,
    names: set[str],
) -> dict[str, PerExampleGradient]:
    """Find the per-example gradients of a use whose layout is known; ``rows``: of all examples."""
    major = tuple(example_major(s, layout, rows) if b else s for s, b in zip(saved, use.batched, strict=True))
    turned = layout == SECOND and gy.dim() >= 2
    return Arrival(use, major, example_major(gy, layout, rows), num_examples, turned).per_example(names)


def due(number: int) -> bool:
    """Tell whether the backward pass of this number proves again what was proven: the 16th, the 64th, the 256th and so on.

    A model may begin to mix examples after its first step (an augmentation that starts late, a flag). To look now and then is
    cheap insurance, not a proof.
    """
    return number > 4 and number.bit_count() == 1 and number.bit_length() % 2 == 1


def fixed_order(num_examples: int, turn: int = 0) -> Tensor:
    """Return ``[B]`` a random order, the same for a turn, in which neighbours, mirror images and other partners are apart."""
    return torch.randperm(
        num_examples, generator=torch.Generator().manual_seed(20221201 + turn), device="cpu"
    )


def weights(num_examples: int, digit: int = 0) -> Tensor:
    """``[B]`` weights of the losses in a proof: `LEVELS` in equal parts, in a fixed random order.

    More than two levels, because examples of the same weight can exchange their gradients unseen: signs alone happen to read the
    same from either end for some B, and mixing each example with its mirror image is a usual augmentation. Powers of two,
    because multiplying by them rounds nothing, also in 16 bits. Other ``digit``s give other weights, see `all_weights`.
    """
    levels = torch.tensor(LEVELS, device="cpu")
    return levels[fixed_order(num_examples) // len(LEVELS) ** digit % len(LEVELS)]


def all_weights(num_examples: int) -> list[Tensor]:
    """As many `weights` as it takes that no two examples have the same in all: where rows are put in order, any two may change
    places."""
    digits = 1
    while len(LEVELS) ** digits < num_examples:
        digits += 1
    return [weights(num_examples, digit) for digit in range(digits)]


def weighted_rows(tensor: Tensor, layout: str, rows: int, by_row: Tensor) -> Tensor:
    """Multiply the rows of each example by the example's weight; ``by_row`` is ``[rows]``, the layout stays."""
    major = example_major(tensor, layout, rows)
    weights = by_row.to(tensor).repeat_interleave(major.shape[0] // rows)
    if layout == STRIDED:
        weights = by_row.to(tensor).repeat(tensor.shape[0] // rows)
    if layout == SECOND and major is not tensor:
        return tensor * weights.view(1, -1, *[1] * (tensor.dim() - 2))
    return tensor * weights.view(-1, *[1] * (tensor.dim() - 1))
