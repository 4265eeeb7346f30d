"""``python -m dpexp.report run FOLDER [FOLDER ...]``: runs of one's own beside each other, as a page and pictures.

Finished runs of one task are compared by configuration, over their seeds.
A folder of `dpexp.train` shows everything below. One of `PrivacyEngine` or of the Trainer has a ledger and no log of losses or
norms: it shows ε and the speed.
"""

from __future__ import annotations

import argparse
import html
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from dpexp.config.usage import shipped
from dpexp.errors import UserError
from dpexp.own_runs.comparison import HEAD, comparison, repeated
from dpexp.own_runs.reading import OwnRun, of_groups, read
from dpexp.privacy import accountants
from dpexp.privacy.events import composed
from dpexp.privacy.shown import upwards
from dpexp.record import KNOWN
from dpexp.reproduce.drawing import draw, lines
from dpexp.statement import with_choice

# of thresholds and norms that are drawn, spread over the model
MOST_GROUPS = 12
NOT_PRIVATE = "not private: computed from the training data without noise"


def main(arguments: list[str]) -> int:
    """Write the page. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dpexp.report run", description=__doc__)
    parser.add_argument(
        "folder", nargs="*", type=Path, help="of a run: it holds ledger.jsonl or summary.json"
    )
    parser.add_argument("--out", type=Path, help="default: FOLDER/report of one run, ./report of several")
    parser.add_argument(
        "--released", action="store_true", help="leave out what is not private, times and memory too"
    )
    given = parser.parse_args(arguments)
    if not given.folder:
        raise UserError("not given: the folder of a run, runs/TASK/SIGNATURE/seed0 for example, or several")
    # a folder that is named twice, or through a link, is one run
    runs = list({run.folder.resolve(): run for run in map(read, given.folder)}.values())
    out = given.out or (runs[0].folder / "report" if len(runs) == 1 else Path("report"))
    print(f"written to {write(runs, out, released=given.released)}")
    return 0


def write(runs: list[OwnRun], out: Path, *, released: bool = False) -> Path:
    """Write ``index.html`` and its pictures, as SVG for the page and as PNG for elsewhere. Returns the page.

    Args:
        runs: at least one.
        out: a folder; made where it does not exist.
        released: leave out what no noise covers.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        parts = [
            *_compared(runs),
            _table(runs, released),
            *_together(runs),
            *_conditions(runs),
            *(part for name, part in _figures(runs, out) if not (released and name in WITHHELD)),
        ]
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from error
    if released:
        for name, kind in product(WITHHELD, ("svg", "png")):
            (out / f"{name}.{kind}").unlink(missing_ok=True)
    style = shipped("reproduce").joinpath("site.css").read_text(encoding="utf-8")
    title = html.escape(" and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs")
    page = out / "index.html"
    body = "\n".join(parts)
    page.write_text(
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n<style>{style}\n'
        f"img {{max-width: 100%}}</style>\n<main>\n<h1>{title}</h1>\n{body}\n</main>\n</html>\n",
        encoding="utf-8",
    )
    return page


PRIVATE = {"loss": f"training loss ({NOT_PRIVATE})", "norms": f"mean norm of each group ({NOT_PRIVATE})"}
PUBLIC = {
    "epsilon": "ε of everything charged so far, by each accountant",
    "dev": "on the dev set, which is public",
    "thresholds": "clipping thresholds (released through noise)",
}
# what follows from the sizes of private batches
TIMES = {
    "throughput": "examples per second, of the expected batch (outside of the guarantee: keep it to yourself)"
}
WITHHELD = (*PRIVATE, *TIMES)
# names of lines that find room among these
MOST_WITHIN = 6


def _figures(runs: list[OwnRun], out: Path) -> Iterator[tuple[str, str]]:
    """Draw what there is of each picture. Yields its name and its part of the page."""
    for name, what in (PUBLIC | PRIVATE | TIMES).items():
        series = [
            (_label(runs, run, label), x, y)
            for run in runs
            for label, x, y in _SERIES[name](run)
            if len(x) and not (name == "epsilon" and len(runs) > 2 and label != run.named(run.accountant))
        ]
        if not series:
            continue
        log = name in ("thresholds", "norms")
        picture = draw(partial(_plot, series, log), size=size_for(len(series)), png=out / f"{name}.png")
        (out / f"{name}.svg").write_text(picture, encoding="utf-8")
        yield (
            name,
            f'<section>\n<h2>{html.escape(what)}</h2>\n<img src="{name}.svg" alt="{html.escape(what)}">\n</section>',
        )


