"""``python -m dpexp.audit task=sst2 scale=demo clip=flat``: what an attacker finds out about the data of one training run."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from dpexp import record
from dpexp.auditing import canaries, gaussian, one_run
from dpexp.auditing.canaries import Planted, Without
from dpexp.auditing.verdict import sentences, verdict
from dpexp.auditing.white_box import Observer, Watched, WithGradientCanaries
from dpexp.checks import did_you_mean
from dpexp.config import RunConfig, hydra_entry, signature, to_dict
from dpexp.durable import write_atomic, write_json
from dpexp.errors import UserError
from dpexp.metrics import exposure
from dpexp.models import ModelBundle, build_model, build_tokenizer
from dpexp.privacy.events import ADD_OR_REMOVE_ONE
from dpexp.privacy.keys import Keys, delete_key, open_keys
from dpexp.privacy.plan_checks import resolve_delta
from dpexp.sweeps import Result
from dpexp.tasks import Task, build_task
from dpexp.tasks.users import by_user
from dpexp.trackers import tells_all, tracking
from dpexp.train import (
    INTERRUPTED,
    announce,
    budget_groups,
    build_plan,
    choose_device,
    dry_start,
    how_to_resume,
    number_of_steps,
    summarise,
)
from dpexp.training.batching import Sampler, sampler_for
from dpexp.training.loop import Trainer
from dpexp.training.progress import Progress
from dpexp.training.state import disk_errors, exclusive

METHODS = ("one_run", "white_box", "exposure")
REFUTES = (
    "a lower bound from one run: above the claimed epsilon it refutes the claim; below, it confirms nothing"
)
ADJACENCY = (
    "canaries take the slots of examples drawn at random, so that N stays as declared; the slot of a canary that is out stays "
    "empty. So it is this relation that is audited: {relation}"
)
BLACK_BOX = "the attacker sees the last model alone; epsilon also covers one who sees every step, so a gap is to be expected"
WHITE_BOX = (
    "the attacker sees the noisy sum of every step, and each canary's gradient is as long as clipping allows, in a direction of "
    "its own: what ε is about, so the bound should come close to it"
)
ESTIMATORS = (
    "each estimator has its share of the error; the Gaussian pair takes scores for independent and Gaussian, which full batches "
    "make them; the others do without"
)
BY_GROUP = "each group of examples has an epsilon of its own, which its canaries are held against; the groups share the error"
NOT_A_MODEL = "the training data holds canaries: this model is for the audit alone"
CHANCE = "a secret that was never trained on has a mean exposure of 1/ln 2 = 1.44 bits"
SHARED = "the secrets of all repetitions are in one training set; Li et al., Table 9, has a training set for each repetition"
GROUP = (
    "epsilon is about one example; a secret in k examples is protected by k times epsilon at a larger delta"
)


@dataclass
class AuditConfig(RunConfig):
    """A run of `dpexp.train`, and what is done to it: the settings of ``conf/audit.yaml``."""

    method: str = "one_run"
    canaries: int = 1000
    content: str = "random"
    guesses: list[float] = field(default_factory=lambda: [1.0, 0.3, 0.1])
    confidence: float = 0.95
    repetitions: list[int] = field(default_factory=lambda: [1, 10, 100])
    secrets: int = 3
    candidates: int = 1000


@hydra_entry("audit", AuditConfig)
def main(run: AuditConfig) -> dict[str, float]:
    """Train with canaries, attack the result, record. A finished audit is shown again."""
    check(run)
    console = Console(highlight=False, soft_wrap=True)
    if run.runtime.dry_run:
        return dry_start(run, console)  # of the training: the canaries take slots of its examples
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


def relation(trainer: Trainer) -> str:
    """Which data sets the audited ε speaks of, in words."""
    told = trainer.plan.neighbouring if trainer.plan is not None else ADD_OR_REMOVE_ONE
    return ADJACENCY.format(relation=told)


def audit_folder(run: AuditConfig) -> Path:
    """``runs_dir/audit/<task>/<signature>/seed<k>``: never among the training runs."""
    return Path(run.runtime.runs_dir) / "audit" / run.task.name / signature(run) / f"seed{run.seed}"


def check(run: AuditConfig) -> None:
    """Refuse settings of the audit that make no sense. Text is not generated: it would take long and tell nothing here.

    Raises:
        UserError: one of them, with the way out.
    """
    if run.method not in METHODS:
        raise UserError(f"method={run.method} is not a choice{did_you_mean(run.method, METHODS)}")
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
            "model.frozen_features=true: an audit plants texts in front of the encoder; leave it false"
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
    bundle = build_model(
        run.model, run.peft,
        head=task.head, num_labels=len(task.labels), scale=scale, seed=run.seed, tokenizer=tokenizer,
        image_shape=task.image_shape,
    )  # fmt: skip
    keys = open_keys(folder, run.privacy.noise_seed, f"{signature(run)} {run.seed}")
    task = by_user(run, task)
    method = {"one_run": one_run_audit, "white_box": white_box_audit, "exposure": exposure_audit}[run.method]
    summary = method(run, folder, console, task, bundle, keys)
    write_json(folder / "summary.json", summary)
    show(summary, folder, console)
    return summary


def one_run_audit(
    run: AuditConfig, folder: Path, console: Console, task: Task, bundle: ModelBundle, keys: Keys
) -> dict[str, Any]:
    """Coins, one training, guesses by how far each canary's loss fell (Steinke et al. 2023); see `dpexp.auditing.one_run`."""
    device = choose_device(run.runtime.device)
    slots = canaries.choose_slots(task.num_examples, run.canaries, keys.run)
    included = canaries.flip_coins(len(slots), keys.run)
    made = canaries.make_canaries(task, bundle.tokenizer, slots, run.content, keys.run)
    planted = Planted(task, dict(zip(slots.tolist(), made, strict=True)), {})  # as long as what stood there
    before = canaries.canary_losses(task, bundle.model.to(device), made, device)
    trainer, summary = train_once(
        run, folder, console, planted, bundle, keys, lambda sampler: Without(sampler, slots[~included])
    )
    after = canaries.canary_losses(task, trainer.model, made, device)
    delta = trainer.plan.delta if trainer.plan else resolve_delta(run.privacy.delta, task.num_examples)
    scores = before - after

    def bounds(mine: np.ndarray, confidence: float) -> list[dict[str, Any]]:
        tried = one_run.attempts(scores[mine], included[mine], run.guesses, delta, confidence)
        return [vars(attempt) for attempt in tried]

    members = members_of(run, task, slots)
    found = verdict(summary["privacy"], members, len(slots), run.confidence, bounds)
    summary["metrics"] |= _measured(found)
    summary["audit"] = {
        "method": run.method,
        "what": REFUTES,
        **found,
        "delta": delta,
        "confidence": run.confidence,
        "canaries": len(slots),
        "included": int(included.sum()),
        "score": f"loss of the initial model minus loss of the trained one, on {run.content} canaries",
        "notes": [relation(trainer), *([] if members is None else [BY_GROUP]), BLACK_BOX, NOT_A_MODEL],
    }
    return summary


