"""What a network is made of, read off its modules: repeated blocks, linear layers, the outputs of a block's sublayers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dpexp.errors import UserError


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks by name, the lowest first: the longest `ModuleList` or `Sequential` of modules of one class.

    Raises:
        UserError: there are none, or two stacks of equal length (an encoder and a decoder).
    """
    stacks: list[dict[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
            if children and len({type(child) for child in children.values()}) == 1:
                stacks.append(children)
    longest = max((len(stack) for stack in stacks), default=0)
    found = [stack for stack in stacks if len(stack) == longest and any(True for _ in _weights(stack))]
    if not found:
        raise UserError(f"{type(model).__name__} has no repeated blocks of one class: take another peft")
    if len(found) > 1:
        names = " and ".join(next(iter(stack)).rpartition(".")[0] for stack in found[:2])
        raise UserError(
            f"{type(model).__name__} has two stacks of {longest} blocks, {names}: which one is meant can't be told; "
            "take another peft"
        )
    return found[0]


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`nn.Linear` and transformers' `Conv1D` layers: name, layer."""
    for name, child in module.named_modules():
        if is_linear(child):
            yield name, child


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes x·W (+ b) with a matrix of its own, and nothing else."""
    return type(module) is nn.Linear or input_first(module)


def input_first(module: nn.Module) -> bool:
    """Whether the weight is stored as `[inputs, outputs]`, as in transformers' `Conv1D`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def matrix(layer: nn.Module) -> Tensor:
    """The weight as W of `[outputs, inputs]`: a view."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.t() if input_first(layer) else weight


def sublayer_outputs(block: nn.Module) -> list[str]:
    """The linear layers that end the attention and the feed-forward part of a block, by name.

    Each is the last one that the part registers, and returns to the width of the block. Empty where the block has no
    attention.
    """
    attention: list[str] = []
    rest: list[str] = []
    owner = next(
        (name for name, module in block.named_modules() if type(module).__name__.endswith("Attention")), None
    )
    if owner is None:
        return []
    for name, _ in linear_layers(block):
        (attention if name.startswith(owner + ".") else rest).append(name)
    return [part[-1] for part in (attention, rest) if part]


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where the submodule `name` is."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, new)


def _weights(stack: dict[str, nn.Module]) -> Iterator[torch.nn.Parameter]:
    for module in stack.values():
        yield from module.parameters()
