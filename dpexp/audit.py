"""``python -m dpexp.audit task=sst2 scale=demo clip=flat``: what an attacker finds out about the data of one training run."""

import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from dpexp import record
from dpexp.auditing import canaries
from dpexp.auditing.config import AuditConfig
from dpexp.auditing.methods import METHODS
from dpexp.auditing.verdict import sentences
from dpexp.config import hydra_entry, signature, to_dict
from dpexp.config.sweeps import Result
from dpexp.durable import write_atomic, write_json
from dpexp.errors import INTERRUPTED, UserError, did_you_mean
from dpexp.metrics import exposure
from dpexp.models import build_tokenizer
from dpexp.privacy.keys import delete_key, open_keys
from dpexp.privacy.shown import downwards, upwards
from dpexp.tasks import build_task
from dpexp.tasks.users import by_user
from dpexp.train import dry_start, how_to_resume
from dpexp.training.state import disk_errors, exclusive


@hydra_entry("audit", AuditConfig)
def main(run: AuditConfig) -> dict[str, float]:
    """Train with canaries, attack the result, record. A finished audit is shown again."""
    check(run)
    console = Console(highlight=False, soft_wrap=True)
    if run.runtime.dry_run:
        # of the training: the canaries take slots of its examples
        return dry_start(run, console)
    folder = audit_folder(run)
    try:
        with disk_errors(folder), exclusive(folder):
            summary = record.finished_summary(folder)
            if summary is None:
                with record.failures(run, folder):
                    summary = audit(run, folder, console)
            else:
                show(summary, folder, console)
                console.print("this audit is finished: nothing was trained again", markup=False)
            if not run.privacy.keep_key:
                delete_key(folder)
    except KeyboardInterrupt:
        console.print(how_to_resume(folder), markup=False)
        sys.exit(INTERRUPTED)
    first = f"exposure_{run.repetitions[0]}" if run.method == "exposure" else "epsilon_lower"
    return Result(summary["metrics"], first)


def audit_folder(run: AuditConfig) -> Path:
    """``runs_dir/audit/<task>/<signature>/seed<k>``: never among the training runs."""
    return Path(run.runtime.runs_dir) / "audit" / run.task.name / signature(run) / f"seed{run.seed}"


def check(run: AuditConfig) -> None:
    """Refuse settings of the audit that make no sense. Text is not generated: it would take long and tell nothing here.

    Raises:
        UserError: one of them, with the way out.
    """
    if run.method not in METHODS:
        raise UserError(f"method={run.method} is not a choice{did_you_mean(run.method, tuple(METHODS))}")
    if run.content not in canaries.CONTENTS:
        raise UserError(
            f"content={run.content} is not a choice{did_you_mean(run.content, canaries.CONTENTS)}"
        )
    if run.privacy.sampling == "fixed":
        raise UserError(
            "an audit leaves examples out, and sampling=fixed is about replacing them: use Poisson batches"
        )
    if not 0 < run.confidence < 1:
        raise UserError(f"confidence={run.confidence} must be between 0 and 1")
    if not run.guesses or not all(0 < share <= 1 for share in run.guesses):
        raise UserError(f"guesses={list(run.guesses)}: give shares of the canaries, above 0 and at most 1")
    if run.candidates < exposure.FEWEST_TO_FIT:
        raise UserError(
            f"candidates={run.candidates}: give {exposure.FEWEST_TO_FIT} or more, to whose losses a distribution can be fitted"
        )
    if not run.repetitions or len(set(run.repetitions)) < len(run.repetitions):
        raise UserError(f"repetitions={list(run.repetitions)}: give different counts, such as [1,10,100]")
    if run.model.frozen_features:
        raise UserError(
            "model.frozen_features=true: an audit plants examples in front of the encoder: set it to false"
        )
    if run.privacy.bands != "1" and run.method == "white_box":
        raise UserError(
            f"privacy.bands={run.privacy.bands} ties steps together, and method=white_box looks at them one by one: leave it out"
        )
    if run.search.name != "none":
        raise UserError(
            f"search={run.search.name} releases more than noisy sums, and an audit looks at these alone: set search=none"
        )
    if run.unit.name == "user" and run.method != "white_box":
        raise UserError(
            f"unit=user and method={run.method}: its canaries are single examples; take method=white_box"
        )
    run.task.generation.when = "never"


