"""Large pieces of memory on a CPU: used again, and given back.

Instantiating into fresh memory costs about twice as much as into memory that has been touched before (page faults), and that
decides which norm method is fastest. A GPU's caching allocator does this by itself.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

DEFAULT_CAP = 256 << 20
# bytes of gradients that a CPU surely still has in reach when it looks at them again
HOT = 4 << 20
# the same for what is looked at once
WARM = 4 * HOT


class Scratch:
    """A buffer that grows to what was asked of it, one per thread and dtype.

    Args:
        cap_bytes: how much memory a chunk of instantiated gradients may take. A single example is always
            possible, whatever its size.
    """

    def __init__(self, cap_bytes: int = DEFAULT_CAP):
        self.cap_bytes = cap_bytes
        self._local = threading.local()

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A tensor with undefined contents, valid until the next call; None where fresh memory is just as good."""
        if device.type != "cpu":
            return None
        numel = math.prod(shape)
        buffers = self._local.__dict__
        held = buffers.get(str(dtype))
        if held is None or held.numel() < numel:
            held = buffers[str(dtype)] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel].view(*shape)

    def chunk(self, bytes_per_example: int, device: torch.device, caches: int = WARM) -> int:
        """How many examples to work on at once; at least one. On a CPU, more than the caches hold gains nothing."""
        cap = min(self.cap_bytes, caches) if device.type == "cpu" else self.cap_bytes
        return max(1, cap // max(1, bytes_per_example))

    def __deepcopy__(self, memo: dict) -> Scratch:
        return Scratch(self.cap_bytes)


SHARED = Scratch()


def give_back_freed_memory() -> None:
    """Let the C library return what was freed: proofs and trials leave holes in its heap that nothing fills later."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """The function of glibc; None with other libraries."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
