"""Synthetic data in the published layouts: files that the same readers read, for trying things out without files or a network.

They are no data set of anybody's, and no number measured on them says anything about one. Sentences come from small grammars over
`dpexp.models.demo_words`; no source of dev or test is in train.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from dpexp.errors import UserError
from dpexp.models.demo_words import (
    AREAS,
    DAYS,
    FOODS,
    HOBBIES,
    KINDS_OF_PLACE,
    PEOPLE,
    PLACES,
    PRICES,
    RATINGS,
    THINGS,
    TOWNS,
)
from dpexp.tasks.demo import check_rows

MOST_ROWS = 20_000
# texts of every split but train
OTHER_ROWS = 48
Item = tuple[str, Any, list[str]]
"""What tells sources apart, the source in the layout's own form, and its texts."""


def write_demo(folder: Path, layout: str, files: dict[str, str], rows: int) -> None:
    """Write the files of all splits below a folder, the same on every machine.

    Args:
        folder: there already.
        layout: a key of `WRITERS`.
        files: split -> path below `folder`.
        rows: texts of train, the declared N.

    Raises:
        UserError: so many rows would be mere repetition, or there is no such grammar.
    """
    check_rows(rows, MOST_ROWS)
    if layout not in WRITERS:
        raise UserError(
            f"there is no synthetic demo data in the layout {layout}: choose one of {', '.join(WRITERS)}"
        )
    make, write = WRITERS[layout]
    draw = random.Random(f"dpexp demo, {layout}")
    held_out: set[str] = set()
    # train last, so that it can avoid the others
    for split in sorted(files, key="train".__eq__):
        items = _draw(
            make, draw, rows if split == "train" else OTHER_ROWS, held_out if split == "train" else set()
        )
        if split != "train":
            held_out |= {item[0] for item in items}
        path = folder / files[split]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write(items, path.suffix), encoding="utf-8")


def _draw(
    make: Callable[[random.Random], Item], draw: random.Random, rows: int, avoid: set[str]
) -> list[Item]:
    items: list[Item] = []
    while rows > 0:
        key, source, texts = make(draw)
        if key not in avoid:
            items.append((key, source, texts[:rows]))
            rows -= len(texts[:rows])
    return items


def _restaurant(draw: random.Random) -> Item:
    name, kind, food = draw.choice(PLACES), draw.choice(KINDS_OF_PLACE), draw.choice(FOODS)
    price, rating, area = draw.choice(PRICES), draw.choice(RATINGS), draw.choice(AREAS)
    fields = {"name": name, "eatType": kind, "food": food}
    text = f"the {name} is a {food} {kind}"
    more = f"{name} serves {food} food"
    for field, value, words, other in (
        ("priceRange", price, f"with {price} prices", f"with a {price} price"),
        ("customer rating", rating, f"rated {rating}", f"and has a {rating} customer rating"),
        ("area", area, f"in the {area}", f"in the area {area}"),
    ):
        if draw.random() < 0.5:
            fields[field] = value
            text, more = f"{text} {words}", f"{more} {other}"
    if draw.random() < 0.5:
        fields["familyFriendly"] = draw.choice(("yes", "no"))
        word = "" if fields["familyFriendly"] == "yes" else "not "
        text, more = f"{text} . it is {word}family friendly", f"{more} and is {word}family friendly"
    mr = ", ".join(f"{field}[{value}]" for field, value in fields.items())
    return mr, mr, [f"{text} .", f"{more} ."][: draw.randrange(1, 3)]


def _town(draw: random.Random) -> Item:
    town, other = draw.sample(TOWNS, 2)
    facts: list[tuple[str, str, str]] = [
        ("leaderName", draw.choice(PEOPLE), "the leader of {} is {}"),
        ("IS_PART_OF", other, "{} is part of {}"),
        ("FOOD", draw.choice(FOODS), "the food of {} is {}"),
    ]
    chosen = draw.sample(facts, draw.randrange(1, 4))
    triples = [[f"{town}_town", relation, value] for relation, value, _ in chosen]
    text = " and ".join(words.format(town, value) for _, value, words in chosen)
    return json.dumps(triples), triples, [f"{text} .", f"in {town} , {text} ."][: draw.randrange(1, 3)]


def _chat(draw: random.Random) -> Item:
    one, two = draw.sample(PEOPLE, 2)
    thing, day = draw.choice(THINGS), draw.choice(DAYS)
    lines = [f"{one}: can you lend me the {thing} ?", f"{two}: sure . on {day} ?", f"{one}: great , thanks"]
    lines = lines[: draw.randrange(2, 4)]
    dialogue = "\r\n".join(lines)
    return dialogue, dialogue, [f"{two} will bring {one} the {thing} on {day} ."]


def _persona(draw: random.Random) -> Item:
    hobby, town, thing = draw.choice(HOBBIES), draw.choice(TOWNS), draw.choice(THINGS)
    persona = [f"i love {hobby} .", f"i live in {town} .", f"i need a {thing} ."]
    turns = [
        ("hello , where do you live ?", f"i live in {town} ."),
        ("what do you like ?", f"i love {hobby} ."),
        ("what do you need ?", f"i need a {thing} ."),
    ]
    draw.shuffle(persona)
    draw.shuffle(turns)
    return json.dumps([persona, turns]), (persona, turns), [reply for _, reply in turns]


def _csv(items: Iterable[Item], suffix: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["mr", "ref"])
    writer.writerows([source, reference] for _, source, texts in items for reference in texts)
    return text.getvalue()


def _pairs(items: Iterable[Item], suffix: str) -> str:
    return "".join(
        json.dumps({"source": source, "target": text}) + "\n" for _, source, texts in items for text in texts
    )


def _triples(items: Iterable[Item], suffix: str) -> str:
    if suffix != ".xml":
        rows = [
            {"tripleset": s, "annotations": [{"source": "demo", "text": t} for t in texts]}
            for _, s, texts in items
        ]
        return json.dumps(rows, indent=1)
    return "\n".join(
        [
            "<?xml version='1.0' encoding='utf-8'?>",
            "<benchmark><entries>",
            *_entries(items),
            "</entries></benchmark>",
        ]
    )


def _entries(items: Iterable[Item]) -> Iterator[str]:
    for _, triples, texts in items:
        inside = "".join(f"<mtriple>{escape(' | '.join(triple))}</mtriple>" for triple in triples)
        lexes = "".join(f'<lex comment="demo">{escape(text)}</lex>' for text in texts)
        yield f"<entry><modifiedtripleset>{inside}</modifiedtripleset>{lexes}</entry>"


def _samsum(items: Iterable[Item], suffix: str) -> str:
    rows = [{"id": str(i), "summary": texts[0], "dialogue": s} for i, (_, s, texts) in enumerate(items)]
    return json.dumps(rows, indent=1)


def _parlai(items: Iterable[Item], suffix: str) -> str:
    lines: list[str] = []
    for _, (persona, turns), texts in items:
        episode = [f"your persona: {line}" for line in persona]
        episode += [f"{utterance}\t{reply}" for utterance, reply in turns[: len(texts)]]
        lines += [f"{number} {content}" for number, content in enumerate(episode, 1)]
    return "\n".join(lines) + "\n"


WRITERS: dict[str, tuple[Callable[[random.Random], Item], Callable[[Iterable[Item], str], str]]] = {
    "e2e": (_restaurant, _csv),
    "triples": (_town, _triples),
    "samsum": (_chat, _samsum),
    "personachat": (_persona, _parlai),
    "columns": (_restaurant, _pairs),
}
"""Layout -> its grammar, and how its items become the text of a file."""
