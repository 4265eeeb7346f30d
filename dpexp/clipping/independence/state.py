"""All that a forward of a model may write to, copied: a replay starts from it, and what it writes goes to copies of that."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpexp.clipping.tapping.forwards import attributes_of

# every module has these; children and buffers are treated by name, and parameters are never copied
COMMON = frozenset(nn.Module().__dict__) - {"training"}
# a forward may add hooks to these tables when it first runs, and a mark that it has, as those of transformers do
HOOKS = tuple(
    key for key, value in nn.Module().__dict__.items() if isinstance(value, dict) and "hooks" in key
)
NO_STATE = (type, FunctionType, MethodType, ModuleType, torch.Generator)
# a class of one's own that is one of these holds something that is no attribute, and that nobody can write to
VALUES = (int, float, complex, str, bytes, tuple, frozenset)
# for a generator of the model's own stands the one of all, which a replay seeds and watches: a new one would begin anywhere, so
# that each run would differ from the others, and nothing could be told from that
GENERATORS: dict[type, Any] = {
    random.Random: random.random.__self__,  # type: ignore[attr-defined]
    np.random.RandomState: np.random.random_sample.__self__,  # type: ignore[attr-defined]
    np.random.Generator: np.random.Generator(np.random.get_bit_generator()),  # type: ignore[attr-defined]
}
# values that nobody can write to
ATOMS = {bool, int, float, str, type(None)}


class State:
    """Copies of all that a forward of a model may write to: buffers, attributes, the tables of children and of hooks."""

    def __init__(self, model: nn.Module):
        copier = _Copier()
        # modules that stand in a plain list, and are no children, come up on the way
        waiting = list(model.modules())
        self._saved: dict[nn.Module, _Saved] = {}
        while waiting:
            module = waiting.pop()
            # what a scripted module has lies in C++, and not among its attributes
            if module not in self._saved and not isinstance(module, torch.jit.ScriptModule):
                self._saved[module] = _Saved(module, copier)
                waiting += copier.modules()

    def switch(self) -> None:
        """Set the modes that modules had: training, names, flags."""
        for module, saved in self._saved.items():
            if isinstance(module, DistributedDataParallel):
                # which is kept from waiting for other ranks
                continue
            every = saved.fixed | saved.own
            module.__dict__.update({k: v for k, v in every.items() if isinstance(v, bool | str)})

    @contextmanager
    def installed(self) -> Iterator[Callable[[], None]]:
        """Inside, what the model writes is lost; what is given sets it to this state, each time it is called."""
        before = [(module, dict(module.__dict__)) for module in self._saved]
        settings = [saved.setting(module.__dict__) for module, saved in self._saved.items()]

        def set_back() -> None:
            fresh = _Copier()
            for setting in settings:
                setting(fresh)

        try:
            yield set_back
        finally:
            for module, values in before:
                module.__dict__.clear()
                module.__dict__.update(values)


class _Saved:
    """What one module had: what nobody can write to, apart from what is copied again each time."""

    def __init__(self, module: nn.Module, copier: _Copier):
        self.fixed: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        for key, value in module.__dict__.items():
            if not _is_common(key):
                (self.fixed if type(value) in ATOMS else self.own)[key] = copier(value)
        # what the copier has seen it names
        del self.own["_modules"]
        # most are empty
        tables = {key: module.__dict__[key] for key in HOOKS}
        self.hooks = {key: copy(table) if table else type(table)() for key, table in tables.items()}
        self.children = dict(module._modules)

    def setting(self, held: dict[str, Any]) -> Callable[[_Copier], None]:
        """What sets the attributes of the module, ``held``, with fresh copies, each time it is called."""
        kept = {key: value for key, value in held.items() if _is_common(key)}
        # neither those that the forward added by itself and adds again, nor those that were there for it alone
        hooks = {key: _in_both(saved, held[key]) for key, saved in self.hooks.items()}
        kept |= hooks | self.fixed
        full = [(key, table) for key, table in hooks.items() if table]
        empty = [table for table in hooks.values() if not table]

        def set_back(fresh: _Copier) -> None:
            for table in empty:
                table.clear()
            held.clear()
            held.update(kept)
            for key, value in self.own.items():
                held[key] = fresh(value)
            for key, table in full:
                held[key] = copy(table)
            held["_modules"] = dict(self.children)

        return set_back


def _in_both(saved: dict[int, Any], now: dict[int, Any]) -> dict[int, Any]:
    return type(saved)([(handle, hook) for handle, hook in saved.items() if handle in now] if saved else ())


class _Copier:
    """Copies values and keeps who shares what with whom."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._modules: list[nn.Module] = []

    def modules(self) -> list[nn.Module]:
        """Return the modules that have come up since the last call."""
        found, self._modules = self._modules, []
        return found

    def __call__(self, value: Any, depth: int = 0) -> Any:
        if type(value) in ATOMS:
            return value
        if id(value) in self._known:
            return self._known[id(value)][0]
        result = self._copied(value, depth)
        self._known[id(value)] = (result, value)
        return result

    def _copied(self, value: Any, depth: int) -> Any:
        # what stands for a module, like the weak proxy by which a trainer knows its model, is none
        if issubclass(type(value), nn.Module):
            self._modules.append(value)
        if isinstance(value, nn.Module):
            return value
        if isinstance(value, Tensor):
            return value if isinstance(value, nn.Parameter) else value.detach().clone()
        if isinstance(value, np.ndarray):
            return value.copy()
        for kind, common in GENERATORS.items():
            if isinstance(value, kind):
                return common
        if isinstance(value, dict):
            result = copy(value)
            for key in value:
                result[key] = self(value[key], depth)
            return result
        if isinstance(value, deque):
            return deque((self(v, depth) for v in value), value.maxlen)
        if type(value) in (list, tuple, set):
            return type(value)(self(v, depth) for v in value)
        own_way = any("__reduce_ex__" in vars(c) for c in type(value).__mro__[:-1])
        held = attributes_of(value)
        fixed = own_way or isinstance(value, NO_STATE + VALUES)
        if depth > 1 or fixed or not (held or hasattr(value, "__dict__")):
            return value
        try:
            # an object of the user's, like a record of running statistics; what lies deeper is not the model's state
            result = value.__new__(type(value))
            for key, part in held.items() if result is not value else ():
                object.__setattr__(result, key, self(part, depth + 1))
            for kind in (list, set):
                if isinstance(value, kind):
                    # what it holds is no attribute; the methods of its class may do more than hold it
                    kind.__init__(result, [self(v, depth) for v in value])
            return result
        except (TypeError, AttributeError):
            return value


@functools.cache
def _is_common(key: str) -> bool:
    return (key in COMMON and key not in ("_buffers", "_modules")) or key.startswith("_dpexp")
