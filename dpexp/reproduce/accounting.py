"""The ε columns of Li et al. (2022), Tables 1, 2, 3, 7 and 8, beside ours.

Their σ spends ε = 3 or 8 under RDP (their Appendix B); the columns say what the same σ costs under the
central limit theorem of Gaussian DP and under numerically composed tradeoff functions. Settings that the
paper states are used as stated, the others are those that come closest to all printed values of a data set
at once; every row says which (``results/paper/settings.yaml``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from dpexp.privacy.accountants import epsilon, prv_bounds
from dpexp.privacy.events import releases
from dpexp.privacy.plan import Plan
from dpexp.reproduce.documents import Document, Rows, Section, as_rows, grouped, page
from dpexp.reproduce.noise import plan_of
from dpexp.reproduce.paper import paper_table, settings_of_runs

COLUMNS = (
    "paper", "table", "row", "target ε", "printed CLT", "our CLT", "difference CLT", "printed composed", "our composed",
    "difference composed", "to the digit", "σ that gives both", "settings", "N", "B", "E", "steps", "δ", "σ", "note",
)  # fmt: skip
# a value under the CLT, and composed
Pair = tuple[float, float]


class Run(NamedTuple):
    """N examples, expected batch B, E epochs, δ; steps are E·⌊N/B⌋, as with the last, incomplete batch dropped.
    ``as_in``: N of the data set whose B/N and number of steps are kept, where that is stated."""

    N: int
    B: int
    E: int
    δ: str | float = "half_over_n"
    as_in: int | None = None


class Line(NamedTuple):
    """One line of the page: what the paper prints at a target ε, and one of the settings that are tried on it."""

    table: str
    row: str
    target: float
    printed: Pair
    run: Run
    source: str
    note: str = ""


def lines() -> Iterator[Line]:
    """Every printed pair with each of its settings."""
    for listed in settings_of_runs("li2022"):
        for target, printed in _printed(listed["table"], listed["of"]).items():
            for tried in listed["tried"]:
                run = Run(**{name: tried[name] for name in Run._fields if name in tried})
                note = tried.get("note", "")
                yield Line(listed["table"], listed["row"], target, printed, run, tried["source"], note)


def _printed(table: str, of: str) -> dict[float, Pair]:
    """Target ε -> what the paper prints; ``of``: a task, or the method that the names of rows begin with."""
    found = {
        (cell.settings["epsilon"], cell.settings["accountant"]): float(cell.value)
        for cell in paper_table("li2022", table)
        if cell.value
        and cell.settings.get("metric") == "epsilon"
        and of in (cell.settings["task"], cell.row.partition(",")[0])
    }
    return {float(target): (found[target, "gdp"], found[target, "prv"]) for target in ("3", "8")}


@cache
def reproduce(run: Run, target: float, factor: float = 1.0) -> tuple[Plan, Pair]:
    """The plan with σ that spends the target under RDP, times a factor, and what it costs under the CLT and composed."""
    sampled = run.as_in or run.N
    plan = plan_of(run.N, run.B * run.N / sampled, run.E * (sampled // run.B), run.δ, target)
    plan = replace(plan, noise_multiplier=plan.noise_multiplier * factor)
    event = plan.event()
    parts = releases(event)
    assert parts is not None
    # what the authors' code reports as its estimate
    composed = prv_bounds(parts, plan.delta, eps_error=0.02)[1]
    return plan, (epsilon(event, plan.delta, "gdp"), composed)


def _to_the_digit(printed: Pair, ours: Pair) -> str:
    """Which of the two values round to what is printed."""
    same = [f"{value:.2f}" == f"{shown:.2f}" for shown, value in zip(printed, ours, strict=True)]
    return ["no", "composed", "CLT", "both"][2 * same[0] + same[1]]


def _sigma_for_both(line: Line, ours: Pair) -> str:
    """The change of σ, in percent, with which both values would round to print (to first order); "none" within 1%."""
    if _to_the_digit(line.printed, ours) == "both":
        return "ours"
    # the slopes are taken from half a percent more noise
    step = 0.005
    _, moved = reproduce(line.run, line.target, 1 + step)
    low, high = -0.01, 0.01
    for shown, value, other in zip(line.printed, ours, moved, strict=True):
        slope = (other - value) / math.log1p(step)
        ends = sorted((shown + side * 0.005 - value) / slope for side in (-1, 1))
        low, high = max(low, ends[0]), min(high, ends[1])
    return f"{100 * min(max(0.0, low), high):+.3f}%" if low <= high else "none"


def rows() -> Rows:
    """A row for each line, as text."""
    found = []
    for line in lines():
        plan, ours = reproduce(line.run, line.target)
        pairs = zip(line.printed, ours, strict=True)
        beside = (text for a, b in pairs for text in (f"{a:.2f}", f"{b:.2f}", f"{b - a:+.3f}"))
        found.append((
            "Li et al. 2022", line.table, line.row, f"{line.target:g}", *beside, _to_the_digit(line.printed, ours),
            _sigma_for_both(line, ours), line.source, line.run.N, f"{plan.expected_batch_size:.0f}", line.run.E, plan.steps,
            f"{plan.delta:.3g}", f"{plan.noise_multiplier:.3f}", line.note,
        ))  # fmt: skip
    return as_rows(COLUMNS, found)


def accounting_li() -> Document:
    """The page: a section for each table of the paper."""
    blocks = grouped(rows(), lambda row: row["table"])
    sections = [Section(f"Table {name}", (), COLUMNS[2:], own) for name, own in blocks.items()]
    return page("accounting-li", sections, COLUMNS)
