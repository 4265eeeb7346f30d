"""Exact, refused, wrong or crashed: what a library makes of a case, against one example at a time.

*Exact*: every step's clipped sum is within the tolerance of the sum made from separate forward and backward passes, one for
each example alone; leaving any one example out moves it by at most C; and no buffer of the model depends on the examples.
*Refused*: an error of the library's own kind that names a part of the model. *Crash*: any other error. *Wrong*: a number
that is none of this, and no error. It is the only verdict that breaks a promise of privacy, so it wins over all others.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpexp.conform.case import Batch, Case, LossFn

Gradients = dict[str, Tensor]
Step = Callable[..., Mapping[str, Tensor]]
MakeStep = Callable[[nn.Module, LossFn, float], Step]
VERDICTS = ("exact", "refused", "wrong", "crash")
FAILURES = ("wrong", "crash")
"""What our own engines must never be. A wrong number breaks the promise; an error that names no part leaves its reader alone."""


@dataclass(frozen=True)
class Adapter:
    """A library, as the judge sees it.

    Attributes:
        name: as in the table.
        make_step: ``(model, loss_fn, clip_norm) -> step``. ``step(*pieces)`` takes the physical batches of one logical batch,
            and returns the clipped sum by parameter name; a name that is missing is a sum of zeros. ``loss_fn(model, piece)``
            gives ``[B]`` losses and may be called with the library's own wrapper as the model.
        groups: ``flat``, or ``layer``: the parameters of one module share a norm, with the threshold C/√K.
        refusals: kinds of errors by which the library says no.
    """

    name: str
    make_step: MakeStep
    groups: str = "flat"
    refusals: tuple[type[Exception], ...] = (NotImplementedError, ValueError)


@dataclass(frozen=True)
class Verdict:
    """What came of one cell.

    Attributes:
        verdict: one of `VERDICTS`.
        error: the largest distance from the reference, in units of C; None where no step came to an end.
        sensitivity: the largest movement when one example is left out, in units of C; None where not measured.
        message: why, in words; of an error its first line.
        seconds: it took.
    """

    verdict: str
    error: float | None
    sensitivity: float | None
    message: str
    seconds: float


class Reference:
    """The right answer for a case: per-example gradients from one example at a time, and what they add up to.

    The losses are scaled so that the median norm of the first batch is 1; C is then the case's ``clip_norm``.
    """

    def __init__(self, case: Case):
        self.case = case
        self.scale = 1.0
        self._known: dict[int, tuple[Batch, list[Gradients]]] = {}
        norms = [float(_norm(g)) for g in self._alone(case.batch)]
        middle = statistics.median([n for n in norms if math.isfinite(n)] or [1.0])
        self.scale = 1.0 / middle if middle > 0 else 1.0
        self._known.clear()

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """``[B]`` scaled losses; what the library under test is given."""
        return self.case.losses(model, batch) * self.scale

    def clipped_sum(self, batch: Batch, groups: str) -> Gradients:
        """The sum of the clipped gradients; an example without a finite gradient adds nothing."""
        alone = self._alone(batch)
        parts = partition(self.case.model, groups)
        limit = self.case.clip_norm / math.sqrt(len(parts))
        total = {name: torch.zeros_like(p) for name, p in _trainable(self.case.model).items()}
        for gradients in alone:
            if not all(bool(g.isfinite().all()) for g in gradients.values()):
                continue
            for names in parts:
                norm = float(_norm({name: gradients[name] for name in names}))
                factor = min(1.0, limit / norm) if norm > 0 else 1.0
                for name in names:
                    total[name] += factor * gradients[name]
        return total

    def _alone(self, batch: Batch) -> list[Gradients]:
        """Each example's gradients, computed once: all adapters are compared with the same ones."""
        if id(batch) in self._known:
            return self._known[id(batch)][1]
        found = []
        for i in range(self.case.size(batch)):
            model = self.case.fresh_model()
            losses = self.losses(model, self.case.pick(batch, [i]))
            params = _trainable(model)
            losses.sum().backward()
            found.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()})
        self._known[id(batch)] = batch, found
        return found


