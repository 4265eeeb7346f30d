"""Where the batch enters the model: a tap without parameters on the input itself.

The first layer's output is the first place where a tap of a layer sees whether rows belong to one example. Statistics of the raw
input (``x - x.mean(0)``) mix examples before that. So the input is proven, too, like the input of a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils._pytree import tree_map

from dpexp.clipping.contributions.base import Contribution
from dpexp.clipping.taps import Call

if TYPE_CHECKING:
    from dpexp.clipping.taps import Recorder


class _Entrance:
    """The `Source` of the input's tap: it owns nothing and contributes nothing."""

    label, owner = "input", "the model"
    names: tuple[str, ...] = ()

    def contributions(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        return {}

    def plain_gradients(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, names: set[str]
    ) -> dict[str, Tensor]:
        return {}


def watched(recorder: Recorder, inputs: list[Tensor], args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments of the model's forward with a tap on the batch; None where it cannot be told which input that is.

    Two inputs of as many rows may be a batch and a mask that all examples share, and integers have no gradient.
    """
    wide = [t for t in inputs if t.dim() >= 2 and t.shape[0] == recorder.rows]
    if len(wide) != 1 or not wide[0].is_floating_point() or recorder.flow is None:
        return None
    (batch,) = wide
    y = batch.clone()  # a model may write to its input, which a tap on the caller's tensor would not survive
    call = Call(_Entrance(), recorder.place("input"), batch.shape, batch.shape, from_batch=True)
    tapped = recorder.tap(y, call, ())
    return tree_map(lambda leaf: tapped if leaf is batch else leaf, (args, kwargs))
