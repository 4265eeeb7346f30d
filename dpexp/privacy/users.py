"""Who gave which rows, where the guarantee protects users and not rows (`dpexp.privacy.plan.UNITS`)."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor

from dpexp.errors import UserError

# what programs write where nobody is named: as pandas reads it. Somebody may be called Na
MISSING = frozenset(
    ("nan", "NaN", "-nan", "-NaN", "NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "NaT", "null", "NULL", "None", "none")
)  # fmt: skip
# of rows without a name among the codes of categories, also as read from a file
NO_CODES = (-1, "-1")


class Users:
    """Who gave which rows.

    Args:
        names: `[rows]`, of each row's user, in the order of the data: a list, an array, a tensor or a column of a table. Users
            count from 0 in the order of their first rows.
        most: M, the rows that a step takes of one user.

    Raises:
        UserError: M is below 1, nobody is there, a row has no name that equals itself and nobody else's, or one name is
            written in two ways.
    """

    def __init__(self, names: Sequence[Hashable], most: int):
        if most < 1:
            raise UserError(f"{most} rows of a user in a step: at least one is needed")
        if not hasattr(names, "__len__"):
            raise UserError(
                f"users={names!r} names nobody: give the user of each row, in the order of the data"
            )
        if isinstance(names, Mapping | Set | str) or hasattr(names, "columns"):
            raise UserError(
                f"users is a {type(names).__name__}, which does not hold the user of each row in the order of the data: give a "
                "list, an array or one column of a table"
            )
        if not len(names):
            raise UserError("there are no rows, and so no users: give the user of each row")
        found: dict[Hashable, list[int]] = {}
        for row, name in enumerate(_plain(names)):
            _check_name(name, row)
            # é may be one character or two, and a blank behind a name is nobody else
            same = unicodedata.normalize("NFC", name).strip() if isinstance(name, str) else name
            found.setdefault(same, []).append(row)
        _check_alike(found)
        if len(nobodies := [row for code in NO_CODES for row in found.get(code, ())]) > 1:
            raise UserError(
                f"{len(nobodies)} rows have the user -1 (row {nobodies[0]}, say), as the codes of categories mark rows without a "
                "name: several people would be protected as one. Leave these rows out, or give each a user of its own"
            )
        self.most = most
        self.members = [np.asarray(rows, dtype=np.int64) for rows in found.values()]
        self.num_rows = len(names)

    def __len__(self) -> int:
        return len(self.members)

    def rows(self, user: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """What a step takes of a user: a function of these three numbers and of the user's rows alone.

        Returns:
            `[M]` row numbers, of which the last ones only fill up where a user has fewer, and `[M]` float32 weights that add
            up to 1 and are 0 for those.
        """
        chosen = self.members[user]
        if len(chosen) > self.most:
            chosen = np.random.default_rng([seed, step, user]).choice(chosen, self.most, replace=False)
        weights = np.zeros(self.most, dtype=np.float32)
        weights[: len(chosen)] = 1 / len(chosen)
        return np.resize(chosen, self.most), weights

    def sha256(self) -> str:
        """Of who gave which rows; hexadecimal."""
        digest = hashlib.sha256()
        for rows in self.members:
            digest.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
        return digest.hexdigest()

    def longest(self, length: Callable[[int], int]) -> Callable[[int], int]:
        """From the length of a row to that of a user, the length of the longest row."""
        return lambda user: max(length(int(row)) for row in self.members[user])


def _plain(names: Any) -> Sequence[Hashable]:
    """The names as plain values: the elements of a tensor are objects of their own, however equal their numbers are."""
    plain: Sequence[Hashable] = names.tolist() if hasattr(names, "tolist") else names
    return plain


def _check_name(name: Any, row: int) -> None:
    """Refuse what would make a user of every row although somebody has several: the guarantee would be for less than a user."""
    by_identity = isinstance(name, Tensor) or getattr(type(name), "__eq__", None) is object.__eq__
    nobody = name is None or (isinstance(name, str) and (not name.strip() or name.strip() in MISSING))
    if nobody or not isinstance(name, Hashable) or by_identity or name != name:
        raise UserError(
            f"the user of row {row} is {name!r}, and which other rows are the same user's cannot be told by that: give each row "
            "the name or the number of its user"
        )


def _check_alike(found: Mapping[Hashable, Sequence[int]]) -> None:
    """Refuse 7 beside "7" and "7.0": pandas reads a long column in parts, and makes numbers of one part and texts of another.

    And Ann beside ann: addresses and names are typed in either way.
    """
    seen: dict[str, Sequence[int]] = {}
    for name, rows in found.items():
        if isinstance(name, str | bytes | Number):
            text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
            others = seen.setdefault(re.sub(r"(?<=\d)\.0+$", "", text).casefold(), rows)
            if others is not rows:
                # by its rows: the name is private
                raise UserError(
                    f"rows {others[0]} and {rows[0]}, counted from 0, have users whose names read alike and are not equal (a "
                    "number and a text, 7 and 7.0, or upper and lower case): one user would be protected as two. Write all names "
                    "in one way; where case tells users apart, give them numbers"
                )


def of_users(losses: Tensor, weights: Tensor) -> Tensor:
    """Make of the losses of rows, `[B·M]`, those of users, `[B]`: their means with the weights of `Users.rows`, `[B, M]`."""
    return (losses.reshape(weights.shape) * weights.to(losses)).sum(1)
