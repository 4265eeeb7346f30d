"""Traps: small models that each contain one thing that a clipping library has been seen to get wrong."""

from __future__ import annotations

from dpexp.conform.case import Case, seeded
from dpexp.conform.traps import coupling, layers, rows, sharing, steps
from dpexp.conform.traps.base import Trap

FAMILIES = {
    "parameters that are shared, derived, frozen or idle": sharing.TRAPS,
    "layers with options": layers.TRAPS,
    "rows that are not one for each example": rows.TRAPS,
    "examples that see each other, and buffers that keep them": coupling.TRAPS,
    "steps: precision, accumulation, empty batches, values that are not finite": steps.TRAPS,
}


def traps() -> dict[str, Trap]:
    """All traps by name."""
    found: dict[str, Trap] = {}
    for family in FAMILIES.values():
        assert not found.keys() & family.keys()
        found |= family
    return found


def trap_case(name: str) -> Case:
    """A trap, built; always the same one."""
    trap = traps()[name]
    return seeded(name, trap.build, trap.dtype)
