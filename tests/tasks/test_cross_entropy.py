"""The lean cross-entropies are the library's, value and gradient, for every dtype, and hold less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpexp.tasks import cross_entropy as module
from dpexp.tasks.cross_entropy import cross_entropy_, frozen_head_cross_entropy

ROWS, WORDS, WIDTH = 23, 11, 5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
Losses = Callable[..., Tensor]


class Problem:
    """Hidden states and a head whose logits they make; some targets are ignored, and every loss has a weight."""

    def __init__(self, dtype: torch.dtype, bias: bool = True):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden, self.weight = draw(ROWS, WIDTH), draw(WORDS, WIDTH) * 3
        self.bias = draw(WORDS) if bias else None
        self.logits = F.linear(self.hidden, self.weight, self.bias)
        self.targets = torch.randint(WORDS, (ROWS,), generator=generator)
        self.targets[::5] = -100
        wide = torch.promote_types(dtype, torch.float32)
        self.weights = torch.rand(ROWS, generator=generator, dtype=wide)
        self.factors = torch.rand(ROWS, generator=generator, dtype=wide)

    def expected(self, x: Tensor, logits: Tensor, factors: Tensor, weights: bool) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = F.cross_entropy(logits.to(wide), self.targets, reduction="none")
        losses = losses * self.weights if weights else losses
        return losses, torch.autograd.grad(losses, x, factors)[0]


def overwriting(problem: Problem, weights: bool) -> tuple[Tensor, Tensor, Losses]:
    """A leaf, its logits, and the losses from a copy of it."""
    leaf = problem.logits.clone().requires_grad_()
    given = problem.weights if weights else None
    return leaf, leaf, lambda x: cross_entropy_(x.clone(), problem.targets, weights=given)


def frozen(problem: Problem, weights: bool) -> tuple[Tensor, Tensor, Losses]:
    leaf = problem.hidden.clone().requires_grad_()
    given = problem.weights if weights else None

    def losses(x: Tensor) -> Tensor:
        return frozen_head_cross_entropy(x, problem.weight, problem.bias, problem.targets, weights=given)

    return leaf, F.linear(leaf, problem.weight, problem.bias), losses


WAYS = pytest.mark.parametrize("way", [overwriting, frozen])


@pytest.mark.parametrize("block", [1, 40, 1 << 22])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("summed", [False, True])
@WAYS
def test_they_equal_the_librarys(
    way: Any, summed: bool, weights: bool, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "HEAD_BLOCK", 2 * block)
    problem = Problem(dtype)
    leaf, logits, losses = way(problem, weights)
    factors = torch.ones_like(problem.factors) if summed else problem.factors
    wanted, gradient = problem.expected(leaf, logits, factors, weights)
    found = losses(leaf)
    assert found.dtype == wanted.dtype
    close = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)
    (mine,) = torch.autograd.grad(found, leaf, factors)
    assert mine.dtype == gradient.dtype
    torch.testing.assert_close(mine, gradient, rtol=close, atol=close)
    assert torch.equal(mine[::5], torch.zeros_like(mine[::5]))
    assert torch.equal(found[::5], torch.zeros_like(found[::5]))


@WAYS
def test_gradients_are_those_of_finite_differences(way: Any):
    leaf, _, losses = way(Problem(torch.float64), True)
    assert torch.autograd.gradcheck(losses, leaf)


@WAYS
def test_two_backward_passes_over_one_graph_agree_whatever_their_factors(way: Any):
    problem = Problem(torch.float32)
    leaf, _, losses = way(problem, True)
    found, ones = losses(leaf), torch.ones(ROWS)
    first = torch.autograd.grad(found, leaf, ones, retain_graph=True)[0].clone()
    scaled = torch.autograd.grad(found, leaf, problem.factors, retain_graph=True)[0]
    torch.testing.assert_close(scaled, first * problem.factors[:, None])
    assert torch.equal(torch.autograd.grad(found, leaf, ones)[0], first)


def test_the_gradient_takes_the_place_of_the_logits():
    problem = Problem(torch.float32)
    leaf = problem.hidden.requires_grad_()
    logits = F.linear(leaf, problem.weight, problem.bias)
    at = logits.data_ptr()
    arrived: list[Tensor] = []
    logits.register_hook(arrived.append)
    cross_entropy_(logits, problem.targets).sum().backward()
    assert arrived[0].data_ptr() == at


def test_what_needs_the_logits_values_is_refused_by_autograd():
    logits = Problem(torch.float32).logits.requires_grad_().exp()
    losses = cross_entropy_(logits, torch.zeros(ROWS, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_logits_without_a_graph_stay():
    problem = Problem(torch.float32)
    before = problem.logits.clone()
    cross_entropy_(problem.logits, problem.targets)
    assert torch.equal(problem.logits, before)


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that an operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [
            leaf.untyped_storage().nbytes() // leaf.itemsize
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor)
        ]
        self.numbers = max(self.numbers, *found, 0)
        return result


def test_no_tensor_of_all_logits_is_made_for_a_frozen_head(monkeypatch: pytest.MonkeyPatch):
    rows, words, width = 64, 1000, 4
    monkeypatch.setattr(module, "BLOCK", 2 * words)
    monkeypatch.setattr(module, "HEAD_BLOCK", 8 * words)
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(words, width)
    targets = torch.randint(words, (rows,))
    with Largest() as seen:
        frozen_head_cross_entropy(hidden, weight, None, targets).sum().backward()
    assert seen.numbers == 8 * words
    with Largest() as plain:
        F.cross_entropy(F.linear(hidden, weight), targets)
    assert plain.numbers == rows * words  # so the mode does see them


def test_autocast_computes_in_16_bits_as_a_layer_would():
    problem = Problem(torch.float32)
    leaf = problem.hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = F.linear(leaf, problem.weight, problem.bias)
        found = frozen_head_cross_entropy(leaf, problem.weight, problem.bias, problem.targets)
    wanted = F.cross_entropy(logits.float(), problem.targets, reduction="none")
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    mine, gradient = (torch.autograd.grad(x.sum(), leaf)[0] for x in (found, wanted))
    torch.testing.assert_close(mine, gradient, rtol=2e-2, atol=2e-2)


def frozen_in_autocast(problem: Problem, weights: bool) -> tuple[Tensor, Tensor, Losses]:
    """As `frozen`, with a float32 input: its gradient is in float32, what it is made of in float16."""
    leaf, given = problem.hidden.float().requires_grad_(), problem.weights if weights else None
    with torch.autocast("cpu", dtype=torch.float16):
        logits = F.linear(leaf, problem.weight, problem.bias)

    def losses(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return frozen_head_cross_entropy(x, problem.weight, problem.bias, problem.targets, weights=given)

    return leaf, logits, losses


@pytest.mark.parametrize("way", [overwriting, frozen, frozen_in_autocast])
def test_small_probabilities_are_not_lost_in_float16(way: Any):
    """A static loss scale comes too late for a gradient that was rounded to nothing before."""
    problem = Problem(torch.float16)
    problem.weights = torch.full_like(problem.weights, 1e-4)
    leaf, logits, losses = way(problem, True)
    scale = torch.full_like(problem.factors, 4096.0)
    (mine,) = torch.autograd.grad(losses(leaf), leaf, scale)
    _, wanted = problem.expected(leaf, logits, scale, True)
    assert (wanted[1::5] != 0).float().mean() > 0.7
    torch.testing.assert_close(mine, wanted, rtol=2e-2, atol=1e-4)


def test_a_head_that_trains_is_refused():
    problem = Problem(torch.float32)
    with pytest.raises(ValueError, match="require one"):
        frozen_head_cross_entropy(problem.hidden, problem.weight.requires_grad_(), None, problem.targets)


def test_no_rows():
    none = torch.zeros(0, dtype=torch.int64)
    assert cross_entropy_(torch.zeros(0, 5), none).shape == (0,)
    assert frozen_head_cross_entropy(torch.zeros(0, 3), torch.zeros(5, 3), None, none).shape == (0,)
