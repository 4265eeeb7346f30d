"""Files that survive a crash: replaced as a whole, on the disk before anything relies on them."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpexp.errors import UserError, first_line

log = logging.getLogger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNUSABLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG,
}  # fmt: skip


def disk_error(error: Exception) -> UserError | None:
    """Say what a full disk, or a place that can't be used, means for a person; None of any other error."""
    number = error_number(error)
    name = getattr(error, "filename", None)
    if number in FULL:
        return UserError(f"the disk is full ({name or os.strerror(number)}): free some space and start again")
    if number in UNUSABLE:
        return UserError(f"{name}: {os.strerror(number)}: choose a place that can be read and written")
    return None


def error_number(error: Exception) -> int:
    """What the operating system said, also through a library in Rust, whose errors are no OSErrors; 0: nothing."""
    if isinstance(error, OSError):
        return error.errno or 0
    said = re.search(r"\(os error (\d+)\)", str(error))
    return int(said[1]) if said else 0


def memory_error(error: Exception) -> UserError | None:
    """Say what too little memory means for a person; None of any other error."""
    # of Python and numpy, of torch on a GPU, and of torch on the host
    if not (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
    ):
        return None
    return UserError(
        f"out of memory ({first_line(error)}): lower runtime.physical_batch_size or runtime.eval_batch_size, or the size of what "
        "is trained"
    )


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole: after a crash it holds the old text or the new one, never a part."""
    _replace(path, text.encode(), 0o666)


def write_private(path: Path, content: bytes) -> None:
    """`write_atomic` for what its owner alone may read, at no moment anybody else; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, content, 0o600)


def _replace(path: Path, content: bytes, mode: int) -> None:
    # of this call alone: jobs side by side write one file, that of their machine
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            flush_file(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def cache_folder(given: str | None = None) -> Path:
    """Where is kept what takes long to make: the folder that is given, else that of DPEXP_CACHE, else one in the home."""
    return Path(given or os.environ.get("DPEXP_CACHE") or "~/.cache/dpexp").expanduser()


def keep_cached(path: Path, content: bytes, what: str) -> None:
    """Write a file of a cache, which may hold private data; one that can't be written costs time alone: a warning."""
    try:
        write_private(path, content)
    except OSError as error:
        log.warning("the cache of %s could not be written: %s (%s)", what, path, error.strerror)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` for a JSON value; see `finite`."""
    write_atomic(path, json.dumps(finite(value), indent=2, default=str, allow_nan=False) + "\n")


def kept_beside(folder: str | Path) -> Path:
    """The folder beside an output folder, which may be uploaded, for what must not be: the ledger and the key.

    Raises:
        UserError: the output folder is the root of the file system.
    """
    # of "." too, which has no name of its own
    place = Path(os.path.abspath(folder))
    if not place.name:
        raise UserError(f"{folder} has no place beside it: give a folder of its own")
    return place.with_name(f"{place.name}.privacy")


def make_folder(folder: Path, setting: str) -> None:
    """Make a folder and those above it, where they don't exist.

    Args:
        folder: the folder.
        setting: what named it, for the message.

    Raises:
        UserError: it can't be: a file stands in its way, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder {folder} can't be made ({error.strerror}): choose another one with {setting}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file, or something else in it (cut off, edited, another kind)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the YAML mapping in a file; empty where there is no file, or something else in it."""
    # takes longer to import than all the rest here
    import yaml

    try:
        value = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that are complete; a torn last one is what a crash leaves."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def flattened(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested dicts."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def finite(value: Any) -> Any:
    """The value with null for each number that JSON does not have: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


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
