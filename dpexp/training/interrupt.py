"""Ctrl-C and SIGTERM end a run between two of its atoms, never inside one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_like_ctrl_c() -> None:
    """Let SIGTERM raise KeyboardInterrupt too, so that it ends a run with the same words wherever it arrives."""
    # elsewhere Python delivers no signals
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class Interrupts:
    """Inside, the first signal only sets `requested`; the second one ends the process as usual.

    That is safe too: a folder survives a process that is killed at any instant.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        # elsewhere Python delivers no signals
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
