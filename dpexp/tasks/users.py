"""Users as the unit of privacy: every user is one example to the rest of the program, and has several rows.

A step draws users, not rows. Of a user who was drawn it takes at most M rows, at random where there are more; their mean loss is
the user's one loss, whose gradient is clipped. So the noise hides a person with all rows (McMahan et al. 2018; the "user-level
sampling" of Charles et al. 2024), and N, δ and the sampling rate are those of the users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.privacy.users import Users, of_users
from dpexp.schemas.declared import declared_users
from dpexp.tasks.base import Task, WrappedTask
from dpexp.tasks.files import read_table

if TYPE_CHECKING:
    from dpexp.schemas import RunConfig

PERSON, WEIGHTS = "person", "weights"
MADE_UP = "users were made up: every {size} rows drawn at random are one (unit.size)"


class Person(NamedTuple):
    """A user of the training data, or one row of the public dev set that stands for one."""

    public: bool
    number: int


class People(Sequence[Person]):
    """Users by number."""

    def __init__(self, public: bool, count: int):
        self.public, self.length = public, count

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: Any) -> Any:
        if not -self.length <= i < self.length:
            raise IndexError(i)
        return Person(self.public, int(i) % self.length)


class ByUser(WrappedTask):
    """A task whose examples are the users of another one.

    Args:
        task: of rows; one row of the model for each.
        users: who gave which rows of its training data.

    Raises:
        UserError: another number of rows has a user than the training data has.
    """

    def __init__(self, task: Task, users: Users):
        if users.num_rows != len(task.train):
            raise UserError(f"{users.num_rows} rows have a user, and the training data has {len(task.train)}")
        if task.rows_per_example != 1:
            raise UserError("unit=user needs one row for each example: set task.augmentations=0")
        super().__init__(task)
        self.users, self.num_examples, self.rows_per_example = users, len(users), users.most
        self.train, self.dev = People(False, len(users)), People(True, len(task.dev))
        self.data = dataclasses.replace(task.data, sha256={**task.data.sha256, "users": users.sha256()})

    def collate(self, examples: list[Person]) -> dict[str, Tensor]:
        """Who they are, `[B, 2]`: which rows of theirs a step sees is up to `augmented`, which knows the step."""
        return {PERSON: torch.tensor(examples, dtype=torch.int64).reshape(len(examples), 2)}

    def blank(self) -> None:
        """Not known: a made-up row is nobody's."""

    def augmented(
        self, batch: dict[str, Tensor], indices: np.ndarray, seed: int, step: int
    ) -> dict[str, Tensor]:
        """Return M adjacent rows of every user, as the task collates them, and `weights` `[B, M]`."""
        examples: list[Any] = []
        weights = np.zeros((len(batch[PERSON]), self.users.most), dtype=np.float32)
        for place, (public, number) in enumerate(batch[PERSON].tolist()):
            if public:
                rows, weights[place] = np.full(self.users.most, number), 1 / self.users.most
            else:
                rows, weights[place] = self.users.rows(number, seed, step)
            source = self.task.dev if public else self.task.train
            examples += [source[int(row)] for row in rows]
        others = {name: value for name, value in batch.items() if name != PERSON}
        return others | self.task.collate(examples) | {WEIGHTS: torch.from_numpy(weights)}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The weighted mean of each user's losses, `[B]`."""
        of_rows = {name: value for name, value in batch.items() if name != WEIGHTS}
        return of_users(self.task.losses(model, of_rows), batch[WEIGHTS])

    def length(self, i: int) -> int:
        """Of the longest row of a user."""
        return self.users.longest(self.task.length)(i)


def by_user(run: RunConfig, task: Task) -> Task:
    """The task as `unit` says: itself, or that of its users.

    Raises:
        UserError: a file or a column that does not fit the training data, or another number of users than was declared.
    """
    unit = run.unit
    if unit.name == "example":
        return task
    names = _names(run, len(task.train))
    made = ByUser(task, _counted(run, names))
    notes = [MADE_UP.format(size=unit.size)] if unit.size else _also_measured(run, set(names))
    made.data = dataclasses.replace(made.data, notes=[*made.data.notes, *notes])
    return made


def _also_measured(run: RunConfig, trained: set[Hashable]) -> list[str]:
    """Say how many rows of a dev set that names its users are of users who are trained on; as rows in both are told of."""
    if run.unit.column is None or run.data.dev is None:
        return []
    try:
        table = read_table(
            Path(run.data.dev).expanduser(),
            [run.unit.column],
            header=run.task.columns,
            skip_malformed=run.task.malformed == "skip",
        )
    except UserError:
        # it need not have the column
        return []
    names = table.columns[run.unit.column]
    if not (shared := sum(name.strip() in trained for name in names)):
        return []
    return [
        f"{shared} of {len(names)} rows of dev are of users who are trained on: these rows are published as if they were public "
        "(counted without noise on private data)"
    ]


def read_users(run: RunConfig, rows: int) -> Users:
    """Who gave which of so many training rows, from where `unit` says.

    Raises:
        UserError: as `by_user`.
    """
    return _counted(run, _names(run, rows))


def _counted(run: RunConfig, names: Sequence[Hashable]) -> Users:
    users = Users(names, run.unit.rows)
    declared = declared_users(run)
    if declared is not None and declared != len(users):
        raise UserError(
            f"the training data has {len(users)} users and unit.num_users={declared} was declared: it is public and fixes the "
            "guarantee, so give the number that holds"
        )
    return users


def _names(run: RunConfig, rows: int) -> Sequence[Hashable]:
    """`[rows]`, the user of each."""
    unit = run.unit
    if unit.size:
        order = np.random.default_rng([run.seed, rows]).permutation(rows)
        owners = np.empty(rows, dtype=np.int64)
        owners[order] = np.arange(rows) // unit.size
        return owners.tolist()
    if unit.file is not None:
        where = f"unit.file={unit.file}"
        try:
            names = Path(unit.file).expanduser().read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where} cannot be read: {error}") from None
    else:
        assert run.data.train is not None
        assert unit.column is not None
        where = f"unit.column={unit.column}"
        table = read_table(
            Path(run.data.train).expanduser(),
            [unit.column],
            header=run.task.columns,
            skip_malformed=run.task.malformed == "skip",
        )
        names = table.columns[unit.column]
        if run.task.held_out:
            # the last rows are the dev set
            names, measured = names[:rows], names[rows:]
            trained = {name.strip() for name in names}
            # by its number: the name is private
            if both := [row for row, name in enumerate(measured, rows + 1) if name.strip() in trained]:
                raise UserError(
                    f"task.held_out={run.task.held_out} measures on {len(both)} rows of users who are trained on, too (row "
                    f"{both[0]}, say): nothing protects those rows. Sort the file so that the users of its last rows are in no "
                    "other row, or give a file of other users as data.dev"
                )
    if len(names) != rows:
        raise UserError(
            f"{where} names {len(names)} users for {rows} training rows: one name for each is needed, in the order of the data"
        )
    # one person with a blank behind the name in some rows is one person
    names = [name.strip() for name in names]
    if "" in names:
        raise UserError(f"{where}: row {names.index('') + 1} has no user; every row needs one")
    return names
