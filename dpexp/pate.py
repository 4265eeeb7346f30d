"""``python -m dpexp.pate task=mnist scale=small``: teachers on private shares, noisy answers about public data, a student."""

import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from dpexp import provenance, record
from dpexp.config import hydra_entry
from dpexp.config.checks import task_problems, value_problems
from dpexp.config.sweeps import Result
from dpexp.durable import flattened, read_json, write_json
from dpexp.errors import UserError, did_you_mean
from dpexp.models import build_tokenizer
from dpexp.models.images import FAMILIES
from dpexp.privacy.accountants import ACCOUNTANTS
from dpexp.privacy.caveats import CLT, next_to_nothing
from dpexp.privacy.events import encode
from dpexp.privacy.fingerprint import fingerprint
from dpexp.privacy.individual import draw_groups, read_groups
from dpexp.privacy.keys import LEDGER, delete_key, open_keys
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.noise import KeyedGenerator, SecureGenerator, add_gaussian_, check_multiplier, describe
from dpexp.privacy.pate import METHODS, VOTE_MOVE, VotePlan, plan_votes
from dpexp.privacy.plan_checks import resolve_delta
from dpexp.privacy.shown import upwards
from dpexp.schemas import (
    AccountantConfig,
    DataConfig,
    IndividualConfig,
    ModelConfig,
    PeftConfig,
    PrivacyConfig,
    RunConfig,
    RuntimeConfig,
    ScaleConfig,
    TaskConfig,
)
from dpexp.tasks import build_task
from dpexp.tasks.generation import Generation
from dpexp.tasks.images import ImageClassification
from dpexp.training.pate.questions import Classes, NextTokens
from dpexp.training.pate.teachers import VotesConfig, learn, share_out, summed_answers
from dpexp.training.planning import choose_device
from dpexp.training.state import disk_errors, exclusive

NEIGHBOURS = "add or remove one example; N is public and stays: its slot in the teachers' data is empty"
# settings of `dpexp.train` that nothing here reads
UNREAD = (
    "privacy.noise_multiplier", "privacy.sampling", "privacy.bands", "individual.name", "individual.budgets",
    "runtime.dry_run", "runtime.parallel", "runtime.precision",
)  # fmt: skip


