"""`attach`: from here on ``clipper.backward(losses)`` leaves in ``p.grad`` the sum of the clipped per-example gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpexp.clipping import distributed
from dpexp.clipping.backward import BackwardPass
from dpexp.clipping.coverage import CoverageRow, coverage_table, find_sites, refuse_couplings
from dpexp.clipping.dataflow import entered, inside_reentrant_checkpoint
from dpexp.clipping.donation import keep_buffers, release_buffers
from dpexp.clipping.engines import Engine, engine_named
from dpexp.clipping.entrance import watched
from dpexp.clipping.fullgraph import GraphTaps, possible
from dpexp.clipping.graph_tap import tracing_full_graph
from dpexp.clipping.groups import Group, GroupsSpec, build_groups, trainable_parameters
from dpexp.clipping.memory import LateSum, Memory
from dpexp.clipping.opacus_engine import OpacusBackend
from dpexp.clipping.rules import RULES
from dpexp.clipping.swap import CUT, REENTRANT, SITE, install, uninstall
from dpexp.clipping.taps import Recorder
from dpexp.errors import UserError


@dataclass(frozen=True)
class Report:
    """What one backward pass saw. Private data: release it through a mechanism only.

    Attributes:
        norms: ``[K, B]`` per-example gradient norms of each group before clipping, at least float32, detached. NaN or Inf where
            an example's gradient was not finite (it contributed nothing).
        clipped: ``[K]`` how many examples had a norm above their threshold.
    """

    norms: Tensor
    clipped: Tensor


Sums = dict[str, Tensor | LateSum]


def attach(
    model: nn.Module,
    groups: GroupsSpec = "flat",
    clip_norm: float | Sequence[float] | Tensor = 1.0,
    rule: str = "abadi",
    engine: str = "auto",
    *,
    max_clip_scale: float = 1.0,
    rows_per_example: int = 1,
    choice: str | None = None,
    memory_cap_mib: int = 512,
) -> Clipper:
    """Prepare ``model`` for per-example clipping.

    Args:
        model: any module; its trainable parameters (``requires_grad``) at this moment are clipped, the others are left alone.
        groups: ``"flat"``, ``"layer"``, ``"block"`` or ``{"name": ["param.name", ...], ...}`` (see `groups.build_groups`).
        clip_norm: the total threshold C (then ``C_k = C / sqrt(K)``), or a sequence of K thresholds.
        rule: ``"abadi"``, ``"automatic"`` (gamma 0.01) or ``"none"``.
        engine: see `engines.ENGINES`.
        max_clip_scale: upper bound of ``clip_scale`` in `Clipper.backward`; the sensitivity rests on it.
        rows_per_example: the model sees this many adjacent rows of each example; ``losses`` stays ``[B]``.
        choice: overrides how the norm method is chosen per layer: measured, rule, ghost, instantiate or loop.
        memory_cap_mib: most memory that one instantiated per-example gradient may take.

    Raises:
        UserError: anything that cannot be clipped exactly, naming the module, the parameter and the way out.
    """
    return Clipper(
        model,
        groups,
        clip_norm,
        rule,
        engine_named(engine),
        max_clip_scale,
        rows_per_example,
        choice,
        memory_cap_mib,
    )


class Clipper:
    """Returned by `attach`. Printing it shows the coverage table."""

    def __init__(
        self,
        model: nn.Module,
        groups: GroupsSpec,
        clip_norm: float | Sequence[float] | Tensor,
        rule: str,
        engine: Engine,
        max_clip_scale: float,
        rows_per_example: int,
        choice: str | None,
        memory_cap_mib: int,
    ):
        if rule not in RULES:
            raise UserError(f"rule={rule!r} is not known; choose {', '.join(RULES)}")
        if not (max_clip_scale > 0 and math.isfinite(max_clip_scale)):
            raise UserError(f"max_clip_scale={max_clip_scale} must be positive and finite")
        if not (isinstance(rows_per_example, int) and rows_per_example >= 1):
            raise UserError(f"rows_per_example={rows_per_example!r} must be a whole number, at least 1")
        if any(SITE in m.__dict__ or getattr(m, "_dpexp_clipper", None) is not None for m in model.modules()):
            raise UserError("this model has a clipper attached already: call detach() on it first")
        refuse_couplings(model)
        self.model, self.rule, self.engine = model, rule, engine
        self.max_clip_scale, self.rows_per_example = max_clip_scale, rows_per_example
        self.groups: list[Group] = build_groups(model, groups)
        self._params = trainable_parameters(model)
        device = next(iter(self._params.values())).device
        self._thresholds = _initial_thresholds(clip_norm, len(self.groups)).to(device)
        self._hooks: list[Any] = []
        self._reducer = distributed.reducer_of(model)
        self._backend: TapBackend | OpacusBackend
        if engine.name == "opacus":
            self._backend = OpacusBackend(model, self.groups, rows_per_example)
        else:
            self._backend = TapBackend(
                model, self.groups, engine, rows_per_example, choice, memory_cap_mib, rule
            )
        graph = getattr(self._backend, "graph", None)
        enter, leave = (self._enter, self._leave) if graph is None else (self._enter_graph, self._leave_graph)
        self._hooks.append(model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self._hooks.append(model.register_forward_hook(leave, always_call=True))
        self._attached = True

    @property
    def thresholds(self) -> Tensor:
        """``[K]`` thresholds C_k. Assign a sequence of K positive numbers, or write in place, between steps."""
        return self._thresholds

    @thresholds.setter
    def thresholds(self, value: Tensor | Sequence[float]) -> None:
        new = torch.as_tensor(value, dtype=self._thresholds.dtype, device=self._thresholds.device).detach()
        if new.shape != self._thresholds.shape:
            raise UserError(f"thresholds must have shape {[len(self.groups)]}, got {list(new.shape)}")
        self._thresholds = new.clone()

    def backward(
        self, losses: Tensor, clip_scale: Tensor | None = None, *, loss_scale: float = 1.0
    ) -> Report:
        """Add the sum over examples of the clipped per-example gradients to ``p.grad``.

        Args:
            losses: ``[B]``, one loss per example, unreduced. ``[0]`` is an empty batch.
            clip_scale: ``[B]`` in ``[0, max_clip_scale]``; multiplies the thresholds example by example (individualised
                privacy).
            loss_scale: a static factor that keeps fp16 gradients representable; undone before norms are taken.

        Raises:
            UserError: before any gradient is written.
        """
        if not self._attached:
            raise UserError("this clipper is detached: call attach() again")
        self._check_losses(losses)
        distributed.check_reducer(self._reducer)
        self._check_coverage()
        thresholds = self._checked_thresholds()
        num_examples = losses.shape[0]
        scale = _checked_scale(clip_scale, num_examples, self.max_clip_scale, thresholds)
        rule, values = RULES[self.rule], thresholds.tolist()

        def factors(k: int, sq_norms: Tensor, examples: slice = slice(None)) -> Tensor:
            """Factors for gradients that still carry the loss scale."""
            limit = values[k] if scale is None else thresholds[k].to(sq_norms) * scale[examples].to(sq_norms)
            if loss_scale != 1.0:
                sq_norms = sq_norms / loss_scale**2
            result = rule(sq_norms, limit)
            if loss_scale != 1.0:
                result = result / loss_scale
            # 0/0 where both the norm and the threshold vanish: an example without a budget contributes nothing
            return result if scale is None else result.nan_to_num(nan=0.0)

        sums: Sums = {}
        if num_examples == 0:
            sq = torch.zeros(len(self.groups), 0, device=thresholds.device)
            if isinstance(self._backend, OpacusBackend):
                self._backend.forget()
        else:
            if isinstance(self._backend, TapBackend) and self._backend.graph is not None:
                self._backend.graph.write_settings(thresholds, scale, loss_scale)
            sq, sums = self._backend.clipped_sums(losses, factors, loss_scale)
        norms = (sq / loss_scale**2).clamp(min=0).sqrt().detach()
        limits = thresholds.to(norms)[:, None] * (1.0 if scale is None else scale.to(norms))
        report = Report(norms, (norms > limits).sum(dim=1))
        distributed.deliver(self._reducer, self._params, sums)
        return report

    def detach(self) -> None:
        """Give the model back exactly as it was."""
        if self._attached:
            for hook in self._hooks:
                hook.remove()
            self._backend.uninstall()
            release_buffers(self._backend)
            self._attached = False

    @property
    def choices(self) -> dict[str, str]:
        """Parameter -> how its norms are computed; complete after the first backward pass."""
        return {row.parameter: row.method for row in self._backend.coverage()}

    def remember(self) -> dict[str, Any]:
        """What the engine has measured and proven, as JSON: a resumed run that recalls it computes bit for bit the same."""
        if not isinstance(self._backend, TapBackend):
            return {}
        return self._backend.memory.state() | {"batch": self._backend.recorder.batch}

    def recall(self, state: dict[str, Any]) -> None:
        """The counterpart of `remember`, on a model of the same structure with the same engine; or ``{"choices": …}`` alone."""
        if state and isinstance(self._backend, TapBackend):
            self._backend.memory.load_state(state)
            self._backend.recorder.batch = state.get("batch", self._backend.recorder.batch)
            self._backend.follow()

    def __str__(self) -> str:
        return coverage_table(self._backend.coverage(), self.groups, self._thresholds, self.engine.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Clipper:
        """Copying an attached model copies its clipper; both then stand alone."""
        memo[id(self)] = twin = object.__new__(Clipper)
        twin.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a model with a clipper attached cannot be pickled: call clipper.detach() first")

    def _enter_graph(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """`_enter`, where `torch.compile` may be tracing."""
        graph: GraphTaps = self._backend.graph  # type: ignore[union-attr, assignment]
        if torch.compiler.is_dynamo_compiling() and tracing_full_graph():
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if graph.enter(self.model, inputs, self._reducer):
                return None
        return self._enter(module, args, kwargs)

    def _leave_graph(self, module: nn.Module, args: tuple, output: Any) -> None:
        graph: GraphTaps = self._backend.graph  # type: ignore[union-attr, assignment]
        if torch.compiler.is_dynamo_compiling() and tracing_full_graph() and graph.obstacle() is None:
            graph.leave()
        else:
            self._leave(module, args, output)

    @torch.compiler.disable(reason=CUT)
    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._reducer = distributed.reducer_of(self.model)
        inputs, shapes, first = entered((args, kwargs))
        if not isinstance(self._backend, TapBackend):
            self._backend.rows = inputs[0].shape[0] if inputs and inputs[0].dim() else None
        elif torch.is_grad_enabled():
            self._check_coverage()
            keep_buffers(self._backend)
            alone = bool(shapes) and all(shape[0] == self.rows_per_example for shape in shapes)
            follow = not (self._backend.memory.settled or alone)
            self._backend.recorder.open(inputs, shapes, first, follow)
            if follow and all(p.requires_grad for p in self.model.parameters()):
                # a frozen part keeps nothing for a gradient of its input, and must not begin to
                return watched(self._backend.recorder, inputs, args, kwargs)
        elif inside_reentrant_checkpoint():
            raise UserError(REENTRANT)
        return None

    @torch.compiler.disable(reason=CUT)
    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(self._backend, TapBackend):
            release_buffers(self._backend)
            self._backend.recorder.close()

    def _check_losses(self, losses: Tensor) -> None:
        if not isinstance(losses, Tensor):
            raise UserError(f"losses must be a tensor of shape [B], got {type(losses).__name__}")
        if losses.dim() != 1:
            raise UserError(
                f"losses must be 1-D, one loss per example, got shape {list(losses.shape)}: "
                "use reduction='none' and reduce over everything but the batch"
            )
        if losses.shape[0] and not losses.requires_grad:
            raise UserError(
                "losses carry no graph: compute them with gradients enabled, from the attached model"
            )

    def _check_coverage(self) -> None:
        """The trainable parameters must still be the ones that were attached (PEFT, unfreezing, new layers)."""
        now = _trainable_ids(self.model)
        then = {id(p) for p in self._params.values()}
        if now == then:
            return
        distributed.refuse_sharded(self.model)
        names = {id(p): n for n, p in self.model.named_parameters()}
        new = [names[i] for i in now - then]
        gone = [name for name, p in self._params.items() if id(p) not in now]
        what = f"{new[0]!r} is new" if new else f"{gone[0]!r} is frozen or gone"
        raise UserError(
            f"the trainable parameters changed after attach ({what}): call clipper.detach(), then attach() again "
            "(for PEFT: get_peft_model first, attach afterwards)"
        )

    def _checked_thresholds(self) -> Tensor:
        values = self._thresholds.detach()
        if not bool((values.isfinite() & (values > 0)).all()):
            raise UserError(f"thresholds must be positive and finite, got {values.tolist()}")
        return values


class TapBackend:
    """All engines but ``opacus``: taps on swapped modules."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[Group],
        engine: Engine,
        rows_per_example: int,
        choice: str | None,
        memory_cap_mib: int,
        rule: str,
    ):
        distributed.refuse_sharded(model)
        self.groups, self.rows_per_example = groups, rows_per_example
        self.engine = engine if choice is None else replace(engine, norm=choice)
        self.recorder = Recorder()
        self.memory = Memory(memory_cap_mib * 2**20)
        if engine.name == "loop":
            self.memory.looped = {name for group in groups for name in group.params}
        self.sites = find_sites(model, self.recorder)
        self.graph: GraphTaps | None = None
        if possible(self.engine):
            self.graph = GraphTaps(
                self.engine, groups, rule, self.memory, self.recorder, rows_per_example, self.sites, self
            )
        for module, site in self.sites:
            install(module, site)

    def uninstall(self) -> None:
        for module, _ in self.sites:
            uninstall(module)

    def clipped_sums(self, losses: Tensor, factors: Any, grad_scale: float) -> tuple[Tensor, Sums]:
        step = BackwardPass(
            self.recorder,
            self.groups,
            self.engine,
            self.memory,
            losses,
            self.rows_per_example,
            factors,
            grad_scale,
            self.graph,
        )
        result = step.run()
        if self.engine.name != "loop":
            self.memory.followed |= self.memory.surprises
            if self.follow() or step.batch_moved:
                # the next forward takes another way: look at it as closely as at the first one
                self.memory.looped -= self.memory.surprises
                self.memory.settled = self.memory.ways_known = False
        if self.graph is not None:
            self.graph.learn(self.memory)
        self.memory.surprises = set()
        return result

    def follow(self) -> bool:
        """Make two kinds of use visible from the next forward on, which cost a loop over examples in this one.

        Parameters read from outside of their module's forward, like a head tied by hand, and embeddings that are looked up
        once for all examples. Returns whether anything is new.
        """
        before = [(site.shared_table, len(site.tracked)) for _, site in self.sites]
        for _, site in self.sites:
            site.shared_table = self.memory.loops(site.owner)
            site.tracked |= {local for local, name in site.params.items() if name in self.memory.followed}
        return before != [(site.shared_table, len(site.tracked)) for _, site in self.sites]

    def coverage(self) -> list[CoverageRow]:
        rows, seen = [], set()
        group_of = {name: group.name for group in self.groups for name in group.params}
        for _, site in self.sites:
            for name in site.names:
                if name not in seen:
                    seen.add(name)
                    rows.append(
                        CoverageRow(name, group_of[name], site.label, self.memory.methods.get(name, ""))
                    )
        return rows


