"""The table *function → formula*. A function that is missing here is found by `torch.func.vmap`, or left to the loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.operations.conv import Convolution, TransposedConvolution
from dpexp.clipping.operations.linear import AddedProduct, GroupedProduct, Linear, Product, StackedProduct
from dpexp.clipping.operations.lookup import Embedding, Indexed
from dpexp.clipping.operations.norms import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from dpexp.clipping.operations.others import AnyFunction, Spread, spreads
from dpexp.clipping.tapping.uses import Formula

FORMULAS: dict[Any, Formula] = {
    F.linear: Linear(),
    torch.matmul: Product(),
    Tensor.matmul: Product(),
    Tensor.__matmul__: Product(),
    torch.mm: Product(),
    Tensor.mm: Product(),
    torch.addmm: AddedProduct(),
    Tensor.addmm: AddedProduct(),
    torch.bmm: StackedProduct(),
    Tensor.bmm: StackedProduct(),
    torch._grouped_mm: GroupedProduct(),
    # which torch 2.8 does not have
    **({F.grouped_mm: GroupedProduct()} if hasattr(F, "grouped_mm") else {}),
    F.conv1d: Convolution(),
    F.conv2d: Convolution(),
    F.conv3d: Convolution(),
    F.conv_transpose1d: TransposedConvolution(),
    F.conv_transpose2d: TransposedConvolution(),
    F.conv_transpose3d: TransposedConvolution(),
    F.embedding: Embedding(),
    Tensor.__getitem__: Indexed(),
    F.layer_norm: LayerNorm(),
    torch.layer_norm: LayerNorm(),
    F.rms_norm: RMSNorm(),
    torch.rms_norm: RMSNorm(),
    F.group_norm: GroupNorm(),
    torch.group_norm: GroupNorm(),
    F.instance_norm: InstanceNorm(),
    F.batch_norm: BatchNorm(),
}

SPREAD, ANY_FUNCTION = Spread(), AnyFunction()

__all__ = ["ANY_FUNCTION", "FORMULAS", "SPREAD", "spreads"]
