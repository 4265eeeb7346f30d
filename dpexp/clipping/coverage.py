"""Which layer kind covers which parameter, and what is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpexp.clipping.groups import Group
from dpexp.clipping.layers import kind_of, refusal
from dpexp.clipping.swap import Site
from dpexp.clipping.taps import Recorder
from dpexp.errors import UserError


@dataclass(frozen=True)
class CoverageRow:
    """One line of the coverage table."""

    parameter: str
    group: str
    kind: str
    method: str


def refuse_couplings(model: nn.Module) -> None:
    """Refuse modules that mix examples or cannot be clipped, whether they train or not."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("a TorchScript model cannot be clipped: attach to the original nn.Module")
    for name, module in model.named_modules():
        reason = refusal(module)
        if reason:
            raise UserError(f"{name or '(root)'} ({type(module).__name__}): {reason}")
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise UserError(
                f"{name} is not initialised yet (lazy module): run one forward pass before attach()"
            )
        if param.requires_grad and not param.is_floating_point():
            raise UserError(
                f"{name} has dtype {param.dtype}; only real floating-point parameters can be clipped"
            )


def find_sites(model: nn.Module, recorder: Recorder) -> list[tuple[nn.Module, Site]]:
    """Every module that directly owns a trainable parameter, with the kind that covers it (None: bare parameters)."""
    first_name = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    sites = []
    for owner, module in model.named_modules():
        params = {
            local: first_name[id(p)]
            for local, p in module._parameters.items()
            if p is not None and id(p) in first_name
        }
        if params:
            twice = len(set(params.values())) < len(params)  # one parameter in two roles, which no kind knows
            kind = None if twice else kind_of(module)
            sites.append((module, Site(owner or "(root)", kind, params, recorder)))
    return sites


def coverage_table(rows: list[CoverageRow], groups: list[Group], thresholds: Tensor, engine: str) -> str:
    """The table that ``print(clipper)`` shows; the method is empty until the first backward pass has chosen it."""
    header = CoverageRow("parameter", "group", "layer kind", "norm method")
    lines = [header, *rows]
    width = [max(len(getattr(row, field)) for row in lines) for field in ("parameter", "group", "kind")]
    body = [
        f"{row.parameter:<{width[0]}}  {row.group:<{width[1]}}  {row.kind:<{width[2]}}  {row.method}".rstrip()
        for row in lines
    ]
    sizes = ", ".join(
        f"{g.name}: {c:.4g}" for g, c in list(zip(groups, thresholds.tolist(), strict=True))[:4]
    )
    more = ", …" if len(groups) > 4 else ""
    return "\n".join([f"Clipper(engine={engine}, K={len(groups)}, thresholds={{{sizes}{more}}})", *body])
