"""The coverage table: which operation uses which parameter, and how its norms are found."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpexp.clipping.groups import Group


@dataclass(frozen=True)
class CoverageRow:
    """One line of the coverage table."""

    parameter: str
    group: str
    operation: str
    method: str


def coverage_table(rows: list[CoverageRow], groups: list[Group], thresholds: Tensor, engine: str) -> str:
    """Write the table that ``print(clipper)`` shows; operation and method are empty until a backward pass has seen them."""
    header = CoverageRow("parameter", "group", "operation", "norm method")
    lines = [header, *rows]
    width = [max(len(getattr(row, field)) for row in lines) for field in ("parameter", "group", "operation")]
    body = [
        f"{row.parameter:<{width[0]}}  {row.group:<{width[1]}}  {row.operation:<{width[2]}}  {row.method}".rstrip()
        for row in lines
    ]
    sizes = ", ".join(
        f"{g.name}: {c:.4g}" for g, c in list(zip(groups, thresholds.tolist(), strict=True))[:4]
    )
    more = ", …" if len(groups) > 4 else ""
    return "\n".join([f"Clipper(engine={engine}, K={len(groups)}, thresholds={{{sizes}{more}}})", *body])
