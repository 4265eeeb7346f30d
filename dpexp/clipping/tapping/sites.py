"""Reading a parameter gives a followed value: modules are swapped to a subclass of their class, in place.

The same object, the same state-dict keys, still an ``nn.Linear``. The subclass has one property per trainable parameter: inside
of a forward, with gradients on, it gives the followed parameter (`following`), anywhere else the parameter itself.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dpexp.clipping.compiling import uncompiled
from dpexp.clipping.tapping.following import Followed
from dpexp.clipping.tapping.forwards import inside_reentrant_checkpoint
from dpexp.clipping.tapping.messages import REENTRANT
from dpexp.clipping.tapping.rewritten import REWRITTEN
from dpexp.clipping.tapping.taps import Recorder
from dpexp.errors import UserError

SITE = "_dpexp_site"
MOVED = (
    "{name!r} was taken out of its module after attach, or put back into it (a parametrisation, weight norm, pruning, or the end "
    "of one): do that before the clipper or the PrivacyEngine is made, or after clipper.detach() or engine.close(), to the model "
    "as it was before"
)


class Site:
    """What a swapped module knows: the first names of its trainable parameters, and the recorder."""

    def __init__(self, params: dict[str, str], recorder: Recorder):
        self.params, self.recorder = params, recorder

    @uncompiled
    def read(self, module: nn.Module, local: str) -> Tensor:
        """Return what ``module.<local>`` is for whoever reads it."""
        if local not in module._parameters:
            raise UserError(MOVED.format(name=self.params[local]))
        param = module._parameters[local]
        # a subclass has methods and operations of its own, which no followed value has: the loop takes it as it is; and what is
        # frozen while a part of the forward runs is a constant there
        plain = type(param) is nn.Parameter and param.requires_grad
        if plain and torch.is_grad_enabled() and self.recorder.following:
            assert param is not None
            name = self.params[local]
            if self.recorder.is_followed(param, name):
                return Followed.of(param, name, self.recorder)
        # also what torch.func.functional_call has put in its place, which has a graph of its own
        return param  # type: ignore[return-value]


def find_sites(model: nn.Module, recorder: Recorder) -> list[tuple[nn.Module, Site]]:
    """Return every module that directly owns a trainable parameter, with its site."""
    sites = []
    for module in model.modules():
        params = {
            local: recorder.names[id(p)]
            for local, p in module._parameters.items()
            if p is not None and id(p) in recorder.names
        }
        if params:
            sites.append((module, Site(params, recorder)))
    return sites


def install(module: nn.Module, site: Site) -> None:
    """Swap the class of ``module``; its parameters, buffers, hooks and children stay untouched."""
    cls: Any = type(module)
    alone = next(module.children(), None) is None or cls is nn.MultiheadAttention
    made = swapped_class(cls, tuple(site.params), alone, is_parametrized(module))
    module.__dict__[SITE] = site
    module.__class__ = made


def uninstall(module: nn.Module) -> None:
    """Give a module its class back."""
    module.__class__ = native_class(module)
    del module.__dict__[SITE]


def native_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of the module without a clipper."""
    return getattr(type(module), "_dpexp_native", type(module))


@functools.cache
def swapped_class(
    cls: Any, params: tuple[str, ...], with_forward: bool, parametrized: bool
) -> type[nn.Module]:
    """Return a subclass of ``cls`` with one property per parameter.

    Args:
        cls: of the module.
        params: local names.
        with_forward: whether its forward runs as one piece, uncompiled: a module without children, or one whose child's weights
            it hands to a function itself.
        parametrized: whether torch has given ``cls`` a property of its own for a tensor, and may want to delete it.
    """
    body: dict[str, Any] = {local: _property(local) for local in params}
    body |= {"_dpexp_native": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    body["__reduce_ex__"] = _reduce
    if with_forward:
        body["forward"] = _forward
    if not hasattr(cls, "__deepcopy__"):
        body["__deepcopy__"] = _deepcopy
    kind: Any = type(cls)
    kind = _keeping(kind) if parametrized else kind
    # an author's `__init_subclass__` is not to hear of it: it belongs in no registry, and has no keywords
    heard = hasattr(cls.__init_subclass__, "__func__")
    made = kind(cls.__name__, (nn.Module if heard else cls,), body)
    made.__bases__ = (cls,)
    return made


def _keeping(kind: Any) -> Any:
    """Return a kind of classes that nothing is deleted from."""

    def delete(cls: type, name: str) -> None:
        raise UserError(MOVED.format(name=f"{cls.__name__}.{name}"))

    return type(kind.__name__, (kind,), {"__delattr__": delete})


def _property(local: str) -> property:
    def read(module: nn.Module) -> Any:
        return module.__dict__[SITE].read(module, local)

    def write(module: nn.Module, value: Any) -> None:
        # a module sets its own parameters elsewhere
        raise UserError(MOVED.format(name=module.__dict__[SITE].params[local]))

    return property(read, write)


# uses are recorded in Python: compiled code is cut here, and exact
@uncompiled
def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    cls, recorder = native_class(module), module.__dict__[SITE].recorder
    if recorder.quiet or not torch.is_grad_enabled():
        if recorder.current is not None and inside_reentrant_checkpoint():
            raise UserError(REENTRANT)
        return cls.forward(module, *args, **kwargs)
    recorder.inside += 1
    try:
        rewritten = REWRITTEN.get(cls)
        result = NotImplemented if rewritten is None else rewritten(module, *args, **kwargs)
        return cls.forward(module, *args, **kwargs) if result is NotImplemented else result
    finally:
        recorder.inside -= 1


def _reduce(module: nn.Module, protocol: Any) -> Any:
    raise TypeError(
        f"{type(module).__name__} has a clipper attached and cannot be pickled: call clipper.detach() first, "
        "or save model.state_dict()"
    )


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    memo[id(module)] = twin = type(module).__new__(type(module))
    twin.__dict__.update({key: copy.deepcopy(value, memo) for key, value in module.__dict__.items()})
    return twin
