"""What N counts and a step draws, in a loop of one's own: the examples of a data set, or the users who gave them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpexp.errors import UserError
from dpexp.privacy.sampling import stream
from dpexp.privacy.users import Users, of_users
from dpexp.schemas import UnitConfig

Length = Callable[[int], int]


class Units:
    """The examples of a data set, each protected by itself.

    Attributes:
        count: N.
        config: the unit, for the record.
        identity: what makes a run on the same examples another run.
        due: how many losses the rows have that `rows` gave last.
        ordered: whether it matters which row stands where in a batch.
    """

    ordered = False

    def __init__(self, count: int, config: UnitConfig, identity: str = ""):
        self.count, self.config, self.identity = count, config, identity
        self.due = 0

    def rows(self, piece: np.ndarray, key: bytes, step: int) -> list[int]:
        """Return the numbers in the data set of what a physical batch of units holds."""
        self.due = len(piece)
        return list(piece.tolist())

    def length(self, of_row: Length) -> Length:
        """From the length of a row to that of a unit."""
        return of_row

    def losses(self, of_rows: Tensor) -> Tensor:
        """From the losses of the rows that `rows` gave to those of their units."""
        return of_rows


class UserUnits(Units):
    """Users, each protected with all examples of theirs."""

    ordered = True

    def __init__(self, users: Users):
        super().__init__(len(users), UnitConfig("user", rows=users.most), f" of users {users.sha256()}")
        self.users, self.weights = users, torch.zeros(0, 0)

    def rows(self, piece: np.ndarray, key: bytes, step: int) -> list[int]:
        """As `Units.rows`: M rows for each user."""
        seed = stream(key, "rows of users", 0)
        found = [self.users.rows(int(user), seed, step) for user in piece]
        self.weights = torch.from_numpy(np.stack([weights for _, weights in found]))
        self.due = self.weights.numel()
        return [int(row) for rows, _ in found for row in rows]

    def length(self, of_row: Length) -> Length:
        """The longest row of a user."""
        return self.users.longest(of_row)

    def losses(self, of_rows: Tensor) -> Tensor:
        """The mean over the rows of each user."""
        return of_users(of_rows, self.weights)


def units_of(num_rows: int, users: Sequence[Hashable] | None, most: int) -> Units:
    """Return the units of a data set.

    Args:
        num_rows: of the data set.
        users: who gave each row; None: the rows are the units.
        most: M, the rows that a step takes of one user.

    Raises:
        UserError: there are not as many names as rows, or see `Users`.
    """
    if users is None:
        return Units(num_rows, UnitConfig())
    named = Users(users, most)
    if named.num_rows != num_rows:
        raise UserError(f"users names {named.num_rows} users for {num_rows} examples: give one for each")
    return UserUnits(named)
