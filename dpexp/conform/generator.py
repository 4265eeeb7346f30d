"""Random models as source code, and a shrinker: what fails is printed as the smallest program that still fails.

A model is a list of statements, each one line (or two) of ``__init__`` and one of ``forward``. The value that goes through has
the shape ``[B, T, 4]``. A seed decides everything, so a number in a report is a model.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.conform.case import Batch, Case

W = 4
"""Width of the value that goes through a model."""

_HEADER = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
"""

MENU: dict[str, tuple[str, str]] = {
    "linear": ("self.m{i} = nn.Linear(4, 4)", "x = x + torch.tanh(self.m{i}(x))"),
    "no bias": ("self.m{i} = nn.Linear(4, 4, bias=False)", "x = x + torch.tanh(self.m{i}(x))"),
    "replace": ("self.m{i} = nn.Linear(4, 4)", "x = torch.sin(self.m{i}(x))"),
    "bottleneck": (
        "self.m{i} = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 4))",
        "x = x + self.m{i}(x)",
    ),
    "layer norm": ("self.m{i} = nn.LayerNorm(4)", "x = self.m{i}(x)"),
    "RMS norm": ("self.m{i} = nn.RMSNorm(4)", "x = self.m{i}(x)"),
    "group norm": ("self.m{i} = nn.GroupNorm(2, 4)", "x = self.m{i}(x.mT).mT"),
    "scale": ("self.m{i} = nn.Parameter(torch.randn(4))", "x = x * self.m{i}"),
    "scalar": ("self.m{i} = nn.Parameter(torch.tensor(0.7))", "x = x * self.m{i}.exp()"),
    "row scale": ("self.m{i} = nn.Parameter(torch.randn(1, 1, 4))", "x = torch.tanh(x * self.m{i})"),
    "token": (
        "self.m{i} = nn.Parameter(torch.randn(1, 1, 4))",
        "x = torch.cat([self.m{i}.expand(x.shape[0], -1, -1), x[:, 1:]], 1)",
    ),
    "by hand": ("self.m{i} = nn.Parameter(torch.randn(4, 4))", "x = x + torch.tanh(x @ self.m{i})"),
    "einsum": (
        "self.m{i} = nn.Parameter(torch.randn(4, 4))",
        "x = torch.einsum('btd,de->bte', x, self.m{i})",
    ),
    "symmetric": (
        "self.m{i} = nn.Parameter(torch.randn(4, 4))",
        "x = x + torch.tanh(F.linear(x, self.m{i} + self.m{i}.T))",
    ),
    "positions": ("self.m{i} = nn.Embedding(12, 4)", "x = x + self.m{i}(torch.arange(x.shape[1])[None])"),
    "flat positions": ("self.m{i} = nn.Embedding(12, 4)", "x = x + self.m{i}(torch.arange(x.shape[1]))"),
    "convolution": ("self.m{i} = nn.Conv1d(4, 4, 3, padding=1)", "x = torch.tanh(self.m{i}(x.mT)).mT"),
    "circular": (
        "self.m{i} = nn.Conv1d(4, 4, 3, padding=1, groups=2, padding_mode='circular')",
        "x = x + torch.tanh(self.m{i}(x.mT)).mT",
    ),
    "flattened": (
        "self.m{i} = nn.Linear(4, 4)",
        "x = torch.tanh(self.m{i}(x.reshape(-1, 4))).view(x.shape)",
    ),
    "positions first": (
        "self.m{i} = nn.Linear(4, 4)",
        "x = torch.tanh(self.m{i}(x.transpose(0, 1))).transpose(0, 1)",
    ),
    "positions first, flattened": (
        "self.m{i} = nn.Linear(4, 4)",
        "x = torch.tanh(self.m{i}(x.transpose(0, 1).reshape(-1, 4))).view(x.shape[1], -1, 4).transpose(0, 1)",
    ),
    "attention": (
        "self.m{i} = nn.MultiheadAttention(4, 2, batch_first=True)",
        "x = x + self.m{i}(x, x, x, need_weights=False)[0]",
    ),
    "recurrent": ("self.m{i} = nn.GRU(4, 4, batch_first=True)", "x = x + self.m{i}(x)[0]"),
    "recomputed": (
        "self.m{i} = nn.Linear(4, 4)",
        "x = x + checkpoint(lambda h: torch.tanh(self.m{i}(h)), x, use_reentrant=False)",
    ),
    "weight norm": (
        "self.m{i} = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
        "x = x + torch.tanh(self.m{i}(x))",
    ),
    "pooled": ("self.m{i} = nn.Linear(4, 4)", "x = x + torch.tanh(self.m{i}(x.mean(1, keepdim=True)))"),
    "first position": ("self.m{i} = nn.Linear(4, 4)", "x = x + torch.tanh(self.m{i}(x[:, 0]))[:, None]"),
    "in place": ("self.m{i} = nn.Linear(4, 4)", "x = self.m{i}(x).mul_(0.5).tanh_()"),
    "frozen": ("self.m{i} = nn.Linear(4, 4).requires_grad_(False)", "x = x + torch.tanh(self.m{i}(x))"),
    "frozen bias": (
        "self.m{i} = nn.Linear(4, 4)\n        self.m{i}.bias.requires_grad_(False)",
        "x = x + torch.tanh(self.m{i}(x))",
    ),
    "idle": ("self.m{i} = nn.Linear(4, 4)", "pass"),
    "picked": (
        "self.m{i} = nn.Linear(4, 4)",
        "x = x.index_put(tuple((x[..., 0] > 0).nonzero().T), torch.tanh(self.m{i}(x[x[..., 0] > 0])))",
    ),
}
"""Name -> a line of ``__init__`` and one of ``forward``."""

