"""What a clipper tells: of a backward pass, and of the operations that use its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpexp.clipping.groups import Group


@dataclass(frozen=True)
class Report:
    """What one backward pass saw. Private data: release it through a mechanism only.

    Attributes:
        norms: ``[K, B]`` per-example gradient norms of each group before clipping, at least float32, detached. NaN or Inf where
            an example's gradient was not finite (it contributed nothing).
        clipped: ``[K]`` how many examples had a norm above their threshold.
        input_gradients: of the roots' inputs (`Roots`): what a stage of a pipeline sends to the one before.
    """

    norms: Tensor
    clipped: Tensor
    input_gradients: tuple[Tensor | None, ...] = ()

    @classmethod
    def of(cls, norms: Tensor, thresholds: Tensor, scale: Tensor | None = None) -> Report:
        """Report norms ``[K, B]``, held against the thresholds ``[K]`` times each example's ``scale``, ``[B]``."""
        limits = thresholds.to(norms)[:, None]
        if scale is not None:
            limits = limits * scale.to(norms)
        return cls(norms.detach(), (norms > limits).sum(dim=1))


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
    pairs = [*zip(groups, thresholds.tolist(), strict=True)][:4]
    sizes = ", ".join(f"{group.name}: {threshold:.4g}" for group, threshold in pairs)
    more = ", …" if len(groups) > 4 else ""
    return "\n".join([f"Clipper(engine={engine}, K={len(groups)}, thresholds={{{sizes}{more}}})", *body])
