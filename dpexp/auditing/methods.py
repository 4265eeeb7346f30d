"""What `dpexp.audit` does to a run: plant canaries or secrets, train once, attack. Each method makes the record of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from dpexp.auditing import canaries, one_run
from dpexp.auditing.canaries import Planted, Without
from dpexp.auditing.config import AuditConfig
from dpexp.auditing.estimates import estimates
from dpexp.auditing.verdict import verdict
from dpexp.auditing.white_box import Observer, WithCanaryTable, WithGradientCanaries
from dpexp.errors import UserError
from dpexp.metrics import exposure
from dpexp.models import ModelBundle
from dpexp.privacy.events import ADD_OR_REMOVE_ONE
from dpexp.privacy.keys import Keys
from dpexp.privacy.plan_checks import resolve_delta
from dpexp.tasks import Task
from dpexp.train import summarise, trained
from dpexp.training.loop import Trainer
from dpexp.training.planning import budget_groups, choose_device

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


def one_run_audit(
    run: AuditConfig, folder: Path, console: Console, task: Task, bundle: ModelBundle, keys: Keys
) -> dict[str, Any]:
    """Coins, one training, guesses by how far each canary's loss fell (Steinke et al. 2023); see `dpexp.auditing.one_run`."""
    device = choose_device(run.runtime.device)
    slots = canaries.choose_slots(task.num_examples, run.canaries, keys.run)
    included = canaries.flip_coins(len(slots), keys.run)
    made = canaries.make_canaries(task, bundle.tokenizer, slots, run.content, keys.run)
    members = members_of(run, task, slots, included, each_side=0)
    # as long as what stood there
    planted = Planted(task, dict(zip(slots.tolist(), made, strict=True)), {})
    before = canaries.canary_losses(task, bundle.model.to(device), made, device)
    trainer, summary = train_once(
        run,
        folder,
        console,
        planted,
        bundle,
        keys,
        sampled=lambda sampler: Without(sampler, slots[~included]),
    )
    after = canaries.canary_losses(task, trainer.model, made, device)
    delta = trainer.plan.delta if trainer.plan else resolve_delta(run.privacy.delta, task.num_examples)
    scores = before - after

    def bounds(mine: np.ndarray, confidence: float) -> list[dict[str, Any]]:
        tried = one_run.attempts(scores[mine], included[mine], run.guesses, delta, confidence)
        return [vars(attempt) for attempt in tried]

    score = f"loss of the initial model minus loss of the trained one, on {run.content} canaries"
    return _judged(run, trainer, summary, members, included, delta, bounds, score, BLACK_BOX)


def white_box_audit(
    run: AuditConfig, folder: Path, console: Console, task: Task, bundle: ModelBundle, keys: Keys
) -> dict[str, Any]:
    """Gradient canaries, one training, and one who sees every noisy sum; see `dpexp.auditing.white_box`.

    Raises:
        UserError: nothing is clipped, or something else than the gradients of one group.
    """
    if not run.clip.private or run.clip.groups != "flat" or run.clip.method != "norm":
        raise UserError(
            f"method=white_box sees what a gradient of length C does, which needs one clipping group: clip={run.clip.name} has "
            "another way. Take clip=flat, or method=one_run"
        )
    slots = canaries.choose_slots(task.num_examples, run.canaries, keys.run)
    included = canaries.flip_coins(len(slots), keys.run)
    planted = WithGradientCanaries(task, slots, run.clip.clip_norm)
    watched = WithCanaryTable(bundle.model, len(slots))
    members = members_of(run, task, slots, included, each_side=2)
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
            if release.plan.grows:
                observer.rates = np.full(len(slots), release.plan.rate(step))
            observer.see(watched.canary_table.weight.grad, threshold, std)
            return noisy_counts

        release.add_noise = seen  # type: ignore[method-assign]

    trainer, summary = train_once(
        run, folder, console, planted, replace(bundle, model=watched), keys,
        sampled=lambda sampler: Without(sampler, slots[~included]), watch=watch,
    )  # fmt: skip
    assert trainer.plan is not None
    delta, scores = trainer.plan.delta, observer.scores

    def bounds(mine: np.ndarray, confidence: float) -> list[dict[str, Any]]:
        return estimates(scores[mine], included[mine], run.guesses, delta, confidence)

    number = 2 * len(run.guesses) + 2
    score = f"log-likelihood ratio of {trainer.steps} noisy sums; {number} estimators share the error"
    return _judged(run, trainer, summary, members, included, delta, bounds, score, WHITE_BOX, ESTIMATORS)