def judge(case: Case, reference: Reference, adapter: Adapter) -> Verdict:
    """Ask a library one question."""
    begun = time.perf_counter()
    trial = _Trial(case, reference, adapter)
    failure: Exception | None = None
    try:
        trial.run()
    except MemoryError:
        raise
    except Exception as raised:
        # whatever a library raises is its answer
        failure = raised
    seconds = time.perf_counter() - begun
    error = trial.error if trial.steps else None
    sensitivity = trial.sensitivity if trial.steps else None
    if trial.faults:
        return Verdict("wrong", error, sensitivity, "; ".join(trial.faults), seconds)
    if failure is None:
        return Verdict("exact", error, sensitivity, "", seconds)
    message = " ".join(str(failure).split())[:400]
    named = isinstance(failure, adapter.refusals) and names_a_part(message, case)
    verdict = "refused" if named else "crash"
    return Verdict(verdict, error, sensitivity, f"{type(failure).__name__}: {message}", seconds)


class _Trial:
    """The steps that a library is asked for, and what was found wrong with them so far."""

    def __init__(self, case: Case, reference: Reference, adapter: Adapter):
        self.case, self.reference, self.adapter = case, reference, adapter
        self.steps = 0
        self.error = self.sensitivity = 0.0
        self.faults: list[str] = []

    def run(self) -> None:
        case, batch = self.case, self.case.batch
        model, step = self._attached()
        whole = None
        for number, given in enumerate([batch, batch, *case.then]):
            found = self._step(step, given)
            right = self.reference.clipped_sum(given, self.adapter.groups)
            self._compare(found, right, number)
            whole = found if number == 1 else whole
        assert whole is not None
        for i in case.left_out or range(case.size(batch)):
            self._moved(whole, self._step(step, case.without(batch, i)), f"example {i}")
        last = case.size(batch) - 1
        model, step = self._attached()
        first = self._step(step, batch)
        other, step = self._attached()
        self._moved(first, self._step(step, case.without(batch, last)), f"example {last} in the first step")
        for name, value in model.named_buffers():
            beside = dict(other.named_buffers()).get(name)
            if beside is None or not torch.equal(value, beside):
                self.faults.append(f"buffer {name} depends on the examples")

    def _attached(self) -> tuple[nn.Module, Step]:
        model = self.case.fresh_model()
        torch.manual_seed(0)
        return model, self.adapter.make_step(model, self.reference.losses, self.case.clip_norm)

    def _step(self, step: Step, batch: Batch) -> Gradients:
        found = {name: value.detach().clone() for name, value in step(*self.case.cut(batch)).items()}
        self.steps += 1
        return found

    def _compare(self, found: Gradients, right: Gradients, number: int) -> None:
        distance = _distance(found, right) / self.case.clip_norm
        self.error = _larger(self.error, distance)
        if not distance <= self.case.tolerance:
            self.faults.append(f"step {number + 1} is off by {distance:.3g} C")

    def _moved(self, whole: Gradients, rest: Gradients, what: str) -> None:
        distance = _distance(whole, rest) / self.case.clip_norm
        self.sensitivity = _larger(self.sensitivity, distance)
        if not distance <= 1 + self.case.slack:
            self.faults.append(f"{what} moves the sum by {distance:.6g} C")


def partition(model: nn.Module, groups: str) -> list[list[str]]:
    """Names of trainable parameters, in groups that share a norm: all, or those of one module."""
    names = list(_trainable(model))
    if groups == "flat":
        return [names]
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.rpartition(".")[0], []).append(name)
    return list(parts.values())


def names_a_part(message: str, case: Case) -> bool:
    """Whether a message names a module, a parameter, a buffer or a class of the model, its inputs, or the losses."""
    model = case.model
    parts = {"input", "inputs", "losses", *case.parts}
    parts |= {name for name, _ in model.named_modules(remove_duplicate=False)}
    parts |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parts |= {name for name, _ in model.named_buffers()}
    kinds = {type(module).__name__ for module in model.modules()}
    parts |= kinds | {re.sub(r"[123]d$", "", kind) for kind in kinds}
    dotted = {word.strip(".") for word in re.findall(r"[\w.]+", message)}
    words = dotted | {word.rpartition(".")[2] for word in dotted}
    return any(part in words and not part.isdigit() for part in parts) or any(
        p in message for p in case.parts
    )


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _norm(gradients: Mapping[str, Tensor]) -> Tensor:
    return _length(gradients.values())


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    names = sorted({*one, *other})
    differences = (
        -other[n].double() if n not in one else one[n].double() - (other[n].double() if n in other else 0.0)
        for n in names
    )
    return float(_length(differences))


def _length(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all together, float64."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        total = total + tensor.detach().double().square().sum()
    return total.sqrt()


def _larger(known: float, new: float) -> float:
    """The maximum, in which a NaN is larger than all."""
    return new if math.isnan(new) or new > known else known
