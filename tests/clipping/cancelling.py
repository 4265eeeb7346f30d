"""Models and examples whose gradients are built to cancel: sums of many large terms that nearly add up to nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

PATTERNS = ("halves", "alternating", "two values", "mirrored", "partly", "all one")
KINDS = (
    "linear", "with bias", "twice", "norm twice", "pixel", "convolution", "transposed", "embedding", "tied", "standardised",
)  # fmt: skip


@dataclass
class Terms:
    """What the gradient of one example is the sum of: ``sum_t g_t a_tᵀ``, with ``a`` ``[T, d]`` and ``g`` ``[T, p]``."""

    a: Tensor
    g: Tensor


def terms(pattern: str, count: int, d: int, p: int, scale: float, seed: int) -> Terms:
    """Terms that cancel, in float64: all but about 1e-4 of them, or all; "all one": nothing cancels, and all rounds alike."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    a, g = normal(1, d).expand(count, d).clone(), normal(1, p).expand(count, p).clone()
    signs = torch.ones(count, 1, dtype=torch.float64)
    if pattern == "alternating":
        signs[1::2] = -1
        a *= 1 + 1e-4 * normal(count, 1)
    elif pattern == "halves":
        signs[count // 2 :] = -1
        a += 1e-3 * normal(count, d)
    elif pattern == "two values":
        signs[count // 2 :] = -1
        a = torch.where(signs > 0, a, a * (1 + 3e-5))
    elif pattern in ("mirrored", "partly"):
        half = count - count // 2
        a, g = normal(half, d), normal(half, p)
        a, g = torch.cat([a, a.flip(0)])[:count], torch.cat([g, g.flip(0)])[:count]
        signs[half:] = -1 if pattern == "mirrored" else -0.9
    return Terms(a * scale**0.5, g * signs * scale**0.5)


class Twice(nn.Module):
    """A layer that is called twice: on the first half of the positions, and then on the second half."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        middle = x.shape[1] // 2
        return torch.cat([self.layer(x[:, :middle]), self.layer(x[:, middle:])], 1)


class Tied(nn.Module):
    """An embedding whose table is the head's weight; the head's inputs are given."""

    def __init__(self, rows: int, features: int):
        super().__init__()
        self.table = nn.Embedding(rows, features)
        self.head = nn.Linear(features, rows, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), self.head(hidden)


@dataclass
class Case:
    """A model, inputs with examples first, and the gradients of its outputs."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    probes: tuple[Tensor, ...]

    def losses(self, examples: slice, dtype: torch.dtype) -> Tensor:
        """One loss per example, linear in the outputs, so that the gradients of these are the probes."""
        inputs = (x[examples].to(dtype) if x.is_floating_point() else x[examples] for x in self.inputs)
        outputs = self.model(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weighted = (
            y.to(dtype) * probe[examples].to(dtype) for y, probe in zip(outputs, self.probes, strict=True)
        )
        return sum(w.flatten(1).sum(1) for w in weighted)  # type: ignore[return-value]


def case(kind: str, all_terms: list[Terms]) -> Case:
    """A model of one kind of layer whose gradients are sums of these terms, one list entry for each example."""
    a, g = torch.stack([t.a for t in all_terms]), torch.stack([t.g for t in all_terms])
    (examples, count, d), p = a.shape, g.shape[2]
    torch.manual_seed(0)
    if kind == "linear":
        return Case(nn.Linear(d, p, bias=False), (a,), (g,))
    if kind == "with bias":
        return Case(nn.Linear(d, p), (a,), (g,))
    if kind == "twice":
        return Case(Twice(nn.Linear(d, p)), (a,), (g,))
    if kind == "norm twice":
        return Case(Twice(nn.LayerNorm(d)), (a,), (g.mean(2, keepdim=True).expand_as(a),))
    if kind == "embedding":
        ids = torch.arange(count).expand(examples, count) % 3
        return Case(nn.Embedding(5, p), (ids,), (g,))
    if kind == "tied":  # visits that take back what the head adds
        ids = torch.arange(count).expand(examples, count) % 3
        model, size = Tied(4, d), min(p, 4)
        probe = torch.zeros(examples, count, 4, dtype=a.dtype)
        probe[:, :, :size] = g[:, :, :size]
        taken = probe.gather(2, ids.unsqueeze(2))
        return Case(model, (ids, a), (-taken * a, probe))
    width = max(w for w in range(1, 17) if count % w == 0)
    images, gradients = (t.mT.reshape(examples, -1, count // width, width) for t in (a, g))
    if kind == "pixel":
        return Case(nn.Conv2d(d, p, 1, bias=False), (images,), (gradients,))
    if kind == "transposed":
        return Case(nn.ConvTranspose2d(d, p, 3, padding=1, bias=False), (images,), (gradients,))
    layer = nn.Conv2d(d, p, 3, padding=1, padding_mode="circular", bias=False)
    if kind == "standardised":
        from timm.layers import StdConv2d

        layer = StdConv2d(d, p, 3, padding=1, bias=False)
    return Case(layer, (images,), (gradients,))
