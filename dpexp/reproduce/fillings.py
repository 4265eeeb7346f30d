"""What fills a printed cell: a configuration with its seeds, in the unit of print, and what a table says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dpexp.metrics.text import PERCENT
from dpexp.privacy.shown import upwards
from dpexp.reproduce.documents import Key, grouped, number
from dpexp.reproduce.records import Record, by_configuration
from dpexp.reproduce.statistics import mean_std

# the metric of canaries, which `dpexp.audit` measures
EXPOSURE = "exposure"
# those of `columns` that say where a number comes from
ORIGIN = ("configuration", "ε", "δ", "accountant", "sampling", "hardware", "record")
_PRINTED_TIMES_100 = PERCENT | {"accuracy", "train_accuracy", "accuracy_mismatched"}


@dataclass(frozen=True)
class Filling:
    """One configuration that fills a cell.

    Attributes:
        records: its seeds.
        values: the metric of each, in the unit of the cell.
        metric: its name.
    """

    records: tuple[Record, ...]
    values: tuple[float, ...]
    metric: str

    @property
    def record(self) -> Record:
        """Of the first seed: what it is set to holds for all."""
        return self.records[0]

    @classmethod
    def of(cls, records: Iterable[Record], metric: str) -> Filling | None:
        """What the records of one configuration say that have the metric; None where none has it."""
        found = [(record, value) for record in records if (value := record.metric(metric)) is not None]
        if not found:
            return None
        having, values = zip(*found, strict=True)
        factor = printed_factor(metric)
        return cls(having, tuple(factor * value for value in values), metric)

    @property
    def mean(self) -> float:
        """Of the values."""
        return mean_std(self.values)[0]

    @property
    def merit(self) -> float:
        """The larger, the better: of perplexities the smallest; the worst is a mean that is no number."""
        if math.isnan(self.mean):
            return -math.inf
        return -self.mean if self.metric.removesuffix("_test") == "perplexity" else self.mean

    @property
    def rank(self) -> tuple[bool, float]:
        """The larger, the better: of several configurations those of more than one seed come first, then the best mean."""
        return len(self.values) > 1, self.merit

    @property
    def std(self) -> float | None:
        """Of a sample; None for a single value."""
        return mean_std(self.values)[1]

    def said(self, digits: int = 2) -> str:
        """Mean ± standard deviation, the latter where there is one."""
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" ± {self.std:.2f}")

    @property
    def paths(self) -> str:
        """Of the records, from the top of the repository."""
        return ", ".join(record.path for record in self.records)

    @property
    def seconds(self) -> float:
        """Wall time, the mean over the seeds."""
        return mean_std([record.summary["wall_s"] for record in self.records])[0]

    @property
    def dev_error(self) -> float | None:
        """The standard error of the mean accuracy, in points, that comes from the number of dev examples: √(p(1 - p)/n).

        All seeds are measured on the same examples, so that more seeds don't make it smaller. None for other metrics.
        """
        rows = self.record.summary["data"]["rows"].get("dev")
        if not rows or self.metric not in ("accuracy", "accuracy_mismatched"):
            return None
        share = min(1.0, max(0.0, self.mean / 100))
        return 100 * math.sqrt(share * (1 - share) / float(rows))


def measured(records: Iterable[Record], metric: str) -> list[Filling]:
    """Every configuration of these records that has the metric, sorted; values as in print."""
    return [found for group in by_configuration(records) if (found := Filling.of(group, metric))]


def most_seeds(fillings: Iterable[Filling], key: Callable[[Filling], Key]) -> dict[Key, Filling]:
    """Key -> the configuration of the most seeds there."""
    found = grouped(fillings, key)
    return {at: max(own, key=lambda filling: len(filling.values)) for at, own in found.items()}


def printed_factor(metric: str) -> float:
    """100 for what is a fraction in a record and printed in percent."""
    return 100.0 if metric.removesuffix("_test") in _PRINTED_TIMES_100 else 1.0


def columns(filling: Filling, digits: int) -> dict[str, str]:
    """What a table says of a configuration: mean ± std, n, configuration, privacy, hardware, records."""
    record, privacy = filling.record, filling.record.summary["privacy"]
    return {
        "ours": filling.said(digits),
        "n": str(len(filling.values)),
        "dev error": "" if filling.dev_error is None else f"± {filling.dev_error:.2f}",
        "configuration": in_full(record),
        "ε": spent(record, ".2f"),
        "δ": number(privacy.get("delta"), ".3g"),
        "accountant": privacy.get("accountant") or "none",
        "sampling": str(privacy.get("sampling")),
        "hardware": record.summary["performance"].get("device", ""),
        "record": filling.paths,
    }


def spent(record: Record, form: str) -> str:
    """ε as text, rounded upwards; "∞" without a guarantee."""
    return "∞" if record.spent is None else upwards(record.spent, form)


def method(record: Record) -> str:
    """How a record was trained privately: its way to clip, and the variants of DP-SGD."""
    facts = record.facts
    variants = (("schedule.name", "constant"), ("individual.name", "none"))
    extra = [facts[name] for name, usual in variants if facts.get(name) not in (None, usual)]
    extra += ["correlated noise"] if facts.get("privacy.bands") not in (None, "1") else []
    extra += ["adadp"] if facts.get("optim.name") == "adadp" else []
    return " + ".join([str(facts["clip"]), *extra])


def budget(record: Record) -> str:
    """What a record was to spend: one ε, those of its groups, or none with the noise that was given."""
    facts = record.facts
    target, noise = facts.get("privacy.epsilon"), facts.get("privacy.noise_multiplier")
    if target:
        return f"ε = {target:g}"
    if noise is not None:
        return f"σ = {noise:g}"
    groups = facts.get("individual.epsilons")
    return f"ε = {'/'.join(f'{e:g}' for e in groups)}" if groups else "no privacy"


def described(record: Record) -> str:
    """The configuration of a record in a few words: what a reader must know to judge its number."""
    facts = record.facts

    def unless(key: str, usual: str, form: str = "{}") -> str:
        value = facts.get(key)
        return "" if value in (None, False, usual) else form.format(value)

    length = facts.get("optim.epochs")
    words = [
        str(facts["model"]),
        unless("peft.name", "full"),
        unless("model.pooling", "own", "{} pooling"),
        unless("model.head", "linear", "{} head"),
        unless("model.frozen_features", "", "frozen features"),
        unless("model.trainable", "all", "trains {}"),
        f"E = {length:g}" if length is not None else f"{facts.get('optim.steps')} steps",
        f"B = {facts.get('optim.batch_size'):g}",
        f"lr {facts.get('optim.lr'):g}",
    ]
    if facts.get("method") == EXPOSURE:
        counts = "/".join(map(str, facts.get("repetitions") or ()))
        words.append(f"{facts.get('secrets')} canaries of each r = {counts} in one training set")
    words.append(unless("runtime.precision", "fp32"))
    return ", ".join(filter(None, words))


def in_full(record: Record) -> str:
    """As `described`, with the settings of its way to clip, and the budgets of its groups."""
    facts = record.facts
    clip, allocation = str(facts["clip"]), facts.get("clip.allocation")
    fixed = clip in ("flat", "perlayer") and facts.get("clip.clip_norm")
    quantile = clip.startswith("adaptive_") and facts.get("clip.target_quantile")
    words = [
        described(record),
        f"C = {fixed:g}" if fixed else "",
        f"quantile {quantile:g}" if quantile else "",
        f"{allocation} allocation" if allocation not in (None, "global") else "",
        budget(record) if facts.get("individual.name") not in (None, "none") else "",
    ]
    return ", ".join(filter(None, words))
