"""Where the part of a sharded tensor that lies here stands in the whole."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from dpexp.errors import UserError


def is_sharded(tensor: Any) -> bool:
    """Whether this process holds a part of the tensor, or one of its replicas (a `DTensor`)."""
    return hasattr(tensor, "to_local")


def replicas_of(tensor: Any) -> tuple[Tensor, list[Any]]:
    """Return the part of a sharded tensor that lies here, and the process groups over which copies of it lie."""
    mesh, placements = tensor.device_mesh, tensor.placements
    copied = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    return tensor.to_local(), [mesh.get_group(dim) for dim in copied]


def part_here(tensor: Any) -> tuple[Tensor, int, list[Any]]:
    """Return the part of a tensor that lies here.

    Returns:
        the part; its first element's place in the flattened whole; the process groups over which the other parts lie.

    Raises:
        UserError: it is a sum that is not reduced yet, or is cut along another dimension than the first.
    """
    if not is_sharded(tensor):
        return tensor, 0, []
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise UserError("a tensor is a partial sum: reduce it over the ranks first")
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if any(not placements[dim].is_shard(0) for dim in cut):
        raise UserError(
            f"a tensor of shape {list(tensor.shape)} is cut along another dimension than its first: leave shard_placement_fn= of "
            "fully_shard out"
        )
    local = tensor.to_local()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place = offset[0] * math.prod(tensor.shape[1:]) if local.numel() else 0
    return local, place, [mesh.get_group(dim) for dim in cut]