def size_for(count: int) -> tuple[float, float]:
    """Inches for so many lines: their names stand beside them where they are many, and below each other."""
    return (5.0, 3.6) if count <= MOST_WITHIN else (10.0, max(3.6, 0.18 * count + 0.3))


def _plot(series: list[tuple[str, list[float], list[float]]], log: bool, axes: Any) -> None:
    lines(axes[0], series)
    if len(series) > MOST_WITHIN:
        axes[0].get_legend().remove()
        axes[0].figure.legend(loc="outside right upper")
    axes[0].set_xlabel("step")
    if log:
        axes[0].set_yscale("log")


def _label(runs: list[OwnRun], run: OwnRun, label: str) -> str:
    return label if len(runs) == 1 else f"{run.name} {label}".strip()


def _epsilon_series(run: OwnRun) -> Iterator[tuple[str, list[int], list[float]]]:
    steps, found = run.epsilons
    for name, values in found.items():
        kept = [(x, y) for x, y in zip(steps, values, strict=True) if y == y and y != float("inf")]
        yield run.named(name), [x for x, _ in kept], [y for _, y in kept]


def _dev_series(run: OwnRun) -> Iterator[tuple[str, list[int], list[float]]]:
    steps, values = run.series("dev")
    for name in values[0] if values else ():
        if name in ("loss", "accuracy", "bleu"):
            yield f"dev {name}", steps, [value.get(name) for value in values]


def _group_series(run: OwnRun, name: str, private: bool) -> Iterator[tuple[str, list[int], list[float]]]:
    steps, values = run.series(name, private)
    number = len(values[0]) if values else 0
    names = run.summary.get("details", {}).get("groups") or range(number)
    for k in range(0, number, -(-number // MOST_GROUPS) or 1):
        yield f"group {names[k]}", steps, [value[k] for value in values]


def _loss_series(run: OwnRun) -> Iterator[tuple[str, list[int], list[float]]]:
    steps, values = run.series("loss", private=True)
    yield "loss", steps, values


def _throughput_series(run: OwnRun) -> Iterator[tuple[str, list[int], list[float]]]:
    """From the times of the charges: each step is charged just before it is taken."""
    batch = run.settings.get("expected_batch_size") or run.settings.get("optim", {}).get("batch_size")
    times = [time for _, time in run.events]
    taken = [(i + 1, b - a) for i, (a, b) in enumerate(pairwise(times)) if b > a]
    if batch:
        yield "examples/s", [i for i, _ in taken], [batch / seconds for _, seconds in taken]


_SERIES: dict[str, Any] = {
    "epsilon": _epsilon_series,
    "dev": _dev_series,
    "thresholds": partial(_group_series, name="thresholds", private=False),
    "throughput": _throughput_series,
    "loss": _loss_series,
    "norms": partial(_group_series, name="mean_norms", private=True),
}


def _compared(runs: list[OwnRun]) -> Iterator[str]:
    """The finished runs by configuration, where there are several."""
    finished = [run for run in runs if run.summary.get("status") == "finished"]
    again = [finished[i] for i in repeated([run.settings for run in finished])]
    finished = [run for run in finished if run not in again]
    if rows := comparison([run.summary for run in finished], [run.settings for run in finished]):
        lines = [f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in HEAD)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        yield "<h2>By configuration</h2>\n<table>\n" + "\n".join(lines) + "\n</table>\n"
        if again:
            left = html.escape(", ".join(run.name for run in again))
            yield f"<p>Left out, because a run before it has the same configuration and seed: {left}.</p>"
        yield "<h2>Run by run</h2>"


def _table(runs: list[OwnRun], released: bool) -> str:
    """The runs beside each other, a column for each; without times and memory where only what is released is shown."""
    rows: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        for name, value in _facts(run, released).items():
            rows.setdefault(name, [""] * len(runs))[number] = value
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    body = "\n".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(v)}</td>' for v in values)}</tr>"
        for name, values in rows.items()
    )
    return f"<table>\n<tr><th></th>{head}</tr>\n{body}\n</table>"


