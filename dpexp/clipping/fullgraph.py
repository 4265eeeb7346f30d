"""Clipping inside one compiled graph: ``torch.compile(model, fullgraph=True)``.

While `torch.compile` traces the model, a layer's forward is its own forward with detached parameters, followed by a `GraphTap`.
What the eager engine proves by looking at records is proven here from what the taps deliver:

- *coverage*: gradients that reach a parameter outside of the taps arrive at the parameter itself, and are refused;
- *reuse*: a tap's gradient counts the calls that were summed in it (a module called twice) and their examples;
- *layouts*: where a layout was only read off the shapes, the graph is back-propagated once more with weighted losses, some
  of them left out: the norm of each example must follow its own weight. Rows that examples share fail this.

Nothing is written to ``p.grad`` before all of it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpexp.clipping import layouts
from dpexp.clipping.contributions.numerics import wide
from dpexp.clipping.distributed import reducer_of
from dpexp.clipping.donation import keep_buffers, release_buffers
from dpexp.clipping.engines import Engine
from dpexp.clipping.graph_tap import MARKS, Detached, GraphTap, HeadTap, TableTap, clip_factors, given_factors
from dpexp.clipping.groups import Group
from dpexp.clipping.memory import Memory
from dpexp.errors import UserError

if TYPE_CHECKING:
    from dpexp.clipping.backward import BackwardPass
    from dpexp.clipping.swap import Site
    from dpexp.clipping.taps import Recorder

LARGEST_BATCH = 1 << 16  # examples of one physical batch in a compiled graph
NUMBERS = 1 << 22  # that all taps together may hold
CUT_ONLY = "which a compiled graph cannot clip"
EAGER_STEP = "run this step on the model without torch.compile, or without fullgraph=True"


def possible(engine: Engine) -> bool:
    """Whether an engine needs no records: its backward is a function of one layer, or it back-propagates twice."""
    return engine.name == "onepass" or engine.second_pass


class GraphTaps:
    """The taps of one clipper in compiled graphs.

    Attributes:
        entered: the first tensor that entered the model. The tensor, not its size: a number would be compiled in.
        settings: what the backward reads when it runs; see `clip_factors` and `given_factors`.
        pending: places whose layout a graph was traced with and which no backward pass has proven since.
        traced: whether there is any compiled graph with taps.
    """

    def __init__(
        self,
        engine: Engine,
        groups: list[Group],
        rule: str,
        memory: Memory,
        recorder: Recorder,
        rows_per_example: int,
        sites: list[tuple[nn.Module, Site]],
        holder: Any,
    ):
        self.two_passes, self.norm, self.rule = engine.second_pass, engine.norm, rule
        self.groups, self.recorder, self.rows_per_example = groups, recorder, rows_per_example
        self.scratch = memory.scratch
        self.capacity = max(1 << 12, min(LARGEST_BATCH, NUMBERS // max(1, len(sites))))
        self.entered: Tensor | None = None
        self.batch_dim = 0
        self.pending: dict[tuple[int, str], int] = {}
        self.proven: set[tuple[int, str]] = set()
        self.traced = False
        self._holder = holder
        self.sites = [GraphSite(self, index, module, site) for index, (module, site) in enumerate(sites)]
        self._tie()
        self.settings = torch.zeros(())
        self.renew_settings(next(iter(groups[0].params.values())).device)

    def _tie(self) -> None:
        """Join an embedding with the head that shares its table; refuse every other sharing."""
        users: dict[str, list[GraphSite]] = {}
        for site in self.sites:
            for name in site.names:
                users.setdefault(name, []).append(site)
        for name, sites in users.items():
            roles = {
                site.kind.name: site for site in sites if site.kind is not None and site.names == (name,)
            }
            if len(sites) == 2 and set(roles) == {"embedding", "linear"}:
                roles["embedding"].partner, roles["linear"].partner = roles["linear"], roles["embedding"]
            elif len(sites) > 1:
                for site in sites:
                    site.off = site.off or f"{site.owner}: {name} is shared with another module, {CUT_ONLY}"

    # -- while a forward is traced ------------------------------------------------------------------------------------

    def obstacle(self) -> str | None:
        """Why some layer cannot be traced, or None."""
        for site in self.sites:
            if site.off is not None:
                return site.off
        return None

    def enter(self, model: nn.Module, inputs: list[Tensor], reducer: Any) -> bool:
        """The root's forward begins, in a graph. False where it has to be cut."""
        if not torch.is_grad_enabled():
            return True
        why = self.obstacle()
        if why is None and reducer_of(model) is not reducer:
            why = "DistributedDataParallel was put around the model after attach(): attach to the wrapper"
        if why is not None:
            torch._dynamo.graph_break(msg=why)
            return False
        self.entered = inputs[0] if inputs and inputs[0].dim() > self.batch_dim else None
        return True

    def leave(self) -> None:
        self.entered = None
        for site in self.sites:
            if site.carriers is not None:
                site.carriers = None

    def note(self, site: GraphSite, layout: str, bits: int) -> None:
        """A graph is being traced with this site in it. What other graphs have proven does not hold for this one."""
        self.traced = True
        keep_buffers(self._holder)
        self.pending[site.index, layout] = bits

    # -- around a backward pass ---------------------------------------------------------------------------------------

    def renew_settings(self, device: torch.device) -> None:
        """New memory for the settings, on the device of the parameters."""
        shape = (
            (len(self.groups), self.capacity) if self.two_passes else (1 + len(self.groups) + self.capacity,)
        )
        self.settings = torch.zeros(shape, dtype=torch.float64, device=device)

    def write_settings(self, thresholds: Tensor, scale: Tensor | None, loss_scale: float) -> None:
        """What the next backward pass clips with.

        Written past the version counter (``.data``): graphs whose forward is done have saved this tensor, to read it now.
        """
        release_buffers(self._holder)
        if self.two_passes or not self.traced:
            return
        values, num_groups = self.settings.data, len(self.groups)
        values[0] = loss_scale
        values[1 : 1 + num_groups].copy_(thresholds)
        values[1 + num_groups :].fill_(1.0)
        if scale is not None:
            values[1 + num_groups :][: len(scale)].copy_(scale)

    def leaves(self, sums: bool = True) -> list[Tensor]:
        """What autograd is asked for: the taps, and the stand-ins where they receive clipped sums."""
        if not self.traced:
            return []
        taps = [site.tap for site in self.sites]
        return [*taps, *self.standins()] if sums and not self.two_passes else taps

    def standins(self) -> list[Tensor]:
        return [standin for site in self.sites for standin in site.standins.values()]

    def prove(self, step: BackwardPass) -> None:
        """Back-propagate weighted losses where a layout is not proven yet."""
        self._weighted: dict[int, Tensor] = {}
        self._weights = layouts.weights(step.num_examples, layouts.UNSIGNED).to(step.losses)
        if not self.pending or step.num_examples < 2:
            return
        step._handle = _nothing  # taps outside of the graph have been looked at before
        found = step._back_propagate(retain=True, weights=self._weights, params=self.leaves(sums=False))
        self._weighted = {i: g[MARKS:] for i, g in enumerate(found) if g is not None}

    def collect(self, step: BackwardPass, found: list[Tensor | None], elsewhere: set[str]) -> bool:
        """Check what the taps delivered and hand it to the backward pass. Returns whether they delivered anything.

        Args:
            found: gradients of `leaves`.
            elsewhere: parameters that a gradient reached outside of any tap.
        """
        delivered = dict(enumerate(found[: len(self.sites)]))
        standins = iter(found[len(self.sites) :])
        sums = {site.index: [next(standins, None) for _ in site.standins] for site in self.sites}
        called = [site for site in self.sites if delivered.get(site.index) is not None]
        recorded = {name for owner in step.arrived for call in owner.calls for name in call.source.names}
        for site in called:
            marks = delivered[site.index]
            assert marks is not None
            self._check(site, marks, step.num_examples, recorded, elsewhere)
            sq_norms = marks[MARKS : MARKS + step.num_examples]
            self._settle(site, sq_norms, step.num_examples)
            k = step.group_of[site.names[0]]
            step.sq_norms[k] += sq_norms.to(step.sq_norms[k])
            if not self.two_passes:
                step.flushed.add(k)
                for name, total in zip(site.names, sums[site.index], strict=True):
                    if total is not None:
                        step.grads[name] = total
        return bool(called)

    def second_pass(self, step: BackwardPass) -> None:
        """Back-propagate again, with the factors of the complete groups."""
        for k in range(len(self.groups)):
            factors, keep = step.factor[k]
            values = factors if keep is None else torch.where(keep, factors, 0.0)
            self.settings.data[k, : step.num_examples].copy_(values)
        found = step._back_propagate(retain=False, params=self.standins())
        names = [name for site in self.sites for name in site.names]
        for name, total in zip(names, found, strict=True):
            if total is not None:
                step._add(name, total)

    def learn(self, memory: Memory) -> None:
        """Take over what uncompiled steps have proven, and what they have found to need the loop."""
        unfit = memory.looped | memory.followed | memory.surprises
        for site in self.sites:
            layout = memory.layouts.get(site.owner)
            if layout == layouts.LOOP:
                site.off = f"{site.owner}: it is used once for all examples, {CUT_ONLY}"
            elif unfit.intersection(site.names):
                site.off = f"{site.owner}: its parameters are used outside of its forward, {CUT_ONLY}"
            elif layout is not None:
                if site.off is UNPROVEN:
                    site.off = None
                if (site.index, layout) not in self.proven:
                    self.proven.add((site.index, layout))
                    self.pending.pop((site.index, layout), None)
                    site.layout = None if layout == layouts.ROWS else layout

    def _check(
        self, site: GraphSite, marks: Tensor, num_examples: int, recorded: set[str], elsewhere: set[str]
    ) -> None:
        calls, examples = (round(float(mark)) for mark in marks[:MARKS])
        why = None
        if calls != 1:
            why = f"was called {calls} times in one compiled forward"
        elif recorded.intersection(site.names):
            why = "was called both inside and outside of a compiled graph"
        elif elsewhere.intersection(site.names):
            why = "has a parameter that is also used outside of its forward"
        elif examples != num_examples:
            raise UserError(
                f"{site.owner} saw {examples} examples, but losses have {num_examples}: pass the losses of exactly the "
                f"examples that entered the model; for inputs whose first dimension is not the batch, {EAGER_STEP}, once"
            )
        if why is not None:
            site.off = f"{site.owner} {why}, {CUT_ONLY}"
            raise UserError(f"{site.owner} {why}, and such sums cannot be clipped there: {EAGER_STEP}")

    def _settle(self, site: GraphSite, sq_norms: Tensor, num_examples: int) -> None:
        """Compare the norms with those of the proof, where there was one."""
        weighted = self._weighted.get(site.index)
        open_places = [place for place in self.pending if place[0] == site.index]
        if weighted is None or not open_places:
            return
        whole, weighted = sq_norms.sqrt()[:, None], weighted[:num_examples].sqrt()[:, None]
        dtype = torch.float32 if self.pending[open_places[0]] >= 32 else torch.bfloat16
        verdict = layouts.proven((whole, whole[:, 0]), (weighted, weighted[:, 0]), self._weights, dtype)
        if verdict is None:
            return  # all gradients are zero: they contribute nothing now, and the next step proves
        if not verdict:
            site.off = UNPROVEN
            raise UserError(
                f"{site.owner}: the rows of its input are not one example's each as their shape suggests, or its gradient mixes "
                f"examples (a table looked up once for all, a batch statistic): {EAGER_STEP}, which tells these apart"
            )
        for place in open_places:
            del self.pending[place]
            self.proven.add(place)


