"""A stage of `torch.distributed.pipelining` whose backward goes through a clipper.

The library's schedules decide what runs when, and send; a stage is asked for two things, the output of a microbatch and, later,
the gradients of its inputs. Here the second is the clipper's: it is given the outputs and their gradients (of the last stage,
losses), adds the clipped sum to ``p.grad``, and returns the gradients of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from dpexp.clipping import Clipper, Report
from dpexp.clipping.tapping.forwards import ForwardPass
from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError
from dpexp.pipeline.flat import FlatNorms
from dpexp.pipeline.traffic import Traffic


class ClippedStage(PipelineStage):
    """One stage for one logical batch.

    Args:
        module: called with what the stage before sent (of the first stage, with tokens). The last one returns losses ``[b]``.
        index, count: which stage, of how many.
        device: where it computes.
        input_args, output_args: on the device "meta", what enters and leaves with each microbatch.
        group: the processes of this pipeline, one for each stage.
        clipper: attached to the model in ``module``; None trains without privacy.
        flat: what joins the norms of the stages, for one threshold; None where each stage clips by itself.
        loss_scale: static, for fp16.
        clip_scales: of each microbatch, ``[b]`` factors of the thresholds or None.
        traffic: where bytes are counted.

    Attributes:
        reports: of each microbatch, in order, once the schedule is done.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        *,
        input_args: tuple[Tensor, ...],
        output_args: tuple[Tensor, ...],
        group: Any,
        clipper: Clipper | None,
        flat: FlatNorms | None,
        loss_scale: float,
        clip_scales: list[Tensor | None],
        traffic: Traffic,
    ):
        super().__init__(
            module, index, count, device, input_args=input_args, output_args=output_args, group=group
        )
        self.clipper, self.flat, self.loss_scale, self.traffic = clipper, flat, loss_scale, traffic
        self.clip_scales = clip_scales
        self.reports: dict[int, Report] = {}
        self._owners: dict[int, ForwardPass] = {}
        self._chunk = -1

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Compute, and remember which forward it was: several wait for their backward."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if self.clipper is not None and self.has_backward:
            self._owners[fwd_chunk_id] = self.clipper.last_forward()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Remember which microbatch comes back."""
        self._chunk = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Back-propagate through the clipper in place of autograd alone.

        Raises:
            UserError: a schedule that divides a backward into one for inputs and one for weights.
        """
        root = bwd_kwargs["stage_output"]
        if self.clipper is None:
            if self.is_last:
                bwd_kwargs = bwd_kwargs | {"stage_output": root.sum() * self.loss_scale}
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type != "full":
            raise UserError(
                "schedules that back-propagate to inputs and to weights apart (zero bubble) have no clipped form here: use "
                "runtime.schedule=1f1b or gpipe"
            )
        given = [t for t in bwd_kwargs["input_values"] if isinstance(t, Tensor)]
        owner = self._owners.pop(self._chunk)
        if self.is_last:
            roots = Roots.of_losses(root, self.loss_scale, given, owner)
        else:
            roots = Roots.of_outputs(
                root, bwd_kwargs["output_grads"], given, owner, self.clipper.rows_per_example
            )
        arrived = dict(zip(map(id, roots.inputs), self._clipped(roots), strict=True))
        return tuple(arrived.get(id(value)) for value in bwd_kwargs["input_values"]), None

    def finish(self) -> list[Report]:
        """Sum what waits for the other stages' norms. Returns the reports of the microbatches in order."""
        if self.flat is not None:
            self.reports |= self.flat.finish()
        return [self.reports[chunk] for chunk in sorted(self.reports)]

    def _clipped(self, roots: Roots) -> tuple[Tensor | None, ...]:
        assert self.clipper is not None
        scale = self.clip_scales[self._chunk]
        if self.flat is not None:
            return self.flat.take(self.clipper, self._chunk, roots, scale, self.loss_scale)
        report = self.clipper.backward_from(roots, scale, loss_scale=self.loss_scale)
        self.reports[self._chunk] = report
        return report.input_gradients

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Count what is sent on."""
        ops: list[Any] = super().get_fwd_send_ops(fwd_chunk_id)
        self.traffic.add("activations", sum(op.tensor.nbytes for op in ops))
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Count what is sent back."""
        ops: list[Any] = super().get_bwd_send_ops(bwd_chunk_id)
        self.traffic.add("gradients", sum(op.tensor.nbytes for op in ops))
        return ops
