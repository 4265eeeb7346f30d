"""A logical batch through the stages: microbatches of one shape, a schedule of torch, and what each stage has found."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from dpexp.clipping import Clipper, Report
from dpexp.errors import UserError, either
from dpexp.pipeline.flat import WAYS, FlatNorms
from dpexp.pipeline.parking import parked
from dpexp.pipeline.split import base_of
from dpexp.pipeline.stage import ClippedStage
from dpexp.pipeline.traffic import Traffic
from dpexp.torch_versions import check_pipelining

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
INTERLEAVED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
Batch = dict[str, Tensor]


def check_schedule(name: str) -> None:
    """Refuse a schedule that is not known, or not exact here, and any where torch is too old for it.

    Raises:
        UserError: says which to take.
    """
    if name.lower().replace("_", "") in INTERLEAVED:
        raise UserError(
            f"runtime.schedule={name} gives a process several stages, or divides their backward in two; a device is then no "
            "group of consecutive blocks, and a clipped sum needs both halves: use runtime.schedule=1f1b or gpipe"
        )
    if name not in SCHEDULES:
        raise UserError(f"runtime.schedule={name} is not known; choose {either(SCHEDULES)}")
    check_pipelining()


@dataclass
class Pipeline:
    """One stage of a model, and how it works with the others.

    Args:
        model: what `keep_stage` has left.
        index, count: which stage, of how many; there are two at least.
        losses: of the model (called with hidden states as `input_ids`) and a microbatch, ``[b]``; asked in the last stage.
        group: the processes of this pipeline in the order of the stages.
        schedule: a key of `SCHEDULES`.
        clipper: attached to `model`; None trains without privacy.
        flat: one of `flat.WAYS` where one group spans the stages; None where each stage clips by itself.
        norms: a group of the same processes for flat clipping, whose traffic runs beside that of the schedule.
        device: where the stage computes.
        loss_scale: static, for fp16.
        context: entered around each forward (autocast).
        rematerialise: compute the inside of each block again in the backward pass (Huang et al. 2019; He et al., Algorithm 4).
        park: hold what the forward saved on the host until its backward (He et al., Algorithm 3, line 4).

    Raises:
        UserError: the schedule, or the way of flat clipping, is refused.
    """

    model: nn.Module
    index: int
    count: int
    losses: Callable[[nn.Module, Batch], Tensor]
    group: Any
    schedule: str = "1f1b"
    clipper: Clipper | None = None
    flat: str | None = None
    norms: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    loss_scale: float = 1.0
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    rematerialise: bool = False
    park: bool = False
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        if self.flat is not None and self.flat not in WAYS:
            raise UserError(f"runtime.flat={self.flat} is not known; choose {', '.join(WAYS)}")
        base = base_of(self.model)
        if self.rematerialise:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._width = int(base.config.hidden_size)
        self._dtype = next(base.parameters()).dtype
        self._module = _StageModule(self)

    def run(self, batch: Batch, size: int, clip_scales: Tensor | None = None) -> tuple[Tensor, list[Report]]:
        """Take a whole batch through forward and backward; ``p.grad`` of this stage's parameters gets its sums.

        Args:
            batch: collated, ``[B, …]`` each; the same in all processes. B > 0.
            size: examples in a microbatch. The last one is filled up with copies that have no loss, and so no gradient.
            clip_scales: ``[B]``, or None.

        Returns:
            the losses ``[B]`` (of the last stage; zeros elsewhere) and a report of this stage's groups for each microbatch,
            without the copies.
        """
        self._refuse_lost(batch)
        total = len(batch["input_ids"])
        number = -(-total // size)
        size = -(-total // number)
        filled = number * size - total
        pieces = [_filled(batch, i * size, (i + 1) * size) for i in range(number)]
        real = torch.arange(number * size) < total
        scales: list[Tensor | None] = [None] * number
        if clip_scales is not None:
            every = torch.cat([clip_scales, clip_scales[-1:].expand(filled)])
            scales = list(every.split(size))
        losses: list[Tensor] = []
        stage = self._stage(size, batch["input_ids"].shape[1], batch["input_ids"].dtype, scales)
        with_losses = [mask.to(self.device) for mask in real.split(size)]
        # with fewer microbatches than stages, one forward and one backward in turn is all forwards, then all backwards
        kind = self.schedule if number >= self.count else "gpipe"
        schedule = SCHEDULES[kind](stage, number, loss_fn=_masked, scale_grads=False)
        first, last = self.index == 0, self.index == self.count - 1
        schedule.step(
            arg_mbs=[(piece.pop("input_ids").to(self.device),) if first else () for piece in pieces],
            kwarg_mbs=[
                {k: v.to(self.device) for k, v in piece.items() if last and k != "input_ids"}
                for piece in pieces
            ],
            target_mbs=with_losses if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        reports = stage.finish()
        found = (
            torch.cat([x.detach() for x in losses])
            if last
            else torch.zeros(number * size, device=self.device)
        )
        keep = [int(mask.sum()) for mask in real.split(size)]
        return found[:total], [_cut(report, n) for report, n in zip(reports, keep, strict=False)]

    def _refuse_lost(self, batch: Batch) -> None:
        """Refuse what the whole model would read beside its tokens, and no stage but the last is given."""
        read = inspect.signature(type(base_of(self.model)).forward).parameters.keys() - {
            "input_ids",
            "labels",
        }
        if lost := sorted(read & batch.keys()):
            raise UserError(
                f"a batch has {', '.join(lost)}, and a model in stages is called with input_ids alone: leave it out and pad on "
                "the right, as dpexp.tasks.generation does, or use runtime=ddp"
            )

    def _stage(
        self, size: int, length: int, tokens: torch.dtype, scales: list[Tensor | None]
    ) -> ClippedStage:
        hidden = torch.empty(size, length, self._width, dtype=self._dtype, device="meta", requires_grad=True)
        entering = hidden if self.index else torch.empty(size, length, dtype=tokens, device="meta")
        leaving = hidden
        if self.index == self.count - 1:
            leaving = torch.empty(size, dtype=torch.float32, device="meta", requires_grad=True)
        flat = None
        if self.flat is not None and self.clipper is not None:
            flat = FlatNorms(self.flat, self.norms, self.traffic)
        return ClippedStage(
            self._module, self.index, self.count, self.device,
            input_args=(entering,), output_args=(leaving,), group=self.group, clipper=self.clipper, flat=flat,
            loss_scale=self.loss_scale, clip_scales=scales, traffic=self.traffic,
        )  # fmt: skip


class _StageModule(nn.Module):
    """What the schedule calls: tokens or hidden states in, hidden states or losses out."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.model = pipeline.model
        # in a list: no submodule, and no cycle through one
        self._of = [pipeline]

    def forward(self, entering: Tensor, **rest: Tensor) -> Tensor:
        of = self._of[0]
        with ExitStack() as inside:
            inside.enter_context(of.context())
            if of.park:
                inside.enter_context(parked(self.model, of.traffic))
            if of.index == of.count - 1:
                return of.losses(self.model, {"input_ids": entering, **rest})
            hidden: Tensor = self.model(input_ids=entering).logits
        if hidden.dtype != of._dtype:
            raise UserError(
                f"stage {of.index} hands on {hidden.dtype} and its weights are {of._dtype}: load the model in one precision"
            )
        return hidden


def _masked(losses: Tensor, real: Tensor) -> Tensor:
    return torch.where(real, losses, 0.0)


def _filled(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows; behind the end, copies of the last one."""
    rows = torch.arange(start, stop).clamp(max=len(batch["input_ids"]) - 1)
    return {name: tensor[rows.to(tensor.device)] for name, tensor in batch.items()}


def _cut(report: Report, count: int) -> Report:
    """Without the copies, whose gradients are zero: they are above no threshold."""
    return Report(report.norms[:, :count], report.clipped)


def new_group(ranks: list[int]) -> Any:
    """Make a group of these processes; all processes of the job must call this, in the same order."""
    return dist.new_group(ranks)
