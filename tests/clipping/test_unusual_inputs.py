"""What enters a model or a layer in an unusual way: exact, or refused for a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.exact_steps import WIDTH, Batch, rows, square
from tests.clipping.test_engines import expected

Forward = Callable[..., Tensor]


class Own(nn.Module):
    """A model of some parts and a forward."""

    def __init__(self, forward: Forward, **parts: nn.Module):
        super().__init__()
        self.compute = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, **batch: Any) -> Tensor:
        return self.compute(self, **batch)


def linears(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(WIDTH, WIDTH) for name in names}


def exact(
    model: nn.Module, batches: list[Batch], alone: Callable[[Batch, int], Batch], engine: str, **settings: Any
) -> list[str]:
    """Every step equals the naive loop. Returns the parameters that needed the loop."""
    model.double()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    examples = [
        [
            torch.autograd.grad(
                square(model, alone(batch, i)).sum(), list(params.values()), materialize_grads=True
            )
            for i in range(len(batch["x"]))
        ]
        for batch in batches
    ]
    clipper = attach(model, clip_norm=0.5, engine=engine, **settings)
    for batch, grads in zip(batches, examples, strict=True):
        per_example = {name: torch.stack([g[j] for g in grads]) for j, name in enumerate(params)}
        model.zero_grad()
        report = clipper.backward(square(model, batch))
        norms, sums = expected(per_example, clipper.groups, clipper.thresholds)
        torch.testing.assert_close(report.norms, norms, rtol=1e-9, atol=1e-12)
        for name, p in params.items():
            torch.testing.assert_close(p.grad, sums[name], rtol=1e-9, atol=1e-11)
    return [name for name, method in clipper.choices.items() if method.startswith("one back-propagation")]


def of_x(batch: Batch, i: int) -> Batch:
    """Example i, where everything but ``x`` is the same for all."""
    return batch | {"x": batch["x"][i : i + 1]}


MASK = torch.randn(5, 5, dtype=torch.float64).softmax(-1)
# as many as a multiple of the examples
POINTS = torch.randn(6, WIDTH, dtype=torch.float64)
LAYERS_BY_KEYWORD = Own(
    lambda self, x: self.out(input=self.table(input=x)), table=nn.Embedding(7, WIDTH), **linears("out")
)
INPUTS: dict[str, tuple[nn.Module, Callable[[], Batch]]] = {
    "layers by keyword": (LAYERS_BY_KEYWORD, lambda: {"x": torch.randint(0, 7, (3, 5))}),
    "products by keyword": (
        Own(
            lambda self, x: torch.mm(
                torch.tanh(torch.matmul(x, other=self.first.weight)), mat2=self.out.weight
            ),
            **linears("first", "out"),
        ),
        lambda: rows(3),
    ),
    "copies by keyword": (
        Own(
            lambda self, x: self.out(
                torch.tanh(x + torch.broadcast_to(input=torch.relu_(input=self.first.bias * 1), size=x.shape))
            ),
            **linears("first", "out"),
        ),
        lambda: rows(3),
    ),
    "a vector as weight": (
        Own(
            lambda self, x: F.linear(torch.tanh(self.first(x)), self.out.bias) + self.out.weight.sum(),
            **linears("first", "out"),
        ),
        lambda: rows(3, 1),
    ),
    "a mask first": (
        Own(lambda self, mask, x: self.out(torch.tanh(mask @ self.first(x))), **linears("first", "out")),
        lambda: {"mask": MASK} | rows(3, 5),
    ),
    "positions first": (
        Own(lambda self, at, x: self.out(self.table(at) * x), table=nn.Embedding(7, WIDTH), **linears("out")),
        lambda: {"at": torch.arange(5)[None]} | rows(3, 5),
    ),
    "a number first": (
        Own(lambda self, time, x: self.out(torch.tanh(self.first(x) * time)), **linears("first", "out")),
        lambda: {"time": torch.tensor([0.5], dtype=torch.float64)} | rows(3, 5),
    ),
    "a list": (
        Own(lambda self, x: self.out(torch.tanh(self.first(torch.stack(x)))), **linears("first", "out")),
        lambda: {"x": list(rows(3, 5)["x"])},
    ),
}


@pytest.mark.parametrize("engine", ["auto", "ghost"])
@pytest.mark.parametrize("case", INPUTS)
def test_inputs(case: str, engine: str) -> None:
    torch.manual_seed(0)
    model, batch = INPUTS[case]
    assert exact(copy.deepcopy(model), [batch(), batch(), batch()], of_x, engine) == []


@pytest.mark.parametrize("engine", ["auto", "ghost"])
@pytest.mark.parametrize("case", ["points of all", "each token once"])
def test_rows_that_examples_share_are_no_mixture(case: str, engine: str) -> None:
    """Such rows have what all losses add, and the loop tells it apart."""
    if case == "points of all":
        model = Own(
            lambda self, x, points: torch.tanh(self.out(x)) @ torch.tanh(self.first(points)).T,
            **linears("first", "out"),
        )
        batches = [{"x": rows(3)["x"], "points": POINTS} for _ in range(3)]
    else:

        def forward(self: Any, x: Tensor) -> Tensor:
            tokens, places = x.unique(return_inverse=True)
            return torch.tanh(self.out(self.table(tokens)))[places]

        model = Own(forward, table=nn.Embedding(7, WIDTH), **linears("out"))
        batches = [{"x": torch.randint(0, 7, (3, 5))} for _ in range(3)]
    assert exact(model, batches, of_x, engine) != []


@pytest.mark.parametrize("sizes", [(4, 4), (3, 2), (5, 4)])
def test_a_layer_may_be_called_for_one_example_at_a_time(sizes: tuple[int, int]) -> None:
    """Also where each example has as many rows, or features, as there are examples."""

    def forward(self: Any, x: Tensor) -> Tensor:
        summed = [torch.tanh(self.first(example)).sum(0) for example in x]
        return torch.stack([self.out(one) for one in summed])

    model = Own(forward, **linears("first", "out"))
    exact(model, [rows(*sizes), rows(3, 4), rows(*sizes)], of_x, "auto")


@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
@pytest.mark.parametrize("where", ["input", "one loss"])
def test_mixed_batches_are_refused(where: str, engine: str) -> None:
    """Statistics before the first layer; and statistics whose gradient belongs to a single example."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if where == "input":
            x -= x.mean(0)
        h = torch.tanh(self.first(x))
        return self.out(h if where == "input" else h - h.mean(0))

    model = Own(forward, **linears("first", "out")).double()
    clipper = attach(model, engine=engine)
    for _ in range(2):
        losses = square(model, rows(4))
        with pytest.raises(UserError, match="mixes examples"):
            clipper.backward(losses if where == "input" else losses * torch.tensor([1.0, 0, 0, 0]))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
