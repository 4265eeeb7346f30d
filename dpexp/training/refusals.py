"""What a step cannot be taken with: processes that nobody counted, shards over a part of them, sums of 16 bits, counted calls,
chance that a physical batch shares."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp.clipping import Clipper
from dpexp.errors import UserError
from dpexp.parallel import Ranks
from dpexp.parallel.shards import is_sharded
from dpexp.torch_versions import check_wide_gradients


def refuse_shards(ranks: Ranks, parameters: Sequence[Any], exact: bool) -> None:
    """Refuse shards over fewer processes than those that share the examples, whose sums would be of some examples alone; and the
    exact noise, before a step is charged for which there is none."""
    if exact:
        raise UserError(
            "secure=True draws noise for whole tensors, one after another, and here each process has a part: leave secure out, "
            "or let every process hold the whole model"
        )
    over = {p.device_mesh.size() for p in parameters if is_sharded(p)}
    if over - {ranks.size}:
        raise UserError(
            f"the model is sharded over {min(over)} of {ranks.size} processes, and gradients would be added up among those "
            "alone: give fully_shard a mesh of all processes, with a second dimension for replicas (init_device_mesh(device, "
            "(replicas, shards), mesh_dim_names=...))"
        )


def refuse_narrow(parameters: Sequence[Tensor], clipper: Any) -> None:
    """Refuse weights of 16 bits where their sums cannot have 32.

    Bfloat16 has 8 bits for a number: the sum of a thousand clipped gradients, rounded to them, moves by more than C when one
    example goes, and the noise would be too small.
    """
    if (
        isinstance(clipper, Clipper)
        and clipper.engine.name != "opacus"
        and not any(map(is_sharded, parameters))
    ):
        check_wide_gradients(parameters[0].dtype)
        return
    raise UserError(
        f"trained weights of {parameters[0].dtype}, whose clipped sums would be rounded to 16 bits before they hold noise: "
        "an example could move them by more than its threshold. Keep the weights in float32 (model.float()) and compute in 16 "
        "bits by autocast; or take clip=flat with engine=auto, in one process or under ddp"
    )


def refuse_counted(counted: str) -> None:
    """Refuse a model that goes by how often it was called: once for each physical batch, and their number is private.

    Args:
        counted: what of it does, see `AnyClipper.counted`.
    """
    if counted:
        raise UserError(
            f"{counted} goes by how often the model was called (a counter, a temperature that falls, a teacher that "
            "follows, the power iteration of a spectral norm). A step calls it once for each physical batch, and how many of "
            "these there are follows from who was drawn: no noise covers that. Let it go by the number of steps, which is "
            "public: a loop moves it on where engine.step(losses) returns True, and leaves it alone in between (eval() of that "
            "module)"
        )


def refuse_shared(shared: str) -> None:
    """Refuse chance that a physical batch shares, where who is in it follows from who was drawn.

    Args:
        shared: what its examples share, see `AnyClipper.shared` and `Steps.around`.
    """
    if shared:
        raise UserError(
            f"all examples of a physical batch share {shared} (LayerDrop, dropout of positions or of weights, noise on weights, "
            "a coin for the batch). One example more moves others into the next physical batch, where chance has it otherwise: "
            "the sum moves by more than one example may, and no noise is for that. Switch it off (a probability of 0, or eval() "
            "of that module), draw for each example, or let nobody share: a physical batch size of 1, or, in one process, one "
            "that holds every batch with room to spare"
        )


def goes_together(size: int, expected: float, most: int) -> bool:
    """Whether all examples of a sample are in one physical batch of this size, but for a probability of e^-60.

    Args:
        size: of the physical batch.
        expected: size of the sample, in which each example is or is not by itself (Chernoff's bound holds for any rates).
        most: N, or the size itself where that is fixed.
    """
    return size >= most or (size > expected and size * math.log(size / expected) - size + expected >= 60)


def refuse_processes() -> None:
    """Refuse a process group of several processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UserError(
            f"{distributed.get_world_size()} processes train together, and this way of training knows of one alone: each would "
            "draw the same batch, and every example would count several times. Use dpexp.PrivacyEngine in a loop of your own, or "
            "python -m dpexp.train runtime=ddp; or start one process"
        )
