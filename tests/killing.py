"""Work in a process that kills itself at a chosen call of a Python function: any instant, and the same one in every run."""

import os
import signal
import sys
from collections.abc import Callable


def in_child(work: Callable[[], object], at: int | None = None) -> tuple[int, int]:
    """Do `work` in a fork of this process.

    Args:
        work: makes at least one call.
        at: the call, counted from 1, at whose beginning SIGKILL comes; None: never.

    Returns:
        The status of `os.waitpid`, and the number of calls that were made (0 where it did not reach its end).
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(count)
            work()
            sys.setprofile(None)
            os.write(writing, str(calls).encode())
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    os.close(writing)
    with open(reading) as pipe:
        made = pipe.read()
    return os.waitpid(pid, 0)[1], int(made or 0)
