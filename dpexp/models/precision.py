"""The precision that a network computes in."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# to how many bits numbers are rounded
ROUNDED = {torch.bfloat16: 8, torch.float16: 11}
SIXTEEN_BITS = (
    "that one example moves the sum by C alone: the network computed in 16 bits, and through the shape of its physical batch one "
    "example also moves the others in it, by some 2^-{bits} C each. Epsilon does not count this (docs/privacy.md#noise)"
)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The forward pass's precision: nothing for fp32, else autocast. Parameters and losses stay float32."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def rounded(device: torch.device, dtypes: Iterable[torch.dtype]) -> str | None:
    """Say what 16 bits cost the guarantee, where a network with weights of these types computes in them at this moment."""
    now = [torch.get_autocast_dtype(device.type)] if torch.is_autocast_enabled(device.type) else []
    bits = [ROUNDED[dtype] for dtype in (*dtypes, *now) if dtype in ROUNDED]
    return SIXTEEN_BITS.format(bits=min(bits)) if bits else None
