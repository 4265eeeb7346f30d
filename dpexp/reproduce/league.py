"""The league: many methods on a few tasks under one budget, each with as many learning rates tried.

``league.yaml`` has the list; `commands` makes the runs of it, and `document` says what their records in ``results/league`` show.
A record belongs to the row whose command it was.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import itemgetter

from dpexp.privacy import accountants
from dpexp.privacy.events import composed, decode
from dpexp.reproduce.documents import Document, Rows, Section, Verdict, as_rows, bound, grouped, number, page
from dpexp.reproduce.fillings import Filling
from dpexp.reproduce.pairs import Choice, Finding, Pair, at_the_edge, compared
from dpexp.reproduce.paper import listed
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import LEVEL, Comparison, against, interval, mean_std

NAME = "league"
# words of a command that do not say which method it is
_COUNTED = ("seed", "trials")
_FREE = (*_COUNTED, "privacy", "optim.lr")
_ELSEWHERE = ("runtime", "data.", "tracker")


@dataclass(frozen=True)
class Entry:
    """One method on one task at one budget.

    Attributes:
        task, method: names in the list.
        epsilon: target.
        words: of its command, without what `_FREE` names.
        rates: that are to be tried.
        tuning: seeds that each of them is tried with.
        settings: those of the words that are the method's.
        seeds: that are to be run at the best rate.
    """

    task: str
    method: str
    epsilon: float
    words: tuple[str, ...]
    rates: tuple[float, ...]
    tuning: tuple[int, ...]
    settings: str
    seeds: tuple[int, ...]

    def command(self, rate: float, seeds: Sequence[int], trials: int) -> str:
        """That trains it."""
        own = (f"privacy=eps{self.epsilon:g}", f"optim.lr={rate:g}", f"trials={trials}")
        several = " -m" if len(seeds) > 1 else ""
        return f"python -m dpexp.train {' '.join(self.words + own)} seed={','.join(map(str, seeds))}{several}"

    def runs(self, records: Sequence[Record]) -> dict[tuple[float, int], Record]:
        """(learning rate, seed) -> its record."""
        return {
            (float(record.facts["optim.lr"]), int(record.facts["seed"])): record
            for record in by_command(records, self.command(self.rates[0], self.tuning, 1), _FREE)
            if record.matches({"privacy.epsilon": self.epsilon})
        }


def by_command(records: Sequence[Record], command: str, free: tuple[str, ...] = _COUNTED) -> Iterator[Record]:
    """The records that came of a command, whatever it said of settings that are free."""
    asked = _settings_of(command, free)
    return (record for record in records if _settings_of(record.summary["command"], free) == asked)


@cache
def _settings_of(command: str, free: tuple[str, ...]) -> tuple[str, frozenset[str]]:
    """The program of a command, and its settings without those that are free, or that say where it ran."""
    _, _, program, *words = shlex.split(command)
    names = {word: word.partition("=")[0] for word in words if word != "-m"}
    kept = (word for word, name in names.items() if name not in free and not name.startswith(_ELSEWHERE))
    return program, frozenset(kept)


@dataclass(frozen=True)
class Standing:
    """What the runs of an entry found.

    Attributes:
        rate: the learning rate that was best, by the mean of the tuning seeds.
        tried: how often each rate was tried.
        filling: the other seeds at this rate.
    """

    entry: Entry
    rate: float
    tried: dict[float, int]
    filling: Filling

    @property
    def trials(self) -> int:
        """How many trainings it took, the one itself among them."""
        return sum(self.tried.values()) + 1

    @property
    def choice(self) -> Choice:
        """As a side of a comparison: its search is not finished where the best rate is the largest or smallest tried."""
        return Choice(self.filling, 1, at_the_edge("lr", self.rate, list(self.tried)))


def entries(task: str) -> Iterator[Entry]:
    """Every method on a task, first at the first budget."""
    said = listed(NAME)
    own = said["tasks"][task]
    tried, tuning = (own.get(what, said[what]) for what in ("rates", "tuning_seeds"))
    for epsilon in said["budgets"]:
        for method, settings in said["methods"].items():
            mine = settings.format(**own["values"])
            words = tuple(shlex.split(f"{said['settings']} {own['settings']} {mine}"))
            rates = tuple(float(rate) * said["slower"].get(method, 1) for rate in tried)
            yield Entry(task, method, float(epsilon), words, rates, tuple(tuning), mine, tuple(said["seeds"]))


def commands(task: str, records: Sequence[Record]) -> list[str]:
    """What is still to run: each rate with the tuning seeds; where those have records, the best one with the other seeds."""
    found = []
    for entry in entries(task):
        runs = entry.runs(records)
        untried = (at for at in product(entry.rates, entry.tuning) if at not in runs)
        found += [entry.command(rate, [seed], 1) for rate, seed in untried]
        rate, tried = _best_rate(entry, runs)
        left = [seed for seed in entry.seeds if (rate, seed) not in runs]
        if rate and left:
            found.append(entry.command(rate, left, sum(tried.values()) + 1))
    return found


def _best_rate(entry: Entry, runs: Mapping[tuple[float, int], Record]) -> tuple[float, dict[float, int]]:
    """The rate with the best mean of the tuning seeds, of equals the smallest, 0 before the list has been tried; and how often
    each was tried."""
    own, merits = grouped((at for at in sorted(runs) if at[1] in entry.tuning), itemgetter(0)), {}
    for rate, tried in own.items():
        filling = Filling.of(map(runs.__getitem__, tried), listed(NAME)["metric"])
        if filling and len(filling.values) == len(entry.tuning):
            # as many right answers are one merit, whatever the order of additions
            merits[rate] = round(filling.merit, 9)
    best = max(merits, key=merits.__getitem__) if set(entry.rates) <= merits.keys() else 0.0
    return best, {rate: len(tried) for rate, tried in own.items()}


def standings(task: str, records: Sequence[Record]) -> list[Standing]:
    """The entries of a task that are complete: every rate tried, every seed run."""
    found = []
    for entry in entries(task):
        runs = entry.runs(records)
        rate, tried = _best_rate(entry, runs)
        own = (runs[rate, seed] for seed in entry.seeds if (rate, seed) in runs)
        filling = Filling.of(own, listed(NAME)["metric"])
        if filling and len(filling.records) == len(entry.seeds):
            found.append(Standing(entry, rate, tried, filling))
    return found


def document(records: Sequence[Record]) -> Document:
    """Ranks over all that is complete, what the runs say of published claims, and a block for each task."""
    said, words = listed(NAME), listed("pages")[NAME]
    reference, *_ = said["methods"]
    found = {task: standings(task, records) for task in said["tasks"]}
    rows = {task: _rows(own, reference) for task, own in found.items()}
    sections: list[Section] = []
    if ranked := _complete(rows):
        sections += [_ranks(ranked, reference), _claims([one for own in found.values() for one in own])]
    for task, asked in said["tasks"].items():
        complete, total = len(rows[task]), len(list(entries(task)))
        settings = f"{said['settings']} {asked['settings']}"
        tuning = ", ".join(map(str, next(entries(task)).tuning))
        done = words["block"].format(settings=settings, tuning=tuning, complete=complete, total=total)
        done += f" {words['rest'].format(task=task)}" if complete < total else ""
        sections.append(Section(f"scale=small, {asked['words']}", (done,), rows=rows[task], scale="small"))
    every = [row for own in rows.values() for row in own]
    return page(
        NAME, sections, otherwise=f"small {len(every)} rows" if every else "not run",
        methods=len(said["methods"]), budgets=" and ".join(f"{b:g}" for b in said["budgets"]), reference=reference,
    )  # fmt: skip


def _complete(rows: Mapping[str, Rows]) -> dict[tuple[str, str], Rows]:
    """(task, ε) -> its rows, where every method has one."""
    every = len(listed(NAME)["methods"])
    return {
        (task, epsilon): own
        for task in rows
        for epsilon, own in grouped(rows[task], itemgetter("ε")).items()
        if len(own) == every
    }


def _rows(found: Sequence[Standing], reference: str) -> Rows:
    """A row for each entry, best first within a budget."""
    rows: Rows = []
    for own in grouped(found, lambda standing: standing.entry.epsilon).values():
        base = [standing for standing in own if standing.entry.method == reference]
        others = [standing for standing in own if base and standing is not base[0]]
        results = against(base[0].filling.values, [s.filling.values for s in others]) if base else []
        beside = {s.entry.method: result for s, result in zip(others, results, strict=True)}
        own.sort(key=lambda standing: -standing.filling.mean)
        rows += as_rows(
            _row(standing, rank, reference, beside.get(standing.entry.method))
            for rank, standing in enumerate(own, 1)
        )
    return rows


def _row(
    standing: Standing, rank: int, reference: str, beside: tuple[Comparison, float | None] | None
) -> dict[str, object]:
    """The columns of an entry; ``beside``: what `against` says of it and the reference, None for the reference itself."""
    entry, filling = standing.entry, standing.filling
    low, high = interval(filling.values)
    result, p = beside or (None, None)
    word = "" if result is None else "better" if result.difference > 0 else "worse"
    priced = _price(filling.record, standing.trials)
    return {
        "method": entry.method, "ε": f"{entry.epsilon:g}", "rank": rank, "ours": filling.said(),
        "95% interval": f"[{low:.2f}, {high:.2f}]", f"minus {reference}": result and f"{result.difference:+.2f}",
        "95% of it": result and result.interval,
        "p": number(result.p_two_sided if result else None, ".3f"), "p (Holm)": number(p, ".3f"),
        f"beside {reference}": "not told apart" if result and (p is None or p >= LEVEL) else word,
        "lr": f"{standing.rate:g}", "lr tried": ", ".join(f"{rate:g}" for rate in standing.tried), "n": len(filling.values),
        "dev error": number(filling.dev_error), "ε with tuning": bound(priced), "seconds": f"{filling.seconds:.0f}",
        "settings": entry.settings,
    }  # fmt: skip


def _price(record: Record, trials: int) -> float | None:
    """ε of ``trials`` trainings like that of a record, by Rényi DP; a record may know of fewer. None where it holds no events."""
    privacy = record.summary["privacy"]
    events = (composed([(decode(event), trials)]) for event in privacy.get("events") or ())
    return max((accountants.epsilon(event, privacy["delta"], "rdp") for event in events), default=None)


def _ranks(ranked: Mapping[tuple[str, str], Rows], reference: str) -> Section:
    """The mean rank of each method over tasks and budgets."""
    by_method = grouped((row for rows in ranked.values() for row in rows), itemgetter("method"))
    table: Rows = []
    for method in listed(NAME)["methods"]:
        own = by_method[method]
        ranks, said = [int(row["rank"]) for row in own], [row.get(f"beside {reference}") for row in own]
        counts = {"best": ranks.count(1)}
        counts |= {f"{word} than {reference}": said.count(word) for word in ("better", "worse")}
        row = {"method": method, "mean rank": f"{mean_std(ranks)[0]:.1f}"}
        table.append(row | {column: f"{count} of {len(own)}" for column, count in counts.items()})
    table.sort(key=lambda row: float(row["mean rank"]))
    cases = ", ".join(f"{task} at ε = {epsilon}" for task, epsilon in ranked)
    words = listed("pages")[NAME]["ranks"].format(cases=cases, methods=len(table))
    return Section("Ranks", (words,), rows=table, scale="small", in_csv=False)


def _claims(found: Sequence[Standing]) -> Section:
    """What the seeds say of each published claim."""
    choices = {(s.entry.task, s.entry.epsilon, s.entry.method): s.choice for s in found}
    cases = [(task, float(epsilon)) for task in listed(NAME)["tasks"] for epsilon in listed(NAME)["budgets"]]
    paragraphs: list[str] = [listed("pages")[NAME]["claims"]]
    verdicts: list[Verdict] = []
    for claim in listed(NAME)["claims"]:
        sides, margin = (claim["left"], claim["right"]), float(claim.get("margin", 0))
        pairs: list[Pair] = []
        for task, epsilon in cases:
            if all((task, epsilon, name) in choices for name in sides):
                left, right = ((name, choices[task, epsilon, name]) for name in sides)
                pairs.append(compared(f"{task}, ε = {epsilon:g}", left, right, claim["expect"], margin))
        some = f"{len(pairs)} of {len(cases)} tasks and budgets, "
        finding = Finding(pairs, f"{some if len(pairs) < len(cases) else ''}short runs")
        words = f"{claim['source']}: {claim['says']}"
        first, *others = finding.paragraphs
        paragraphs += [f"{words}. {first}", *others]
        verdicts.append(finding.verdict(words))
    return Section("Published claims", tuple(paragraphs), scale="small", verdicts=tuple(verdicts))
