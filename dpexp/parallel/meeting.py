"""A store for a process group that holds nothing of an earlier life of the job.

torchrun's rendezvous (``--rdzv-backend=c10d``, ``--standalone``) keeps one store while it starts the processes again. Under the
same keys lie then the addresses of processes that are dead, and those that live wait for them.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


def fresh(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a part of a store that these processes have for themselves; each of them must call this.

    Each writes down a number drawn now, and reads those of all. A name is made of them, and it counts when every process has
    said that it sees it: who is dead has never seen a number that was drawn now.

    Raises:
        TimeoutError: not all processes have come.
    """
    store.set(f"here/{rank}", secrets.token_hex(16))
    everyone, last = range(size), time.monotonic() + timeout.total_seconds()
    while True:
        numbers = store.multi_get([f"here/{other}" for other in everyone])
        name = hashlib.sha256(b"".join(numbers)).hexdigest()
        store.set(f"seen/{name}/{rank}", "")
        if store.check([f"seen/{name}/{other}" for other in everyone]):
            return PrefixStore(name, store)
        if time.monotonic() > last:
            raise TimeoutError(f"not all of {size} processes have come within {timeout}")
        time.sleep(max(0.02, size / 1000))
