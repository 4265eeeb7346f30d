"""What a model holds, or a batch is made of, is there where its forward runs again: else a mixing part would sleep there."""

import random
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from dpexp.errors import UserError
from tests.clipping.stepping import B, Net, step, x


class Owned:
    """What makes a list of one's own of a list: it has attributes, and asks for an owner."""

    def __init__(self, values: Any = (), owner: Any = None):
        self.owner = owner
        super().__init__(values) if isinstance(self, list | set) else super().__init__()


class OwnedList(Owned, list):
    """A list of layers, as Keras' lists are."""

    def append(self, value: Any) -> None:
        raise AssertionError("nobody asked for another layer")


class OwnedSet(Owned, set):
    """A set of names, as Keras' sets are."""


class OwnedName(str):
    """A word with attributes."""


class OwnedNumber(int):
    """A number with attributes."""


@pytest.mark.parametrize("kind", [OwnedList, OwnedSet, OwnedName, OwnedNumber])
def test_what_a_container_of_ones_own_class_holds_is_there_when_the_forward_runs_again(kind: type) -> None:
    """Without it, a batch norm of Keras stands in evaluation mode there, and passes."""

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = kind("1" if issubclass(kind, str) else 1 if issubclass(kind, int) else ["centre"])
            self.held.note = "an attribute"

        def forward(self, h: Tensor) -> Tensor:
            return h - h.detach().mean(0) if self.held else h

    with pytest.raises(UserError, match="mixes examples"):
        step(Net(Switched()), x())


class Scales(nn.Module):
    """Draws a factor for each row from a generator of its own."""

    def __init__(self, rng: Any, mixes: bool):
        super().__init__()
        self.rng, self.mixes = rng, mixes

    def forward(self, h: Tensor) -> Tensor:
        scale = torch.tensor([self.rng.uniform(0, 1) for _ in h])[:, None]
        return scale * (h - h.detach().mean(0) if self.mixes else h)


@pytest.mark.parametrize("kind", [random.Random, np.random.RandomState, np.random.default_rng])
def test_a_generator_of_a_models_own_hides_no_mixing(kind: type) -> None:
    """It began anywhere in each run, and all of them differed; numpy's moved on with each, and innocent models were refused."""
    model, drawn = Net(Scales(kind(0), False)), kind(0)
    assert not step(model, x()).notes
    for _ in range(B):
        drawn.uniform(0, 1)
    # a look leaves no trace
    assert model.between.rng.uniform(0, 1) == drawn.uniform(0, 1)
    with pytest.raises(UserError, match="mixes examples"):
        step(Net(Scales(kind(0), True)), x())


class Rows(MutableMapping):
    """Tensors by name of so many rows, over which it goes, as TensorDict does."""

    def __init__(self, parts: dict[str, Tensor]):
        self.parts, self.size = parts, len(next(iter(parts.values())))

    def __getitem__(self, key: Any) -> Any:
        return self.parts[key] if isinstance(key, str) else Rows({k: v[key] for k, v in self.parts.items()})

    def __setitem__(self, key: str, value: Tensor) -> None:
        assert len(value) == self.size
        self.parts[key] = value

    def __delitem__(self, key: str) -> None:
        del self.parts[key]

    def __iter__(self) -> Any:
        return (self[i : i + 1] for i in range(self.size))

    def __len__(self) -> int:
        return self.size

    def keys(self) -> Any:
        return self.parts.keys()


register_pytree_node(
    Rows,
    lambda rows: ([*rows.parts.values()], [*rows.parts]),
    lambda parts, names: Rows(dict(zip(names, parts, strict=True))),
)


@pytest.mark.parametrize("between", [torch.tanh, lambda h: h - h.detach().mean(0)])
def test_a_batch_that_torch_can_take_apart_is_looked_at(between: Callable[[Tensor], Tensor]) -> None:
    """It was looked through by its rows: a `TypeError` with TensorDict."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(between)

        def forward(self, rows: Rows) -> Tensor:
            rows["found"] = self.net(rows["features"])
            return rows["found"]

    with nullcontext() if between is torch.tanh else pytest.raises(UserError, match="mixes examples"):
        assert not step(Writes(), Rows({"features": x()})).notes
