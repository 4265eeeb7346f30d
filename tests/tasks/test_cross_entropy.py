"""The lean cross-entropy is the library's, value and gradient, for every dtype, and keeps less."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.tasks import cross_entropy as module
from dpexp.tasks.cross_entropy import cross_entropy


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(23, 11, generator=generator, dtype=torch.float64) * 5).to(dtype)
    targets = torch.randint(11, (23,), generator=generator)
    targets[::5] = -100
    weights = torch.rand(23, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    return logits, targets, weights


@pytest.mark.parametrize("block", [1, 40, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_equals_the_librarys(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BLOCK", block)
    logits, targets, weights = problem(dtype)
    one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    wide = two if dtype == torch.float64 else two.float()
    expected = F.cross_entropy(wide, targets, reduction="none")
    found = cross_entropy(one, targets)
    assert found.dtype == expected.dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    found.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(
        one.grad,
        two.grad,
        rtol=0 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-2 if dtype == torch.bfloat16 else 1e-7,
    )
    assert one.grad is not None
    assert torch.equal(one.grad[::5], torch.zeros_like(one.grad[::5]))
    assert torch.equal(found[::5], torch.zeros_like(found[::5]))


def test_gradients_are_those_of_finite_differences():
    logits, targets, _ = problem(torch.float64)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets), logits.requires_grad_())


def test_two_backward_passes_over_one_graph_agree():
    logits, targets, weights = problem(torch.float32)
    losses = cross_entropy(logits.requires_grad_(), targets)
    (first,) = torch.autograd.grad(losses, logits, weights, retain_graph=True)
    (second,) = torch.autograd.grad(losses, logits, weights)
    assert torch.equal(first, second)


def test_only_the_logits_are_kept():
    logits, targets, _ = problem(torch.float32)
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        cross_entropy(logits.requires_grad_(), targets)
    assert [t.shape for t in held].count(logits.shape) == 1
    assert held[0].data_ptr() == logits.data_ptr()


def test_no_rows():
    assert cross_entropy(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).shape == (0,)
