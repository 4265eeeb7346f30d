"""From the settings of clip= to a method that needs whole per-example gradients (`dpexp.clipping.whole`)."""

from typing import TYPE_CHECKING

from dpexp.clipping.coordinates import AdaClip, Ellipsoid, ScaleThenPrivatise
from dpexp.clipping.embedding import Embedding
from dpexp.clipping.whole import Method
from dpexp.errors import UserError

if TYPE_CHECKING:
    from dpexp.config import ClipConfig


def build_method(clip: "ClipConfig", expected_batch: float) -> Method:
    """The method of a configuration, not attached to a model yet.

    Raises:
        UserError: there is no such method.
    """
    if clip.method == "adaclip":
        memory = (float(clip.memory[0]), float(clip.memory[1]))
        bounds = (float(clip.variance_range[0]), float(clip.variance_range[1]))
        return AdaClip(memory, bounds, clip.init_norm, expected_batch)
    if clip.method == "scaled":
        return ScaleThenPrivatise(float(clip.memory[1]), clip.scale_floor)
    if clip.method == "ellipsoid":
        return Ellipsoid(clip.scale_floor)
    if clip.method == "embedding":
        return Embedding(clip.basis, clip.residual_norm)
    raise UserError(f"clip.method={clip.method} is not known")
