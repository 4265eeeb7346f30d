"""`attach`: from here on ``clipper.backward(losses)`` leaves in ``p.grad`` the sum of the clipped per-example gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping import distributed
from dpexp.clipping.backend import Backend, TapBackend
from dpexp.clipping.backward import Factors
from dpexp.clipping.base import AnyClipper
from dpexp.clipping.choice import known_mode
from dpexp.clipping.compiling import uncompiled
from dpexp.clipping.deferred import Measured
from dpexp.clipping.distributed import Sums
from dpexp.clipping.engines import engine_named
from dpexp.clipping.given import check_losses, check_same_parameters, checked_scale, unwritten
from dpexp.clipping.groups import GroupsSpec
from dpexp.clipping.opacus_engine import ATTACHED, OpacusBackend
from dpexp.clipping.reports import CoverageRow, Report, coverage_table
from dpexp.clipping.rules import RULES, known_rule
from dpexp.clipping.sharding import Shards
from dpexp.clipping.tapping.forwards import ForwardPass, entered
from dpexp.clipping.tapping.roots import Roots
from dpexp.clipping.tapping.sites import SITE
from dpexp.errors import UserError


class Clipper(AnyClipper):
    """Prepare ``model`` for per-example clipping, under the name of `attach`. Printing it shows the coverage table.

    Args:
        model: any module; its trainable parameters (``requires_grad``) at this moment are clipped, the others are left alone.
        groups: ``"flat"``, ``"layer"``, ``"block"`` or ``{"name": ["param.name", ...], ...}`` (see `groups.build_groups`).
        clip_norm: the total threshold C (then ``C_k = C / sqrt(K)``), or a sequence of K thresholds.
        rule: ``"abadi"``, ``"automatic"`` (gamma 0.01), ``"normalized"`` (no gamma), ``"none"``, or one of your own
            (``"rules.py:soft"``, see `rules.known_rule`).
        engine: see `engines.ENGINES`.
        max_clip_scale: upper bound of ``clip_scale`` in `Clipper.backward`; the sensitivity rests on it.
        rows_per_example: the model sees this many adjacent rows of each example; ``losses`` stays ``[B]``.
        choice: overrides how the norm method is chosen per layer: measured, rule, ghost, instantiate or loop.
        memory_cap_mib: most memory that one instantiated per-example gradient may take.
        fixed_length: a promise, which is checked: all batches of sequences are padded to one length, and of images to one size,
            so that the padding of an example does not depend on the others. Without it, a model whose results depend on padding
            is refused.

    Raises:
        UserError: anything that cannot be clipped exactly, naming the module, the parameter and the way out.
    """

    def __init__(
        self,
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
        fixed_length: bool = False,
    ):
        known_rule(rule)
        known_mode(choice)
        self.engine = engine_named(engine)
        if not (max_clip_scale > 0 and math.isfinite(max_clip_scale)):
            raise UserError(f"max_clip_scale={max_clip_scale} must be positive and finite")
        if not (isinstance(rows_per_example, int) and rows_per_example >= 1):
            raise UserError(f"rows_per_example={rows_per_example!r} must be a whole number, at least 1")
        if any(SITE in m.__dict__ or ATTACHED in m.__dict__ for m in model.modules()):
            raise UserError(
                "this model has a clipper attached already: call close() of its PrivacyEngine, or detach() of the clipper, first"
            )
        super().__init__(model, groups, clip_norm, rule, rows_per_example, fixed_length)
        self.max_clip_scale, self.rows_per_example = max_clip_scale, rows_per_example
        # the DistributedDataParallel that the model lies in, or holds, as far as a forward has shown it
        self.reducer: Any = distributed.reducer_of(model)
        self._backend: Backend
        if engine == "opacus":
            self._backend = OpacusBackend(model, self.groups, rows_per_example)
        else:
            own = self.engine if choice is None else replace(self.engine, norm=choice)
            cap_bytes = memory_cap_mib * 2**20
            self._backend = TapBackend(model, self.groups, own, rows_per_example, cap_bytes)
        self._independence.silence = self._backend.silence
        self._shards = self._backend.shards
        self._hook()
        # whether a DistributedDataParallel around the model adds up over ranks in every backward pass
        self.reduces = True
        # whether p.grad holds this rank's part of a sum, of passes under no_sync()
        self._apart = False
        # whether a forward with gradients waits for its backward; and whether there was a forward at all
        self._entered = self._shown = False

    def backward(
        self, losses: Tensor, clip_scale: Tensor | None = None, *, loss_scale: float = 1.0
    ) -> Report:
        """Add the sum over examples of the clipped per-example gradients to ``p.grad``.

        An example adds nothing where its loss or gradient is NaN or infinite, or so long that the square of its norm is no
        32-bit number (beyond 1.8e19).

        Args:
            losses: ``[B]``, one loss per example, unreduced. ``[0]`` is an empty batch.
            clip_scale: ``[B]`` in ``[0, max_clip_scale]``; multiplies the thresholds example by example (individualised
                privacy).
            loss_scale: a static factor that keeps fp16 gradients representable; undone before norms are taken.

        Raises:
            UserError: before any gradient is written.
        """
        check_losses(losses)
        return self.backward_from(Roots.of_losses(losses, loss_scale), clip_scale, loss_scale=loss_scale)

    @uncompiled
    def backward_from(
        self, roots: Roots, clip_scale: Tensor | None = None, *, loss_scale: float = 1.0
    ) -> Report:
        """As `backward`, from the losses or from what a stage of a pipeline handed on; see `Roots`.

        The gradients of the roots' inputs are in the report.
        """
        self._refuse_detached()
        with self._together(roots):
            thresholds, scale = self._checked(roots, clip_scale)
            norms = torch.zeros(len(self.groups), 0, device=thresholds.device)
            sums: Sums = {}
            arrived: tuple[Tensor | None, ...] = ()
            if roots.num_examples:
                # the sums of shards leave while the back-propagation goes on
                with unwritten(self.params) if self._shards is None else nullcontext():
                    norms, sums, arrived = self._clipped(roots, thresholds, scale, loss_scale)
            else:
                self._backend.forget()
                if self._reducing is None and self.reduces and not self._shown:
                    self.reducer = distributed.reducer_around(self.model)
                    distributed.check_reducer(self.reducer, self.params)
                if self._reducing is not None and not self._entered:
                    distributed.pass_by(self._reducing)
            self._entered = False
            self._independence.check(roots.num_examples)
            shards = self._shards if roots.num_examples else None
            self._deliver(sums, shards)
            return replace(Report.of(norms, thresholds, scale), input_gradients=arrived)

    def _clipped(
        self, roots: Roots, thresholds: Tensor, scale: Tensor | None, loss_scale: float
    ) -> tuple[Tensor, Sums, tuple[Tensor | None, ...]]:
        """Norms ``[K, B]``, the clipped sums by parameter, and the gradients of the roots' inputs."""
        factors = self._factors(thresholds, scale, loss_scale)
        squares, sums, arrived = self._backend.clipped_sums(roots, factors)
        return _norms(squares, loss_scale), sums, arrived

    @property
    def _summed(self) -> dict[str, nn.Parameter]:
        """What gets a sum."""
        return self.params

    def _deliver(self, sums: Sums, shards: Shards | None = None) -> None:
        if self._reducing is not None:
            distributed.refuse_settings_apart(self._reducing, self.setting)
        self._apart = distributed.deliver(self._reducing, self._summed, sums, shards, self._apart)

    def _together(self, roots: Roots) -> Any:
        """What is around a backward pass that several ranks make together, each on shards of the parameters."""
        if self._shards is None:
            return nullcontext()
        curious = self._independence.due or self._backend.curious(roots)
        return self._shards.backward(self._shards.together(curious, roots.num_examples, self.setting))

    @uncompiled
    def measure(
        self,
        roots: Roots,
        clip_scale: Tensor | None = None,
        *,
        loss_scale: float = 1.0,
        held: str = "retained",
    ) -> Measured:
        """Find norms now, and sum later, with norms that others have a part in: flat clipping over stages.

        Args:
            roots, clip_scale, loss_scale: see `backward_from`.
            held: what the sums need is ``retained`` (what the engine keeps), ``parked`` (per-example gradients in the host's
                memory) or computed ``again`` (a second back-propagation).

        Raises:
            UserError: as `backward`; the batch is empty, the engine is opacus, or parameters are sharded.
        """
        if not isinstance(self._backend, TapBackend) or not roots.num_examples:
            raise UserError("norms without sums need engine='auto' (or another tapped one) and a batch")
        if self._shards is not None:
            raise UserError(
                "norms without sums need whole parameters on each rank: leave fully_shard out, or take backward()"
            )
        self._refuse_detached()
        thresholds, scale = self._checked(roots, clip_scale)

        def deliver(squares: Tensor, sums: Sums) -> Report:
            self._deliver(sums)
            return Report.of(_norms(squares, loss_scale), thresholds, scale)

        visit, factors = self._backend.visit(roots), self._factors(thresholds, scale, loss_scale)
        with unwritten(self.params):
            measured = Measured(visit, self._backend.setup, factors, held, loss_scale, deliver)
        self._independence.check(roots.num_examples)
        return measured

    @contextmanager
    def public(self) -> Iterator[None]:
        """Take what enters the model inside for public, by the caller's word: a rehearsal or prototypes, in every loss.

        Nothing is looked at there. Its part of each example's gradient is found by one back-propagation per example.
        """
        if not isinstance(self._backend, TapBackend):
            raise UserError("public rows in the losses need engine='auto' (or another of the tapped ones)")
        with self.elsewhere():
            yield

    def last_forward(self) -> ForwardPass:
        """Return the forward of the model that ended last, for `Roots`, where several wait for their backward.

        Raises:
            UserError: it used no parameter, or the model has not run.
        """
        last = self._backend.last_forward()
        if last is None:
            raise UserError(
                "the attached model has not run with gradients, or used none of its trainable parameters"
            )
        return last

    def _checked(self, roots: Roots, clip_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Look at what a backward pass begins with. Returns its thresholds ``[K]`` and scales ``[B]``."""
        distributed.check_reducer(self._reducing, self.params)
        thresholds = self._checked_thresholds()
        scale = checked_scale(clip_scale, roots.num_examples, self.max_clip_scale, thresholds)
        wholes = self._shards.wholes() if self._shards is not None else ()
        self._independence.begin(roots, [*self.params.values(), *wholes])
        return thresholds, scale

    @property
    def _reducing(self) -> Any:
        return self.reducer if self.reduces else None

    def _factors(self, thresholds: Tensor, scale: Tensor | None, loss_scale: float) -> Factors:
        if not loss_scale >= 1.0:
            raise UserError(
                f"loss_scale={loss_scale:g} must be at least 1: squares of gradients that it makes small are nothing in 32 bits, "
                "and what has no norm is not clipped"
            )
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

        return factors

    def detach(self) -> None:
        """Give the model back exactly as it was."""
        if self._attached:
            super().detach()
            self._backend.uninstall()

    @property
    def choices(self) -> dict[str, str]:
        """Parameter -> how its norms are computed; complete after the first backward pass."""
        return {row.parameter: row.method for row in self.coverage()}

    def coverage(self) -> list[CoverageRow]:
        """Return the rows of the coverage table."""
        return self._backend.coverage()

    def remember(self) -> dict[str, Any]:
        """Return what the engine has measured and proven, as JSON; a run that recalls it computes the same to the last bit."""
        return self._backend.state()

    def recall(self, state: dict[str, Any]) -> None:
        """Take over what `remember` gave, for a model of the same structure with the same engine; or ``{"choices": …}`` alone."""
        self._backend.load_state(state)

    def pads_with(self, token: int | float | None) -> None:
        """Take the id of padding, or a float that series are padded with, with which to look whether padding changes an example;
        None: the model may say it.
        """
        self._independence.token = token

    def __str__(self) -> str:
        table = coverage_table(self.coverage(), self.groups, self._thresholds, self.engine.name)
        return "\n".join([table, *self.notes])

    def __deepcopy__(self, memo: dict[int, Any]) -> Clipper:
        """Copying an attached model copies its clipper; both then stand alone."""
        memo[id(self)] = twin = object.__new__(type(self))
        twin.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a model with a clipper attached cannot be pickled: save its state_dict(), or call engine.close() of the "
            "PrivacyEngine, or clipper.detach(), first"
        )

    def new_batch(self) -> None:
        """Tell that another batch begins; see `AnyClipper.new_batch`."""
        super().new_batch()
        self._backend.new_batch()

    def may_begin_again(self) -> None:
        self._backend.may_begin_again()

    @uncompiled
    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = entered((args, kwargs))
        looking = self._independence.looking
        if not looking:
            self.reducer, self._shown = distributed.reducer_of(self.model), True
            if torch.is_grad_enabled():
                if given.tensors and not given.tensors[0].numel():
                    self._try_empty(module, args, kwargs)
                self._entered = True
                self._independence.enter(args, kwargs, given.rows)
                check_same_parameters(self.model, self.params, self._shards)
            else:
                self._independence.pass_by(args, kwargs, given.rows)
        self._backend.enter(given, looking)

    @uncompiled
    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        super()._leave(module, args, output)
        self._backend.leave(output, self._independence.looking)

    def _try_empty(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Many models cannot reshape a batch of no examples, and say so in words about shapes."""
        try:
            with torch.no_grad():
                module(*args, **kwargs)
        except Exception as error:
            raise UserError(
                f"the batch is empty, and this model cannot take that ({error}). An empty Poisson batch need not go through the "
                "model: call clipper.backward(torch.zeros(0))"
            ) from error


attach = Clipper
"""Its usual name: ``clipper = attach(model)``."""


def _norms(squares: Tensor, loss_scale: float) -> Tensor:
    """Norms of gradients from the squared norms of scaled ones."""
    return (squares / loss_scale**2).clamp(min=0).sqrt()
