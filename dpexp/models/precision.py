"""The precision that a network computes in."""

import time
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


def slowdown(precision: str, device: torch.device) -> float:
    """Measure how many times as long as in 32 bits a product of matrices takes in a precision: 1 for fp32.

    A processor without instructions for 16 bits computes in them all the same, many times slower, and says nothing.
    """
    dtype = PRECISIONS[precision]
    if dtype is None:
        return 1.0
    matrix = torch.ones(256, 256, device=device)
    rounded = matrix.to(dtype)
    # the first of each kind also sets up the library behind it
    taken = [[_seconds(matrix), _seconds(rounded)] for _ in range(4)][1:]
    plain, own = (min(times) for times in zip(*taken, strict=True))
    return own / plain


def _seconds(matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    # what is asked for on a GPU waits for it
    (matrix @ matrix)[0, 0].item()
    return time.perf_counter() - started


def rounded(device: torch.device, dtypes: Iterable[torch.dtype]) -> str | None:
    """Say what 16 bits cost the guarantee, where a network with weights of these types computes in them at this moment."""
    now = [torch.get_autocast_dtype(device.type)] if torch.is_autocast_enabled(device.type) else []
    bits = [ROUNDED[dtype] for dtype in (*dtypes, *now) if dtype in ROUNDED]
    return SIXTEEN_BITS.format(bits=min(bits)) if bits else None
