"""The papers' tables of hyper-parameters beside the presets that follow them: printed, in the preset, and whether they agree."""

from __future__ import annotations

import re
from functools import cache
from operator import attrgetter
from typing import Any

from dpexp.config import compose
from dpexp.reproduce.documents import Document, Section, agreement, page
from dpexp.reproduce.paper import PAPERS, Cell, as_number, listed, paper_table

COLUMNS = ("setting", "of", "printed", "preset", "agrees", "command")
# of a rate: C times it is among those (He et al., App. A.1)
_EQUIVALENT = "equivalent "


def hyperparameters() -> Document:
    """One block for each table."""
    sections = []
    for name, presets in listed("hyperparameters")["presets"].items():
        paper, _, table = name.partition("_")
        rows = [row for cell in paper_table(paper, table) if (row := _row(cell, presets))]
        authors = PAPERS[paper].partition(" (")[0]
        sections.append(Section(f"{authors}, Table {table}", (), COLUMNS, rows))
    every = (row for section in sections for row in section.rows)
    return page("hyperparameters", sections, COLUMNS, **agreement(every))


def _row(cell: Cell, presets: dict[str, str]) -> dict[str, str] | None:
    settings = listed("hyperparameters")["settings"].items()
    setting = next((path for word, path in settings if cell.row.lower().startswith(word)), None)
    if setting is None or not cell.value:
        return None
    row = {"setting": cell.row, "of": cell.column, "printed": cell.value}
    of = cell.column if presets["by"] == "column" else cell.settings.get(presets["by"], "")
    if of not in presets:
        return row | {"agrees": "no preset"}
    command = f"experiment={presets[of]}"
    run, accepted = _run(command), values(cell.value)
    value = attrgetter(setting)(run)
    if setting == "clip.init_threshold" and value is None:
        # fixed thresholds begin as they stay
        value = run.clip.clip_norm
    said = _said(value)
    if cell.value.startswith(_EQUIVALENT):
        value *= run.clip.clip_norm
        said += f", times C {_said(value)}"
    agrees = "not comparable" if accepted is None else "yes" if _among(value, accepted) else "no"
    return row | {"preset": said, "agrees": agrees, "command": f"`{command}`"}


@cache
def _run(command: str) -> Any:
    return compose(command.split())


def values(printed: str) -> list[Any] | None:
    """What a printed value admits: numbers, pairs, or words; None where it refers to something else.

    `{1, 2, 4} x 10^-4` is three numbers, `1%` is 0.01, `(0.9, 0.98)` is one pair.
    """
    text = printed.strip().lower().removeprefix(_EQUIVALENT)
    if match := re.fullmatch(r"\{(.*)\}(?: x (\d+)\^(-?\d+))?", text):
        factor = float(match[2]) ** int(match[3]) if match[2] else 1.0
        found = [one for part in match[1].split(", ") for one in values(part) or [None]]
        return None if None in found else [one * factor if isinstance(one, float) else one for one in found]
    if match := re.fullmatch(r"\((.*)\)", text):
        return [[float(part) for part in match[1].split(", ")]]
    if (number := as_number(text.removesuffix("%"))) is not None:
        return [number / (100 if text.endswith("%") else 1)]
    words = listed("hyperparameters")["words"].get(text, text)
    return [words] if re.fullmatch(r"[a-z0-9_]+", words) else None


def _among(value: Any, accepted: list[Any]) -> bool:
    if isinstance(value, int | float):
        return any(
            isinstance(one, float) and abs(one - value) <= 1e-9 * max(1.0, abs(value)) for one in accepted
        )
    return value in accepted


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_said, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
