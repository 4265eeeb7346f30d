"""Whether what a forward leaves in a buffer reaches the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from dpexp.clipping.independence.comparison import same_buffer
from dpexp.clipping.independence.replay import Replay
from dpexp.clipping.independence.runs import Runs

Outputs = Mapping[int, Tensor]


def reads(
    place: tuple[str, str], replay: Replay, runs: Runs, other: Callable[[Outputs, Outputs], bool]
) -> bool:
    """Tell whether a second forward with the same batch is another one where other numbers stand in a buffer before it.

    Many buffers are empty before the first one. A maximum shows with smaller numbers or with larger ones, and what is kept for
    predictions in `eval` mode alone.

    Args:
        place: module and name of the buffer.
        replay: the forward.
        runs: of it.
        other: whether outputs are others.
    """
    for training in (True, False):
        try:
            between = [partial(_spoil, replay.model, place, training, sign) for sign in (0, 1, -1)]
            (first, *rest) = [runs.of([replay.inputs] * 2, change) for change in between]
        except Exception:
            # numbers that it cannot do with: it reads them
            return True
        for outputs, buffers in rest:
            if other(first[0][1], outputs[1]):
                return True
            if training and not same_buffer(first[1][1][place][0], buffers[1][place][0]):
                return True
    return False


def _spoil(model: nn.Module, place: tuple[str, str], training: bool, sign: int) -> None:
    if not training:
        model.eval()
    held = cast(Tensor, model.get_submodule(place[0])._buffers[place[1]]).data
    if held.is_floating_point() or held.is_complex():
        held.add_(sign * (1 + 2 * held.abs()))
    elif held.dtype == torch.bool:
        held.logical_xor_(torch.tensor(bool(sign), device=held.device))
    else:
        held.add_(sign)
