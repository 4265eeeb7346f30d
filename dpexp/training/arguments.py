"""What a person gives to `dpexp.PrivacyEngine`, checked before anything is made of it."""

from __future__ import annotations

import math
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from dpexp.errors import UserError

WHOLE = ("steps", "rows_per_example", "checkpoint_every", "noise_seed", "physical_batch_size")
"""Counts; the others may have a fraction."""
FROM_ZERO = ("checkpoint_every", "noise_multiplier", "noise_seed")
"""May be 0; the others must be above."""


def check_numbers(**arguments: Any) -> None:
    """Refuse what is not a number of the right kind; None is left out.

    Raises:
        UserError: text or another type, NaN or infinity, a fraction of a count, or a number that is too small.
    """
    for name, value in arguments.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UserError(f"{name}={value!r} is not a number: give one, without quotes")
        if not math.isfinite(value):
            raise UserError(f"{name}={value} is not a finite number")
        if name in WHOLE and not (isinstance(value, Integral) or float(value).is_integer()):
            raise UserError(f"{name}={value} is not a whole number")
        if value < 0 or (value == 0 and name not in FROM_ZERO):
            raise UserError(f"{name}={value} must be {'0 or larger' if name in FROM_ZERO else 'above 0'}")


def checked_folder(folder: Any) -> Path:
    """Return the folder of a run as a path.

    Raises:
        UserError: it is none, or a file has its name.
    """
    if not isinstance(folder, str | Path) or not str(folder):
        raise UserError(
            f'folder={folder!r} is not the name of a folder: give one, such as folder="runs/mine"'
        )
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise UserError(f"folder={folder} is a file: give the run a folder of its own")
    return path
