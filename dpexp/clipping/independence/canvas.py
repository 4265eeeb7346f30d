"""Images of several sizes on one canvas: what is found in an image must not feel how large the canvas is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpexp.clipping.independence.arguments import Inputs, changed, leaves, positional_names
from dpexp.clipping.independence.padding import Pairs, Unequal
from dpexp.clipping.independence.replay import Replay
from dpexp.errors import UntoldError

ONE_SIZE = (
    "Leave padding out (a mean over the pixels that are an image's own, a mask behind each convolution), or give all images one "
    "size and say so: fixed_length=True of PrivacyEngine or attach"
)


@dataclass
class Canvas:
    """How the inputs of one forward say where images lie.

    Attributes:
        inside: ``[rows, H, W]`` bool, the pixels of the images; each lies in the upper left corner.
    """

    inputs: Inputs
    names: list[str]
    rows: int
    inside: Tensor

    @staticmethod
    def of(replay: Replay, rows: int, token: int | float | None) -> Canvas | None:
        """None where nothing says that an image is smaller than the canvas: no mask, and no ``token``, see `Padding.of`."""
        names = positional_names(replay.model)
        entered = [
            (name, part)
            for name, part in leaves(replay.inputs, names=names)
            if isinstance(part, Tensor) and part.dim() in (3, 4) and part.shape[0] == rows
        ]
        # some masks are True where nothing is
        said = [part == part[0, 0, 0] for name, part in entered if part.dim() == 3 and "mask" in name]
        if isinstance(token, float):
            said += [
                _around(part != token) for _, part in entered if part.dim() == 4 and part.is_floating_point()
            ]
        for inside in said:
            if torch.equal(inside, _corner(inside)) and not bool(inside.all()):
                return Canvas(replay.inputs, names, rows, inside)
        return None

    def pairs(self, unequal: Unequal) -> Pairs:
        """Pairs of the batch and one on a canvas of twice the height, or the width, and how their outputs are compared."""
        for axis in (-2, -1):
            yield lambda: self.inputs, partial(self.resized, axis), partial(self._differs, unequal, axis)

    def resized(self, axis: int) -> Inputs:
        """The batch on a canvas of twice the size along a dimension."""
        size = self.inside.shape[1:]
        empty = (~self.inside).nonzero()[0]

        def change(name: str, part: Any) -> Any:
            if not isinstance(part, Tensor) or part.shape[:1] != (self.rows,) or part.shape[-2:] != size:
                return part
            row, y, x = empty
            # what stands beside an image, in each channel
            beside = part[row, ..., y, x]
            outside = part.movedim((0, -2, -1), (0, 1, 2))[~self.inside.to(part.device)]
            if not bool((outside == beside).all()):
                raise UntoldError(f"what {name} holds beside the images is no constant")
            more = beside.reshape(1, *beside.shape, 1, 1).expand_as(part)
            return torch.cat([part, more], axis)

        return changed(self.inputs, change, names=self.names)

    def _differs(
        self, unequal: Unequal, axis: int, short: Tensor, long: Tensor, leaf: int | None = None
    ) -> bool | None:
        """Compare what has the shape of the canvas, or a fraction of it, inside of images, and what has none of it as a whole."""
        if short.shape == long.shape:
            return unequal(short, long)
        if short.dim() < 3 or short.shape[0] != self.rows or long.dim() != short.dim():
            return None
        long = long.narrow(axis, 0, min(short.shape[axis], long.shape[axis]))
        strides = [whole // part for whole, part in zip(self.inside.shape[1:], short.shape[-2:], strict=True)]
        if long.shape != short.shape or 0 in strides:
            return None
        # of what stands for several pixels, all lie in the image
        keep = self.inside[:, strides[0] - 1 :: strides[0], strides[1] - 1 :: strides[1]].to(short.device)
        keep = keep.reshape(self.rows, *[1] * (short.dim() - 3), *keep.shape[1:])
        if keep.shape[-2:] != short.shape[-2:]:
            return None
        return unequal(torch.where(keep, short, 0.0), torch.where(keep, long, 0.0))


def _rectangle(tall: Tensor, wide: Tensor) -> Tensor:
    return tall[:, :, None] & wide[:, None]


def _corner(inside: Tensor) -> Tensor:
    """The rectangles in the upper left corners, as high and as wide as what is inside, ``[rows, H, W]``."""
    return _rectangle(*(inside.any(axis).cumprod(1).bool() for axis in (2, 1)))


def _around(seen: Tensor) -> Tensor:
    """The least such rectangles around all that is seen, of ``[rows, channels, H, W]``."""
    return _rectangle(*(seen.any(1).any(axis).flip(1).cummax(1).values.flip(1) for axis in (2, 1)))
