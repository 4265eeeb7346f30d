"""Committed records of runs and of benchmarks: read, checked for provenance, and looked up by their settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dpexp.durable import flattened
from dpexp.errors import UserError
from dpexp.reproduce.paper import as_number
from dpexp.schemas import RunConfig

# Settings that cannot change a result, or that only say where it was computed and by whom.
ELSEWHERE = (
    "seed", "trials", "engine", "spent", "epochs", "label words", "signal_to_noise", "tracker.", "data.root", "data.cache",
    "data.source", "task.", "scale.", "runtime.device", "runtime.physical_batch_size", "runtime.eval_batch_size",
    "runtime.threads", "runtime.eval_every", "runtime.checkpoint_every", "runtime.log_every", "runtime.runs_dir",
)  # fmt: skip
# but what a prompt shows, and how text is written and for how much of the data
_TEXT = ("task.max_length", "task.label_words.", "task.generation.")
# parts of a summary that are groups of values
_GROUPS = ("details", "data", "privacy", "metrics", "performance", "versions", "git", "curves")
VARIANTS = (("individual.name", "sampling"), ("individual.name", "scaling"), ("optim.name", "adadp"))


class Near(float):
    """A number that came out of a run, to be compared with a printed one: within one percent."""


@dataclass(frozen=True)
class Record:
    """One committed summary of a run.

    Attributes:
        name: of its file.
        summary: as the run wrote it (`dpexp.record.summarise`).
        folder: below ``results``.
    """

    name: str
    summary: dict[str, Any]
    folder: str = "runs"

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What it can be looked up by: task, model, clip, engine, scale, seed, and every setting by its dotted name; and
        what came out: "spent", ε under its accountant, "epochs", however its length was given, and "signal_to_noise" of its first
        updates; and its "label words"."""
        config = dict(flattened(self.summary.get("details", {}).get("config", {})))
        if (delta := as_number(str(config.get("privacy.delta")))) is not None:
            # 1e-5 and 1e-05 are one setting
            config["privacy.delta"] = f"{delta:g}"
        words = [config[key] for key in sorted(config) if key.startswith("task.label_words.")]
        return (
            config
            | {key: self.summary.get(key) for key in ("task", "model", "clip", "engine", "scale", "seed")}
            | {"spent": self.spent, "epochs": self._epochs(config)}
            | {"label words": "/".join(map(str, words)) or None}
            | {"signal_to_noise": (self.logged("signal_to_noise") or {}).get("mean")}
        )

    @property
    def path(self) -> str:
        """From the top of the repository."""
        return f"results/{self.folder}/{self.name}"

    @property
    def spent(self) -> float | None:
        """ε under the record's accountant; None for a run without a guarantee."""
        privacy = self.summary.get("privacy") or {}
        found = (privacy.get("epsilon") or {}).get(privacy.get("accountant"))
        return None if found is None else float(found)

    def _epochs(self, config: Mapping[str, Any]) -> float | None:
        if (given := config.get("optim.epochs")) is not None:
            return float(given)
        rows = (self.summary.get("data", {}).get("rows") or {}).get("train")
        steps, batch = config.get("optim.steps"), config.get("optim.batch_size")
        return float(steps) * float(batch) / rows if rows and steps and batch else None

    @cached_property
    def science(self) -> dict[str, Any]:
        """The settings that may change a result, the data's checksums among them; equal for the seeds of one configuration.

        A setting that a record does not know has the schema's default, which never changes its meaning
        (`dpexp.config.signature`): a record from before a setting was there is then like one from after.
        """
        sums = json.dumps(self.summary.get("data", {}).get("sha256"), sort_keys=True)
        every = {**_neutral(), **self.facts, "data.sha256": sums}
        return {k: v for k, v in every.items() if k.startswith(_TEXT) or not k.startswith(ELSEWHERE)}

    @cached_property
    def configuration(self) -> str:
        """Equal for records that differ in the seed, or in where they were computed, alone."""
        return self.without()

    def without(self, names: Collection[str] = (), prefixes: tuple[str, ...] = ()) -> str:
        """Equal for records that differ in these settings too, or in those whose names begin so."""
        kept = {k: v for k, v in self.science.items() if k not in names and not k.startswith(prefixes)}
        return json.dumps(kept, sort_keys=True, default=str)

    def metric(self, name: str) -> float | None:
        """A metric by its name: NaN where a run that diverged came to no number, None where it was not measured."""
        found = self.summary.get("metrics", {})
        return float(math.nan if found[name] is None else found[name]) if name in found else None

    def logged(self, what: str) -> Any:
        """What it kept of its way: "dev", a list of points, "norms" or "signal_to_noise"; {} where it kept none."""
        return self.summary.get("curves", {}).get(what) or {}

    def matches(self, where: Mapping[str, Any]) -> bool:
        """Does every fact agree? A tuple or list means any of its values.

        A variant of the training that is not asked for by name is another method, and does not match.
        """
        facts = self.facts
        return all(agrees(facts.get(key), wanted) for key, wanted in where.items()) and not any(
            key not in where and facts.get(key) == variant for key, variant in VARIANTS
        )