def _together(runs: list[OwnRun]) -> Iterator[str]:
    """What all runs have cost who is in the data of all of them: what each has charged, whatever became of it."""
    charged = [run for run in runs if run.events]
    known = [run.delta for run in charged if run.delta is not None]
    if len(runs) < 2 or not known:
        return
    bare = [run.name for run in runs if run.unprotected]
    # a record says that steps were charged, and not which
    gone = [run.name for run in runs if not run.events and run.summary.get("privacy", {}).get("steps")]
    odd = [run.name for run in charged if run.filtered or _budgets(run) > 1]
    if bare:
        what = f"has no value: nothing protects what {', '.join(bare)} learnt"
    elif gone:
        what = f"is not told here: {', '.join(gone)} has no ledger.jsonl beside its record"
    elif odd:
        what = f"is not told here: of {', '.join(odd)} the ledger alone does not know it"
    elif len(units := {run.unit for run in charged}) > 1:
        what = f"is not told here: they protect different units ({'; '.join(sorted(units))})"
    else:
        counts = Counter(event for run in charged for event, _ in run.events)
        event = composed(pair for encoded, count in counts.items() for pair in of_groups(encoded, count))
        try:
            spent = accountants.epsilon(event, min(known), "rdp")
            what = f"is {upwards(spent)} at δ = {min(known):.3g} by {max((run.named('rdp') for run in charged), key=len)}"
        except UserError as error:
            what = f"is not told here: {error}"
    yield (
        f"<p>ε of all {len(runs)} runs together, the unfinished and failed ones included, {html.escape(what)}. It counts for "
        "an example that all of them have learnt from. It holds however one of them is chosen, if their number was fixed "
        "beforehand.</p>"
    )


def _budgets(run: OwnRun) -> int:
    """How many groups of examples have an ε of their own."""
    return max(len(of_groups(encoded, 1)) for encoded in {encoded for encoded, _ in run.events})


def _conditions(runs: list[OwnRun]) -> Iterator[str]:
    """What a reader of ε must know, as the records say it; with the runs that it is about, where it is not about all."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for note in run.summary.get("privacy", {}).get("notes", ()):
            said.setdefault(note, []).append(run.name)
    if said:
        told = (
            note if len(names) == len(runs) else f"{note} ({', '.join(names)})"
            for note, names in said.items()
        )
        lines = [f"<li>{html.escape(sentence)}</li>" for sentence in told]
        yield "<h2>What ε rests on</h2>\n<ul>\n" + "\n".join(lines) + "\n</ul>"


def _facts(run: OwnRun, released: bool) -> dict[str, str]:
    summary, facts = run.summary, {"status": run.summary.get("status", "unfinished")}
    for name in ("task", "model", "clip", "scale", "seed"):
        if name in summary:
            facts[name] = str(summary[name])
    facts["charges in the ledger"] = str(len(run.events))
    if run.delta is not None:
        facts["δ"] = upwards(run.delta, ".3g")
    steps, spent = run.epsilons
    if steps:
        facts |= {f"ε by {run.named(name)}": upwards(values[-1]) for name, values in spent.items()}
    elif run.filtered:
        budget = summary.get("privacy", {}).get("epsilon") or {}
        facts |= {
            f"ε by {run.named(name)}": upwards(value) for name, value in budget.items() if value is not None
        }
    if (tuned := with_choice(summary.get("privacy", {}))) is not None:
        facts["ε with tuning"] = f"{upwards(tuned[1])} by {run.named(tuned[0])}"
    facts |= {name: f"{value:.4g}" for name, value in summary.get("metrics", {}).items()}
    for name, value in summary.get("performance", {}).items():
        if value is None or (released and name not in KNOWN):
            continue
        facts[name] = f"{value:.4g}" if isinstance(value, float) else str(value)
    return facts
