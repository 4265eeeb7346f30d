"""E2E NLG (Novikova et al. 2017): CSV with a meaning representation and a reference, `mr,ref`.

    name[The Vaults], eatType[pub], priceRange[high]    ->    " name : The Vaults | Type : pub | price : high "

The right-hand side is the encoding of Li et al. (App. M spells it out with the blanks at both ends; Table 11 shows all eight
names, with the bar drawn as a dash).

Their data (that of the prefix-tuning paper) was tokenised beforehand, "£ 20 - 25", "not family - friendly ."; Table 11 shows it
in the references. `e2e_tokenised` does so here, by the rule of `tokenised`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpexp.errors import UserError
from dpexp.tasks.files import Table, read_table
from dpexp.tasks.formats.base import Format, make_table, text_of

NAMES = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}
"""Field of the file -> its name in the prompt, where the two differ."""

_FIELD = re.compile(r"\s*([^\[\]]+)\[([^\]]*)\]\s*(?:,|$)")


_MARK = re.compile(r"(?<!\d)[.,]|[.,](?!\d)|[^\w\s'’.,]")


def tokenised(text: str) -> str:
    """The text with a blank on both sides of every mark that is no letter, digit or apostrophe; 3.5 and 1,000 stay whole.

    What the authors' tokeniser did with apostrophes is not stated, and no sample in print has one: they stay.
    """
    return " ".join(_MARK.sub(r" \g<0> ", text).split())


class E2E(Format):
    """Rows of one meaning representation are references for it, wherever they stand: 630 in the test set.

    Args:
        change: what becomes of a value and of a reference: `tokenised`, or nothing.
    """

    layout = "e2e"
    several = "one text is one example: a meaning representation with several texts stands in several"

    def __init__(self, change: Callable[[str], str] = str) -> None:
        self.change = change

    def read(self, paths: Sequence[Path]) -> Table:
        """`mr,ref`; each reference is one example."""
        found = read_table(paths[0], ["mr", "ref"])
        rows = zip(found.lines, found.columns["mr"], found.columns["ref"], strict=True)
        pairs = (
            (
                line,
                encode(mr, f"{found.where}, {found.unit} {line}", self.change),
                self.change(reference.strip()),
                mr,
            )
            for line, mr, reference in rows
        )
        return make_table(found.where, pairs, found.sha256, found.unit)

    def from_hub(self, row: dict[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
        """The hub's columns are called `meaning_representation` and `human_reference`."""
        mr = text_of(row, "meaning_representation", where)
        reference = text_of(row, "human_reference", where).strip()
        yield encode(mr, where, self.change), self.change(reference), mr


def encode(mr: str, where: str, change: Callable[[str], str] = str) -> str:
    """The prompt of a meaning representation, with `change` applied to its values.

    Raises:
        UserError: it is not a list of NAME[VALUE].
    """
    fields: list[str] = []
    end = 0
    while end < len(mr):
        field = _FIELD.match(mr, end)
        if field is None:
            raise UserError(f"{where}: malformed row: {mr[end : end + 40]!r} in mr is not NAME[VALUE]")
        fields.append(f"{NAMES.get(field[1], field[1])} : {change(field[2])}")
        end = field.end()
    if not fields:
        raise UserError(f"{where}: malformed row: mr is empty")
    return f" {' | '.join(fields)} "
