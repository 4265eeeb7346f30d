"""Synthetic film-review sentences from a small grammar: data for trying the program out without files or a network.

They are no data set of anybody's, and no number measured on them says anything about one. Most sentences give their
label away by a single adjective; some negate it or set one clause against the other, and 3% of the labels are wrong, so
that 97% is about the best that can be reached. No sentence appears twice, in either split.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence

from dpexp.errors import UserError
from dpexp.models.demo_words import ADVERBS, BLAME, CLOSINGS, EVEN, OPENINGS, PRAISE, SUBJECTS
from dpexp.tasks.files import Table

DEMO_NAME = "synthetic demo data (embedded), not a published data set"
DEMO_LABELS = ("0", "1")
DEMO_ROWS = {"train": 2000, "dev": 400}
WRONG_LABELS = 0.03

Row = tuple[str, str, int]
"""First text, second text ("" without pairs), number of the class."""


def demo_tables(labels: Sequence[str], text: str, text_pair: str | None, label: str) -> dict[str, Table]:
    """The demo's train and dev tables, the same on every machine and for every seed.

    Args:
        labels: names of the two or three classes; `DEMO_LABELS` if empty. Of single sentences they run from blame to
            praise; the second sentence of a pair agrees with the first or doesn't (of three classes: is about something
            else, or contradicts it).
        text, text_pair, label: what the columns are called; `text_pair` None for single sentences.

    Raises:
        UserError: there is no such grammar for another number of classes.
    """
    names = list(labels) or list(DEMO_LABELS)
    if len(names) not in (2, 3):
        raise UserError(
            f"the synthetic demo data has two or three classes, and the task {len(names)}: take another scale"
        )
    draw = random.Random(f"dpexp demo, {len(names)} classes, {'pairs' if text_pair else 'single'}")
    make = _pair if text_pair else _single
    seen: set[tuple[str, str]] = set()
    return {
        split: _table(split, _rows(count, make, len(names), draw, seen), names, text, text_pair, label)
        for split, count in DEMO_ROWS.items()
    }


def _rows(
    count: int,
    make: Callable[[random.Random, int, int], tuple[str, str]],
    classes: int,
    draw: random.Random,
    seen: set[tuple[str, str]],
) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < count:
        target = draw.randrange(classes)
        texts = make(draw, target, classes)
        if texts not in seen:
            seen.add(texts)
            wrong = draw.random() < WRONG_LABELS
            rows.append((*texts, (target + draw.randrange(1, classes)) % classes if wrong else target))
    return rows


def _single(draw: random.Random, target: int, classes: int) -> tuple[str, str]:
    words = (BLAME, PRAISE) if classes == 2 else (BLAME, EVEN, PRAISE)
    mine = words[target]
    opposite = words[-1 - target]
    kind = draw.random()
    subject, other = draw.sample(SUBJECTS, 2)
    if mine is EVEN or kind < 0.4:
        text = f"the {subject} is {_adjective(draw, mine)}"
    elif kind < 0.6:
        text = f"a {draw.choice(mine)} {subject} with a {_adjective(draw, mine)} {other}"
    elif kind < 0.8:
        text = f"the {subject} is {_adjective(draw, mine)} and it makes the {other} {draw.choice(mine)}"
    elif kind < 0.9:
        text = f"the {subject} is {draw.choice(('not', 'never'))} {_adjective(draw, opposite)}"
    elif kind < 0.95:
        text = f"the {subject} is {draw.choice(opposite)} , but the {other} is {_adjective(draw, mine)}"
    else:
        text = f"though the {subject} is {draw.choice(opposite)} , the {other} is {_adjective(draw, mine)}"
    return _join(draw.choice(OPENINGS), text, draw.choice(CLOSINGS), "."), ""


def _pair(draw: random.Random, target: int, classes: int) -> tuple[str, str]:
    relation = (
        target if classes == 3 else target * draw.randrange(1, 3)
    )  # 0 agrees, 1 something else, 2 contradicts
    subject, other = draw.sample(SUBJECTS, 2)
    mine, opposite = draw.sample((BLAME, PRAISE), 2)
    second = (mine, draw.choice((mine, opposite)), opposite)[relation]
    return (
        _join(
            draw.choice(OPENINGS), f"the {subject} is {_adjective(draw, mine)}", draw.choice(CLOSINGS), "."
        ),
        _join(f"the {other if relation == 1 else subject} is {_adjective(draw, second)}", "."),
    )


def _adjective(draw: random.Random, words: Sequence[str]) -> str:
    return _join(draw.choice(ADVERBS), draw.choice(words))


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _table(
    split: str, rows: list[Row], names: Sequence[str], text: str, text_pair: str | None, label: str
) -> Table:
    columns = {text: [row[0] for row in rows], label: [names[row[2]] for row in rows]}
    if text_pair:
        columns[text_pair] = [row[1] for row in rows]
    digest = hashlib.sha256(json.dumps(columns, sort_keys=True).encode()).hexdigest()
    return Table(f"{DEMO_NAME}, {split}", columns, range(1, len(rows) + 1), digest, unit="row")
