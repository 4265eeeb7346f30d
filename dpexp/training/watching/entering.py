"""What a model is given with its rows: numbers, tensors, and what the loop has set in its modules."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Entering:
    """A call of the model with rows of all examples of a batch.

    Attributes:
        numbers: among its arguments.
        shapes: of the tensors that enter.
        settings: of its modules, by name: see `settings_of`.
        beside: tensors of which nothing is known.
        moved: settings that the model's own forward has changed, as by counting, also beside other batches.
    """

    numbers: list[float]
    shapes: list[torch.Size]
    settings: dict[str, Any]
    beside: list[Tensor] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, arguments: Any, entering: Iterable[Tensor]) -> "Entering":
        numbers = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, float | int)]
        return cls(numbers, [tensor.shape for tensor in entering], settings_of(model))

    def leave(self, model: nn.Module) -> None:
        """Note what the forward has changed."""
        now = settings_of(model)
        self.moved |= {name for name, value in self.settings.items() if now.get(name) != value}

    def unlike(self, other: "Entering", alike: bool) -> str:
        """Name a setting that had another value in another batch; "" if there is none.

        Args:
            other: the call there.
            alike: whether tensors are as long there; whole numbers may be lengths.
        """
        for name, value in self.settings.items():
            there = other.settings.get(name, value)
            if value != there and name not in self.moved and (alike or type(value) is not int):
                return name
        return ""


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Numbers, words and switches that are attributes of a model's modules (`Dropout.p`, `training`), by name."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (float, int, bool, str)
    }
