"""Layouts: which rows of a layer's input belong to which example.

A layer is told nothing about the batch. From the shapes we propose a layout and then *prove* it on the real graph: weight the
losses and back-propagate again. A row that belongs to example i alone must have its gradient multiplied by exactly the weight
of i. Rows that several examples share (a position table looked up once, a batch statistic)
fail the proof. Proposals that fail leave the layer to the per-example loop, which needs no layout, or are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dpexp.clipping.gradients import PerExampleGradient
from dpexp.clipping.gradients.numerics import wide
from dpexp.clipping.uses import Use

Signature = tuple[Tensor, Tensor]
ROWS, SECOND, BLOCKED, STRIDED, LOOP = "rows", "second", "blocked", "strided", "loop"
# several rows for each example, which may as well be a chance
BLOCKS = (BLOCKED, STRIDED)
# of `weights`
LEVELS = (1.0, -1.0, 0.5, -0.5, 0.25, -0.25)
# no proposal, and no gradient has arrived so far
UNSEEN = "unseen"
# rows along the last dimension
LAST = "last"


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
    return use.per_example(major, example_major(gy, layout, rows), num_examples, names)


def due(number: int) -> bool:
    """Tell whether the backward pass of this number proves again what was proven: the 16th, the 64th, the 256th and so on.

    A model may begin to mix examples after its first step (an augmentation that starts late, a flag). To look now and then is
    cheap insurance, not a proof.
    """
    return number > 4 and number.bit_count() == 1 and number.bit_length() % 2 == 1


def fixed_order(num_examples: int) -> Tensor:
    """Return ``[B]`` a random order, always the same, in which neighbours, mirror images and other regular partners are apart."""
    return torch.randperm(num_examples, generator=torch.Generator().manual_seed(20221201), device="cpu")


def weights(num_examples: int, digit: int = 0) -> Tensor:
    """``[B]`` weights of the losses in a proof: `LEVELS` in equal parts, in a fixed random order.

    More than two levels, because examples of the same weight can exchange their gradients unseen: signs alone happen to read the
    same from either end for some B, and mixing each example with its mirror image is a usual augmentation. Powers of two,
    because multiplying by them rounds nothing, also in 16 bits. Other ``digit``s give other weights, see `all_weights`.
    """
    return torch.tensor(LEVELS)[fixed_order(num_examples) // len(LEVELS) ** digit % len(LEVELS)]


def all_weights(num_examples: int) -> list[Tensor]:
    """As many `weights` as it takes that no two examples have the same in all: where rows are put in order, any two may change
    places."""
    digits = 1
    while len(LEVELS) ** digits < num_examples:
        digits += 1
    return [weights(num_examples, digit) for digit in range(digits)]


def signature(gy: Tensor, layout: str, rows: int) -> Signature:
    """A random projection of each example's gradient rows, ``[rows, m]``, and their norms.

    Random, not a sum: the gradients below a normalisation or a softmax sum to zero.
    """
    flat = example_major(gy, layout, rows).detach()
    flat = flat.reshape(rows, -1) if flat.dim() < 2 or flat.shape[0] == rows else flat.flatten(1)
    flat = flat.to(wide(flat.dtype))
    generator = torch.Generator().manual_seed(flat.shape[1])
    direction = torch.randn(flat.shape[1], generator=generator, dtype=torch.float32, device="cpu").to(flat)
    return (flat @ direction).reshape(rows, -1), flat.norm(dim=1).reshape(rows, -1)


def proven(plain: Signature, weighted: Signature, by_row: Tensor, dtype: torch.dtype) -> bool | None:
    """Does each row follow the weight of its own example? None where no row is large enough to tell: nothing was learnt.

    Rows that come near the end of the exponents' range are only rounding errors, and too small to matter.
    """
    error, scale, finite = _compared(plain, weighted, by_row)
    info = torch.finfo(dtype)
    telling = finite & (scale > (0.0 if dtype == torch.float16 else info.tiny / info.eps))
    if not bool(telling.any()):
        return None
    tolerance = 1e-3 if info.bits >= 32 else 0.1
    return not bool((telling & (error > tolerance * scale)).any())


def single_weight(plain: Signature, weighted: Signature, dtype: torch.dtype) -> float | None:
    """The weight that all rows follow, where that is one of `LEVELS`: they belong to one example."""
    if torch.finfo(dtype).bits < 32:
        # the levels are no further apart than rounding errors
        return None
    levels = torch.tensor(LEVELS).to(plain[0])
    errors = (weighted[0][..., None] - levels * plain[0][..., None]).abs()
    follows = (errors <= 1e-4 * (plain[1] + weighted[1])[..., None]).flatten(0, -2).all(0)
    return float(levels[follows]) if int(follows.sum()) == 1 else None


def views(gy: Tensor) -> dict[str, Signature]:
    """The rows that may be one example's each, where no shape tells: all those in front, or those along the last dimension."""
    if not gy.numel():
        return {}
    seen = {UNSEEN: gy.reshape(-1, 1) if gy.dim() < 2 else gy.flatten(0, -2)}
    if gy.dim() > 1:
        seen[LAST] = gy.movedim(-1, 0).flatten(1)
    return {view: signature(rows, ROWS, len(rows)) for view, rows in seen.items()}