def white_box_audit(
    run: AuditConfig, folder: Path, console: Console, task: Task, bundle: ModelBundle, keys: Keys
) -> dict[str, Any]:
    """Gradient canaries, one training, and one who sees every noisy sum; see `dpexp.auditing.white_box`.

    Raises:
        UserError: nothing is clipped, or there are several clipping groups.
    """
    if not run.clip.private or run.clip.groups != "flat":
        raise UserError(
            f"method=white_box sees what a gradient of length C does, which needs one clipping group: clip={run.clip.name} has "
            "none or several. Take clip=flat, or method=one_run"
        )
    slots = canaries.choose_slots(task.num_examples, run.canaries, keys.run)
    included = canaries.flip_coins(len(slots), keys.run)
    planted = WithGradientCanaries(task, slots, run.clip.clip_norm)
    watched = Watched(bundle.model, len(slots))
    members = members_of(run, task, slots)
    observer = Observer(len(slots), min(1.0, run.optim.batch_size / task.num_examples))

    def watch(trainer: Trainer) -> None:
        if trainer.step:
            raise UserError(
                f"method=white_box must see every step, and {trainer.step} are done: delete {folder} and begin again"
            )
        release = trainer.stepper.release
        assert release is not None
        if members is not None:
            budgets = release.plan.budgets
            assert budgets is not None
            rates, lengths = np.asarray(budgets.rates), np.asarray(budgets.scales)
            observer.rates, observer.lengths = rates[members], lengths[members]
        add_noise = release.add_noise

        def seen(step: int, attempt: int, counts: torch.Tensor) -> torch.Tensor | None:
            (threshold,), (std,) = release.policy.values.tolist(), release.noise(step)["gradients"]
            noisy_counts = add_noise(step, attempt, counts)
            assert watched.canary_table.weight.grad is not None
            observer.see(watched.canary_table.weight.grad, threshold, std)
            return noisy_counts

        release.add_noise = seen  # type: ignore[method-assign]

    trainer, summary = train_once(
        run, folder, console, planted, replace(bundle, model=watched), keys,
        lambda sampler: Without(sampler, slots[~included]), watch,
    )  # fmt: skip
    assert trainer.plan is not None
    delta, scores = trainer.plan.delta, observer.scores
    shares = len(run.guesses)

    def bounds(mine: np.ndarray, confidence: float) -> list[dict[str, Any]]:
        return estimates(scores[mine], included[mine], run.guesses, delta, confidence)

    found = verdict(summary["privacy"], members, len(slots), run.confidence, bounds)
    summary["metrics"] |= _measured(found)
    summary["audit"] = {
        "method": run.method,
        "what": REFUTES,
        **found,
        "delta": delta,
        "confidence": run.confidence,
        "canaries": len(slots),
        "included": int(included.sum()),
        "score": f"log-likelihood ratio of {trainer.steps} noisy sums; {2 * shares + 2} estimators share the error",
        "notes": [
            relation(trainer),
            *([] if members is None else [BY_GROUP]),
            WHITE_BOX,
            ESTIMATORS,
            NOT_A_MODEL,
        ],
    }
    return summary


