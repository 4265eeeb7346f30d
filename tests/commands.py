"""A command as a person calls it, in a fork of this process: importing the libraries takes longer than most commands do."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn


def called(
    what: str | Path, *words: str, cwd: Path, before: Callable[[], object] = lambda: None
) -> subprocess.CompletedProcess[str]:
    """Do what ``python -m what words`` does for a module, or ``python what words`` for a file.

    Args:
        what: of a module its `main` is called.
        cwd: the working directory.
        before: is done first; what it patches, the command meets, and nobody else.

    Returns:
        The exit status (minus the number of the signal where one ended it), and what was printed.
    """
    if isinstance(what, str):
        # once, and not in every fork
        importlib.import_module(what)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if not pid:
            _call(what, words, cwd, before, (out, err))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        printed = [stream.read() for stream in (out, err) if stream.seek(0) == 0]
    return subprocess.CompletedProcess([str(what), *words], status, *printed)


def in_background(*arguments: Any, **named: Any) -> Future[subprocess.CompletedProcess[str]]:
    """`called`, which goes on while the test does something else."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(called, *arguments, **named)
    pool.shutdown(wait=False)
    return future


def _call(
    what: str | Path,
    words: tuple[str, ...],
    cwd: Path,
    before: Callable[[], object],
    streams: tuple[IO[str], IO[str]],
) -> NoReturn:
    status = 1
    try:
        os.chdir(cwd)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        sys.argv = [str(what), *words]
        before()
        if isinstance(what, Path):
            runpy.run_path(str(what), run_name="__main__")
        else:
            module = sys.modules["__main__"] = importlib.import_module(what)
            module.main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # no destructors of a forked interpreter, and never back into the caller's code
            os._exit(status)
