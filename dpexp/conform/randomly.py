"""The suite of random models: each meets one engine; what fails is made small and shown as a program."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from dpexp.conform.adapters import adapters
from dpexp.conform.generator import Spec, random_spec, shrink
from dpexp.conform.judge import FAILURES, VERDICTS, Adapter, Reference, Verdict, judge
from dpexp.conform.render import versions
from dpexp.durable import read_json, write_atomic

KEPT_EVERY = 25
"""Models after which the record is written."""


def random_suite(
    asked: list[Adapter], models: int, seed: int, out: Path | None, console: Console, *, fresh: bool = True
) -> int:
    """Judge `models` random models, each by one adapter that its seed picks.

    Args:
        asked: adapters to pick from.
        models: how many.
        seed: of the first; the next ones count up.
        out: folder for ``random_SEED.json``; None writes nothing.
        console: for failures, as programs.
        fresh: False goes on behind the models that the record holds, if it is of the same versions and the same adapters.

    Returns:
        How many answers of our own engines were wrong, or an error that is no refusal.
    """
    path = out / f"random_{seed}.json" if out is not None else None
    tally = Tally(seed, sorted(adapter.name for adapter in asked))
    if path is not None and not fresh:
        tally = tally.continued(path)
    for number in range(seed + tally.models, seed + models):
        spec = random_spec(number)
        adapter = random.Random(number).choice(asked)
        verdict = judged(spec, adapter)
        tally.add(spec, adapter, verdict)
        if verdict.verdict in FAILURES:
            small = smallest(spec, adapter, verdict.verdict)
            tally.failures.append(
                {"seed": number, "adapter": adapter.name, "verdict": verdict.verdict,
                 "message": judged(small, adapter).message, "program": program(small, adapter)}
            )  # fmt: skip
            console.print(
                f"model {number}, {adapter.name}: {verdict.verdict}: {verdict.message}", markup=False
            )
            console.print(program(small, adapter), markup=False)
        if path is not None and tally.models % KEPT_EVERY == 0:
            tally.write(path)
    console.print(tally.line(), markup=False)
    if path is not None:
        tally.write(path)
    ours = {adapter.name for adapter in adapters("dpexp")}
    return sum(failure["adapter"] in ours for failure in tally.failures)


@dataclass
class Tally:
    """What came of the models so far.

    Attributes:
        seed: of the first model.
        adapters: names of those asked.
        alone: adapter -> verdict -> how many models whose examples do not see each other.
        coupled: the same of models in which they do: a refusal is right, and so is an exact sum where the gradient feels nothing.
        largest: error and sensitivity of the exact ones, in units of C.
        failures: each with its smallest program.
    """

    seed: int
    adapters: list[str]
    alone: dict[str, dict[str, int]] = field(default_factory=dict)
    coupled: dict[str, dict[str, int]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=lambda: {"error": 0.0, "sensitivity": 0.0})
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def models(self) -> int:
        """How many were judged."""
        return sum(self.total(self.alone).values()) + sum(self.total(self.coupled).values())

    def add(self, spec: Spec, adapter: Adapter, verdict: Verdict) -> None:
        """Count one model."""
        coupled = any(kind == "coupling" for kind, _, _ in spec.statements)
        counts = self.coupled if coupled else self.alone
        own = counts.setdefault(adapter.name, dict.fromkeys(VERDICTS, 0))
        own[verdict.verdict] += 1
        if verdict.verdict == "exact":
            self.largest["error"] = max(self.largest["error"], verdict.error or 0.0)
            self.largest["sensitivity"] = max(self.largest["sensitivity"], verdict.sensitivity or 0.0)

    @staticmethod
    def total(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
        """Verdict -> how many, of all adapters together."""
        return {verdict: sum(own[verdict] for own in counts.values()) for verdict in VERDICTS}

    def line(self) -> str:
        """Everything in one sentence."""
        return (
            f"{self.models} random models: {self.total(self.alone)}, and with couplings {self.total(self.coupled)}; of the "
            f"exact ones at most {self.largest}"
        )

    def page(self) -> str:
        """The record in Markdown."""
        used = ", ".join(f"{name} {version}" for name, version in versions().items())
        lines = [
            "# Random models", "",
            f"Made by `make conform-nightly`: {self.models} random programs of one to six statements (seeds {self.seed} to "
            f"{self.seed + self.models - 1}), in float64, each judged with one engine. {used}.", "",
            f"Of the exact ones the sum is within {self.largest['error']:.1e} C of one example at a time, and no example "
            f"moves it by more than {self.largest['sensitivity']:.8f} C. In the last column, models in which examples "
            "see each other.", "",
            f"| engine, groups | {' | '.join(VERDICTS)} | with couplings |",
            "|---" * (len(VERDICTS) + 2) + "|",
        ]  # fmt: skip
        rows = {name: (self.alone.get(name), self.coupled.get(name)) for name in self.adapters}
        rows["together"] = (self.total(self.alone), self.total(self.coupled))
        for name, (alone, coupled) in rows.items():
            cells = [str((alone or {}).get(verdict, 0)) for verdict in VERDICTS]
            mixed = ", ".join(f"{n} {verdict}" for verdict, n in (coupled or {}).items() if n)
            lines.append(f"| {name} | {' | '.join(cells)} | {mixed} |")
        for failure in self.failures:
            lines += [
                "",
                f"Model {failure['seed']}, {failure['adapter']}: {failure['verdict']}, {failure['message']}",
            ]
        return "\n".join([*lines, ""])

    def continued(self, path: Path) -> Tally:
        """The tally that a record holds, if it is of these versions and adapters; otherwise this one."""
        found = read_json(path)
        if found.pop("versions", None) != versions():
            return self
        stored = Tally(**{name: found[name] for name in self.__dataclass_fields__})
        return stored if (stored.seed, stored.adapters) == (self.seed, self.adapters) else self

    def write(self, path: Path) -> None:
        """Write the record, and its page beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        command = f"python -m dpexp.conform suite=random models={self.models} seed={self.seed}"
        record = asdict(self) | {"models": self.models, "versions": versions(), "command": command}
        write_atomic(path, json.dumps(record, indent=1) + "\n")
        write_atomic(path.with_name("random.md"), self.page())


def judged(spec: Spec, adapter: Adapter) -> Verdict:
    """What an adapter makes of a random model."""
    case = spec.case()
    return judge(case, Reference(case), adapter)


def smallest(spec: Spec, adapter: Adapter, verdict: str) -> Spec:
    """The smallest model with the same verdict."""

    def fails(candidate: Spec) -> bool:
        try:
            return judged(candidate, adapter).verdict == verdict
        except (AttributeError, NameError, RuntimeError, IndexError):
            # a statement went whose layer another one needs
            return False

    return shrink(spec, fails)


def program(spec: Spec, adapter: Adapter) -> str:
    """The model as a program, with the engine and groups of the adapter."""
    engine, _, groups = adapter.name.rpartition(" ")
    return spec.program(f'groups="{groups}", clip_norm=1.0, engine="{engine}"')
