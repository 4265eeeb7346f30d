"""Files that survive a crash: replaced as a whole, on the disk before anything relies on them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole: after a crash it holds the old text or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            flush_file(file)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` for a JSON value."""
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")


def flush_file(file: Any) -> None:
    """From the process to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
