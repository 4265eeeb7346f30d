"""What differs between the versions of torch that dpexp works with, in one place.

Everything else asks here. What an older torch cannot do exactly is refused there, by the version that can.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from dpexp.errors import UserError

LOWEST_TORCH = (2, 8)
"""On which the tests are run (``make test-lowest``); pip installs none below it."""

_backends: Any = torch.backends


def refuse_untested(version: str) -> None:
    """Refuse a torch on which nobody has compared clipped sums with a loop over the examples.

    Raises:
        ImportError: it is older than `LOWEST_TORCH`.
    """
    if tuple(map(int, version.split(".")[:2])) < LOWEST_TORCH:
        lowest = ".".join(map(str, LOWEST_TORCH))
        raise ImportError(
            f"dpexp is tested on torch {lowest} and newer, and this is torch {version}: pip install 'torch>={lowest}'"
        )


_NAMES = {"highest": "ieee", "high": "tf32", "medium": "bf16"}


class _MatmulBits:
    """`torch.set_float32_matmul_precision` with the names of torch 2.9: it is one setting for CPU and GPU in torch 2.8."""

    @property
    def fp32_precision(self) -> str:
        return _NAMES[torch.get_float32_matmul_precision()]

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(next(old for old, new in _NAMES.items() if new == value))


class _CudnnBits:
    """`torch.backends.cudnn.allow_tf32` with the names of torch 2.9."""

    @property
    def fp32_precision(self) -> str:
        return "tf32" if _backends.cudnn.allow_tf32 else "ieee"

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        _backends.cudnn.allow_tf32 = value == "tf32"


def float32_settings() -> dict[tuple[str, str], tuple[Any, ...]]:
    """torch's settings for the bits that float32 is multiplied with, by operation and device; each has a ``fp32_precision``.

    On a CPU the convolution of one example is a matrix product; cuDNN's recurrent layers go with its convolutions.
    """
    if hasattr(_backends.mkldnn, "matmul"):
        return {
            ("matmul", "cpu"): (_backends.mkldnn.matmul,),
            ("conv", "cpu"): (_backends.mkldnn.conv, _backends.mkldnn.matmul),
            ("matmul", "cuda"): (_backends.cuda.matmul,),
            ("conv", "cuda"): (_backends.cudnn.conv, _backends.cudnn.rnn),
        }
    return _settings_of_torch_2_8()


def _settings_of_torch_2_8() -> dict[tuple[str, str], tuple[Any, ...]]:
    matmul = (_MatmulBits(),)
    return {
        ("matmul", "cpu"): matmul,
        ("conv", "cpu"): matmul,
        ("matmul", "cuda"): matmul,
        ("conv", "cuda"): (_CudnnBits(),),
    }


WIDE_GRADIENTS = hasattr(torch.Tensor, "grad_dtype")
"""Whether a gradient may be wider than its parameter: torch 2.10 and newer."""


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, unless its ``grad_dtype`` says another one.

    Raises:
        UserError: torch does not know ``grad_dtype``, and it was set.
    """
    dtype: torch.dtype = getattr(param, "grad_dtype", None) or param.dtype
    if dtype != param.dtype and not WIDE_GRADIENTS:
        raise UserError(
            f"grad_dtype={dtype} of a parameter of {param.dtype} needs torch 2.10 or newer, and this is torch {torch.__version__}"
        )
    return dtype


def check_wide_gradients(dtype: torch.dtype) -> None:
    """Refuse weights of 16 bits where their sums cannot have 32.

    Raises:
        UserError: a gradient always has the dtype of its parameter in this torch.
    """
    if not WIDE_GRADIENTS:
        raise UserError(
            f"trained weights of {dtype} need torch 2.10 or newer, and this is torch {torch.__version__}: before, a gradient has "
            "16 bits too, and an example could move the clipped sum by more than its threshold. Update torch, or keep the "
            "weights in float32 (model.float()) and compute in 16 bits by autocast"
        )


def check_fully_shard() -> None:
    """Refuse FSDP2 where it cannot wait for the clipped sums.

    Raises:
        UserError: this torch reduces gradients over ranks before they are clipped.
    """
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_manual_backward_finalization"):
        raise UserError(
            f"fully_shard (runtime=fsdp) needs torch 2.15 or newer, and this is torch {torch.__version__}, which cannot hold its "
            "reduction back until gradients are clipped: update torch, or train whole models (runtime=ddp)"
        )


def check_pipelining() -> None:
    """Refuse pipelines where a schedule does not take the microbatches that a stage has cut.

    Raises:
        UserError: this torch cuts a whole batch by itself, and none that has fewer microbatches than stages.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    if "arg_mbs" not in signature(PipelineScheduleSingle.step).parameters:
        raise UserError(
            f"runtime=pipeline needs torch 2.14 or newer, and this is torch {torch.__version__}, whose schedules take no "
            "microbatches that are cut already: update torch, or train whole models (runtime=ddp)"
        )
