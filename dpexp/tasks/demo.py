"""Synthetic film-review sentences from a small grammar: data for trying the program out without files or a network.

They are no data set of anybody's, and no number measured on them says anything about one. Most sentences give their
label away by a single adjective; some negate it or set one clause against the other, and 3% of the labels are wrong, so
that 97% is about the best that can be reached. No sentence of dev is in train.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence

from dpexp.errors import UserError
from dpexp.models.demo_words import ADVERBS, BLAME, EVEN, PRAISE, SUBJECTS
from dpexp.tasks.files import Table

DEMO_NAME = "synthetic demo data (embedded), not a published data set"
DEMO_LABELS = ("0", "1")
# of text infilling
DEMO_WORDS = {"0": "terrible", "1": "great"}
# where the configuration declares no N
DEMO_TRAIN_ROWS = 2000
DEMO_DEV_ROWS = 400
MOST_ROWS = 100_000
WRONG_LABELS = 0.03

Row = tuple[str, str, int]
"""First text, second text ("" without pairs), number of the class."""
Maker = Callable[[random.Random, int, int], tuple[str, str]]
"""(source of randomness, number of the class, number of classes) -> first text, second text."""


def demo_tables(
    labels: Sequence[str],
    text: str,
    text_pair: str | None,
    label: str,
    rows: int | None = None,
    dev_sets: Sequence[str] = ("dev",),
) -> dict[str, Table]:
    """The demo's train and dev tables, the same on every machine and for every seed.

    Args:
        labels: names of the two or three classes; `DEMO_LABELS` if empty. Of single sentences they run from blame to
            praise; the second sentence of a pair agrees with the first or doesn't (of three classes: is about something
            else, or contradicts it).
        text, text_pair, label: what the columns are called; `text_pair` None for single sentences.
        rows: of train; the declared N. Dev is the same for every N.
        dev_sets: names of the dev sets, where a task has several (MNLI); each has sentences of its own.

    Raises:
        UserError: there is no such grammar for another number of classes, or so many rows would be mere repetition.
    """
    names = list(labels) or list(DEMO_LABELS)
    rows = DEMO_TRAIN_ROWS if rows is None else rows
    if len(names) not in (2, 3):
        raise UserError(
            f"the synthetic demo data has two or three classes, and the task has {len(names)}: take another scale"
        )
    check_rows(rows)
    draw = random.Random(f"dpexp demo, {len(names)} classes, {'pairs' if text_pair else 'single'}")
    make = _pair if text_pair else _single
    devs = {split: [_row(make, len(names), draw) for _ in range(DEMO_DEV_ROWS)] for split in dev_sets}
    held_out = {row[:2] for dev in devs.values() for row in dev}
    train: list[Row] = []
    while len(train) < rows:
        row = _row(make, len(names), draw)
        if row[:2] not in held_out:
            train.append(row)
    return {
        split: _table(split, made, names, text, text_pair, label)
        for split, made in (("train", train), *devs.items())
    }


def check_rows(rows: int, most: int = MOST_ROWS) -> None:
    """Raise `UserError` for no rows, and for so many that they would be mere repetition."""
    if not 1 <= rows <= most:
        raise UserError(f"the synthetic demo data has from 1 to {most} rows, and {rows} are declared")


def _row(make: Maker, classes: int, draw: random.Random) -> Row:
    target = draw.randrange(classes)
    texts = make(draw, target, classes)
    if draw.random() < WRONG_LABELS:
        target = (target + draw.randrange(1, classes)) % classes
    return (*texts, target)


def _single(draw: random.Random, target: int, classes: int) -> tuple[str, str]:
    words = (BLAME, PRAISE) if classes == 2 else (BLAME, EVEN, PRAISE)
    mine = words[target]
    opposite = words[-1 - target]
    kind = draw.random()
    subject, other = draw.sample(SUBJECTS, 2)
    if mine is EVEN or kind < 0.4:
        text = f"the {subject} is {_adjective(draw, mine)}"
    elif kind < 0.6:
        text = f"{draw.choice(mine)} {subject} with {_adjective(draw, mine)} {other}"
    elif kind < 0.8:
        text = f"the {subject} is {_adjective(draw, mine)} and it makes the {other} {draw.choice(mine)}"
    elif kind < 0.9:
        text = f"the {subject} is {draw.choice(('not', 'never'))} {_adjective(draw, opposite)}"
    elif kind < 0.95:
        text = f"the {subject} is {draw.choice(opposite)} , but the {other} is {_adjective(draw, mine)}"
    else:
        text = f"though the {subject} is {draw.choice(opposite)} , the {other} is {_adjective(draw, mine)}"
    return f"{text} .", ""


def _pair(draw: random.Random, target: int, classes: int) -> tuple[str, str]:
    # 0: the second sentence agrees, 1: it is about something else, 2: it contradicts; of two classes, 1 and 2 are one.
    relation = target if classes == 3 else target * draw.randrange(1, 3)
    subject, other = draw.sample(SUBJECTS, 2)
    mine, opposite = draw.sample((BLAME, PRAISE), 2)
    second = (mine, draw.choice((mine, opposite)), opposite)[relation]
    return (
        f"the {subject} is {_adjective(draw, mine)} .",
        f"the {other if relation == 1 else subject} is {_adjective(draw, second)} .",
    )


def _adjective(draw: random.Random, words: Sequence[str]) -> str:
    return f"{draw.choice(ADVERBS)} {draw.choice(words)}".lstrip()


def _table(
    split: str, rows: list[Row], names: Sequence[str], text: str, text_pair: str | None, label: str
) -> Table:
    columns = {text: [row[0] for row in rows], label: [names[row[2]] for row in rows]}
    if text_pair:
        columns[text_pair] = [row[1] for row in rows]
    digest = hashlib.sha256(json.dumps(columns, sort_keys=True).encode()).hexdigest()
    return Table(f"{DEMO_NAME}, {split}", columns, range(1, len(rows) + 1), digest, unit="row")
