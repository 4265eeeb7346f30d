"""Persona-Chat (Zhang et al. 2018) as in ConvAI2: ParlAI's text files, or pairs of source and target files made of them.

ParlAI: numbered lines; `N your persona: ...` describes who answers, `N UTTERANCE<TAB>REPLY...` is one exchange, and number 1
begins a dialogue. Files that are not called `no_cands` have the candidates for hits@1 in the fourth cell, the reply among them.
Source and target: a line each, `PERSONA<TAB>...<TAB>UTTERANCE` and `REPLY`, without earlier exchanges.

    your persona: i like to ski.
    partner: hello , how are you ?
    you: good . and you ?
    partner: fine .

Every reply is one example (131,438 in the training set); its source is the persona and the last five utterances, as in the
code base that Li et al. built on (App. K), in plain words. `task.generation.speakers` puts tokens into the place of these words
(recipe=li2022_personachat).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpexp.errors import UserError
from dpexp.tasks.files import Table, read_text
from dpexp.tasks.formats.base import CANDIDATES, Format, Pair, make_table

# utterances, the last of the partner included
HISTORY = 5
PERSONA, PARTNER, YOU = "your persona: ", "partner: ", "you: "


class PersonaChat(Format):
    """The original personas of the one who answers ("self_original")."""

    layout = "personachat"
    several = (
        "one reply is one example: a dialogue gives several, its persona stands in all of them, and what was said before in "
        "those that follow"
    )

    def layouts(self, stem: str) -> list[tuple[str, ...]]:
        """ParlAI's file, the one without candidates, or the latter's source and target files."""
        base, dot, suffix = stem.rpartition(".")
        bare = f"{base}_no_cands"
        return [
            (stem,),
            (f"{bare}{dot}{suffix}",),
            (f"{bare}_source{dot}{suffix}", f"{bare}_target{dot}{suffix}"),
        ]

    def read(self, paths: Sequence[Path]) -> Table:
        """One file of ParlAI's, or a source and a target file."""
        where, (text, digest) = str(paths[0]), read_text(paths[0])
        if len(paths) == 1:
            table = make_table(where, _parlai(text, where), digest, self.unit)
            lines = text.split("\n")
            cells = [lines[line - 1].rstrip("\r").split("\t") for line in table.lines]
            given = [row[3].strip() if len(row) > 3 else "" for row in cells]
            return replace(table, columns={**table.columns, CANDIDATES: given}) if any(given) else table
        targets, other = read_text(paths[1])
        return make_table(where, _lines_of(text, targets, paths), f"{digest}+{other}", self.unit)

    def from_hub(self, row: dict[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
        """`personality`, `history` and `candidates`, the last of which is the reply."""
        names = ("personality", "history", "candidates")
        if not all(isinstance(row.get(name), list) for name in names):
            raise UserError(f"{where}: malformed row: {', '.join(names)} must be lists")
        yield encode(row["personality"], row["history"]), row["candidates"][-1].strip(), ""


def encode(persona: Sequence[str], history: Sequence[str]) -> str:
    """The prompt.

    Args:
        persona: sentences about the one who answers.
        history: utterances in turn, the last of them the partner's.
    """
    kept = history[-HISTORY:]
    speakers = [PARTNER if (len(kept) - i) % 2 else YOU for i in range(len(kept))]
    return "\n".join([*(PERSONA + line for line in persona), *map("".join, zip(speakers, kept, strict=True))])


def _parlai(text: str, where: str) -> Iterator[Pair]:
    persona: list[str] = []
    history: list[str] = []
    for line, content in enumerate(text.rstrip("\r\n").split("\n"), 1):
        number, _, rest = content.rstrip("\r").partition(" ")
        if not number.isdecimal():
            raise UserError(
                f"{where}, line {line}: malformed row: ParlAI's lines begin with a number and a blank"
            )
        if number == "1":
            persona, history = [], []
        if rest.startswith("partner's persona: "):
            # of the files for both sides: the one who answers does not know it
            continue
        if rest.startswith(PERSONA):
            persona.append(rest.removeprefix(PERSONA).strip())
            continue
        cells = rest.split("\t")
        if len(cells) < 2:
            raise UserError(f"{where}, line {line}: malformed row: no tab between an utterance and its reply")
        history.append(cells[0].strip())
        yield line, encode(persona, history), cells[1].strip(), str(line)
        history.append(cells[1].strip())


def _lines_of(sources: str, targets: str, paths: Sequence[Path]) -> Iterator[Pair]:
    given, wanted = sources.rstrip("\n").split("\n"), targets.rstrip("\n").split("\n")
    if len(given) != len(wanted):
        raise UserError(
            f"{paths[0]} has {len(given)} lines and {paths[1]} has {len(wanted)}: they don't belong together"
        )
    for line, (source, target) in enumerate(zip(given, wanted, strict=True), 1):
        *persona, utterance = source.rstrip("\r").split("\t")
        if not persona:
            raise UserError(
                f"{paths[0]}, line {line}: malformed row: no tab between a persona and an utterance"
            )
        yield line, encode(persona, [utterance]), target.strip(), str(line)
