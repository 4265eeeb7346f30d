"""Which weights a network uses and in what shapes, from one forward pass.

Calls of torch's functions are watched rather than modules alone, because some networks hand a module's weight to a function
themselves (timm's BEiT does); modules whose own forward hides the weight are read off their input and output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpexp.clipping.gradients import Lookup, Outer, PerExampleGradient
from dpexp.clipping.operations import FORMULAS
from dpexp.clipping.operations.conv import Convolution
from dpexp.complexity.formulas import Layer

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PRODUCTS = (torch.addmm, torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm)


def layers_of(model: nn.Module, forward: Callable[[], object]) -> list[Layer]:
    """Every use of a weight in a linear map, convolution or lookup, in the order of the forward pass.

    A module that is called again adds its positions to its first use, as its gradients add up; a weight that another
    module uses too is a layer of its own, with `Layer.tied`.

    Args:
        model: on any device, the meta device included.
        forward: runs it once on one example.
    """
    watch = _Watch(model)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if module._parameters or isinstance(module, nn.MultiheadAttention):
                before, after = watch.hooks(name)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        with watch:
            forward()
    return watch.layers()


def coverage(model: nn.Module, layers: list[Layer]) -> tuple[int, int, list[str]]:
    """The number of parameters, of those that are weights of listed layers, and the names of unlisted ones that have two
    dimensions or more (bare parameters, recurrent weights, layers that the forward pass did not reach)."""
    listed = {layer.name for layer in layers}
    covered, rest = 0, []
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        if parameter.dim() < 2:
            continue
        if owner in listed or name in listed:
            covered += parameter.numel()
        elif sum(size > 1 for size in parameter.shape) > 1:
            rest.append(name)
    return sum(p.numel() for p in model.parameters()), covered, rest


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in model.named_parameters() if weight.dim() > 1}
        self._first: dict[int, str] = {}  # weight -> the name of the layer that used it first
        self._found: dict[tuple[str, int], Layer] = {}
        self._calls: Counter[int] = Counter()  # weight -> uses seen
        self._inside: list[tuple[str, nn.Module, int]] = []

    def layers(self) -> list[Layer]:
        return list(self._found.values())

    # Functions.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear or func is F.embedding:
            x, weight = _arguments(args, kwargs or {}, "input", "weight")
            self._seen(x, weight, weight.shape[0], weight.shape[1], lookup=func is F.embedding)
        elif func in _PRODUCTS and len(args) >= 2:
            x, weight = args[-2:]
            if isinstance(weight, Tensor) and weight.dim() == 2:
                self._seen(x, weight, weight.shape[1], weight.shape[0])
        return result

    def _seen(self, x: Tensor, weight: Tensor, rows: int, width: int, lookup: bool = False) -> None:
        """A map to ``rows`` outputs, or a lookup in a table of ``rows`` rows."""
        if id(weight) not in self._names:
            return
        if lookup:
            self._add(weight, "embedding", x.numel(), width, rows, sample=_lookups(x.numel(), width, rows))
        else:
            T = x.numel() // width
            self._add(weight, "linear", T, rows, width, sample=_products(T, rows, width))

    # Modules.

    def hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            weight = getattr(module, "weight", None)
            self._inside.append((name, module, self._calls[id(weight)]))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            *_, calls = self._inside.pop()
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.MultiheadAttention):
                self._attention(name, module, *_arguments(args, kwargs, "query", "key"))
            elif weight is not None and self._calls[id(weight)] == calls and id(weight) in self._names:
                self._module(name, module, weight, args[0] if args else next(iter(kwargs.values())), output)

        return before, after

    def _module(self, name: str, module: nn.Module, weight: Tensor, x: Tensor, y: Tensor) -> None:
        """A convolution, or a layer that does not hand its own parameter to the function that it calls."""
        if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
            slides = x if isinstance(module, _TRANSPOSED) else y
            T, p, d = slides.numel() // weight.shape[0], weight.shape[0], weight[0].numel()
            sample = _images(module, x.shape, y.shape)
            self._add(weight, "convolution", T, p, d, module.groups, name, sample)
        elif isinstance(module, nn.Linear):
            p, d = weight.shape
            self._add(weight, "linear", x.numel() // d, p, d, name=name)
        elif isinstance(module, nn.Embedding):
            d, p = weight.shape
            self._add(weight, "embedding", x.numel(), p, d, name=name)

    def _attention(self, name: str, module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> None:
        """torch's own attention hides its weights inside one call."""
        E, T = module.embed_dim, query.numel() // module.embed_dim
        if (weight := module.in_proj_weight) is not None:
            into = f"{name}.in_proj_weight"
            if query is key:
                self._add(weight, "linear", T, 3 * E, E, name=into, sample=_products(T, 3 * E, E))
            else:
                for part, positions, p in (("query", T, E), ("key, value", key.numel() // E, 2 * E)):
                    self._add(weight, "linear", positions, p, E, name=f"{into} ({part})", part=part)
        out = module.out_proj.weight
        self._add(out, "linear", T, E, E, name=f"{name}.out_proj", sample=_products(T, E, E))

    def _add(
        self, weight: Tensor, kind: str, T: int, p: int, d: int, groups: int = 1, name: str | None = None,
        sample: Callable[[int], PerExampleGradient] | None = None, part: str = "",
    ) -> None:  # fmt: skip
        self._calls[id(weight)] += 1
        name = name or self._name(weight)
        if any(taken == name and layer.kind != kind for (taken, _), layer in self._found.items()):
            name = f"{name} (as {kind})"  # an embedding whose table a function multiplies with, too
        key = (name, id(weight))
        if (known := self._found.get(key)) is not None:
            T += known.T
            sample = _products(T, p, d) if kind == "linear" and sample else None
        first = self._first.setdefault(id(weight), name)
        tied = None if first == name or part else first
        self._found[key] = Layer(name, kind, T, p, d, groups, tied, sample)

    def _name(self, weight: Tensor) -> str:
        for name, module, _ in reversed(self._inside):
            if getattr(module, "weight", None) is weight:
                return name
        return self._names[id(weight)].removesuffix(".weight")


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    return [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]


# Random per-example gradients for measurements, of the very classes that the clipping engine uses.


def _products(T: int, p: int, d: int) -> Callable[[int], PerExampleGradient]:
    return lambda batch: Outer(torch.randn(batch, T, d), torch.randn(batch, T, p))


def _lookups(T: int, p: int, d: int) -> Callable[[int], PerExampleGradient]:
    return lambda batch: Lookup(torch.randint(d, (batch, T)), torch.randn(batch, T, p), d)


def _images(module: nn.Module, x: torch.Size, y: torch.Size) -> Callable[[int], PerExampleGradient]:
    assert isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED))
    dims = len(module.kernel_size)
    plain = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    formula = FORMULAS[transposed if isinstance(module, _TRANSPOSED) else plain]
    assert isinstance(formula, Convolution)
    options = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}

    def sample(batch: int) -> PerExampleGradient:
        inputs, gradients = (torch.randn(batch * size[0], *size[1:]) for size in (x, y))
        return formula.weight(inputs, gradients, module.weight.shape, options, batch)

    return sample
