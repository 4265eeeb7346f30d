"""Bounds beside claims: for everybody, or for each group of examples with a budget of its own.

Where examples have individual budgets (`dpexp.privacy.individual`), neighbours that differ in an example of group g are told
apart no better than the ε of group g allows. So the canaries of a group, and they alone, are evidence against its claim. The
groups share the error: all bounds hold together at the confidence asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dpexp.privacy.shown import upwards

Bounds = Callable[[npt.NDArray[np.bool_], float], list[dict[str, Any]]]
"""(`[m]` which canaries, confidence) -> rows that each have an ``epsilon_lower``."""


def verdict(
    privacy: Mapping[str, Any],
    members: npt.NDArray[np.int64] | None,
    number: int,
    confidence: float,
    bounds: Bounds,
) -> dict[str, Any]:
    """The best bound beside the claim, and whether it refutes it.

    Args:
        privacy: the block of the record.
        members: `[m]`, the group of each canary, from 0; None where all examples have one budget.
        number: m.
        confidence: of everything together.
        bounds: the estimators.

    Returns:
        ``epsilon_lower``, ``epsilon_claimed``, ``refuted``, ``rows``; with groups also ``groups``, each with the same fields. The
        first two are then those of the group whose bound comes nearest to its claim, or is furthest above it.
    """
    name = privacy["accountant"]
    if members is None:
        claimed = privacy["epsilon"][name] if name else None
        return _beside(claimed, bounds(np.ones(number, bool), confidence))
    claims = [group["epsilon"][name] for group in privacy["individual"]["groups"]]
    level = 1 - (1 - confidence) / len(claims)
    groups = []
    for group, claimed in enumerate(claims):
        mine = members == group
        rows = [{"group": group + 1} | row for row in bounds(mine, level)]
        groups.append({"group": group + 1, "canaries": int(mine.sum())} | _beside(claimed, rows))
    worst = max(groups, key=lambda found: found["epsilon_lower"] / (found["epsilon_claimed"] or np.inf))
    return {
        "epsilon_lower": worst["epsilon_lower"],
        "epsilon_claimed": worst["epsilon_claimed"],
        "refuted": any(found["refuted"] for found in groups),
        "rows": [row for found in groups for row in found.pop("rows")],
        "groups": groups,
    }


def sentences(found: Mapping[str, Any]) -> list[str]:
    """The verdict in words; of several groups one for each."""
    if "groups" in found:
        return [f"group {part['group']}: {_sentence(part)}" for part in found["groups"]]
    return [_sentence(found)]


def _sentence(found: Mapping[str, Any]) -> str:
    claimed = found["epsilon_claimed"]
    if claimed is None:
        return "no epsilon is claimed, so there is nothing to refute"
    if found["refuted"]:
        return f"REFUTED: the training leaks more than the claimed epsilon of {upwards(claimed)} allows"
    return f"the claimed epsilon of {upwards(claimed)} is not refuted"


def _beside(claimed: float | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    lower = max(float(row["epsilon_lower"]) for row in rows)
    refuted = claimed is not None and lower > claimed
    return {"epsilon_lower": lower, "epsilon_claimed": claimed, "refuted": refuted, "rows": rows}
