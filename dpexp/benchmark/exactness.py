"""How far a method's clipped sum is from the truth: ordinary autograd on one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.benchmark.methods import Settings, make_method
from dpexp.benchmark.workloads import Batch, Parts
from dpexp.clipping.groups import build_groups

# gradients this much below the model's largest are judged on the scale of the largest
_SMALL = 1e-3


def max_relative_error(
    name: str,
    parts: Parts,
    batch: Batch,
    model: nn.Module,
    call: Callable[[Any], Any],
    forward: Callable[[Any, Batch], Tensor],
) -> float:
    """Largest deviation of one step's clipped sum, noise off, from the naive loop's in float32.

    max |sum - truth| over a parameter, relative to the largest |truth| in it, or to 1e-3 of the largest in the model where it
    is below that (the bias of an attention key has a gradient of exactly zero). NaN where the sum is not finite. C is half the
    median norm, so that flat clipping scales down about every example, and per-layer clipping some groups and not others.

    Args:
        name: the method.
        model: is changed (the method attaches to it), not its weights.
        call: makes what is called from the network of the method (the identity, or a compiler).
        forward: losses in the precision of the measurement.
    """
    twin = copy.deepcopy(model)
    truth_of = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    examples = [{key: rows[i : i + 1] for key, rows in batch.items()} for i in range(_size(batch))]
    norms = torch.stack([_norms(_gradients(parts, twin, truth_of, example)) for example in examples])
    clip_norm = 0.5 * norms.square().sum(1).sqrt().median().item()
    if not clip_norm > 0:
        raise ValueError("every gradient is zero: nothing to compare")

    by_name = {n: p for n, p in model.named_parameters() if p.requires_grad}
    method = make_method(name, Settings(model, _size(batch), clip_norm, 0.0, 0.0))
    groups = _groups(twin, method.groups)
    truth = {n: torch.zeros_like(p) for n, p in truth_of.items()}
    for example, row in zip(examples, norms, strict=True):
        squares = dict(zip(truth_of, row.square(), strict=True))
        factors = {}
        for members in groups:
            norm = torch.stack([squares[n] for n in members]).sum().sqrt()
            limit = clip_norm / len(groups) ** 0.5
            factor = 1.0 if method.groups is None else (limit / norm).clamp(max=1.0).nan_to_num(nan=1.0)
            factors.update(dict.fromkeys(members, factor))
        for n, gradient in _gradients(parts, twin, truth_of, example).items():
            truth[n] += factors[n] * gradient

    method.network = call(method.network)
    method.step(lambda network: forward(network, batch))
    scale = _size(batch) if method.mean else 1
    largest = max(t.abs().max().item() for t in truth.values())
    worst = 0.0
    for n, wanted in truth.items():
        found = by_name[n].grad
        difference = wanted if found is None else found.float() * scale - wanted
        error = (difference.abs().max() / max(wanted.abs().max().item(), _SMALL * largest)).item()
        # NaN goes through as well
        if not error <= worst:
            worst = error
        if worst != worst:
            break
    return worst


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _gradients(
    parts: Parts, model: nn.Module, parameters: dict[str, Any], example: Batch
) -> dict[str, Tensor]:
    loss = parts.losses(model, example).sum()
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def _norms(gradients: dict[str, Tensor]) -> Tensor:
    # torch adds up the squares of a hundred million numbers in float32 with an error of half a percent
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients.values()])


def _groups(model: nn.Module, groups: str | None) -> list[list[str]]:
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    if groups == "param":
        return [[n] for n in names]
    if groups is None:
        return [names]
    return [list(group.params) for group in build_groups(model, groups)]
