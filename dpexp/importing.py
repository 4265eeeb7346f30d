"""What a setting names by ``package.module:name``: a network, a task, a clipping rule of a person's own."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dpexp.errors import UserError


def imported(setting: str, path: str | None) -> Any:
    """What ``package.module:name`` or ``folder/file.py:name`` names; modules of the working folder are found too.

    Args:
        setting: what holds the path, for messages.
        path: of a function or class.

    Raises:
        UserError: no such path, or its module can't be imported.
    """
    module, _, name = (path or "").rpartition(":")
    if not module or not name:
        raise UserError(f"{setting}={path}: give package.module:name, or file.py:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = _of_file(module) if module.endswith(".py") else importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise UserError(f"{setting}={path}: {module} can't be imported: {error}") from error
    if not hasattr(found, name):
        raise UserError(f"{setting}={path}: {module} has no {name}")
    return getattr(found, name)


def file_of(path: str | None) -> Path | None:
    """The file in which ``module:name`` or ``file.py:name`` stands; None where nothing is named, or it lies elsewhere."""
    module, _, name = (path or "").rpartition(":")
    file = Path(module if module.endswith(".py") else module.replace(".", "/") + ".py")
    return file if name and file.is_file() else None


@functools.cache
def _of_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module
