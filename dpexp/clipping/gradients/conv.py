"""Convolution weights, of any dimension, grouped, dilated, strided, transposed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp import native
from dpexp.clipping import cost
from dpexp.clipping.cost import Cost
from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.base import PerExampleGradient
from dpexp.clipping.gradients.grams import gram_norms

# above this many padded input pixels their Gram matrix costs more than it saves
PIXELS_AT_MOST = 400


@dataclass(frozen=True)
class Geometry:
    """How a convolution slides: one number per spatial dimension, as in ``torch.nn.ConvNd``. Padding is with zeros."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


class Conv(PerExampleGradient):
    """Per-example weight gradients of a convolution.

    "loop" is the library's own weight gradient, one example at a time. "cores" is the same with the examples spread over
    the cores, where `dpexp.native` was built: the best on a CPU in most cases.
    "grouped" computes those of all examples as one convolution with B times as many groups. "unfold" copies out
    what each output pixel saw (im2col) and multiplies matrices; "ghost" is the ghost norm of that (Bu et al.
    2022a). "pixel", for few input pixels, gets the Gram matrix of the unfolded input by adding up shifted pieces
    of the Gram matrix of the pixels, so that nothing is unfolded.

    A transposed convolution is a convolution from its output to its input: for unfolding they change places.

    Args:
        x: ``[B * m, C, *spatial]``, the rows of one example adjacent, already padded unless by zeros.
        gy: ``[B * m, O, *spatial]``, the gradient of the output.
        shape: of the weight.
        geometry: how the layer slides.
        num_examples: B.
    """

    held = ("x", "gy")
    without_gradients = frozenset({"ghost", "pixel"})

    def __init__(self, x: Tensor, gy: Tensor, shape: Sequence[int], geometry: Geometry, num_examples: int):
        x, gy = numerics.align(x, gy)
        super().__init__(shape, num_examples, x.dtype, x.device)
        self.x, self.gy, self.geometry = x, gy, geometry
        self.rows = x.shape[0] // num_examples if num_examples else 1
        self.kernel = self.shape[2:]

    # The layer as Bu et al. see it: T output pixels, d = what one of them sees, p outputs; per group of channels.

    @property
    def _seen(self) -> Tensor:
        """What is unfolded: the input, or the output gradient of a transposed convolution."""
        return self.gy if self.geometry.transposed else self.x

    @property
    def _slid(self) -> Tensor:
        """What belongs to the positions of the sliding window."""
        return self.x if self.geometry.transposed else self.gy

    def _sizes(self) -> tuple[int, int, int, int]:
        """B, T, p, d: ``p * d`` is the number of weights."""
        positions = self.rows * math.prod(self._slid.shape[2:])
        return self.num_examples, positions, self.shape[0], self.shape[1] * math.prod(self.kernel)

    def _padded(self) -> tuple[int, ...]:
        return tuple(n + 2 * p for n, p in zip(self._seen.shape[2:], self.geometry.padding, strict=True))

    def _pixels(self) -> int:
        """Padded, of one example."""
        return self.rows * math.prod(self._padded())

    def methods(self) -> tuple[str, ...]:
        spread = numerics.static(self.x) and self.x.dtype == self.dtype and native.kernels() is not None
        first, last = ("cores",) if spread else (), ("pixel",) if self._pixels() <= PIXELS_AT_MOST else ()
        return (*first, "loop", "grouped", "unfold", "ghost", *last)

    def resolve(self, method: str) -> str:
        if method == "instantiate":
            return "grouped" if self.x.is_cuda else next(m for m in self.methods() if m in ("cores", "loop"))
        return super().resolve(method)

    def cost(self, method: str) -> Cost:
        B, T, p, d = self._sizes()
        groups = self.geometry.groups
        if method == "pixel":
            grams = self._pixels() ** 2 * self._seen.shape[1] + T * T * self._slid.shape[1]
            shifted = T * T * math.prod(self.kernel) * groups
            return Cost(2 * B * (grams + shifted), self.workspace(method) // self.dtype.itemsize * B)
        if method in self.without_gradients:
            # over all groups: p outputs, d * groups seen
            ghost = cost.ghost_norm(B, T, p, d * groups)
            return Cost(ghost.flops, ghost.floats * groups)
        whole = cost.instantiation(B, T, p, d)
        return Cost(whole.flops, p * d) if method == "loop" else whole

    def workspace(self, method: str) -> int:
        _, T, p, d = self._sizes()
        groups = self.geometry.groups
        unfolded = T * d * groups
        floats = {
            "loop": p * d,
            "cores": 2 * p * d,
            "grouped": 2 * p * d,
            "unfold": p * d + unfolded,
            "ghost": 2 * T * T * groups + unfolded,
            "pixel": (2 * T * T + self._pixels() ** 2) * groups,
        }
        return self.dtype.itemsize * floats[self.resolve(method)]

    def signature(self) -> tuple[Hashable, ...]:
        sizes = (tuple(self.x.shape), tuple(self.gy.shape), tuple(self.shape), self.num_examples)
        return ("convolution", *sizes, self.geometry, self.x.dtype, str(self.device))

    # Norms without gradients.

    def _terms(self) -> int:
        return self._sizes()[1]

    def _magnitudes(self) -> Tensor | None:
        by_group = (self.num_examples, self.rows, self.geometry.groups)
        seen, slid = [
            numerics.squared_norms(t.reshape(math.prod(by_group), -1)).view(by_group).sum(1)
            for t in (self._seen, self._slid)
        ]
        windows = zip(
            self._seen.shape[2:], self._slid.shape[2:], self.kernel,
            self.geometry.stride, self.geometry.dilation, self.geometry.padding, strict=True,
        )  # fmt: skip
        return (seen * slid).sum(1) * math.prod([_times_seen(*along) for along in windows])

    def _norms(self, method: str) -> tuple[Tensor, Tensor | None]:
        found = self._pixel_norms if method == "pixel" else self._unfolded_norms
        return self._in_chunks(found, self.workspace(method))

    def _unfolded_norms(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        seen, slid = self._unfold(start, stop), self._positions(start, stop)
        norms, magnitudes = gram_norms(seen.mT, slid.mT, self.scratch)
        return norms.view(stop - start, -1).sum(1), magnitudes.view(stop - start, -1).sum(1)

    def _pixel_norms(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        geometry, m, n = self.geometry, self.rows, len(self.kernel)
        padded, window = self._padded(), self._slid.shape[2:]
        pixels = self._by_group(self._pad(self._seen[start * m : stop * m]))
        gram = numerics.product(pixels.mT, pixels).view(-1, m, *padded, m, *padded)
        unfolded = torch.zeros(gram.shape[0], m, *window, m, *window, dtype=gram.dtype, device=gram.device)
        for offset in itertools.product(*map(range, self.kernel)):
            starts = [o * dilation for o, dilation in zip(offset, geometry.dilation, strict=True)]
            sliding = zip(starts, window, geometry.stride, strict=True)
            seen = tuple(slice(s, s + (size - 1) * step + 1, step) for s, size, step in sliding)
            unfolded += gram[(slice(None), slice(None), *seen, slice(None), *seen)]
        slid = self._positions(start, stop)
        both = unfolded.flatten(n + 2).flatten(1, n + 1).mul_(numerics.product(slid.mT, slid))
        norms = both.sum((1, 2)).clamp_(min=0).view(stop - start, -1).sum(1)
        return norms, both.abs_().sum((1, 2)).view(stop - start, -1).sum(1)

    # Gradients.

    def _gradients(self, start: int, stop: int, method: str, out: Tensor | None) -> Tensor:
        count = stop - start
        if method == "unfold":
            seen, slid = self._unfold(start, stop), self._positions(start, stop)
            matrices = None if out is None else out.view(seen.shape[0], slid.shape[1], seen.shape[1])
            return numerics.product(slid, seen.mT, matrices).view(count, *self.shape)
        m = self.rows
        x, gy = [t[start * m : stop * m].to(self.dtype) for t in (self.x, self.gy)]
        if method == "cores":
            return self._over_cores(x, gy, count, out)
        # examples become groups of channels; the rows of an example remain a batch
        if count > 1:
            x, gy = (t.unflatten(0, (count, m)).transpose(0, 1).flatten(1, 2) for t in (x, gy))
        rows = self._weight_gradient(x, gy, count).view(count, *self.shape)
        # channels-last inputs give channels-last gradients
        return rows.contiguous()

    def _weight_gradient(self, x: Tensor, gy: Tensor, copies: int = 1) -> Tensor:
        """The library's weight gradient in float32 at least; ``copies`` times as many groups as the layer has."""
        # only its shape is looked at
        weight = x.new_empty((copies * self.shape[0], *self.shape[1:]))
        with numerics.full_precision("conv", x.device):
            _, found, _ = torch.ops.aten.convolution_backward(
                gy, x, weight, None, *self._options(copies), (False, True, False)
            )
        return found

    def _options(self, copies: int = 1) -> tuple[Any, ...]:
        """What torch and `dpexp.native` are told of the layer."""
        g = self.geometry
        rest = g.output_padding or (0,) * len(self.kernel)
        return g.stride, g.padding, g.dilation, g.transposed, rest, g.groups * copies

    def _over_cores(self, x: Tensor, gy: Tensor, count: int, out: Tensor | None) -> Tensor:
        kernels = native.kernels()
        assert kernels is not None
        rows = x.new_empty((count, *self.shape)) if out is None else out
        with numerics.full_precision("conv", x.device):
            kernels.conv_gradients_(rows, x, gy, self.rows, *self._options())
        return rows

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        x, gy = self.x, self.gy
        factors = factors if self.rows == 1 else factors.repeat_interleave(self.rows)
        x, gy = numerics.scale_smaller(x, gy, factors)
        return numerics.add_to(out, self._weight_gradient(x.to(self.dtype), gy.to(self.dtype)))

    # Unfolding.

    def _pad(self, seen: Tensor) -> Tensor:
        padding = self.geometry.padding
        return F.pad(seen, [n for p in reversed(padding) for n in (p, p)]) if any(padding) else seen

    def _by_group(self, t: Tensor) -> Tensor:
        """``[b * m, G * c, *spatial]`` -> ``[b * G, c, m * positions]``."""
        m, groups = self.rows, self.geometry.groups
        # [b * m, G, c, positions]
        t = t.flatten(2).unflatten(1, (groups, -1))
        if m > 1:
            # [b, G, c, m * positions]
            t = t.unflatten(0, (-1, m)).movedim(1, 3).flatten(3)
        return t.reshape(-1, *t.shape[2:])

    def _positions(self, start: int, stop: int) -> Tensor:
        """``[b * G, p / G, T]``."""
        return self._by_group(self._slid[start * self.rows : stop * self.rows])

    def _unfold(self, start: int, stop: int) -> Tensor:
        """``[b * G, d, T]``: what each position of the window sees."""
        geometry, n = self.geometry, len(self.kernel)
        seen = self._pad(self._seen[start * self.rows : stop * self.rows])
        window = self._slid.shape[2:]
        sliding = zip(self.kernel, geometry.dilation, geometry.stride, window, strict=True)
        # views, one window each
        for dim, (size, dilation, stride, positions) in enumerate(sliding, start=2):
            seen = seen.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
            seen = seen.narrow(dim, 0, positions)
        # kernel before positions
        seen = seen.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
        return self._by_group(seen.reshape(seen.shape[0], -1, *window))


@cache
def _times_seen(pixels: int, positions: int, size: int, stride: int, dilation: int, padding: int) -> int:
    """How many positions of the window see one pixel, at most, along one dimension; 0 where all see padding."""
    found = (t * stride + o * dilation - padding for t in range(positions) for o in range(size))
    return max(Counter(i for i in found if 0 <= i < pixels).values(), default=0)
