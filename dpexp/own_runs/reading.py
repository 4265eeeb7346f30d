"""What the files of a run say, of an unfinished one too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dpexp.durable import json_lines, kept_beside, read_json, read_yaml
from dpexp.errors import UserError
from dpexp.privacy import accountants
from dpexp.privacy.events import composed, decode, decode_groups
from dpexp.privacy.schedules import ADAPTIVE
from dpexp.statement import UNPROTECTED

# moments of a run at which ε is computed
POINTS = 12


@dataclass
class OwnRun:
    """What the files of a run say.

    Attributes:
        name: short, of its folder.
        summary: of a finished run, else empty.
        settings: what was asked for.
        released, private: lines of `metrics.jsonl`, without and with data that no noise covers.
        events: of the ledger's lines, as JSON, in order, with the time of each.
        delta: None where it is not known.
    """

    name: str
    folder: Path
    summary: dict[str, Any]
    settings: dict[str, Any]
    released: list[dict[str, Any]] = field(default_factory=list)
    private: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[str, float]] = field(default_factory=list)
    delta: float | None = None

    @property
    def accountant(self) -> str:
        """The one that decided the noise."""
        chosen = self.summary.get("privacy", {}).get("accountant") or self.settings.get("accountant") or "rdp"
        return str(chosen.get("name", "rdp") if isinstance(chosen, dict) else chosen)

    @property
    def filtered(self) -> bool:
        """Whether a Rényi filter ends the run, by its record or its settings: ε is then that of its budget, which the record of a
        finished run holds."""
        search, schedule = (_part(self.settings, name) for name in ("search", "schedule"))
        raised = search.get("name", "none") != "none" and search.get("mechanism") != "gaussian"
        told = self.summary.get("privacy", {}).get("filtered")
        return bool(told or raised or schedule.get("name") in ADAPTIVE)

    @property
    def unprotected(self) -> bool:
        """Whether it learns without privacy, by its record, or, where it has not ended, by its settings."""
        ended = self.summary.get("status") == "finished"
        plain = not ended and _part(self.settings, "clip").get("private") is False
        return plain or UNPROTECTED in self.summary.get("privacy", {}).get("released", ())

    @property
    def unit(self) -> str:
        """Whom the run protects: examples, or the users of one source of names."""
        unit = _part(self.settings, "unit")
        source = [f"{name}={unit[name]}" for name in ("column", "file", "size") if unit.get(name)]
        return " ".join([unit.get("name", "example"), *source])

    def named(self, accountant: str) -> str:
        """An accountant as the page calls it: by shuffled batches none of them gives a guarantee, and gdp never does."""
        parts = (self.summary.get("privacy"), self.settings.get("privacy"))
        shuffled = "shuffle" in [part.get("sampling") for part in parts if isinstance(part, dict)]
        return f"{accountant} (not a guarantee)" if shuffled or accountant == "gdp" else accountant

    @cached_property
    def epsilons(self) -> tuple[list[int], dict[str, list[float]]]:
        """ε under each accountant after some of the charges, evenly spread, the last one included.

        Returns:
            Numbers of charges, and for each accountant as many values; of the least protected group, where groups differ. None
            where the noise followed the run: no accountant speaks of the course that it took.
        """
        total = 0 if self.filtered else len(self.events)
        moments = sorted({max(1, round(total * (i + 1) / POINTS)) for i in range(POINTS)}) if total else []
        found: dict[str, list[float]] = {}
        if self.delta is None:
            return [], found
        for moment in moments:
            counts = Counter(event for event, _ in self.events[:moment])
            spent = [
                accountants.epsilons(composed((event, count) for event, count in each), self.delta)
                for each in zip(
                    *(of_groups(encoded, count) for encoded, count in counts.items()), strict=True
                )
            ]
            for name in spent[0]:
                values = [group[name] for group in spent]
                found.setdefault(name, []).append(max(float("nan") if v is None else v for v in values))
        return moments, found

    def series(self, name: str, private: bool = False) -> tuple[list[int], list[Any]]:
        """Steps and values of the lines that have a value of this name."""
        found = [
            (line["step"], line[name])
            for line in (self.private if private else self.released)
            if name in line
        ]
        return [step for step, _ in found], [value for _, value in found]


def read(folder: Path) -> OwnRun:
    """Read the folder of a run, unfinished ones too.

    Raises:
        UserError: it is no folder of a run.
    """
    # of Hugging Face's Trainer
    beside = kept_beside(folder)
    if not (folder / "ledger.jsonl").exists() and (beside / "ledger.jsonl").exists():
        folder = beside
    summary = read_json(folder / "summary.json") or {}
    settings = read_yaml(folder / "config.yaml") or read_json(folder / "run.json") or {}
    events = list(_charges(folder / "ledger.jsonl"))
    if not (summary or events or settings):
        raise UserError(
            f"{folder} is no folder of a run: give one that holds ledger.jsonl or summary.json, "
            "runs/TASK/SIGNATURE/seed0 for example"
        )
    logged = list(json_lines(folder / "metrics.jsonl"))
    delta = summary.get("privacy", {}).get("delta") or settings.get("delta")
    return OwnRun(
        name="/".join(folder.resolve().parts[-3:]),
        folder=folder,
        summary=summary,
        settings=settings,
        released=[line for line in logged if not line.get("not_private")],
        private=[line for line in logged if line.get("not_private")],
        events=events,
        delta=delta if isinstance(delta, float | int) and delta > 0 else None,
    )


def of_groups(encoded: str, count: int) -> list[tuple[Any, int]]:
    """An event for each group of examples with a budget of its own, each with its count."""
    record = json.loads(encoded)
    groups = decode_groups(record)
    return [(event, count) for event in (groups.events if groups is not None else [decode(record)])]


def _charges(path: Path) -> Iterator[tuple[str, float]]:
    """Events and times of a ledger, 0 in a strict release. Its signature is not checked: a finished run has deleted the key."""
    for line in json_lines(path):
        if "event" in line:
            yield json.dumps(line["event"], sort_keys=True), float(line.get("time") or 0.0)


def _part(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the settings; a loop of one's own may have its name alone."""
    part = settings.get(name) or {}
    return part if isinstance(part, dict) else {"name": part}
