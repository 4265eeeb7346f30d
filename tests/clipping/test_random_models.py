"""Random models against the naive loop: shapes, sharing, reuse, order, options, frozen parts, checkpointing, engines."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpexp.clipping import attach
from tests.clipping.test_engines import OURS, check, naive
from tests.clipping.zoo import Problem, square

WIDTH = 4


class Scale(nn.Module):
    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Positions(nn.Module):
    def __init__(self, flat: bool):
        super().__init__()
        self.table, self.flat = nn.Embedding(12, WIDTH), flat

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1])
        return x + self.table(where if self.flat else where[None])


class Along(nn.Module):
    """A convolution along the positions, with its options."""

    def __init__(self, padding_mode: str, groups: int, dilation: int):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=dilation, dilation=dilation, groups=groups,
                              padding_mode=padding_mode)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Flat(nn.Module):
    """A layer that sees every position as a row, in batch-major or in time-major order."""

    def __init__(self, time_major: bool):
        super().__init__()
        self.inner, self.time_major = nn.Linear(WIDTH, WIDTH), time_major

    def forward(self, x: Tensor) -> Tensor:
        if self.time_major:
            x = x.transpose(0, 1)
        y = torch.tanh(self.inner(x.reshape(-1, WIDTH))).view(x.shape)
        return y.transpose(0, 1) if self.time_major else y


class ByHand(nn.Module):
    """A linear map whose parameters are used without a layer."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias


MENU = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "scale": lambda: Scale((WIDTH,)),
    "scalar": lambda: Scale(()),
    "row scale": lambda: Scale((1, 1, WIDTH)),
    "positions": lambda: Positions(False),
    "flat positions": lambda: Positions(True),
    "convolution": lambda: Along("zeros", 1, 1),
    "circular": lambda: Along("circular", 2, 2),
    "flat": lambda: Flat(False),
    "time major": lambda: Flat(True),
    "by hand": ByHand,
    "nested": lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.ReLU(inplace=True), nn.Linear(3, WIDTH)),
}


class Random(nn.Module):
    def __init__(self, parts: list[str], order: list[int], recompute: bool):
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.parts = nn.ModuleList([MENU[name]() for name in parts])
        self.order, self.recompute = order, recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index in self.order:
            part = self.parts[index % len(self.parts)]
            if self.recompute:
                x = x + checkpoint(lambda h, p=part: torch.tanh(p(h)), x, use_reentrant=False)
            else:
                x = x + torch.tanh(part(x))
        return x


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    parts=st.lists(st.sampled_from(sorted(MENU)), min_size=1, max_size=4),
    order=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    batch=st.integers(1, 4),
    length=st.integers(2, 5),
    recompute=st.booleans(),
    share=st.booleans(),
    freeze=st.integers(0, 3),
    groups=st.sampled_from(["flat", "layer"]),
    engine=st.sampled_from(OURS),
    seed=st.integers(0, 2**16),
)
def test_random_models(parts, order, batch, length, recompute, share, freeze, groups, engine, seed) -> None:
    torch.manual_seed(seed)
    model = Random(parts, order, recompute).double()
    linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.shape == (WIDTH, WIDTH)]
    if share and len(linears) > 1:
        linears[-1].weight = linears[0].weight
    for parameter in list(model.parameters())[1 : 1 + freeze]:
        parameter.requires_grad_(False)
    problem = Problem(model, {"ids": torch.randint(0, 7, (batch, length))}, square)
    per_example = naive(problem)
    clipper = attach(model, groups=groups, clip_norm=0.7, engine=engine)
    check(problem, clipper, per_example, times=3)
