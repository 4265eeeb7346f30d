"""What a loop has of its own and goes on with: an average of the weights, the best loss so far, a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpexp.errors import UserError
from dpexp.parallel.shards import is_sharded


class Kept:
    """Objects of a loop as one part of a checkpoint.

    Args:
        objects: by name: dicts, and what has `state_dict` and `load_state_dict`.

    Raises:
        UserError: something is neither, so that nothing could be put back into it.
    """

    def __init__(self, objects: Mapping[str, Any] | None):
        if not isinstance(objects, Mapping | None):
            raise UserError(
                f'keep={objects!r}: give a dictionary with names, such as keep={{"average": average}}'
            )
        self.objects = dict(objects or {})
        for name, value in self.objects.items():
            if not (isinstance(value, dict) or hasattr(value, "load_state_dict")):
                raise UserError(
                    f"keep[{name!r}] is {type(value).__name__}, into which nothing can be put back: put it into a dictionary, "
                    f'such as keep={{"mine": {{{name!r}: ...}}}}, and read it from there'
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each by its name."""
        state = {
            name: dict(value) if isinstance(value, dict) else value.state_dict()
            for name, value in self.objects.items()
        }
        for name, held in state.items():
            if any(isinstance(value, Tensor) and is_sharded(value) for value in tree_leaves(held)):
                raise UserError(
                    f"keep[{name!r}] holds sharded tensors, and is written by one process: leave it out"
                )
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave; what is named since keeps what it has."""
        for name, value in self.objects.items():
            if name not in state:
                continue
            if isinstance(value, dict):
                value.clear()
                value.update(state[name])
            else:
                value.load_state_dict(state[name])