def _nothing(*_: Any) -> None:
    """What a tap of the eager engine does in a pass that is not for it."""


UNPROVEN = "a layer's rows could not be told apart by example: run one step without torch.compile, which proves or refuses it"


class GraphSite:
    """What a layer's tap in a compiled graph knows.

    Attributes:
        off: why this layer cannot be traced, or None.
        layout: the layout to assume where the shapes suggest another one.
        partner: the other user of the only parameter: an embedding's head, a head's embedding.
        carriers: of an embedding with a head, between the two: see `TableTap`.
        tap: a leaf whose gradient takes the marks and the norms; it owns one number of memory.
        standins: by local name, leaves in the shape of the parameters whose gradients take the sums; likewise.
    """

    def __init__(self, graph: GraphTaps, index: int, module: nn.Module, site: Site):
        self.graph, self.index, self.owner, self.names = graph, index, site.owner, site.names
        self.kind: Any = site.kind
        self.native = type(module)  # without a clipper: it is not installed yet
        self.locals = tuple(site.params)
        self.layout: str | None = None
        self.partner: GraphSite | None = None
        self.carriers: tuple[Tensor, Tensor] | None = None
        holders = [k for k, group in enumerate(graph.groups) if set(group.params) & set(site.names)]
        self.group, self.off = holders[0], self._obstacle(site, holders)
        self.tap: Tensor
        self.standins: dict[str, Tensor]
        self.renew(module)
        site.graph = self

    def _obstacle(self, site: Site, holders: list[int]) -> str | None:
        if site.kind is None:
            return f"{self.owner}: bare parameters and modules without a layer kind cannot be clipped inside one compiled graph"
        if len(holders) > 1 or (
            not self.graph.two_passes and set(self.graph.groups[holders[0]].params) != set(self.names)
        ):
            return (
                f"{self.owner} shares a clipping group with other modules or is split over groups: inside one compiled graph "
                "use groups='layer', or engine='ghost' (two passes) for groups of several modules"
            )
        return None

    def renew(self, module: nn.Module) -> None:
        """Leaves of the device and dtype that the parameters have now."""
        params = {local: module._parameters[local] for local in self.locals}
        first = next(iter(params.values()))
        assert first is not None
        self.standins = {
            local: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).requires_grad_()
            for local, p in params.items()
            if p is not None
        }
        zero = torch.zeros((), dtype=wide(first.dtype), device=first.device)
        self.tap = zero.expand(MARKS + self.graph.capacity).requires_grad_()

    @torch.compiler.assume_constant_result
    def note(self, layout: str, bits: int) -> bool:
        """Runs when a graph is traced, and never again."""
        self.graph.note(self, layout, bits)
        return True

    def _tied(
        self, module: nn.Module, layout: str, num_examples: int, x: Tensor, y: Tensor, tap: Tensor
    ) -> Any:
        assert self.partner is not None
        if layout != layouts.ROWS:
            torch._dynamo.graph_break(
                msg=f"{self.owner} is tied to {self.partner.owner}, and the batch is not in front"
            )
            return NotImplemented
        if self.kind.name == "embedding":
            device = y.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else y.dtype
            settings, (standin,) = self.graph.settings, self.standins.values()
            y, *carriers = TableTap.apply(self, module, num_examples, dtype, y, tap, settings, x, standin)
            self.carriers = (carriers[0], carriers[1])
            return y
        if self.partner.carriers is None or self.partner.carriers[0].shape != x.shape:
            torch._dynamo.graph_break(
                msg=f"{self.owner} is tied to {self.partner.owner}, which must come first and see the same positions"
            )
            return NotImplemented
        first, second = self.partner.carriers
        self.partner.carriers = None
        return HeadTap.apply(self, num_examples, y, tap, x, first, second)

    def _layout(self, x: Tensor, y: Tensor, rows: Any) -> str | None:
        """The proven layout where the shapes allow it, else what they suggest first."""
        if self.layout is None and x.shape[0] == rows and y.shape[0] == rows:
            return layouts.ROWS  # at once: every further comparison of a size with the batch is compiled in
        found = layouts.candidates(x.shape, y.shape, rows)
        return self.layout if self.layout in found else next(iter(found), None)

    def factors(self, sq_norms: Tensor, settings: Tensor) -> Tensor:
        """``[B]`` factors, in a running backward."""
        if self.graph.two_passes:
            return given_factors(sq_norms, settings, self.group)
        return clip_factors(sq_norms, settings, self.group, len(self.graph.groups), self.graph.rule)

    def forward(self, module: nn.Module, args: tuple, kwargs: dict, cast: bool) -> Any:
        """The layer's forward in a graph; NotImplemented where the graph has to be cut.

        Args:
            cast: whether autocast computes this kind in 16 bits.
        """
        if self.off is not None:
            torch._dynamo.graph_break(msg=self.off)
            return NotImplemented
        if self.graph.recorder.flow is not None:
            torch._dynamo.graph_break(
                msg=f"{self.owner} is compiled, but not the model around it, whose first step is still to be looked at: run it "
                "without torch.compile, or compile the attached model as a whole"
            )
            return NotImplemented
        saved = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        x = saved[0]
        if cast and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            low = x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))
            args = tuple(low if value is x else value for value in args)
            kwargs = {key: low if value is x else value for key, value in kwargs.items()}
            x = low
        values = {local: module._parameters[local].detach() for local in self.locals}  # type: ignore[union-attr]
        y = self.native.forward(Detached(module, self.native, values), *args, **kwargs)
        graph = self.graph
        batch = graph.entered
        rows: Any = graph.recorder.rows if batch is None else batch.shape[graph.batch_dim]
        if (
            self.kind.name == "embedding"
            and x.dim() == 2
            and x.shape[0] == 1
            and rows is not None
            and rows > 1
        ):
            # a position table looked up once for the whole batch: give each example its own row
            x, y = x.expand(rows, -1), y.expand(rows, *y.shape[1:]).clone()
        layout = self._layout(x, y, x.shape[0] if rows is None else rows)
        if layout is None:
            torch._dynamo.graph_break(msg=f"{self.owner}: no dimension of its input is the batch")
            return NotImplemented
        rows = {layouts.ROWS: x.shape[0], layouts.SECOND: y.shape[1] if y.dim() > 1 else 0}.get(layout, rows)
        num_examples = rows // graph.rows_per_example
        if num_examples > graph.capacity:
            torch._dynamo.graph_break(
                msg=f"a compiled graph clips at most {graph.capacity} examples at a time: use smaller physical batches"
            )
            return NotImplemented
        if self.partner is None or self.kind.name == "embedding":  # which delivers the norms of both
            self.note(layout, torch.finfo(y.dtype).bits)
        saved[0] = x
        tap = self.tap[: MARKS + num_examples]
        if self.partner is not None:
            return self._tied(module, layout, num_examples, x, y, tap)
        return GraphTap.apply(
            self,
            module,
            layout,
            num_examples,
            len(saved),
            y,
            tap,
            graph.settings,
            *saved,
            *self.standins.values(),
        )
