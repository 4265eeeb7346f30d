"""Per-example gradients that are obviously right: ordinary autograd on one example at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping.gradients import PerExampleGradient, merge
from dpexp.clipping.tapping.forwards import ForwardPass, entered
from dpexp.clipping.tapping.roots import Roots
from dpexp.clipping.tapping.sites import find_sites, install, uninstall
from dpexp.clipping.tapping.taps import Recorder, Visit
from dpexp.clipping.tapping.uses import Arrival, Use

LossFn = Callable[[Tensor, Tensor], Tensor]


def rows_of(x: Tensor, i: int, num_examples: int) -> Tensor:
    """The rows of example i: ``x[i * m : (i + 1) * m]``."""
    m = x.shape[0] // num_examples
    return x[i * m : (i + 1) * m]


def naive_per_example(
    module: nn.Module, loss_fn: LossFn, x: Tensor, probe: Tensor, num_examples: int
) -> dict[str, Tensor]:
    """Gradients ``[B, *shape]`` by parameter name, from B separate forward and backward passes."""
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in params}
    for i in range(num_examples):
        loss = loss_fn(module(rows_of(x, i, num_examples)), rows_of(probe, i, num_examples))
        for name, grad in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
            found[name].append(grad)
    return {name: torch.stack(grads) for name, grads in found.items()}


def nonlinear_loss(y: Tensor, probe: Tensor) -> Tensor:
    """A loss whose gradient depends on the output and differs at every position; summed over rows."""
    return (y * probe + (y - probe).square() / 2).sum()


def per_examples_of(
    module: nn.Module,
    x: Tensor,
    probe: Tensor,
    num_examples: int,
    names: set[str] | None = None,
    loss_fn: LossFn = nonlinear_loss,
) -> dict[str, PerExampleGradient]:
    """As the engine does it: parameters are followed to the operations that use them."""
    found: dict[str, PerExampleGradient] = {}

    def collect(owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> None:
        with torch.no_grad():
            for name, gradient in Arrival(use, saved, gy, num_examples).per_example(set(use.names)).items():
                found[name] = merge(found[name], gradient) if name in found else gradient

    with uses_of(module, x, names) as (recorder, y):
        parts = [
            loss_fn(rows_of(y, i, num_examples), rows_of(probe, i, num_examples)) for i in range(num_examples)
        ]
        losses = torch.stack(parts) if parts else y.flatten()[:0]
        roots = Roots.of_losses(losses)
        Visit(recorder, roots, x.shape[0] // max(1, num_examples)).back_propagate(collect, retain=False)
    return found


@contextmanager
def uses_of(module: nn.Module, x: Tensor, names: set[str] | None = None) -> Iterator[tuple[Recorder, Tensor]]:
    """The module's output, and a recorder that knows its uses of the parameters ``names`` (all where not given)."""
    params = dict(module.named_parameters())
    for name, p in params.items():
        p.requires_grad_(names is None or name in names)
    params = {name: p for name, p in params.items() if p.requires_grad}
    recorder = Recorder(params, {})
    sites = find_sites(module, recorder)
    for part, site in sites:
        install(part, site)
    try:
        recorder.open(entered(x), watch=True)
        y = module(x)
        recorder.close()
        yield recorder, y
    finally:
        for part, _ in sites:
            uninstall(part)
        module.requires_grad_(True)


def assert_exact(per_example: PerExampleGradient, grads: Tensor, rtol: float = 1e-9) -> None:
    """Everything that per-example gradients can be asked for, by every method, against instantiated gradients ``[B, *shape]``."""
    close = torch.testing.assert_close
    examples = grads.shape[0]
    scale = grads.abs().max().item() if grads.numel() else 1.0
    tolerance = {"rtol": rtol, "atol": rtol * max(scale, 1e-30) * (grads[0].numel() if examples else 1)}
    norm_tolerance = {"rtol": rtol, "atol": tolerance["atol"] * scale}
    norms = grads.flatten(1).square().sum(1) if grads.dim() > 1 else grads.square()
    factors = torch.rand(examples, generator=torch.Generator().manual_seed(0), dtype=grads.dtype)
    weighted = torch.tensordot(factors, grads, 1)

    assert per_example.shape == grads.shape[1:]
    assert per_example.num_examples == examples
    close(per_example.instantiate(), grads, **tolerance)
    close(per_example.weighted_sum(factors), weighted, **tolerance)
    base = torch.ones(grads.shape[1:], dtype=grads.dtype)
    returned = per_example.weighted_sum(factors, out=base)
    assert returned is base
    close(base, 1 + weighted, **tolerance)
    for method in per_example.methods():
        close(per_example.sq_norms(method), norms, **norm_tolerance)

        def factors_of(some: Tensor, where: slice, factors: Tensor = factors) -> tuple[Tensor, None]:
            assert some.shape == factors[where].shape
            return factors[where], None

        found, total = per_example.norms_and_sum(method, factors_of)
        close(found, norms, **norm_tolerance)
        close(total, weighted, **tolerance)
        if per_example.instantiates(method):
            close(per_example.instantiate(method), grads, **tolerance)
        assert per_example.cost(method).flops >= 0
        assert per_example.workspace(method) >= 0
    keep = torch.arange(examples) % 2 == 0
    masked = per_example.mask(keep)
    close(masked.weighted_sum(factors), torch.tensordot(factors * keep, grads, 1), **tolerance)
    for method in masked.methods():
        close(masked.sq_norms(method), norms * keep, **norm_tolerance)
    assert per_example.nbytes >= 0
    hash(per_example.signature())


def weighted_passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each back-propagation of a clipper adds whether its losses are weighted."""
    asked: list[bool] = []
    back_propagate = Visit.back_propagate

    def counted(*args: object, **named: object) -> object:
        asked.append(named.get("weights") is not None)
        return back_propagate(*args, **named)

    monkeypatch.setattr(Visit, "back_propagate", counted)
    return asked
