"""What clipping costs and what noise costs: accuracy against the threshold, with noise and without it, and thresholds that adapt.

It is the question of He et al. (section 3) about fixed and adaptive thresholds, on a head that is trained in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

from dpexp.reproduce.documents import Document, Rows, Section, number, page
from dpexp.reproduce.drawing import draw, style
from dpexp.reproduce.fillings import Filling, budget, columns, measured, most_seeds
from dpexp.reproduce.paper import listed
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import compare, mean_std

NAME = "figure-thresholds"
COLUMNS = (
    "head", "noise", "threshold", "ours", "n", "dev error", "loss", "configuration", "ε", "δ", "accountant", "hardware", "record",
)  # fmt: skip
# what was to be spent -> what it is called here
NOISE = {"ε = 3": "ε = 3", "σ = 0": "no noise"}
# in the place of a threshold that is fixed; the largest of all
ADAPTIVE = math.inf
# of one head: (noise, C) -> its configuration
Grid = Mapping[tuple[str, float], Filling]


def document(records: Sequence[Record]) -> Document:
    """A block and a panel for each head."""
    said = listed("pages")[NAME]
    grids = {head: own for head in said["heads"] if (own := grid(records, head))}
    sections = [
        Section(said["heads"][head], _said(own), COLUMNS, _rows(head, own), "small")
        for head, own in grids.items()
    ]
    todo = "Not run: " + ", ".join(f"`{command}`" for command in commands())
    count = sum(len(filling.records) for own in grids.values() for filling in own.values())
    return page(
        NAME, sections or [Section("", (todo,), scale="small", commands=commands())], COLUMNS,
        otherwise=f"small {count} runs" if count else "not run",
        svg=draw(lambda axes: _plot(axes, grids), len(grids), (4.4, 3.6)) if grids else "", lr=said["where"]["optim.lr"],
    )  # fmt: skip


def commands() -> tuple[str, ...]:
    """That make its records."""
    said = listed("pages")[NAME]["runs"]
    return tuple(
        f"python -m dpexp.train {clip} {noise} {said['settings']}" for clip, noise in product(said["clip"], said["noise"])
    )  # fmt: skip


def grid(records: Sequence[Record], head: str) -> Grid:
    """The configuration of the most seeds at each noise and threshold, sorted."""
    where = {**listed("pages")[NAME]["where"], "model.head": head}
    own = (record for record in records if record.matches(where) and budget(record) in NOISE)
    found = most_seeds(measured(own, "accuracy"), lambda f: (NOISE[budget(f.record)], _threshold(f.record)))
    return dict(sorted(found.items()))


def _threshold(record: Record) -> float:
    return float(record.facts["clip.clip_norm"]) if record.facts["clip"] == "flat" else ADAPTIVE


def _named(threshold: float) -> str:
    return "adaptive" if threshold == ADAPTIVE else f"C = {threshold:g}"


def _rows(head: str, found: Grid) -> Rows:
    rows: Rows = []
    for (noise, threshold), filling in found.items():
        losses = [value for r in filling.records if (value := r.metric("loss")) is not None]
        named = {"head": head, "noise": noise, "threshold": _named(threshold)}
        loss = mean_std(losses)[0] if losses else None
        rows.append(named | columns(filling, 2) | {"loss": number(loss, ".3f")})
    return rows


def _said(found: Grid) -> tuple[str, ...]:
    """The smallest threshold beside the largest, and the adaptive one beside both; no claim is made, and none is judged."""
    lines = []
    for noise in NOISE.values():
        fixed = [c for n, c in found if n == noise and c != ADAPTIVE]
        ends = list(dict.fromkeys((*fixed[:1], *fixed[-1:])))
        for side in (*combinations(ends, 2), *((ADAPTIVE, c) for c in ends if (noise, ADAPTIVE) in found)):
            left, right = (found[noise, c].values for c in side)
            names = (f"{_named(c)} (n = {len(found[noise, c].values)})" for c in side)
            result = compare(left, right, "greater")
            line = f"- {noise}: {' minus '.join(names)} = {result.difference:+.2f}"
            p = number(result.p_two_sided, ".3f")
            lines.append(line + (f", 95% {result.interval}, p = {p} (Welch's t, two-sided)" if p else ""))
    return ("\n".join(lines),) if lines else ()


def _plot(axes: Any, grids: Mapping[str, Grid]) -> None:
    heads = listed("pages")[NAME]["heads"]
    for axis, (head, found) in zip(axes, grids.items(), strict=True):
        for place, noise in enumerate(NOISE.values()):
            looks = style(place)
            own = {c: filling for (n, c), filling in found.items() if n == noise}
            adaptive = own.pop(ADAPTIVE, None)
            if own:
                y = [float(f"{filling.mean:.2f}") for filling in own.values()]
                error = [float(f"{filling.std or 0:.2f}") for filling in own.values()]
                axis.errorbar([*own], y, yerr=error, markersize=4, capsize=2, label=noise, **looks)
            if adaptive:
                height, label = float(f"{adaptive.mean:.2f}"), f"{noise}, adaptive"
                axis.axhline(height, color=looks["color"], linestyle="--", linewidth=1, label=label)
        axis.set_xscale("log")
        axis.set_xlabel("threshold C")
        axis.set_title(heads[head], fontsize=9)
        axis.sharey(axes[0])
    axes[0].set_ylabel("accuracy, %")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 1.0))