def _trainable_ids(model: nn.Module) -> set[int]:
    """As from ``model.parameters()``, whose generators take three times as long; this is asked twice in every step."""
    waiting, seen, found = [model], {id(model)}, set()
    while waiting:
        module = waiting.pop()
        for param in module._parameters.values():
            if param is not None and param.requires_grad:
                found.add(id(param))
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return found


def _initial_thresholds(clip_norm: float | Sequence[float] | Tensor, num_groups: int) -> Tensor:
    if isinstance(clip_norm, Tensor):
        clip_norm = clip_norm.tolist()
    if isinstance(clip_norm, int | float):
        values = [float(clip_norm) / math.sqrt(num_groups)] * num_groups
    else:
        values = [float(c) for c in clip_norm]
        if len(values) != num_groups:
            raise UserError(f"clip_norm has {len(values)} thresholds, but there are {num_groups} groups")
    if not all(math.isfinite(c) and c > 0 for c in values):
        raise UserError(f"clip_norm={clip_norm} must be positive and finite")
    return torch.tensor(values, dtype=torch.float64)


def _checked_scale(
    clip_scale: Tensor | None, num_examples: int, largest: float, thresholds: Tensor
) -> Tensor | None:
    if clip_scale is None:
        return None
    scale = torch.as_tensor(clip_scale, device=thresholds.device).detach().to(thresholds.dtype)
    if scale.shape != (num_examples,):
        raise UserError(f"clip_scale must have shape {[num_examples]} like losses, got {list(scale.shape)}")
    if not bool(((scale >= 0) & (scale <= largest)).all()):
        raise UserError(
            f"clip_scale must lie in [0, {largest}] (max_clip_scale): a larger value would exceed the sensitivity"
        )
    return scale