@dataclass
class PateConfig:
    """The settings of ``conf/pate.yaml``: those of a run that PATE has, and its own."""

    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    accountant: AccountantConfig = field(default_factory=AccountantConfig)
    individual: IndividualConfig = field(default_factory=IndividualConfig)
    pate: VotesConfig = field(default_factory=VotesConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    seed: int = 0


@hydra_entry("pate", PateConfig)
def main(run: PateConfig) -> dict[str, float]:
    """Train teachers, ask them, train a student on their noisy answers, record. A finished run is shown again."""
    check(run)
    folder = Path(run.runtime.runs_dir) / "pate" / run.task.name / _signature(run) / f"seed{run.seed}"
    console = Console(highlight=False, soft_wrap=True)
    with disk_errors(folder), exclusive(folder):
        if summary := read_json(folder / "summary.json"):
            console.print(
                f"this run is finished: nothing was trained or asked again. To begin anew, on data that were changed say, change "
                f"the seed or move {folder} away",
                markup=False,
            )
        else:
            summary = pate(run, folder, console)
        if not run.privacy.keep_key:
            delete_key(folder)
    show(summary, console)
    console.print(f"record: {folder / 'summary.json'}", markup=False)
    return Result(summary["metrics"], run.task.metric)


def check(run: PateConfig) -> None:
    """Refuse settings that make no sense together.

    Raises:
        UserError: the first of them, with the way out.
    """
    votes, groups = run.pate, run.individual
    settings, neutral = dict(flattened(asdict(run))), dict(flattened(asdict(PateConfig())))
    if unread := [key for key in UNREAD if settings[key] != neutral[key]]:
        raise UserError(
            f"{unread[0]}={settings[unread[0]]} is not read by pate, which would go on without it: leave it out"
        )
    if shots := run.task.generation.shots:
        raise UserError(
            f"task.generation.shots={shots} puts pairs of the private training file, as they are, into the public texts that "
            "teachers are asked about: leave it at 0"
        )
    shared = {part.name: getattr(run, part.name) for part in fields(RunConfig) if hasattr(run, part.name)}
    if problem := next(chain(value_problems(run), task_problems(RunConfig(**shared))), None):
        raise UserError(problem)
    if votes.method not in METHODS:
        raise UserError(f"pate.method={votes.method} is not a choice{did_you_mean(votes.method, METHODS)}")
    if run.task.kind not in ("image_classification", "generation"):
        raise UserError(
            f"pate asks for the classes of images and the words of texts, and task={run.task.name} has neither: take task=mnist, "
            "cifar10 or e2e, for example"
        )
    images = run.task.kind == "image_classification"
    if images != (run.model.family in FAMILIES):
        raise UserError(
            f"model={run.model.name} {'sees no images: take model=cnn_mnist' if images else 'writes no text: take model=gpt2'}, "
            "for example"
        )
    if votes.method == "knn" and not images:
        raise UserError(f"pate.method=knn compares images, and task={run.task.name} has none: take uniform")
    several = bool(groups.epsilons)
    if several == (run.privacy.epsilon is not None):
        raise UserError(
            "give either privacy.epsilon, or individual.epsilons for groups of examples (with privacy.epsilon=null), not both"
        )
    if several != (votes.method in ("upsampling", "weighting")):
        raise UserError(
            f"pate.method={votes.method} has {'one budget' if several else 'groups with budgets of their own'}: "
            + (
                "take upsampling or weighting, or privacy.epsilon"
                if several
                else "give individual.epsilons and individual.shares (or individual.groups), and privacy.epsilon=null"
            )
        )
    if not all(budget > 0 for budget in groups.epsilons):
        raise UserError(
            f"individual.epsilons={list(groups.epsilons)} must be positive numbers, one for each group of examples"
        )
    least = dict.fromkeys(
        ("teachers", "queries", "neighbours", "teacher_epochs", "student_epochs", "batch_size", "texts"), 1
    )
    for name, lowest in (least | {"candidates": 2}).items():
        if getattr(votes, name) < lowest:
            raise UserError(f"pate.{name}={getattr(votes, name)} must be {lowest} or more")
    if votes.lr <= 0:
        raise UserError(f"pate.lr={votes.lr} must be above 0")


def pate(run: PateConfig, folder: Path, console: Console) -> dict[str, Any]:
    """The whole run. Returns its summary."""
    begun = time.perf_counter()
    settings, device = asdict(run), choose_device(run.runtime.device)
    if run.runtime.threads:
        torch.set_num_threads(run.runtime.threads)
    inputs = build_tokenizer(run.model, scale=run.scale.name)
    task = build_task(run.task, run.data, run.scale.name, inputs, run.seed)
    votes = run.pate

    def make(seed: int) -> nn.Module:
        given = {"scale": run.scale.name, "seed": run.seed * 100_003 + seed, "tokenizer": inputs}
        return task.build_network(run.model, PeftConfig(), **given).model

    # Public: what is asked.
    questions: Classes | NextTokens
    if isinstance(task, ImageClassification):
        questions = Classes(task, votes, run.task.metric, device)
    else:
        assert isinstance(task, Generation)
        questions = NextTokens(task, votes, make(-1), device)

    # Who has which budget, and what the answers cost.
    groups = budget_groups(run, task.num_examples)
    budgets = list(run.individual.epsilons) or [float(run.privacy.epsilon or 0)]
    apart = votes.method == "weighting"
    teachers = teachers_of(votes.teachers, np.bincount(groups, minlength=len(budgets)), apart=apart)
    plan = plan_votes(
        votes.method, budgets,
        teachers=teachers, queries=votes.queries, delta=resolve_delta(run.privacy.delta, task.num_examples),
        accountant=run.accountant.name, precision=votes.precision, rate=votes.rate,
    )  # fmt: skip
    console.print(
        f"{votes.method}: noise {plan.sigma:.4g} on each count, {votes.queries} queries, an example moves them by √2 times "
        f"{', '.join(f'{move:.4g}' for move in plan.moves)}",
        markup=False,
    )
    weak = next_to_nothing(plan.delta, task.num_examples, max(budgets))
    # without sampling it is no approximation
    weak += [CLT] if plan.accountant == "gdp" and plan.rate < 1 else []
    if run.task.held_out:
        weak.append(
            f"the last {run.task.held_out} rows of the training file are the dev set (task.held_out): questions are made of "
            "them, and nothing protects them"
        )
    for sentence in weak:
        console.print(f"note: {sentence}", markup=False)

    # Private: answers. Nothing of them is kept before the charge is on the disk.
    keys = open_keys(folder, run.privacy.noise_seed, f"{_signature(run)} {run.seed}")
    if votes.method == "knn":
        assert isinstance(questions, Classes)
        sums = questions.of_neighbours(keys.draws)
    else:
        copies = [int(move) if votes.method == "upsampling" else 1 for move in plan.moves]
        shares = share_out(groups, copies, teachers, run.seed, apart=apart)
        if empty := sum(not len(share) for share in shares):
            raise UserError(
                f"{empty} of {len(shares)} teachers would have no example of {task.num_examples} to learn from, and vote by "
                "chance: lower pate.teachers"
            )
        weights = np.repeat(plan.moves, teachers).tolist() if apart else [1.0] * sum(teachers)

        def fit(network: nn.Module, share: np.ndarray, seed: int) -> nn.Module:
            return learn(
                network, task, share, epochs=votes.teacher_epochs, seed=run.seed * 100_003 + seed,
                lr=votes.lr, batch_size=votes.batch_size, device=device,
            )  # fmt: skip

        with console.status("teachers") as status:
            sums = summed_answers(
                make, fit, shares, weights, questions.answers,
                lambda number: status.update(f"teacher {number} of {sum(teachers)}"),
            )  # fmt: skip
    strict = run.privacy.release == "strict"
    ledger = Ledger(folder / LEDGER, keys.run, times=not strict)
    noisy = release(sums, plan, ledger, keys.draws, {"config": settings}, groups, secure=run.privacy.secure)

    # Public: the student.
    student = make(-1)
    metrics = questions.teach(student, noisy / sum(teachers), run.seed)
    torch.save(student.state_dict(), folder / "student.pt")
    summary = {
        "task": run.task.name, "model": run.model.name, "clip": "none", "engine": "none", "scale": run.scale.name,
        "data": {
            "source": task.data.source, "name": task.data.name, "rows": task.data.rows,
            "sha256": record.private_hashes_withheld(task) if strict else task.data.sha256,
        },
        "privacy": privacy_block(plan, ledger, run, [questions.note, *weak]),
        "metrics": metrics,
        "performance": {"device": provenance.device_name(device)},
        "seed": run.seed, "versions": provenance.versions(), "git": provenance.git_state(), "command": provenance.command_line(),
        "wall_s": None if strict else round(time.perf_counter() - begun, 3), "status": "finished",
        "details": {
            "signature": _signature(run), "config": settings, "teachers": teachers,
            "data_notes": record.data_notes(task, strict=strict), "method": "pate",
            "hardware": provenance.hardware(device),
        },
    }  # fmt: skip
    write_json(folder / "summary.json", summary)
    return summary


def budget_groups(run: PateConfig, num_examples: int) -> np.ndarray:
    """`[N]`, which budget each example has, from 0. Public."""
    individual = run.individual
    if not individual.epsilons:
        return np.zeros(num_examples, np.int64)
    if individual.groups is not None:
        return read_groups(individual.groups, num_examples, len(individual.epsilons))
    if len(individual.shares) != len(individual.epsilons):
        raise UserError(
            f"individual.shares={list(individual.shares)} must be one for each of individual.epsilons={list(individual.epsilons)}"
        )
    return draw_groups(num_examples, individual.shares, run.seed)


def teachers_of(total: int, sizes: np.ndarray, *, apart: bool) -> list[int]:
    """n_j: as many teachers for each group as it has of the examples; all in one number where they are not kept apart."""
    if not apart:
        return [total]
    borders = np.round(np.cumsum(sizes) / sizes.sum() * total).astype(int)
    return np.diff(borders, prepend=0).tolist()


def release(
    sums: np.ndarray,
    plan: VotePlan,
    ledger: Ledger,
    key: bytes,
    facts: dict[str, Any],
    groups: np.ndarray,
    *,
    secure: bool = False,
) -> np.ndarray:
    """Charge all answers, then add their noise. What a run that was cut off has charged is answered again, for nothing.

    Returns:
        ``[Q, C]``, the noisy sums.

    Raises:
        UserError: other votes are charged already, or more noise than its grid is fine enough for; nothing is charged then.
    """
    noisy = torch.from_numpy(sums).clone()
    check_multiplier(plan.sigma / (min(plan.moves) * VOTE_MOVE), noisy.numel())
    found = fingerprint(key, facts | {"sigma": plan.sigma}, [noisy])
    if (charged := ledger.fingerprints(0)) and found not in charged:
        raise UserError(
            f"{ledger.path.parent} is charged for other votes: an earlier run was cut off, and its teachers answered "
            "otherwise (on another machine?). Change the seed, or move the folder away and count its epsilon too"
        )
    membership = hashlib.sha256(groups.astype("<i8").tobytes()).hexdigest()
    attempt = ledger.begin_step(0, plan.charge(membership), found)
    use = f"noise of votes {found} {attempt}"
    kind = SecureGenerator if secure else KeyedGenerator
    add_gaussian_([noisy], plan.sigma, generator=kind(hmac.digest(key, use.encode(), "sha256")))
    return noisy.numpy()


def privacy_block(plan: VotePlan, ledger: Ledger, run: PateConfig, notes: Sequence[str]) -> dict[str, Any]:
    """What the record says of privacy, with what a reader must know; ε is that of the ledger, of the least protected group."""
    by_group = ledger.epsilons_by_budget(plan.delta)
    block: dict[str, Any] = {
        "epsilon": ledger.epsilons(plan.delta), "delta": plan.delta, "accountant": plan.accountant,
        "noise_multiplier": plan.sigma / (max(plan.moves) * 2**0.5), "sigma_new": None, "sigma_b": None,
        "sample_rate": plan.rate, "steps": plan.queries, "sampling": "poisson" if plan.rate < 1 else "none",
        "released": ["answers to queries"], "neighbouring": NEIGHBOURS,
        "events": [encode(event) for event in ledger.events()],
        "notes": [
            "the unit of privacy is one example",
            *notes,
            "answers are charged independently of the votes: no data-dependent bound is used",
            describe(run.privacy.secure),
        ],
    }  # fmt: skip
    if run.individual.epsilons:
        block["notes"].append("who is in which group is taken to be public")
        block["individual"] = {
            "method": plan.method,
            "groups": [
                {"target": target, "moves": move, "epsilon": spent}
                for target, move, spent in zip(plan.epsilons, plan.moves, by_group, strict=True)
            ],
        }
    if run.privacy.release != "strict":
        block["notes"].append(
            "the SHA-256 of the training data, times, and what details.data_notes counted on the training data are outside the "
            "guarantee: keep them to yourself"
        )
    if run.privacy.noise_seed is not None:
        block["notes"].append("the noise is from a fixed seed: the guarantee holds only while it is secret")
    return block


def show(summary: dict[str, Any], console: Console) -> None:
    """The numbers that matter."""
    metrics, privacy = summary["metrics"], summary["privacy"]
    lines = [f"{name:<15} {value:.4f}" for name, value in metrics.items()]
    for name in ACCOUNTANTS:
        value = privacy["epsilon"][name]
        decides = "  (decides)" if name == privacy["accountant"] else ""
        lines.append(f"{'ε ' + name:<15} {upwards(value)}{decides}")
    for number, group in enumerate(privacy.get("individual", {}).get("groups", []), start=1):
        lines.append(
            f"  group {number}: target {group['target']:g}, spent {upwards(group['epsilon'][privacy['accountant']])}"
        )
    console.print("\n".join(lines), markup=False)


def _signature(run: PateConfig) -> str:
    """Ten hex characters of everything that changes the result, but for the seed."""
    ignored = ("seed", "data.root", "data.cache", "runtime.runs_dir", "runtime.threads")
    kept = {key: value for key, value in flattened(asdict(run)) if key not in ignored}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]


if __name__ == "__main__":
    main()
