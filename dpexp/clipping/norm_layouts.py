"""Batch norms and instance norms of tensors with a dimension of size 1: while a clipper is attached, their gradient is right.

The stride of such a dimension means nothing, but torch's batch norm on a CPU (2.15) goes by it where it decides whether its input
and its gradient are channels-last. It may then read one in the order of the other, and the gradient is wrong. An instance norm of
one example is such a batch norm. Where both are contiguous, it is right.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle


def mend_norms(model: nn.Module) -> list[RemovableHandle]:
    """Have the norms of a model, trained or frozen, compute on contiguous tensors where others may be misread."""
    handles = []
    for module in model.modules():
        if isinstance(module, _NormBase):
            # next to the forward, with a person's own hooks around them
            handles.append(module.register_forward_pre_hook(_contiguous))
            handles.append(module.register_forward_hook(_contiguous_gradient, prepend=True))
    return handles


def _contiguous(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (args[0].contiguous(), *args[1:]) if args and _may_be_misread(args[0]) else None


def _contiguous_gradient(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if _may_be_misread(output) and output.requires_grad:
        output.register_hook(Tensor.contiguous)


def _may_be_misread(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_cpu and 1 in tensor.shape