LATER: dict[str, str] = {
    "again": "x = x + torch.tanh(self.m{j}(x))",
    "shared": "self.m{i} = nn.Linear(4, 4)\n        self.m{i}.weight = self.m{j}.weight",
    "tied to the embedding": "x = F.linear(x, self.embed.weight)[..., :4] + x",
}
"""What needs an earlier layer j, a linear one."""

COUPLINGS = (
    "x = x - x.mean(0)",
    "x = x - x.mean(0).detach()",
    "x = x / (1 + x.detach().abs().max())",
    "x = x + 0.1 * x.roll(1, 0)",
    "x = x * len(x)",
    "x = torch.sin(x) if x.detach().max() > 3 else x",
)
_LINEAR = ("linear", "no bias", "replace", "flattened", "positions first", "recomputed")


@dataclass(frozen=True)
class Spec:
    """A random model: statements ``(kind, init lines, forward line)``, and what it is fed."""

    statements: tuple[tuple[str, str, str], ...]
    examples: int
    length: int
    seed: int

    @property
    def source(self) -> str:
        """The program: a class `Model`."""
        made = "".join(f"        {init}\n" for _, init, _ in self.statements if init)
        steps = "".join(f"        {step}\n" for _, _, step in self.statements)
        return f"{_HEADER}{made}\n    def forward(self, ids):\n        x = self.embed(ids)\n{steps}        return x\n"

    def program(self, clip: str) -> str:
        """The source with a batch and a call, ready to run.

        Args:
            clip: the arguments of `attach` behind the model.
        """
        return (
            f"{self.source}\n\n"
            f"from dpexp.clipping import attach\n\n"
            f"torch.manual_seed({self.seed})\n"
            f"model = Model().double()\n"
            f"ids = torch.randint(0, 7, ({self.examples}, {self.length}))\n"
            f"clipper = attach(model, {clip})\n"
            f"print(clipper.backward((model(ids) - 0.3).pow(2).flatten(1).sum(1)).norms)\n"
        )

    def case(self) -> Case:
        """The model in float64, its batch, and the sum of squares."""
        space: dict[str, Any] = {}
        exec(compile(self.source, f"<random model {self.seed}>", "exec"), space)
        torch.manual_seed(self.seed)
        model: nn.Module = space["Model"]().double()
        ids = torch.randint(0, 7, (self.examples, self.length))
        return Case(model, {"ids": ids}, _squares)


def _squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["ids"]) - 0.3).pow(2).flatten(1).sum(1)


def random_spec(seed: int, coupled: float = 0.05) -> Spec:
    """The model of a seed.

    Args:
        coupled: share of models in which examples see each other: they must be refused.
    """
    rng = random.Random(zlib.crc32(f"random model {seed}".encode()))
    statements: list[tuple[str, str, str]] = []
    for i in range(rng.randint(1, 6)):
        linear = [
            int(init.split("=")[0].strip().removeprefix("self.m"))
            for kind, init, _ in statements
            if kind in _LINEAR
        ]
        if linear and rng.random() < 0.25:
            j, kind = rng.choice(linear), rng.choice(list(LATER))
            line = LATER[kind].format(i=i, j=j)
            if kind == "shared":
                statements.append((kind, line, f"x = x + torch.tanh(self.m{i}(x))"))
            else:
                statements.append((kind, "", line))
        else:
            kind = rng.choice(list(MENU))
            init, step = (line.format(i=i) for line in MENU[kind])
            statements.append((kind, init, step))
    if rng.random() < coupled:
        statements.insert(rng.randint(0, len(statements)), ("coupling", "", rng.choice(COUPLINGS)))
    return Spec(tuple(statements), rng.randint(2, 4), rng.randint(2, 5), seed)


def shrink(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """The smallest model found that still fails: statements go one at a time, then examples, then positions.

    Args:
        fails: whether a model fails in the way in question; a model that can't be built does not.
    """
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(spec):
            if fails(candidate):
                spec, smaller = candidate, True
                break
    return spec


def _smaller(spec: Spec) -> list[Spec]:
    cut = [
        replace(spec, statements=spec.statements[:i] + spec.statements[i + 1 :])
        for i in range(len(spec.statements))
    ]
    if spec.examples > 2:
        cut.append(replace(spec, examples=spec.examples - 1))
    if spec.length > 2:
        cut.append(replace(spec, length=spec.length - 1))
    return cut
