"""How many examples fit in memory at once, found with public examples, so that it says nothing private."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.errors import UserError

if TYPE_CHECKING:
    from dpexp.tasks.base import Task

Batch = dict[str, Tensor]

# beyond this, larger batches do not make two or sixteen cores faster
CPU_ACTIVATION_BYTES = 2 << 30
LARGEST = 1024
# of the dev set, repeated to the size that is tried
EXAMPLES = 64
# fits nearly everywhere
UNTRIED = 16


def public_losses(task: Task, seed: int, losses: Callable[[Batch], Tensor]) -> Callable[[int], Tensor] | None:
    """Find what `automatic_size` tries: losses of so many examples of the dev set, over and over, or of a made-up one.

    Args:
        task: the task; None where it has neither.
        seed: of its augmentation.
        losses: a collated batch -> `[n]`.
    """
    made_up = [example for example in [task.blank()] if example is not None]
    examples = [task.dev[i] for i in range(min(EXAMPLES, len(task.dev)))] or made_up
    if not examples:
        return None
    public = task.collate(examples)
    return lambda count: losses(task.augmented(repeated(public, count), np.arange(count), seed, 0))


def repeated(batch: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """`count` rows of a collated batch, over and over; as long as its longest example."""
    rows = torch.arange(count) % len(next(iter(batch.values())))
    return {name: tensor[rows] for name, tensor in batch.items()}


def automatic_size(
    forward: Callable[[int], Tensor] | None,
    backward: Callable[[Tensor], object],
    parameters: Sequence[nn.Parameter],
    device: torch.device,
    expected_batch: float,
) -> int:
    """The largest physical batch that fits, found with public examples (the dev set), so that it says nothing private.

    On a GPU: double until the memory is gone, then leave one step back as a reserve for longer examples. On a
    CPU, where memory is shared and a larger batch is not faster beyond some size: count the bytes that autograd keeps
    for two more examples, and take the size at which they reach `CPU_ACTIVATION_BYTES` or an eighth of the machine's memory.

    Args:
        forward: number of examples -> losses `[n]`, on batches as long as training will meet; None: `UNTRIED` is the answer.
        backward: what training does with the losses. Gradients are dropped afterwards.
        parameters: their gradients are dropped.
        device: where the model is.
        expected_batch: there is no use in a physical batch far above the logical one.

    Returns:
        A power of two, at least 1.

    Raises:
        UserError: not even one example fits.
    """
    if forward is None:
        return UNTRIED
    ceiling = min(LARGEST, 1 << math.ceil(math.log2(max(1.0, expected_batch))))
    try:
        if device.type == "cuda":
            return _largest_on_gpu(forward, backward, parameters, ceiling)
        return _estimate_on_cpu(forward, ceiling)
    finally:
        for parameter in parameters:
            parameter.grad = None
        if device.type == "cuda":
            # the trial is no part of the run's memory
            torch.cuda.reset_peak_memory_stats(device)


def _largest_on_gpu(
    forward: Callable[[int], Tensor],
    backward: Callable[[Tensor], object],
    parameters: Sequence[nn.Parameter],
    ceiling: int,
) -> int:
    size = 1
    while True:
        try:
            backward(forward(size))
        except torch.OutOfMemoryError:
            if size == 1:
                raise UserError(
                    "not even one example fits into the GPU's memory: take a smaller model"
                ) from None
            return max(1, size // 4)
        finally:
            for parameter in parameters:
                parameter.grad = None
            torch.cuda.empty_cache()
        if size >= ceiling:
            return size
        size *= 2


def _estimate_on_cpu(forward: Callable[[int], Tensor], ceiling: int) -> int:
    # weights, frozen or not, and their copies of 16 bits are kept for any number of examples
    per_example = max(1, (_kept(forward, 4) - _kept(forward, 2)) // 2)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = min(CPU_ACTIVATION_BYTES, memory // 8)
    fits = max(1, budget // per_example)
    return min(ceiling, 1 << (int(fits).bit_length() - 1))


def _kept(forward: Callable[[int], Tensor], examples: int) -> int:
    """Bytes that autograd keeps for so many examples."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        # with its history, a node that saves its own output would keep itself alive
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        losses = forward(examples)
    del losses
    return sum(kept.values())