def audit(run: AuditConfig, folder: Path, console: Console) -> dict[str, Any]:
    """Plant, train once, attack. Returns the summary; exits with 130 where it is interrupted.

    Raises:
        UserError: as `dpexp.train.train`, or canaries that don't fit the task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.yaml", yaml.safe_dump(to_dict(run), sort_keys=False, allow_unicode=True))
    torch.set_flush_denormal(True)
    if run.runtime.threads:
        torch.set_num_threads(run.runtime.threads)
    scale = run.scale.name
    tokenizer = build_tokenizer(run.model, scale=scale)
    task = build_task(run.task, run.data, scale, tokenizer, run.seed)
    bundle = task.build_network(run.model, run.peft, scale=scale, seed=run.seed, tokenizer=tokenizer)
    keys = open_keys(folder, run.privacy.noise_seed, f"{signature(run)} {run.seed}")
    task = by_user(run, task)
    summary = METHODS[run.method](run, folder, console, task, bundle, keys)
    write_json(folder / "summary.json", summary)
    show(summary, folder, console)
    return summary


def show(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """The table, the verdict, and what it is worth."""
    console.print(table_of(summary))
    found = summary["audit"]
    if found["method"] != "exposure":
        for sentence in sentences(found):
            console.print(sentence, markup=False)
    for note in [found["what"], *found["notes"]]:
        console.print(f"- {note}", markup=False)
    console.print(f"record: {folder / 'summary.json'}", markup=False)


def table_of(summary: dict[str, Any]) -> Table:
    """The audit's numbers beside the claim."""
    found, privacy = summary["audit"], summary["privacy"]
    claimed = privacy["epsilon"][privacy["accountant"]] if privacy["accountant"] else None
    shown = _claim(claimed, privacy["accountant"])
    title = f"audit: {summary['task']}  {summary['clip']}  scale={summary['scale']}"
    if found["method"] != "exposure":
        title += f", {found['canaries']} canaries, delta {found['delta']:.3g}"
        table = Table(
            "estimator",
            "guesses",
            "right",
            "share",
            f"epsilon at least ({found['confidence']:.0%}, together)",
            "claimed",
            title=title,
        )
        claims = {part["group"]: part["epsilon_claimed"] for part in found.get("groups", [])}
        for row in found["rows"]:
            share, estimator = row["correct"] / row["guesses"], row.get("estimator", "Steinke")
            grouped = "group" in row
            table.add_row(
                f"group {row['group']}: {estimator}" if grouped else estimator,
                str(row["guesses"]), str(row["correct"]), f"{share:.3f}", downwards(row["epsilon_lower"]),
                _claim(claims[row["group"]], privacy["accountant"]) if grouped else shown,
            )  # fmt: skip
        return table
    title += f", {found['candidates']} of 2^{found['space_bits']:.1f} candidates"
    table = Table(
        "repetitions",
        "exposure by distribution (bits)",
        f"by rank (at most {found['most_by_rank']:.1f})",
        "epsilon",
        title=title,
    )
    for row in found["rows"]:
        cells = [_spread(row[name], row[f"{name}_std"]) for name in ("by_distribution", "by_rank")]
        table.add_row(str(row["repetitions"]), *cells, shown)
    return table


def _claim(epsilon: float | None, accountant: str | None) -> str:
    return "none" if epsilon is None else f"{upwards(epsilon)} ({accountant})"


def _spread(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    main()