def members_of(run: AuditConfig, task: Task, slots: np.ndarray) -> np.ndarray | None:
    """`[m]`, the budget group of each canary: that of its slot. None where all examples have one budget."""
    groups = budget_groups(run, task.num_examples)
    return None if groups is None else groups[slots]


def _measured(found: dict[str, Any]) -> dict[str, float]:
    """The audit's metrics: the best bound, and how many guesses the first estimator got right."""
    first = found["rows"][0]
    return {"epsilon_lower": found["epsilon_lower"], "guess_accuracy": first["correct"] / first["guesses"]}


def estimates(
    scores: np.ndarray, included: np.ndarray, guesses: list[float], delta: float, confidence: float
) -> list[dict[str, Any]]:
    """Every estimator's bound on ε, each at its share of the error, so that the best of them is one at `confidence`.

    Args:
        scores: `[m]`, larger where a canary looks in.
        included: `[m]`, the coins.
        guesses: shares of the canaries that the estimators by guesses guess.
        delta: of the claim.
        confidence: of the best bound.
    """
    level = 1 - (1 - confidence) / (2 * len(guesses) + 2)
    rows: list[dict[str, Any]] = []
    for share in guesses:
        # at this level already: attempts() would share the error among its own shares alone
        (found,) = one_run.attempts(scores, included, [share], delta, level)
        counts = {"guesses": found.guesses, "correct": found.correct}
        rows.append({"estimator": "Steinke"} | counts | {"epsilon_lower": found.epsilon_lower})
        bound = gaussian.fdp_lower_bound(len(included), found.guesses, found.correct, delta, level)
        rows.append({"estimator": "f-DP"} | counts | {"epsilon_lower": bound})
    middle = float(np.median(scores))
    right = int(((scores > middle) == included).sum())
    counts = {"guesses": len(included), "correct": right}
    bound = gaussian.pair_lower_bound(scores, included, delta, level)
    rows.append({"estimator": "Gaussian pair"} | counts | {"epsilon_lower": bound})
    bound = gaussian.two_world_lower_bound(scores, included, 0.0, delta, level)
    rows.append({"estimator": "two worlds"} | counts | {"epsilon_lower": bound})
    return rows


