"""A forward may not write the examples of the batch into a buffer, or into a parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.stepping import B, D, Net, step, x


class Keeps(nn.Module):
    """Passes its input on and writes something down."""

    def __init__(self, write: Callable[[nn.Module, Tensor], None], start: Tensor, frozen: bool = False):
        super().__init__()
        self.write = write
        if frozen:
            self.kept = nn.Parameter(start, requires_grad=False)
        else:
            self.register_buffer("kept", start)

    def forward(self, h: Tensor) -> Tensor:
        self.write(self, h.detach())
        return h


def mean(m: nn.Module, h: Tensor) -> None:
    m.kept.mul_(0.99).add_(0.01 * h.mean(0))


def replaced(m: nn.Module, h: Tensor) -> None:
    m.kept = 0.99 * m.kept + 0.01 * h.mean(0)


def row(m: nn.Module, h: Tensor) -> None:
    m.kept.copy_(h[-1])


def largest(m: nn.Module, h: Tensor) -> None:
    m.kept.copy_(torch.maximum(m.kept, h.max()))


def count(m: nn.Module, h: Tensor) -> None:
    m.kept += len(h)


def calls(m: nn.Module, h: Tensor) -> None:
    m.kept += 1


def codes(m: nn.Module, h: Tensor) -> None:
    m.kept.data.lerp_(h.mean(0), 0.01)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "running mean": lambda: Keeps(mean, torch.zeros(D)),
    "running mean, replaced": lambda: Keeps(replaced, torch.zeros(D)),
    "a row": lambda: Keeps(row, torch.zeros(D)),
    "a range": lambda: Keeps(largest, torch.zeros(())),
    "how many examples": lambda: Keeps(count, torch.zeros((), dtype=torch.long)),
    "codes in a frozen parameter": lambda: Keeps(codes, torch.zeros(D), frozen=True),
    "an observer": lambda: torch.ao.quantization.MinMaxObserver(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("engine", ["auto", "opacus"])
def test_a_buffer_that_depends_on_the_batch_is_refused_by_name(name: str, engine: str) -> None:
    torch.manual_seed(0)
    model = Net(REFUSED[name]())
    with pytest.raises(UserError, match=r"^between \(\w+\): its forward writes .* '(kept|min_val|max_val)'"):
        step(model, x(), engine=engine)
    assert all(p.grad is None for p in model.parameters())


def test_counters_and_power_iterations_are_harmless() -> None:
    torch.manual_seed(0)
    assert step(Net(Keeps(calls, torch.zeros(()))), x()).notes == []
    for spectral in (nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm):
        assert step(nn.Sequential(spectral(nn.Linear(D, D)), nn.Linear(D, 3)), x()).notes == []


def test_a_cache_that_goes_by_the_shape_is_harmless() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", None, persistent=False)

        def forward(self, h: Tensor) -> Tensor:
            if self.mask is None or self.mask.shape != h.shape:
                self.mask = torch.ones_like(h)
            return h * self.mask

    model = Net(Cached())
    assert step(model, x()).notes == []
    assert model.between.mask.shape == (B, D)


@pytest.mark.parametrize("engine", ["auto", "opacus"])
def test_a_second_clipper_is_refused(engine: str) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 3))
    first = attach(model, engine=engine)
    for again in (model, model[0]):
        with pytest.raises(UserError, match="attached already"):
            attach(again, engine="auto")
    first.detach()
    step(model, x(), engine=engine)


def test_opacus_drops_a_forward_that_nobody_back_propagates() -> None:
    """As the search for a batch size on a CPU leaves one behind."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))
    clipper = attach(model, engine="opacus")
    model(x(2, D)).square().sum(1)
    report = clipper.backward(model(x()).square().sum(1))
    found = [p.grad.clone() for p in model.parameters()]
    clipper.detach()
    model.zero_grad()
    expected = attach(model).backward(model(x()).square().sum(1))
    torch.testing.assert_close(report.norms, expected.norms)
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
