"""What the system does with large pieces of memory on a CPU: touching them first, and giving them back."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

# bytes that glibc always maps afresh
LARGE = 32 << 20
_PAGE = 4096
# Linux
_MADV_HUGEPAGE = 14


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor with undefined contents, its large pages asked for.

    A gradient of 150 MB is new memory in every step: to have Linux clear it in pieces of 4 KiB takes longer than to add it up.
    """
    result = torch.empty(shape, dtype=dtype, device=device)
    large = device.type == "cpu" and math.prod(shape) * dtype.itemsize >= LARGE
    if large and sys.platform == "linux":
        advise = _function("madvise")
        start = -(-result.data_ptr() // _PAGE) * _PAGE
        length = (result.data_ptr() + result.nbytes - start) // _PAGE * _PAGE
        # advice: where the system does not take it, nothing is lost
        if advise is not None:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return result


def give_back_freed_memory() -> None:
    """Let the C library return what was freed: proofs and trials leave holes in its heap that nothing fills later."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _function(name: str) -> Any:
    """A function of the C library; None on systems without it."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):
        return None