def exposure_audit(
    run: AuditConfig, folder: Path, console: Console, task: Task, bundle: ModelBundle, keys: Keys
) -> dict[str, Any]:
    """Random secrets in k examples each, one training, and how far they then stand out (Li et al., App. M, Table 9)."""
    device = choose_device(run.runtime.device)
    secrets = canaries.make_secrets(task, run.repetitions, run.secrets, keys.run)
    copies = [secret for secret in secrets for _ in range(secret.repetitions)]
    slots = canaries.choose_slots(task.num_examples, len(copies), keys.run).tolist()
    lengths = [len(secret.prompt) + len(secret.example.target) for secret in copies]
    planted = Planted(
        task,
        dict(zip(slots, (secret.example for secret in copies), strict=True)),
        dict(zip(slots, lengths, strict=True)),
    )
    trainer, summary = train_once(run, folder, console, planted, bundle, keys)
    found = []
    for secret in secrets:
        loss, others = canaries.secret_losses(task, trainer.model, secret, run.candidates, device, keys.run)
        fitted = exposure.fit(others)
        found.append(
            {
                "repetitions": secret.repetitions,
                "rank": exposure.rank(loss, others),
                "by_rank": exposure.exposure(loss, others),
                "by_distribution": exposure.extrapolated_exposure(loss, fitted),
                "ks_pvalue": fitted.ks_pvalue,
            }
        )
    rows = []
    for count in run.repetitions:
        row: dict[str, Any] = {"repetitions": count}
        for name in ("by_rank", "by_distribution"):
            values = [float(secret[name]) for secret in found if secret["repetitions"] == count]
            deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
            row |= {name: float(np.mean(values)), f"{name}_std": deviation}
        rows.append(row)
        summary["metrics"][f"exposure_{count}"] = row["by_distribution"]
    summary["audit"] = {
        "method": run.method,
        "what": "exposure of secrets in bits: how well those trained on stand out by their loss; no bound on epsilon",
        "space_bits": float(np.log2(secrets[0].space)),
        "most_by_rank": float(np.log2(len(others) + 1)),
        "candidates": len(others),
        "rows": rows,
        "secrets": found,
        "notes": [CHANCE, SHARED, GROUP, NOT_A_MODEL],
    }
    return summary


def train_once(
    run: AuditConfig,
    folder: Path,
    console: Console,
    task: Task,
    bundle: ModelBundle,
    keys: Keys,
    sampled: Callable[[Sampler], Sampler] = lambda sampler: sampler,
    watch: Callable[[Trainer], None] = lambda trainer: None,
) -> tuple[Trainer, dict[str, Any]]:
    """The training of `dpexp.train`, with the plan made of the configuration and N as ever. Exits with 130 if interrupted.

    Args:
        task: with its canaries.
        keys: the secrets of the run.
        sampled: what is made of the plan's sampler.
        watch: is given the trainer before its first step.

    Returns:
        The trainer, its model detached from the clipper, and the record of a training run.
    """
    batch, total = run.optim.batch_size, task.num_examples
    steps = number_of_steps(run, total)
    groups = budget_groups(run, total)
    plan = build_plan(run, total, steps, groups)
    rates = plan.budgets.rates if plan is not None and plan.budgets is not None else ()
    sampler = sampled(sampler_for(run.privacy.sampling, total, batch, keys.draws, groups, rates))
    device = choose_device(run.runtime.device)
    with tracking(run, to_dict(run), folder) as tracker:
        trainer = Trainer(
            run, task, bundle, plan,
            steps=steps, expected_batch=batch, sampler=sampler, keys=keys, signature=signature(run),
            folder=folder, device=device,
            metrics=record.Metrics(
                folder / "metrics.jsonl", run.privacy.release == "strict", tracker, tells_all(run)
            ),
            groups=groups,
        )  # fmt: skip
        watch(trainer)
        announce(run, trainer, folder, console)
        with Progress(steps, trainer.step, plan.delta if plan else None, device, console) as progress:
            outcome = trainer.train(progress)
    if outcome.status == "interrupted":
        console.print(f"{outcome.step} of {steps} steps are done; {how_to_resume(folder)}", markup=False)
        sys.exit(INTERRUPTED)
    summary = summarise(run, trainer, outcome, bundle)
    trainer.detach()
    return trainer, summary


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
                str(row["guesses"]), str(row["correct"]), f"{share:.3f}", f"{row['epsilon_lower']:.4f}",
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
    return "none" if epsilon is None else f"{epsilon:.4g} ({accountant})"


def _spread(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    main()
