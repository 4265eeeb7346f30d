"""Libraries under test: each adapter is a few lines, and any other library needs no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.engines import ENGINES
from dpexp.conform.case import Batch, LossFn
from dpexp.conform.judge import Adapter, Step
from dpexp.errors import UserError
from dpexp.importing import imported

LIBRARIES = ("dpexp", "opacus")


def adapters(library: str) -> list[Adapter]:
    """The adapters of a library: ``dpexp``, ``opacus``, or ``module:function`` / ``file.py:function`` of a `make_step`.

    Raises:
        UserError: no such library or function.
    """
    if library == "dpexp":
        return [ours(engine, groups) for engine in ENGINES for groups in ("flat", "layer")]
    if library == "opacus":
        return [
            Adapter("opacus hooks", _opacus_hooks),
            Adapter("opacus fast gradient", _opacus_two_pass(ghost=False)),
            Adapter("opacus ghost", _opacus_two_pass(ghost=True)),
        ]
    return [Adapter(library, _foreign(library))]


def ours(engine: str, groups: str) -> Adapter:
    """`dpexp.clipping.attach` with one engine."""

    def make_step(model: nn.Module, loss_fn: LossFn, clip_norm: float) -> Step:
        clipper = attach(model, groups=groups, clip_norm=clip_norm, engine=engine)

        def step(*pieces: Batch) -> Mapping[str, Tensor]:
            model.zero_grad()
            for piece in pieces:
                clipper.backward(loss_fn(model, piece))
            return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

        return step

    return Adapter(f"{engine} {groups}", make_step, groups, (UserError,))


def _opacus_hooks(model: nn.Module, loss_fn: LossFn, clip_norm: float) -> Step:
    """As `opacus.PrivacyEngine.make_private` puts it together, without its noise."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    _opacus_validate(model)
    wrapped = GradSampleModule(model, loss_reduction="sum", strict=True)
    optimizer = DPOptimizer(
        torch.optim.SGD(_trained(model), lr=0.0), noise_multiplier=0.0, max_grad_norm=clip_norm,
        expected_batch_size=1, loss_reduction="sum",
    )  # fmt: skip

    def step(*pieces: Batch) -> Mapping[str, Tensor]:
        optimizer.zero_grad()
        for piece in pieces:
            loss_fn(wrapped, piece).sum().backward()
            optimizer.clip_and_accumulate()
            for p in optimizer.params:
                p.grad_sample = None
        sums = {name: getattr(p, "summed_grad", None) for name, p in model.named_parameters()}
        return {name: total for name, total in sums.items() if total is not None}

    return step


def _opacus_two_pass(*, ghost: bool) -> Any:
    def make_step(model: nn.Module, loss_fn: LossFn, clip_norm: float) -> Step:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        _opacus_validate(model)
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=clip_norm, use_ghost_clipping=ghost, loss_reduction="sum", strict=True
        )
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(_trained(model), lr=0.0), noise_multiplier=0.0, max_grad_norm=clip_norm,
            expected_batch_size=1, loss_reduction="sum",
        )  # fmt: skip
        criterion = DPLossFastGradientClipping(wrapped, optimizer, _Given(), loss_reduction="sum")

        def step(*pieces: Batch) -> Mapping[str, Tensor]:
            optimizer.zero_grad()
            total: dict[str, Tensor] = {}
            for piece in pieces:
                criterion(loss_fn(wrapped, piece)).backward()
                for name, p in model.named_parameters():
                    if p.requires_grad and p.grad is not None:
                        total[name] = total.get(name, 0) + p.grad.detach().clone()
            return total

        return step

    return make_step


class _Given:
    """A criterion whose losses are computed already."""

    reduction = "sum"

    def __call__(self, losses: Tensor) -> Tensor:
        return losses


def _opacus_validate(model: nn.Module) -> None:
    from opacus.validators import ModuleValidator

    ModuleValidator.validate(model, strict=True)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _foreign(where: str) -> Any:
    if ":" not in where:
        raise UserError(
            f"library={where} is not a choice: give {', '.join(LIBRARIES)}, or module:function of a make_step"
        )
    return imported("library", where)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of the libraries under test: a table is made of thousands of attempts."""
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
