"""A second device, of which torch's CPU does the work: what of ours mixes two devices fails on it as it would on a GPU.

It is a program of its own that trains there (`python -m tests.second_device.programs`): the device stays in its process for good.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dpexp.native import COMPILERS

SOURCE = Path(__file__).parent / "device.cpp"
NAME = "second"


def compiler() -> str | None:
    """A compiler of C++, if there is one."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def built(compiler: str, folder: Path) -> Path:
    """Compile the device for this torch, once, and return the library.

    Args:
        compiler: of C++.
        folder: where it is kept.
    """
    name = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {compiler}".encode()).hexdigest()[:16]
    library = folder / f"second_device-{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # another process may be at it, too
        own = library.with_suffix(f".{os.getpid()}")
        torch_here = Path(torch.__file__).parent
        paths = [f"-I{torch_here / 'include'}", f"-L{torch_here / 'lib'}"]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", abi, *paths, "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run([compiler, str(SOURCE), "-o", str(own), *flags], check=True)
        own.replace(library)
    return library


def register(library: Path) -> torch.device:
    """Let this process have the device."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    # a parameter that moves stays the object that it was, as one that moves to a GPU does: tied weights stay tied
    torch.__future__.set_swap_module_params_on_conversion(True)
    return torch.device(NAME, 0)


def _module() -> Any:
    """What torch asks of `torch.second`, as of `torch.cuda`."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = torch.ops.second_device.seed
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.default_generators = (torch.ops.second_device.generator(),)
    module.get_rng_state = lambda device=None: torch.ops.second_device.get_state()
    module.set_rng_state = lambda state, device=None: torch.ops.second_device.set_state(state)
    sys.modules[module.__name__] = module
    return module
