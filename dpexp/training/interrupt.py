"""Ctrl-C and SIGTERM end a run between two of its atoms, never inside one.

A handler that somebody else has set stays. That of submitit lets SIGTERM pass: on Slurm it comes before a job is preempted, and
one that ended by itself then would not be queued again.
"""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_like_ctrl_c() -> None:
    """Let SIGTERM raise KeyboardInterrupt too, so that it ends a run with the same words wherever it arrives."""
    if signal.SIGTERM in _free():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _free() -> list[signal.Signals]:
    """The signals that nobody else handles."""
    # elsewhere Python delivers none
    if threading.current_thread() is not threading.main_thread():
        return []
    known = {number: signal.getsignal(number) for number in SIGNALS}
    return [n for n, before in known.items() if before is signal.default_int_handler or not callable(before)]


class Interrupts:
    """Inside, the first signal only sets `requested`; the second one ends the process as usual.

    That is safe too: a folder survives a process that is killed at any instant.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._handle) for number in _free()}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
