"""The precision that a network computes in."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The forward pass's precision: nothing for fp32, else autocast. Parameters and losses stay float32."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
