"""One optional C++ file for CPUs: noise, convolutions' per-example gradients over the cores, checksums of sums.

It is built when it is first asked for, where a C++ compiler is found, for this source, this torch and this processor; a machine
keeps it (``python -m dpexp.native``, and so `make setup`, builds it ahead of time). Without it, or with ``DPEXP_NATIVE=0``, pure
torch draws the same noise and computes the same clipped sums up to rounding: what is used is therefore part of the fingerprint of
a released step.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from dpexp.durable import cache_folder, make_folder
from dpexp.errors import UserError

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = [
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-fopenmp",
]
COMPILERS = ("c++", "g++", "clang++")
# seconds that a process waits for another one that is building
PATIENCE = 300


def kernels() -> Any | None:
    """``torch.ops.dpexp_native``: `add_noise_`, `chacha_`, `conv_gradients_`, `checksums_`; None if not built or turned off."""
    return torch.ops.dpexp_native if _loaded() else None


def backend() -> str:
    """What computes: "torch", or "native" with a hash of the library, because another compiler may round another way."""
    return f"native {_loaded()}" if _loaded() else "torch"


@cache
def _loaded() -> str | None:
    """Load the library, once per process, and build it first where need be. Returns the beginning of its hash, or None."""
    if os.environ.get("DPEXP_NATIVE") == "0":
        return None
    try:
        path = build()
        torch.ops.load_library(str(path))
    except (UserError, OSError) as reason:
        warnings.warn(
            f"{reason}. On a CPU noise then takes about twenty times as long; DPEXP_NATIVE=0 says that this is meant",
            stacklevel=3,
        )
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def library_path() -> Path:
    """Where the library for this source, torch and processor is, or would be."""
    facts = [SOURCE.read_bytes(), torch.__version__.encode(), " ".join(FLAGS).encode(), _processor().encode()]
    name = hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]
    return cache_folder() / "native" / f"{name}.so"


def build() -> Path:
    """Compile the library, ten to twenty seconds, unless it is there; one process does it for all of a machine. Returns its path.

    Raises:
        UserError: there is no compiler, it fails, or its work can't be kept.
    """
    target = library_path()
    if target.exists():
        return target
    chosen = os.environ.get("CXX")
    compiler = next((found for name in (chosen, *COMPILERS) if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise UserError(
            f"no C++ compiler is installed (tried {', '.join(COMPILERS)}): pure torch is used, which is right and slower"
        )
    make_folder(target.parent, "DPEXP_CACHE")
    with FileLock(target.with_suffix(".lock"), timeout=PATIENCE):
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "kernels.so"
        command = [compiler, *FLAGS, *includes, str(SOURCE), "-o", str(made), f"-L{root / 'lib'}"]
        done = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(
                f"{compiler} could not build the native kernels, so pure torch is used: "
                f"{(done.stderr.strip().splitlines() or ['no message'])[0]}"
            )
        # at once: another process never sees half a file
        made.replace(target)


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return " ".join(line for line in lines[:30] if line.startswith(("model name", "flags", "Features")))
