"""Installing taps by swapping ``module.__class__`` in place: same object, same state-dict keys, still an ``nn.Linear``.

The swapped class adds one property per trainable parameter, because what reading ``module.weight`` should give depends on
who asks: inside the module's own forward the detached value, elsewhere a `Tracked` view where the parameter is used as a bare
parameter, otherwise the parameter itself.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.contributions.base import Contribution
from dpexp.clipping.dataflow import inside_reentrant_checkpoint
from dpexp.clipping.graph_tap import tracing_full_graph
from dpexp.clipping.layers import LayerKind
from dpexp.clipping.rewritten import REWRITTEN
from dpexp.clipping.taps import Call, Recorder
from dpexp.clipping.tracked import Tracked, derive
from dpexp.errors import UserError

if TYPE_CHECKING:
    from dpexp.clipping.fullgraph import GraphSite

SITE = "_dpexp_site"
CUT = (
    "a clipper is attached, which records in Python. For one graph (fullgraph=True) use "
    "attach(model, groups='layer', engine='onepass'), or engine='ghost' for other groups"
)
REENTRANT = (
    "reentrant activation checkpointing cannot be clipped: pass use_reentrant=False "
    "(transformers: gradient_checkpointing_kwargs={'use_reentrant': False})"
)


class Site:
    """What a swapped module knows: its kind, the first names of its trainable parameters, and the recorder.

    ``values`` overrides the parameters while the module's own forward runs. ``tracked`` names the parameters whose reads from
    outside of that forward must be followed (`tracked.py`).
    """

    def __init__(self, owner: str, kind: LayerKind | None, params: dict[str, str], recorder: Recorder):
        self.owner, self.kind, self.params, self.recorder = owner, kind, params, recorder
        self.label = kind.name if kind else "bare parameter"
        self.names = tuple(params.values())
        self.values: dict[str, Tensor] | None = None
        self.originals: dict[str, Any] = {}  # the parameters as they were attached
        self.tracked: set[str] = set() if kind else set(params)
        self.shared_table = (
            False  # an embedding that is looked up once for all examples, known after the first step
        )
        self.graph: GraphSite | None = None  # its tap in compiled graphs, for engines that need no records

    @torch.compiler.disable(reason=CUT)
    def read(self, module: nn.Module, local: str) -> Tensor:
        """`value`, where a compiler is tracing: it must not look inside."""
        return self.value(module, local)

    def value(self, module: nn.Module, local: str) -> Tensor:
        """The value of ``module.<local>`` for whoever reads it."""
        if self.values is not None and local in self.values:
            return self.values[local]
        param = module._parameters[local]
        assert param is not None
        in_forward = self.values is None and torch.is_grad_enabled() and self.recorder.rows is not None
        if in_forward and local in self.tracked and param is self.originals[local]:
            return Tracked.of(param, self.params[local], self.recorder)
        return param

    def native(self, module: nn.Module, values: dict[str, Tensor], args: tuple, kwargs: dict) -> Tensor:
        """The module's own forward with some parameters replaced by ``values``."""
        previous, self.values = self.values, values
        try:
            return native_class(module).forward(module, *args, **kwargs)
        finally:
            self.values = previous

    def _for_all(self, ids: Tensor) -> bool:
        """Whether an embedding is looked up once for all examples, like a table of positions."""
        rows = self.recorder.rows
        return self.shared_table or (ids.dim() == 2 and ids.shape[0] == 1 and rows is not None and rows > 1)

    def forward(self, module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
        if any(module._parameters[local] is not original for local, original in self.originals.items()):
            return self.native(
                module, {}, args, kwargs
            )  # torch.func.functional_call: what it passes has a graph of its own
        ids = args[0] if args else kwargs.get("input")
        if self.label == "embedding" and isinstance(ids, Tensor) and self._for_all(ids):
            table = Tracked.of(module._parameters["weight"], self.names[0], self.recorder)  # type: ignore[arg-type]
            return derive(F.embedding, (ids, table, module.padding_idx), {}, [table])
        saved, template = _take_tensors(args, kwargs)
        args, kwargs = _put_tensors(saved, template)
        if not saved:
            raise UserError(f"{self.owner}: its forward got no tensor to clip by; pass the input as a tensor")
        device, active = saved[0].device.type, None
        if torch.is_autocast_enabled(device) and saved[0].is_floating_point():
            active = (device, torch.get_autocast_dtype(device))
            if self.label in AUTOCAST_KINDS:
                saved = (
                    in_autocast(saved[0]),
                    *saved[1:],
                )  # what it computes with, and all that must be kept
                args, kwargs = _put_tensors(saved, template)
        values = {local: module._parameters[local].detach() for local in self.params}  # type: ignore[union-attr]
        y = self.native(module, values, args, kwargs)
        if not isinstance(y, Tensor):
            raise UserError(
                f"{self.owner}: a {self.label} layer must return one tensor, got {type(y).__name__}"
            )
        x, flow = saved[0], self.recorder.flow
        if (
            y._is_view()
        ):  # an in-place operation may follow, which a view out of a custom function does not allow
            y = torch.ops.aten._unsafe_view(y, y.shape)
        call = Call(
            source=_Bound(self, module),
            key=self.recorder.place(self.owner),
            input_shape=saved[0].shape,
            output_shape=y.shape,
            from_batch=None if flow is None else x in flow,
            routed=flow is not None and flow.routed(x),
            template=template,
            autocast=active,
        )
        return self.recorder.tap(y, call, _shapes_of(saved) if set(self.params) == {"bias"} else saved)


AUTOCAST_KINDS = frozenset({"linear", "conv1d", "convolution", "transposed convolution"})


def in_autocast(x: Tensor) -> Tensor:
    """``x`` as autocast hands it to a matrix product, which leaves float64 as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _shapes_of(saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Zeros in the place of what a layer received, where only its bias trains.

    That gradient needs no input. Ordinary autograd does not keep it either, so models write to it in place.
    """
    return tuple(t.new_zeros(()).expand(t.shape) for t in saved)


class _Bound:
    """A site together with its module: the `Source` of the site's calls."""

    def __init__(self, site: Site, module: nn.Module):
        self.site, self.module = site, module
        self.label, self.owner, self.names = site.label, site.owner, site.names

    def contributions(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        local = {local: name for local, name in self.site.params.items() if name in names}
        assert self.site.kind is not None
        values = {local: self.module._parameters[local].detach() for local in self.site.params}  # type: ignore[union-attr]
        previous, self.site.values = self.site.values, values
        try:
            found = self.site.kind.contributions(self.module, saved, gy, num_examples, set(local))
        finally:
            self.site.values = previous
        return {local[key]: contribution for key, contribution in found.items()}

    def plain_gradients(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, names: set[str]
    ) -> dict[str, Tensor]:
        wanted = {local: name for local, name in self.site.params.items() if name in names}
        args, kwargs = _put_tensors(saved, call.template)
        with torch.enable_grad(), autocast_like(call):
            values = {
                local: self.module._parameters[local].detach().requires_grad_(local in wanted)  # type: ignore[union-attr]
                for local in self.site.params
            }
            y = self.site.native(self.module, values, args, kwargs)
        leaves = [values[local] for local in wanted]
        grads = torch.autograd.grad(y, leaves, gy.to(y.dtype), allow_unused=True)
        return {name: g for name, g in zip(wanted.values(), grads, strict=True) if g is not None}


def autocast_like(call: Call) -> torch.autocast:
    """The autocast state in which the call was made."""
    device, dtype = call.autocast or ("cpu", torch.bfloat16)
    return torch.autocast(device, dtype=dtype, enabled=call.autocast is not None)


def _take_tensors(args: tuple, kwargs: dict) -> tuple[tuple[Tensor, ...], Any]:
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and not isinstance(args[0], Tracked):
        return args, _ALONE
    saved: list[Tensor] = []

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            # a layer ends the following of a parameter that it gets as its input: ordinary autograd goes on from here
            saved.append(value.as_subclass(Tensor) if isinstance(value, Tracked) else value)
            return _Slot(len(saved) - 1)
        return value

    template = (tuple(take(a) for a in args), {k: take(v) for k, v in kwargs.items()})
    return tuple(saved), template


class _Slot(int):
    """Where a saved tensor stood among the arguments."""


_ALONE: tuple[tuple, dict] = ((_Slot(0),), {})  # the arguments of nearly every layer


def _put_tensors(saved: tuple[Tensor, ...], template: Any) -> tuple[tuple, dict]:
    if template is _ALONE:
        return saved, {}
    args, kwargs = template

    def put(value: Any) -> Any:
        return saved[value] if isinstance(value, _Slot) else value

    return tuple(put(a) for a in args), {k: put(v) for k, v in kwargs.items()}


def native_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module without a clipper."""
    cls = type(module)
    return cls.__mro__[1] if getattr(cls, "_dpexp_swapped", False) else cls


_swapped_classes: dict[tuple[type, tuple[str, ...], bool, bool], type] = {}


def swapped_class(
    cls: type[nn.Module], params: tuple[str, ...], with_forward: bool, traceable: bool = False
) -> type[nn.Module]:
    """A subclass of ``cls`` with one property per parameter and, for known kinds, a forward with taps.

    ``traceable``: `torch.compile` may look into both.
    """
    key = (cls, params, with_forward, traceable)
    if key not in _swapped_classes:
        reader = _traceable_reader if traceable else _reader
        body: dict[str, Any] = {local: property(reader(local)) for local in params}
        body |= {"_dpexp_swapped": True, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        body["__reduce_ex__"] = _reduce
        if with_forward:
            body["forward"] = _traceable_forward if traceable else _forward
        if traceable:
            body["_apply"] = _apply
        if not hasattr(cls, "__deepcopy__"):
            body["__deepcopy__"] = _deepcopy
        _swapped_classes[key] = type(cls.__name__, (cls,), body)
    return _swapped_classes[key]


def _reader(local: str) -> Any:
    def read(module: nn.Module) -> Any:
        site = module.__dict__[SITE]
        return site.read(module, local) if torch.compiler.is_compiling() else site.value(module, local)

    return read


def _traceable_reader(local: str) -> Any:
    def read(module: nn.Module) -> Any:
        if torch.compiler.is_dynamo_compiling() and tracing_full_graph():
            # the module's own forward does not ask here: gradients of other uses arrive at the parameter, and are seen
            return module._parameters[local]
        site = module.__dict__[SITE]
        return site.read(module, local) if torch.compiler.is_compiling() else site.value(module, local)

    return read


def _traceable_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling() and tracing_full_graph():
        site = getattr(module, SITE)
        if not torch.is_grad_enabled():
            return native_class(module).forward(module, *args, **kwargs)
        y = site.graph.forward(module, args, kwargs, cast=site.label in AUTOCAST_KINDS)
        if y is not NotImplemented:
            return y
    return _forward(module, *args, **kwargs)


def _apply(module: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """``module.to(...)``: what stands in for the parameters moves along."""
    native_class(module)._apply(module, fn, *args, **kwargs)
    module.__dict__[SITE].graph.renew(module)
    return module


@torch.compiler.disable(reason=CUT)  # taps record in Python: compiled code is cut here, and exact
def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    site: Site = module.__dict__[SITE]
    if not torch.is_grad_enabled():
        if site.recorder.current is not None and inside_reentrant_checkpoint():
            raise UserError(REENTRANT)
        return native_class(module).forward(module, *args, **kwargs)
    if site.kind is not None:
        return site.forward(module, args, kwargs)
    result = REWRITTEN[native_class(module)](module, *args, **kwargs)
    return native_class(module).forward(module, *args, **kwargs) if result is NotImplemented else result


def _reduce(module: nn.Module, protocol: Any) -> Any:
    raise TypeError(
        f"{type(module).__name__} has a clipper attached and cannot be pickled: call clipper.detach() first, "
        "or save model.state_dict()"
    )


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    memo[id(module)] = twin = type(module).__new__(type(module))
    twin.__dict__.update({key: copy.deepcopy(value, memo) for key, value in module.__dict__.items()})
    return twin


def install(module: nn.Module, site: Site) -> None:
    """Swap the class of ``module``; its parameters, buffers, hooks and children stay untouched."""
    with_forward = site.kind is not None or type(module) in REWRITTEN
    traceable = site.graph is not None and site.kind is not None
    cls = swapped_class(type(module), tuple(site.params), with_forward, traceable)
    site.originals = {local: module._parameters[local] for local in site.params}
    module.__dict__[SITE] = site
    module.__class__ = cls


def uninstall(module: nn.Module) -> None:
    module.__class__ = native_class(module)
    del module.__dict__[SITE]