def _judged(
    run: AuditConfig,
    trainer: Trainer,
    summary: dict[str, Any],
    members: np.ndarray | None,
    included: np.ndarray,
    delta: float,
    bounds: Callable[[np.ndarray, float], list[dict[str, Any]]],
    score: str,
    *notes: str,
) -> dict[str, Any]:
    """The record with what the canaries say; ``bounds``: see `verdict`; ``score``: what was compared, in words."""
    found = verdict(summary["privacy"], members, len(included), run.confidence, bounds)
    summary["metrics"] |= _measured(found)
    by_group = [] if members is None else [BY_GROUP]
    summary["audit"] = {
        "method": run.method, "what": REFUTES, **found, "delta": delta, "confidence": run.confidence,
        "canaries": len(included), "included": int(included.sum()), "score": score,
        "notes": [relation(trainer), *by_group, *notes, NOT_A_MODEL],
    }  # fmt: skip
    return summary


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
    **watched: Any,
) -> tuple[Trainer, dict[str, Any]]:
    """The training of `dpexp.train`, with the plan made of the configuration and N as ever. Exits with 130 if interrupted.

    Args:
        task: with its canaries.
        keys: the secrets of the run.
        watched: ``sampled`` and ``watch`` of `dpexp.train.trained`.

    Returns:
        The trainer, its model detached from the clipper, and the record of a training run.
    """
    trainer, outcome = trained(run, task, bundle, folder, console, lambda: keys, **watched)
    summary = summarise(run, trainer, outcome, bundle)
    trainer.detach()
    return trainer, summary


def members_of(
    run: AuditConfig, task: Task, slots: np.ndarray, included: np.ndarray, each_side: int
) -> np.ndarray | None:
    """`[m]`, the budget group of each canary: that of its slot. None where all examples have one budget.

    Args:
        included: `[m]`, whether a canary is trained on.
        each_side: how many must be, and must not be, of each group; 0: it has a canary at all.

    Raises:
        UserError: too few to see anything, before anything is trained.
    """
    groups = budget_groups(run, task.num_examples)
    members = np.zeros(len(slots), np.int64) if groups is None else groups[slots]
    for group in range(1 if groups is None else int(groups.max()) + 1):
        inside, outside = (int(side[members == group].sum()) for side in (included, ~included))
        if min(inside, outside) < each_side or inside + outside < 1:
            of_group = "" if groups is None else f" in the slots of group {group + 1}"
            raise UserError(
                f"canaries={run.canaries}: {inside} of them are in and {outside} out{of_group}, too few: give more"
            )
    return None if groups is None else members


def _measured(found: dict[str, Any]) -> dict[str, float]:
    """The audit's metrics: the best bound, and how many guesses the first estimator got right."""
    first = found["rows"][0]
    return {"epsilon_lower": found["epsilon_lower"], "guess_accuracy": first["correct"] / first["guesses"]}


def relation(trainer: Trainer) -> str:
    """Which data sets the audited ε speaks of, in words."""
    told = trainer.plan.neighbouring if trainer.plan is not None else ADD_OR_REMOVE_ONE
    return ADJACENCY.format(relation=told)


METHODS = {"one_run": one_run_audit, "white_box": white_box_audit, "exposure": exposure_audit}
"""Name -> what is done; each takes the run, its folder, a console, task, model and keys, and returns a summary."""