def apart(seen: Sequence[dict[str, Signature]], dtype: torch.dtype) -> bool:
    """Whether each row follows the weight of one example, whichever that is, in one of the `views`: of the plain
    back-propagation, and of weighted ones."""
    return not seen[0] or any(
        all(_apart(seen[0][view], rows[view], dtype) for rows in seen[1:]) for view in seen[0]
    )


def _apart(plain: Signature, weighted: Signature, dtype: torch.dtype) -> bool:
    tolerance = 1e-3 if torch.finfo(dtype).bits >= 32 else 0.1
    follows = torch.zeros_like(plain[0], dtype=torch.bool)
    for level in LEVELS:
        follows |= (weighted[0] - level * plain[0]).abs() <= tolerance * (plain[1] + weighted[1])
    return bool((follows | ~(plain[1] + weighted[1]).isfinite()).all())


def refuted(plain: Signature, weighted: Signature, by_row: Tensor, dtype: torch.dtype) -> bool:
    """Whether a layout that was proven before does not hold any more.

    Stricter about evidence than `proven` is about proof: training goes on if this is False, and in a trained model the
    gradients of confident examples are so small that rounding is all there is to see.
    """
    error, scale, finite = _compared(plain, weighted, by_row)
    large = scale > 1e-3 * torch.where(finite, scale, 0.0).max()
    tolerance = 0.02 if torch.finfo(dtype).bits >= 32 else 0.2
    return bool((finite & large & (error > tolerance * scale)).any())


def _compared(plain: Signature, weighted: Signature, by_row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far rows are from what their weights ask for, how large they are, and whether both are finite."""
    value, norm = plain
    error, scale = (weighted[0] - by_row.to(value)[:, None] * value).abs(), norm + weighted[1]
    return error, scale, error.isfinite() & scale.isfinite()


def weighted_rows(tensor: Tensor, layout: str, rows: int, by_row: Tensor) -> Tensor:
    """Multiply the rows of each example by the example's weight; ``by_row`` is ``[rows]``, the layout stays."""
    major = example_major(tensor, layout, rows)
    weights = by_row.to(tensor).repeat_interleave(major.shape[0] // rows)
    if layout == STRIDED:
        weights = by_row.to(tensor).repeat(tensor.shape[0] // rows)
    if layout == SECOND and major is not tensor:
        return tensor * weights.view(1, -1, *[1] * (tensor.dim() - 2))
    return tensor * weights.view(-1, *[1] * (tensor.dim() - 1))