def test_the_input_of_a_layer_whose_bias_alone_trains_may_be_written_to(engine: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) + x
        return torch.tanh(h.add_(self.out(h)))

    model = Own(forward, **linears("first", "out"))
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    exact(model, [rows(3, 5)] * 2, of_x, engine)


def test_autocast_leaves_float64_alone() -> None:
    model = Own(lambda self, x: self.out(torch.tanh(self.first(x))), **linears("first", "out"))
    with torch.autocast("cpu", torch.bfloat16):
        exact(model, [rows(3)] * 2, of_x, "auto")


@pytest.mark.parametrize("how", ["copied", "recalled"])
def test_which_input_is_the_batch_outlives_a_copy_and_a_restart(how: str) -> None:
    def forward(self: Any, mask: Tensor, x: Tensor) -> Tensor:
        return self.out(mask @ self.first(x) * self.scale)

    model = Own(forward, **linears("first", "out")).double()
    model.register_parameter("scale", nn.Parameter(torch.randn(WIDTH, dtype=torch.float64)))
    fresh = copy.deepcopy(model)
    clipper = attach(model)
    for _ in range(3):
        clipper.backward(square(model, {"mask": MASK} | rows(3, 5)))
    if how == "copied":
        twin, its_clipper = copy.deepcopy((model, clipper))
    else:
        twin, its_clipper = fresh, attach(fresh)
        its_clipper.recall(clipper.remember())
    its_clipper.backward(square(twin, {"mask": MASK} | rows(3, 5)))
    assert "one back-propagation per example" not in its_clipper.choices.values()
