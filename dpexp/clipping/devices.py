"""Per-device groups: consecutive blocks of a model, as the stages of a pipeline hold them (He et al., section 4).

In one process they are groups like all others; with a process for each, every stage clips its own. Which parameter belongs to
which device is decided here alone, so that both are the same mechanism, with the same noise.
"""

from __future__ import annotations

from torch import nn

from dpexp.clipping.groups import block_of, repeated_blocks, trainable_parameters
from dpexp.errors import UserError


def bounds(blocks: int, devices: int) -> list[int]:
    """Where the blocks are cut: device k holds blocks ``bounds[k]`` to ``bounds[k + 1]``; sizes differ by one at most.

    Raises:
        UserError: there are more devices than blocks.
    """
    if not 1 <= devices <= blocks:
        raise UserError(
            f"a model of {blocks} blocks cannot be cut into {devices} parts, each of which needs one at least: choose a smaller "
            "clip.devices, or, under runtime=pipeline, a smaller runtime.stages (without it there are as many as processes)"
        )
    return [k * blocks // devices for k in range(devices + 1)]


def device_of(model: nn.Module, devices: int) -> dict[str, int]:
    """Every name of every parameter -> its device. What stands before the blocks belongs to the first device, what
    stands behind them to the last one.

    Raises:
        UserError: as `repeated_blocks` and `bounds`; a parameter that trains is used on two devices (tied embeddings).
    """
    stack, count = repeated_blocks(model)
    cuts = bounds(count, devices)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {
        name: max(k for k in range(devices) if cuts[k] <= max(place, 0))
        for name, place in block_of(names, stack, count).items()
    }
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(param), name)
        if param.requires_grad and found[other] != found[name]:
            raise UserError(
                f"{other} and {name} are one parameter (tied), used on devices {found[other]} and {found[name]}: its gradient is "
                "a sum over devices, and no device alone knows its norm. Train with peft=lora, which leaves it frozen, or untie "
                "it (model.config.tie_word_embeddings=false)"
            )
    return found


def device_groups(model: nn.Module, devices: int) -> dict[str, list[str]]:
    """Groups for `attach`: "device 0", "device 1", … with the parameters that train there.

    Raises:
        UserError: as `device_of`; nothing trains on a device.
    """
    where = device_of(model, devices)
    groups: dict[str, list[str]] = {f"device {k}": [] for k in range(devices)}
    for name in trainable_parameters(model):
        groups[f"device {where[name]}"].append(name)
    if idle := [name for name, params in groups.items() if not params]:
        raise UserError(
            f"nothing trains on {idle[0]} of {devices}: take fewer devices (clip.devices), or train parameters in every block"
        )
    return groups