def load(folder: Path, *, audits: bool = False) -> list[Record]:
    """The records of a folder, sorted by name; ``audits``: those of `dpexp.audit`, and no others.

    Raises:
        UserError: a file is no record, or a record that lacks something.
    """
    found = believed(folder, lambda summary: provenance_problems(summary, audits=audits))
    records = [Record(*each, folder.name) for each in found]
    for record in records:
        try:
            # kept for whoever looks it up
            _ = record.science
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"{record.path}: a value is of another kind than a run writes ({error}): restore it from git"
            ) from None
    return records


def believed(
    folder: Path, problems_of: Callable[[dict[str, Any]], list[str]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of every JSON file of a folder, sorted.

    Raises:
        UserError: a file is no record, or one that has problems.
    """
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error}): restore it from git, or remove it") from None
        if not isinstance(content, dict):
            raise UserError(f"{path} is not the summary of a run: remove it")
        if problems := problems_of(content):
            raise UserError(
                f"{path.name} can't be shown: {'; '.join(problems)}. Run it again from a clean checkout; `python -m"
                " dpexp.report run FOLDER` shows runs of one's own"
            )
        yield path.name, content


def provenance_problems(summary: Mapping[str, Any], *, audits: bool = False) -> list[str]:
    """What a reader needs to believe a record and does not find in it, in words."""
    if odd := [name for name in _GROUPS if not isinstance(summary.get(name) or {}, Mapping)]:
        return [f"its {name} is no group of values" for name in odd]
    details, data, metrics = (summary.get(name) or {} for name in ("details", "data", "metrics"))
    needed = {
        "its configuration": details.get("config"),
        "the versions of its libraries": summary.get("versions"),
        "its hardware": details.get("hardware"),
        "its seed": summary.get("seed"),
        "the source of its data": data.get("source"),
        "its privacy": summary.get("privacy"),
        "its metrics": metrics,
        "its command": summary.get("command"),
    }
    found = [f"lacks {name}" for name, value in needed.items() if value in (None, "", {}, [])]
    numbers = (int, float, type(None))
    found += [f"its {name} is {value!r}" for name, value in metrics.items() if type(value) not in numbers]
    if "audit" in summary and not audits:
        found.append("it is an audit, whose data hold canaries")
    if "audit" not in summary and audits:
        found.append("it is no audit")
    sums = data.get("sha256")
    if not sums or (isinstance(sums, Mapping) and not all(sums.values())):
        found.append("lacks a checksum of its data")
    found += code_problems(summary)
    if summary.get("status") != "finished":
        found.append(f"its status is {summary.get('status')}, not finished")
    return found


def code_problems(record: Mapping[str, Any]) -> list[str]:
    """Why its code is not that of a commit, in words; nothing where it is."""
    git = record.get("git") or {}
    if not git.get("commit"):
        return ["its code was in no commit"]
    return [] if git.get("dirty") is False else ["its code differed from its commit"]


def by_configuration(records: Iterable[Record]) -> list[list[Record]]:
    """Records of one configuration together, sorted by seed.

    Raises:
        UserError: a seed has two records, of which a reader could choose the better one.
    """
    groups: dict[str, dict[Any, Record]] = {}
    for record in records:
        first = groups.setdefault(record.configuration, {}).setdefault(record.facts["seed"], record)
        if first is not record:
            raise UserError(
                f"{first.path} and {record.path} are one run with one seed: keep the one of the later commit, whatever it found"
            )
    return [[seeds[seed] for seed in sorted(seeds)] for _, seeds in sorted(groups.items())]


@cache
def _neutral() -> dict[str, Any]:
    return dict(flattened(asdict(RunConfig())))


def agrees(fact: Any, wanted: Any) -> bool:
    """Is a fact of a record what is wanted? Numbers may come as text (δ is one); a list means any of its values, "*" any that it
    may have."""
    if wanted == "*":
        return fact is not None
    if isinstance(wanted, list | tuple):
        return fact in wanted or any(agrees(fact, one) for one in wanted)
    if isinstance(wanted, Near):
        return isinstance(fact, int | float) and abs(fact - wanted) <= 0.01 * abs(wanted)
    if isinstance(wanted, bool) or wanted is None or isinstance(fact, bool) or fact is None:
        return bool(fact == wanted)
    try:
        return abs(float(wanted) - float(fact)) <= 1e-9 * abs(float(fact))
    except (TypeError, ValueError):
        return str(fact) == str(wanted)
