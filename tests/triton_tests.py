"""What the tests of Triton kernels share: an interpreter in a process of its own, and a compiler for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest


def interpret(program: str) -> None:
    """Run a program with Triton's interpreter, which is chosen when Triton is imported; it must print "agreed"."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays" in done.stderr:
        import triton

        if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
            pytest.skip(
                f"the interpreter of Triton {triton.__version__} fails with this NumPy, whatever it runs"
            )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "agreed" in done.stdout


def compiles_for_a_gpu(kernel: Any, kinds: Mapping[str, str], constants: Mapping[str, Any]) -> bool:
    """Whether a kernel becomes machine code of an H100; ``kinds``: of its arguments, "i32" where none is given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    of_constants = dict.fromkeys(constants, "constexpr")
    signature = {name: (kinds | of_constants).get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants))
    return "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
