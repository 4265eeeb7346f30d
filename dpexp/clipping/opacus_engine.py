"""The baseline: Opacus' own `GradSampleModule` computes per-example gradients; grouping and clipping are ours.

Two checks make the library right or refused. Every parameter must have received one gradient per example, and those must add
up to the ordinary gradient, which the same backward pass gives for nothing. Where the library's hooks fail, the error names the
layer and the way out.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.backend import Backend
from dpexp.clipping.backward import Factors
from dpexp.clipping.distributed import Sums
from dpexp.clipping.gradients import numerics
from dpexp.clipping.groups import Group
from dpexp.clipping.sharding import shards_of
from dpexp.clipping.survey import layouts
from dpexp.clipping.tapping.dataflow import FEW
from dpexp.clipping.tapping.forwards import Entered, tensors_in
from dpexp.clipping.tapping.roots import Roots, nodes_behind
from dpexp.errors import UserError

ATTACHED = "_dpexp_clipper"
# what it keeps in modules
LEFT = ("activations", "max_batch_len")
# nodes of autograd behind operations that may give rows another order
_PICKING = ("Index", "Gather", "Scatter", "MaskedS", "Take", "Sort", "Topk", "Stack", "Cat")


class _Graph:
    """Lives as long as the autograd node that it is a hook of, and notes whether gradients have gone through it."""

    used = False

    def __call__(self, gradients: Any) -> None:
        self.used = True


class OpacusBackend(Backend):
    """``engine="opacus"``: per-example gradients of all parameters are instantiated and stored."""

    def __init__(self, model: nn.Module, groups: list[Group], rows_per_example: int):
        try:
            from opacus import GradSampleModule
        except ImportError as error:
            raise UserError("engine='opacus' needs the package opacus: pip install opacus") from error
        if shards_of(model) is not None:
            raise UserError(
                "engine='opacus' needs whole parameters, and these are sharded: choose engine='auto'"
            )
        self.model, self.groups, self.rows_per_example = model, groups, rows_per_example
        self.params = {name: p for group in groups for name, p in group.params.items()}
        # how many nodes autograd made in forwards of which it is proven whose gradient is whose; and in the last one
        self.proven: set[int] = set()
        # in those that picked rows by index, of which it is proven for their own batch alone
        self.routed: set[int] = set()
        self.nodes = self.backwards = 0
        self.rounding = 0.0
        try:
            with _without_second_names(model):
                self.wrapper: Any = GradSampleModule(
                    model, batch_first=True, loss_reduction="sum", strict=True
                )
        except NotImplementedError as error:
            raise UserError(f"Opacus refuses this model: {error}. Use another engine") from error
        # of the batch that is in the model
        self.rows: int | None = None
        # whether a table of the last forward was given more rows than the model asked for
        self.expanded = False
        # of forward passes that wait for their backward
        self.graphs: list[weakref.ref[_Graph]] = []
        for module in model.modules():
            module.__dict__[ATTACHED] = True
        self.forward: Callable[..., Any] | None = model.__dict__.get("forward")
        # A partial function, because a copy of the model then has one of its own; with the signature that others ask for.
        explained = functools.partial(self._explained, model.forward)
        model.__dict__["forward"] = functools.update_wrapper(explained, model.forward)
        self.wrapper.disable_hooks()
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self.hooks = [table.register_forward_pre_hook(self._expand) for table in tables]
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        self.hooks += [convolution.register_forward_pre_hook(_in_order) for convolution in convolutions]

    def _expand(self, table: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Opacus wants one row of positions per example, and transformers look them up once for all."""
        ids = args[0] if args else None
        if self.rows is None or not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
            return None
        self.expanded = self.expanded or self.rows > 1
        return (ids.expand(self.rows, -1), *args[1:])

    def enter(self, given: Entered, looking: bool) -> None:
        """What earlier forwards left is dropped once nobody can back-propagate them any more.

        The library looks at this forward pass and at our backward pass, not at gradients that the loss itself asks for.
        """
        first = given.tensors[0] if given.tensors else None
        self.rows = first.shape[0] if first is not None and first.dim() else None
        if looking:
            return
        self.wrapper.enable_hooks()
        self.expanded = False
        self.nodes = -torch._C._autograd._get_sequence_nr()
        waiting = (graph for ref in self.graphs if (graph := ref()) is not None)
        if self.graphs and all(graph.used for graph in waiting):
            self.graphs.clear()
            self.forget()

    def leave(self, output: Any, looking: bool) -> None:
        if looking:
            return
        self.wrapper.disable_hooks()
        self.nodes += torch._C._autograd._get_sequence_nr()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                graph = _Graph()
                tensor.grad_fn.register_prehook(graph)
                self.graphs.append(weakref.ref(graph))

    def uninstall(self) -> None:
        for module in self.model.modules():
            module.__dict__.pop(ATTACHED, None)
        for hook in self.hooks:
            hook.remove()
        if self.forward is None:
            self.model.__dict__.pop("forward", None)
        else:
            self.model.__dict__["forward"] = self.forward
        self.wrapper.to_standard_module()
        for module in self.model.modules():
            for name in LEFT:
                module.__dict__.pop(name, None)

    def clipped_sums(self, roots: Roots, factors: Factors) -> tuple[Tensor, Sums, tuple[Tensor | None, ...]]:
        losses = roots.tensors[0]
        if roots.owner is not None or not isinstance(losses, Tensor):
            raise UserError(
                "engine='opacus' clips from losses alone, not in a stage of a pipeline: use engine='opacus_improved' or 'auto'"
            )
        per_example = self._per_example_gradients(losses, roots.gradients[0])
        norms: list[Tensor] = []
        sums: Sums = {}
        for k, group in enumerate(self.groups):
            sq = torch.zeros(losses.shape[0], dtype=torch.float32, device=losses.device)
            for name in group.params:
                flat = per_example[name].reshape(losses.shape[0], -1)
                sq = sq + numerics.squared_norms(flat)
            finite = sq.isfinite()
            factor = torch.where(finite, factors(k, torch.where(finite, sq, 0.0)), 0.0)
            for name, param in group.params.items():
                gradient = per_example.pop(name)
                if not bool(finite.all()):
                    gradient = numerics.zero_examples(gradient, finite)
                rows = gradient.to(numerics.wide(gradient.dtype)).contiguous()
                sums[name] = numerics.combine(rows, factor).to(param.dtype)
            norms.append(sq)
        return torch.stack(norms), sums, ()

    def forget(self) -> None:
        """Drop what a forward pass left that is never back-propagated: Opacus would take it for a second use."""
        for module in self.model.modules():
            if isinstance(kept := getattr(module, "activations", None), list):
                kept.clear()
        for p in self.params.values():
            p._forward_counter = 0  # type: ignore[attr-defined]

    def how(self, name: str) -> tuple[str, str]:
        return "opacus", "instantiate"

    def _per_example_gradients(self, losses: Tensor, ones: Tensor) -> dict[str, Tensor]:
        """``ones``: ``[B]``, times the loss scale."""
        signs, signed = self._signed_gradients(losses, ones)
        before = {name: p.grad for name, p in self.params.items()}
        for p in self.params.values():
            p.grad = None
        self.wrapper.enable_hooks()
        try:
            losses.backward(ones)
            samples = {name: getattr(p, "grad_sample", None) for name, p in self.params.items()}
            plain = {name: p.grad for name, p in self.params.items()}
        except Exception as error:
            raise self._said(error, "backward") or error from error
        finally:
            self.wrapper.disable_hooks()
            for name, p in self.params.items():
                p.grad = before[name]
                p.grad_sample = None  # type: ignore[attr-defined]
        sizes = [float(g.abs().max()) for g in plain.values() if g is not None and g.numel()]
        largest = max(sizes, default=0.0)
        double = all(p.dtype == torch.float64 for p in self.params.values())
        self.rounding = (1e-12 if double else 1e-4) * largest if math.isfinite(largest) else 0.0
        found = {name: self._checked(name, samples[name], plain[name], losses) for name in samples}
        try:
            for name, gradient in signed.items():
                self._compare(name, signs, found[name], gradient)
        except UserError:
            # who goes on is looked at again
            self.proven.discard(self.nodes)
            raise
        if signed:
            self.proven.add(self.nodes)
        return found

    def _signed_gradients(self, losses: Tensor, ones: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Ordinary gradients under random weights of the losses: for each new way through the model, for each batch on a way that
        picks rows, for the second one, and now and then."""
        row_weights = layouts.weights(losses.shape[0]).to(losses)
        self.backwards += 1
        proven = self.nodes in self.proven - self.routed and not layouts.due_for_rows(self.backwards)
        if proven or losses.shape[0] < 2:
            return row_weights, {}
        if self.nodes not in self.routed and _picks_rows(losses.grad_fn):
            self.routed.add(self.nodes)
        try:
            grads = torch.autograd.grad(
                losses, list(self.params.values()), row_weights * ones, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise self._said(error, "backward") or error from error
        return row_weights, {name: g for name, g in zip(self.params, grads, strict=True) if g is not None}

    def _explained(self, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            return forward(*args, **named)
        except Exception as error:
            raise self._said(error, "forward") or error from error

    def _said(self, error: Exception, direction: str) -> UserError | None:
        """One sentence with the layer where the library failed; None for an error that is none of its own."""
        if isinstance(error, UserError | torch.OutOfMemoryError):
            return None
        message = (str(error).splitlines() or [type(error).__name__])[0]
        # Its hooks make of each layer's output a view that may not be written to; and a model that gives each example its rows of
        # a table by itself has too many of them.
        too_many = self.expanded and "Sizes" in message
        own = direction == "backward" or "custom Function" in message or too_many
        names = {id(module): name for name, module in self.model.named_modules()}
        layer: nn.Module = self.model
        trace = error.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            own = own or ".opacus." in f".{frame.f_globals.get('__name__', '')}."
            for value in (frame.f_locals.get("self"), frame.f_locals.get("module")):
                if isinstance(value, nn.Module) and id(value) in names:
                    layer = value
        if not own:
            return None
        name = names[id(layer)]
        where = f"{name} ({type(layer).__name__})" if name else type(layer).__name__
        return UserError(
            f"Opacus fails in the {direction} pass, at {where}: {message}. Its hooks don't know this use; take another engine, "
            "such as engine='auto'"
        )

    def _compare(self, name: str, weights: Tensor, sample: Tensor, reference: Tensor) -> None:
        total = torch.tensordot(weights.to(sample), sample, dims=1)
        finite = reference.isfinite() & total.isfinite()
        if self.proven and not bool(finite.all()):
            return
        # What is infinite or no number must be so in both: an example's own infinity is, one that arrived past the layer is not.
        same = torch.equal(reference.isfinite(), total.isfinite())
        sums = torch.where(finite, sample.abs().sum(0), 0.0)
        # some gradients are zero but for rounding, as those of the biases of keys are
        tolerance = 1e-2 * float(sums.max()) + self.rounding
        if not same or float(torch.where(finite, total - reference, 0.0).abs().max()) > tolerance:
            raise UserError(
                f"Opacus' per-example gradients of {name} do not add up to its gradient (a shared parameter, a table that all "
                "examples share, an unusual layer option, or a reused module): they are wrong. Use another engine"
            )

    def _checked(self, name: str, sample: Any, plain: Tensor | None, losses: Tensor) -> Tensor:
        rows = losses.shape[0] * self.rows_per_example
        param = self.params[name]
        if sample is None and plain is None:
            return torch.zeros(losses.shape[0], *param.shape, dtype=param.dtype, device=param.device)
        if isinstance(sample, list):
            sample = sum(sample) if len({s.shape for s in sample}) == 1 else sample[0]
        if sample is None or plain is None or sample.shape != (rows, *param.shape):
            shape = None if sample is None else list(sample.shape)
            raise UserError(
                f"Opacus gave no per-example gradients for {name} (shape {shape}, expected {[rows, *param.shape]}): "
                "the model must be in training mode and the parameter used by one supported layer. Use another engine"
            )
        self._compare(name, torch.ones(rows, device=sample.device), sample, plain)
        m = self.rows_per_example
        return sample if m == 1 else sample.unflatten(0, (losses.shape[0], m)).sum(1)


def _picks_rows(root: Any) -> bool:
    """Whether rows of the batch, which stand in front, were picked, ordered or put together on the way to a node of autograd."""
    for node in nodes_behind([root]):
        if not node.name().startswith(_PICKING):
            continue
        if not hasattr(node, "_saved_indices"):
            if getattr(node, "_saved_dim", 0) == 0:
                return True
            continue
        first, *rest = node._saved_indices
        # as for the last token of each row, and not an order, which may only happen to change nothing
        each = first is not None and len(first) >= FEW and any(part is not None for part in rest)
        if first is not None and not (each and torch.equal(first.flatten().cpu(), torch.arange(len(first)))):
            return True
    return False


def _in_order(convolution: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Opacus reads the images of `nn.Conv2d` as if they lay row by row, whatever their strides say."""
    if not args or not isinstance(args[0], Tensor):
        return None
    return (args[0].contiguous(), *args[1:])


@contextmanager
def _without_second_names(model: nn.Module) -> Iterator[None]:
    """Inside, no module with children owns a parameter of one of its layers under a second name.

    In BERT's masked language model the head owns the bias of its decoder, and Opacus would take the whole head for one
    layer. Should the second name be used after all, the gradients don't add up, and that is refused.
    """
    of_layers = {id(p) for m in model.modules() if not list(m.children()) for p in m._parameters.values()}
    hidden = []
    for module in model.modules():
        second = [name for name, p in module._parameters.items() if p is not None and id(p) in of_layers]
        if second and next(module.children(), None) is not None:
            hidden.append((module, dict(module._parameters)))
            for name in second:
                del module._parameters[name]
    try:
        yield
    finally:
        for module, parameters in hidden:
            module._parameters.clear()
            module._parameters.update(parameters)
