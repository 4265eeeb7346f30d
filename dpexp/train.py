"""``python -m dpexp.train task=sst2 clip=adaptive_perlayer``: train, evaluate, record."""

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from dpexp import provenance, record, siblings, statement
from dpexp.config import hydra_entry, run_folder, signature, to_dict
from dpexp.config.sweeps import Result, in_multirun
from dpexp.durable import flattened, write_atomic, write_json
from dpexp.errors import INTERRUPTED, UserError
from dpexp.importing import file_of
from dpexp.models import ModelBundle, build_tokenizer
from dpexp.models.precision import slowdown
from dpexp.parallel import ALONE, Ranks, joined, started_by_torchrun
from dpexp.privacy.caveats import noise_that_follows, pointless
from dpexp.privacy.keys import COPIED, KEY, Keys, delete_key, open_keys
from dpexp.privacy.shown import upwards
from dpexp.schemas import RunConfig
from dpexp.schemas.declared import declared_units
from dpexp.tasks import Task, build_task
from dpexp.tasks.features import freeze
from dpexp.tasks.users import by_user, read_users
from dpexp.trackers import tells_all, tracking, what_is_told
from dpexp.training.batching import Sampler
from dpexp.training.export import export, write_card
from dpexp.training.identity import check_examples, refuse_other_data
from dpexp.training.interrupt import end_like_ctrl_c
from dpexp.training.loop import Outcome, Trainer
from dpexp.training.planning import budget_groups, build_plan, build_sampler, choose_device, number_of_steps
from dpexp.training.progress import Progress, summary_table
from dpexp.training.state import disk_errors, exclusive


@hydra_entry("train")
def main(run: RunConfig) -> dict[str, float]:
    """Train, evaluate, write a record. An interrupted run goes on, a finished one is shown again."""
    refuse_misfits(run)
    if run.runtime.dry_run:
        return dry_start(run, Console(highlight=False, soft_wrap=True))
    with joined(run.runtime.device) as ranks:
        return run_together(run, ranks)


def run_together(run: RunConfig, ranks: Ranks) -> dict[str, float]:
    """Run on all processes that train together: rank 0 holds the folder, writes and speaks."""
    folder = run_folder(run)
    console = Console(highlight=False, soft_wrap=True, quiet=not ranks.writes)
    end_like_ctrl_c()
    # two jobs of a grid may be one run: the second one is told what the first one found
    told = f"waiting for another job that has these settings: {folder} is in use"
    wait_for = partial(console.print, told, markup=False) if in_multirun() and not ranks.several else None
    try:
        with disk_errors(folder), contextlib.ExitStack() as held:

            def begin() -> dict[str, Any] | None:
                held.enter_context(exclusive(folder, wait_for))
                if known := record.finished_summary(folder):
                    return known
                held.enter_context(record.failures(run, folder))
                return None

            known = ranks.once(begin)
            summary = train(run, folder, console, ranks) if known is None else known
            if not run.privacy.keep_key and ranks.writes:
                delete_key(folder)
    except KeyboardInterrupt:
        # before the first step, after the last one, or a second time
        console.print(how_to_resume(folder), markup=False)
        sys.exit(INTERRUPTED)
    if known is None:
        return result(summary, run.task.metric)
    if ranks.writes and statement.declare_trials(summary, run.trials, run.trials_law):
        write_json(folder / "summary.json", summary)
        write_card(summary, folder / "model")
    report_finished(summary, folder, console, run)
    return result(summary, run.task.metric)


def result(summary: dict[str, Any], metric: str) -> Result:
    """What a job of a grid gives back: its metrics, and ε by the accountant that decided."""
    privacy = summary["privacy"]
    return Result(summary["metrics"], metric, privacy["epsilon"].get(privacy.get("accountant")))


def dry_start(run: RunConfig, console: Console) -> dict[str, float]:
    """Say whether the run would start here.

    Raises:
        UserError: it would not, with what is missing.
    """
    from dpexp.dry import dry_run

    if missing := dry_run(run, console, in_multirun()).missing:
        raise UserError(f"this run can't start here: {'; '.join(missing)}")
    return {}


