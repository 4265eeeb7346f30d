"""The parent's end of a worker: start it, give it a command, wait for the answer, or learn how it died."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from typing import Any

from dpexp.benchmark.worker import OVER_THE_CAP

# how long OpenMP's threads wait before they sleep is that of every command, see `dpexp/__init__.py`
_QUIET = {"TOKENIZERS_PARALLELISM": "false"}


class Failed(Exception):
    """A worker cannot do what it was asked to; the text is the reason, for a table.

    memory: it needed more memory than there is, or than it may have.
    """

    def __init__(self, reason: str, memory: bool = False):
        super().__init__(reason)
        self.memory = memory


class Worker:
    """One process for one method; see `dpexp.benchmark.worker.Bench` for the commands.

    Args:
        threads: of OpenMP and MKL in the process.
        patience: seconds that any one command may take before the process is ended.
    """

    def __init__(self, threads: int, patience: float):
        self.patience = patience
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dpexp.benchmark.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | _QUIET | count,
        )
        self._rest = b""

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            Failed: the process reports a failure, dies, or takes too long. It is of no further use then.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._death() from error
        answer = json.loads(self._line(command))
        if reason := answer.get("failed"):
            raise Failed(reason, memory=reason == "out of memory")
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if stream is not None:
                    stream.close()
            except BrokenPipeError:
                # what a dead process did not read
                continue

    def _line(self, command: str) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([descriptor], [], [], self.patience)
            if not ready:
                self._process.kill()
                raise Failed(f"{command} took longer than {self.patience:g} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise self._death()
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _death(self) -> Failed:
        status = self._process.wait()
        if status == OVER_THE_CAP:
            return Failed("over the memory cap", memory=True)
        if status == -signal.SIGKILL:
            return Failed("killed by the system: out of memory, most likely", memory=True)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return Failed(f"the process ended with status {status}{': ' + lines[-1][:300] if lines else ''}")