def train(run: RunConfig, folder: Path, console: Console, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Train one run from where its folder stands. Returns the summary; exits with 130 where it is interrupted."""
    trials, law = ranks.once(lambda: statement.trials_of(run, folder / "config.yaml"))
    run = replace(run, trials=trials, trials_law=law)
    settings = to_dict(run)
    # a machine may have its copy of the data, and its cache, in a place of its own; the data themselves are compared below
    ranks.agree("the configuration", settings | {"data": settings["data"] | {"root": None, "cache": None}})
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    ranks.once(lambda: write_atomic(folder / "config.yaml", text))
    if run.runtime.parallel == "fsdp" and not all(ranks.gather((folder / "config.yaml").exists())):
        raise ranks.told_once(
            f"not all processes see {folder}, and with runtime=fsdp each writes its part of a checkpoint there: choose a folder "
            "that all machines see with runtime.runs_dir, or runtime=ddp, of which rank 0 alone writes"
        )
    # gradients of confident examples underflow, which makes a CPU a hundred times slower
    torch.set_flush_denormal(True)
    device = choose_device(run.runtime.device)
    if run.runtime.threads:
        torch.set_num_threads(run.runtime.threads)

    # What is learnt from, and what learns.
    scale = run.scale.name
    tokenizer = build_tokenizer(run.model, scale=scale)
    # what one process downloads or keeps in a cache, the others find there
    task = ranks.first(lambda: build_task(run.task, run.data, scale, tokenizer, run.seed))
    source = task

    def build() -> ModelBundle:
        return source.build_network(run.model, run.peft, scale=scale, seed=run.seed, tokenizer=tokenizer)

    bundle = ranks.first(build)
    ranks.agree("the data", task.data.sha256)

    learner = bundle
    if run.model.frozen_features:
        if run.unit.name == "user":
            # what is wrong with the users is told before the encoder has read every row
            read_users(run, len(task.train))
        texts = task
        task, learner = ranks.first(
            lambda: freeze(texts, bundle, run.data, device, run.runtime.precision, private=run.clip.private)
        )

    task = by_user(run, task)
    ranks.agree("who gave which rows", task.data.sha256)

    # the batch of a file that was not counted (scale=own) may be more than there is
    if declared_units(run) is None and run.optim.batch_size > task.num_examples:
        console.print(
            f"note: optim.batch_size={run.optim.batch_size:g} is more than the {task.num_examples} {run.unit.name}s that were "
            "counted: every step takes all of them. data.num_examples=N makes the settings of scale=own follow from N",
            markup=False,
        )
        run = replace(run, optim=replace(run.optim, batch_size=float(task.num_examples)))

    def keys() -> Keys:
        found = ranks.once(lambda: open_keys(folder, run.privacy.noise_seed, f"{signature(run)} {run.seed}"))
        if run.task.kind == "custom":
            # whose hash may be anything
            check_examples(ranks, source.train, found.run)
        places = run.individual.name != "none" or run.privacy.bands != "1"
        ranks.once(
            lambda: refuse_other_data(
                folder, found.run, task.data.sha256, bundle.weights_sha256, places=places
            )
        )
        return found

    trainer, outcome = trained(
        run, task, learner, folder, console, keys, trainer_for(run, build), ranks=ranks
    )
    ranks.once(lambda: refuse_divergence(run, outcome))
    summary = ranks.once(lambda: summarise(run, trainer, outcome, bundle))
    trainer.detach()

    whole = trainer.gathered(bundle)

    def keep() -> None:
        export(whole, summary, folder / "model", task.labels)
        write_json(folder / "summary.json", summary)

    ranks.once(keep)
    show(summary, folder, console)
    return summary


def trained(
    run: RunConfig,
    task: Task,
    bundle: ModelBundle,
    folder: Path,
    console: Console,
    keys: Callable[[], Keys],
    kind: Callable[..., Trainer] = Trainer,
    *,
    ranks: Ranks = ALONE,
    sampled: Callable[[Sampler], Sampler] = lambda sampler: sampler,
    watch: Callable[[Trainer], None] = lambda trainer: None,
) -> tuple[Trainer, Outcome]:
    """Train by the plan that follows from the configuration and N. Exits with 130 where it is interrupted.

    Args:
        run, task, bundle, folder, ranks: see `Learner`.
        console: where to say what is about to happen, and how it goes on.
        keys: opens the secrets of the run, once there is a plan.
        kind: see `trainer_for`.
        sampled: what is made of the plan's sampler.
        watch: is given the trainer before its first step.

    Returns:
        The trainer, its model with the clipper attached, and how the training ended.
    """
    total = task.num_examples
    steps = number_of_steps(run, total)
    groups = budget_groups(run, total)
    plan = build_plan(run, total, steps, groups)
    secrets = keys()
    sampler = sampled(build_sampler(run, plan, total, secrets.draws, groups))
    device = choose_device(run.runtime.device)
    with tracking(run, to_dict(run), folder) if ranks.writes else contextlib.nullcontext() as tracker:
        metrics = record.Metrics(
            folder / "metrics.jsonl", run.privacy.release == "strict", tracker, tells_all(run), ranks.writes
        )
        trainer = kind(
            run, task, bundle, plan,
            steps=steps, sampler=sampler, keys=secrets, signature=signature(run),
            folder=folder, device=device, metrics=metrics, groups=groups, ranks=ranks,
        )  # fmt: skip
        watch(trainer)
        announce(run, trainer, folder, console)
        delta = plan.delta if plan else None
        with Progress(steps, trainer.step, delta, device, console, strict=record.withheld(run)) as progress:
            outcome = trainer.train(progress)
    if outcome.status == "interrupted":
        console.print(f"{outcome.step} of {steps} steps are done; {how_to_resume(folder)}", markup=False)
        sys.exit(INTERRUPTED)
    return trainer, outcome


def trainer_for(run: RunConfig, build: Callable[[], ModelBundle]) -> Callable[..., Trainer]:
    """The trainer of the runtime; ``build`` makes the whole model again, for one that trains a part of it."""
    if run.runtime.parallel != "pipeline":
        return Trainer
    from dpexp.training.stages import StageTrainer

    return partial(StageTrainer, build=build)


def refuse_misfits(run: RunConfig) -> None:
    """Refuse several processes for a runtime that knows of one, and one for a runtime of several.

    Raises:
        UserError: torchrun has started several, or none for stages.
    """
    if run.runtime.parallel == "pipeline" and started_by_torchrun() == 1:
        raise UserError(
            "runtime=pipeline needs a process for each stage: torchrun --nproc-per-node 2 -m dpexp.train runtime=pipeline …; one "
            "process trains the same with clip=perdevice and another runtime"
        )
    if run.runtime.parallel == "none" and (started := started_by_torchrun()) > 1:
        raise UserError(
            f"torchrun has started {started} processes, and runtime.parallel=none is for one: choose runtime=ddp, or start "
            "python -m dpexp.train without torchrun"
        )


def refuse_divergence(run: RunConfig, outcome: Outcome) -> None:
    """Let a run whose loss is no number any more fail, without model and card. (`Trainer.save` looks at the weights.)

    Raises:
        UserError: the loss on dev is NaN or infinite.
    """
    if lost := [k for k, v in outcome.metrics.items() if k.startswith("loss") and not math.isfinite(v)]:
        raise UserError(
            f"the run diverged: after step {outcome.step} its {lost[0]} on dev is NaN or infinite. No model was exported, and "
            f"the steps stay charged: lower optim.lr={run.optim.lr:g}"
        )


def summarise(run: RunConfig, trainer: Trainer, outcome: Outcome, bundle: ModelBundle) -> dict[str, Any]:
    """The record of a finished run; epsilon is that of the ledger."""
    plan, ledger = trainer.plan, trainer.ledger
    spent, by_budget = {}, []
    if ledger is not None and plan is not None:
        spent = plan.guaranteed(ledger.epsilons(plan.delta))
        by_budget = ledger.epsilons_by_budget(plan.delta) if plan.budgets is not None else []
    charged = ledger.steps_charged if ledger is not None else 0
    return record.summarise(
        run,
        trainer.task,
        privacy=statement.privacy_block(
            run,
            plan,
            spent,
            trainer.num_groups,
            charged,
            by_budget,
            trainer.task.data.notes,
            trainer.keys.copied,
            ledger.events() if ledger is not None else (),
            trainer.stepper.unproven,
            ledger.charged_again if ledger is not None else 0,
        ),
        metrics=outcome.metrics,
        performance=outcome.performance,
        wall_s=outcome.wall_s,
        status=outcome.status,
        details=trainer.details() | {"model_source": bundle.source, "config": to_dict(run)},
    )


def announce(run: RunConfig, trainer: Trainer, folder: Path, console: Console) -> None:
    """What is about to happen, in a few lines."""
    plan, task = trainer.plan, trainer.task
    lines = [
        f"{run.task.name}  {run.model.name}  {run.clip.name}  scale={run.scale.name}  seed={run.seed}",
        f"data: {task.data.name} ({task.data.source}), N = {task.num_examples}"
        + (f" users, at most {run.unit.rows} rows of each in a step" if run.unit.name == "user" else ""),
        *(f"  {note}" for note in record.data_notes(task, strict=run.privacy.release == "strict")),
        f"steps: {trainer.steps}, expected batch {trainer.expected_batch:g}, {trainer.batches_in_words}, "
        f"{provenance.device_name(trainer.device)}",
    ]
    if trainer.ranks.several:
        lines.append(
            f"{trainer.ranks.size} processes share every batch (runtime.parallel={run.runtime.parallel})"
        )
    if plan is None:
        lines.append("privacy: none")
    else:
        lines.append(
            f"privacy: noise multiplier {plan.noise_multiplier:.4f}, delta {upwards(plan.delta, '.3g')}, {plan.sampling} "
            f"sampling, clipping groups: {trainer.num_groups}"
        )
        lines += [f"note: {sentence}" for sentence in pointless(plan)]
        if plan.budgets is not None:
            lines += [
                f"  group {g + 1}: {size} examples, ε {target:g}, sampling rate {rate:.4g}, thresholds × {scale:.4g}"
                for g, (size, target, rate, scale) in enumerate(
                    zip(
                        plan.budgets.sizes,
                        plan.budgets.epsilons,
                        plan.budgets.rates,
                        plan.budgets.scales,
                        strict=True,
                    )
                )
            ]
        lines += noise_that_follows(plan)
        if not plan.schedule.adaptive and (last := plan.sigma(plan.steps - 1)) != plan.noise_multiplier:
            lines.append(
                f"noise over time: schedule={plan.schedule.name}, noise multiplier {last:.4f} in the last step"
            )
    times = slowdown(run.runtime.precision, trainer.device)
    if times > 2:
        lines.append(
            f"note: this processor has no fast instructions for {run.runtime.precision}: products of matrices take {times:.0f} "
            "times as long as with runtime.precision=fp32"
        )
    if told := what_is_told(run):
        lines.append(told)
    if not trainer.step and (beside := siblings.sentence(run, to_dict(run), folder, plan)):
        lines.append(beside)
    if trainer.keys.copied:
        lines.append(f"note: {COPIED}")
    if trainer.step:
        lines.append(f"going on after step {trainer.step}, from the checkpoint in {folder}")
    elif plan is not None:
        lines.append(
            "the first step also proves what is clipped, and measures: it takes longer than the others"
        )
    console.print("\n".join(lines), markup=False)


def how_to_resume(folder: Path) -> str:
    """What to do after an interruption."""
    return f"interrupted. {folder} can be resumed: run the same command again\n  {provenance.command_line()}"


def report_finished(
    summary: dict[str, Any], folder: Path, console: Console, run: RunConfig | None = None
) -> None:
    """This run is done already: show what it found, and whether the code and the data that are asked for are still the same."""
    show(summary, folder, console)
    notes = []
    if not (folder / "model").is_dir():
        again = (
            f"Delete {folder / 'summary.json'} and run the same command again: it is exported from the last checkpoint, and "
            "nothing is trained or charged"
            if (folder / KEY).exists()
            else "Put a copy back; or change the seed and train again, which is charged anew (privacy.keep_key=true would have "
            "kept what exporting it again takes)"
        )
        notes.append(f"the folder of the model is gone. {again}")
    fresh = f"change the seed or move {folder} away"
    if changed := provenance.code_changes(summary):
        notes.append(f"{changed}. For a fresh run, {fresh}")
    for setting in elsewhere(summary, run) if run else ():
        notes.append(
            f"this run read its data with {setting}, and other data may be where you ask for it. To train on that, {fresh}"
        )
    for file in (run.data.train, run.data.dev) if run else ():
        if file and newer(Path(file), folder / "config.yaml"):
            notes.append(
                f"{file} was written after this run had begun, and the model knows what it held before. To train on it as it is, "
                f"{fresh}"
            )
    for code in (run.clip.rule, run.optim.factory, run.model.factory, run.task.factory) if run else ():
        if (mine := file_of(code)) and newer(mine, folder / "config.yaml"):
            notes.append(
                f"{mine} was written after this run had begun, and this result is of what {code} was before. To train with it as "
                f"it is, {fresh}"
            )
    done = f"this run is finished: nothing was trained again; its record is {folder / 'summary.json'}"
    console.print("\n".join([done, *(f"note: {note}" for note in notes)]), markup=False)


def elsewhere(summary: dict[str, Any], run: RunConfig) -> list[str]:
    """What a finished run was told of where its data lie, as far as the same run asks for it in another place now.

    Such settings make no other run, so that a published data set may lie anywhere.
    """
    if summary["data"]["source"] not in ("files", "hub"):
        return []
    then, now = (
        dict(flattened(settings)) for settings in (summary["details"].get("config", {}), to_dict(run))
    )
    return [
        f"{key}={value}"
        for key, value in then.items()
        if key.startswith(("data.root", "data.source", "task.files.", "task.hub_")) and now.get(key) != value
    ]


def newer(file: Path, other: Path) -> bool:
    """Whether both are there, and the first was written after the second."""
    return file.exists() and other.exists() and file.stat().st_mtime > other.stat().st_mtime


def show(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """The final table, the conditions of the guarantee, and where everything is."""
    console.print(summary_table(summary))
    for note in summary["privacy"]["notes"]:
        console.print(f"- {note}", markup=False)
    # of a grid its own table says so
    if not in_multirun() and (others := siblings.also_tried(summary, folder)):
        console.print(others, markup=False)
    console.print(f"record: {folder / 'summary.json'}\nmodel:  {folder / 'model'}", markup=False)


if __name__ == "__main__":
    main()
