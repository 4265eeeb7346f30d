"""What stands behind a `dpexp.PrivacyEngine`: the folder, the clipper, the ledger and the steps of one run, put together."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpexp import provenance
from dpexp.clipping import attach
from dpexp.clipping.distributed import silent
from dpexp.parallel import ALONE, Ranks
from dpexp.parallel.replicas import made_same
from dpexp.privacy.keys import LEDGER, Keys, open_keys
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.shown import upwards
from dpexp.training.batching import sampler_for
from dpexp.training.decisions import Decisions
from dpexp.training.earlier import also_tried, learnt_before, remembering, taught
from dpexp.training.export import summary_of, write_card
from dpexp.training.identity import (
    check_examples,
    check_optimizers,
    data_identity,
    facts_of,
    recognise,
    refuse_other_ledgers,
    settings_of,
)
from dpexp.training.own_loop.checkpoints import Checkpoints, give_own_memory
from dpexp.training.own_loop.keeping import Kept
from dpexp.training.own_loop.loop import OwnLoop
from dpexp.training.own_loop.planned import Planned
from dpexp.training.own_loop.rows import equal_rows, fitted_to_itself, tensors_of
from dpexp.training.release import Release, build_policy
from dpexp.training.state import disk_errors, exclusive
from dpexp.training.steps import Steps
from dpexp.training.sums import not_finite
from dpexp.training.watching.guards import GuardedOptimizer

IDLE = (
    "{name} trains ({count} such parameters), and no loss of the first batch went through it: noise alone moves it. Freeze it "
    "with requires_grad_(False), or take torch.no_grad() and detach() away, unless later batches use it (this is known without "
    "noise: keep it to yourself)"
)


class OwnRun:
    """A run that is begun, or gone on with, and open until it is closed or dropped.

    Args:
        model: without wrappers.
        optimizer, scheduler: see `dpexp.PrivacyEngine`.
        dataset: the examples.
        folder: of the run.
        planned: what it is to be.
        wrappers: every DistributedDataParallel around the model, or in it.
        ranks: the processes that train together.
        engine, fixed_length, data_name, keep: see `dpexp.PrivacyEngine`.

    Raises:
        UserError: what cannot be done privately or exactly; the folder is then given back.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        folder: Path,
        planned: Planned,
        *,
        scheduler: Any,
        wrappers: Sequence[DistributedDataParallel],
        ranks: Ranks,
        engine: str,
        fixed_length: bool,
        data_name: str | None,
        keep: Mapping[str, Any] | None,
    ):
        self.model, self.dataset, self.folder = model, dataset, folder
        self.planned, self.ranks = planned, ranks
        plan, clip, units, numbers = planned.plan, planned.config.clip, planned.units, planned.numbers
        self._kept = Kept(keep)
        self.optimizer = GuardedOptimizer(optimizer, scheduler, model)
        self._open = ExitStack()
        self._held = self._open.enter_context(ExitStack())
        self._open.callback(self.optimizer.release)
        try:
            self.keys = ranks.once(self._take_folder)
            key = self.keys.draws
            self._open.enter_context(silent(wrappers))
            give_own_memory(model)
            made_same(ranks, model)
            self._data = data_identity(dataset, data_name)
            settings = settings_of(plan, clip, model, optimizer, self._data + units.identity, self.keys.run)
            ranks.agree("what is trained on what", settings)
            check_optimizers(ranks, optimizer, model)
            if data_name is not None:
                # which says nothing of their order
                check_examples(ranks, dataset, self.keys.run)
            # what cannot be clipped leaves no settings behind, with which a mended model would be compared
            self.clipper = attach(
                model, clip.groups, clip.clip_norm, clip.rule, engine,
                rows_per_example=numbers.rows_per_example, fixed_length=fixed_length,
            )  # fmt: skip
            self.clipper.reduces = False
            self._open.callback(self.clipper.detach)
            with disk_errors(folder):
                identity = ranks.once(lambda: recognise(folder, settings))
            self.device = next(p for p in model.parameters() if p.requires_grad).device
            self.ledger = Ledger(
                folder / LEDGER, self.keys.run, ranks if ranks.several else None, times=False
            )
            self.policy = build_policy(clip, len(self.clipper.groups))
            decisions = Decisions(folder / "decisions.json", provenance.device_name(self.device), ranks=ranks)
            if (memory := decisions.of_rank("engine")) is not None:
                self.clipper.recall(memory)
            release = Release(
                plan, self.clipper, self.policy, self.ledger,
                key=key, allocation=clip.allocation, secure=planned.config.privacy.secure,
            )  # fmt: skip
            self.steps = Steps(
                model, self.optimizer,
                sampler=sampler_for("poisson", plan.num_examples, plan.expected_batch_size, key, bands=plan.bands),
                key=key, expected_batch=plan.expected_batch_size, policy=self.policy, release=release, decisions=decisions,
                loss_scale=numbers.loss_scale, on_taken=_weakly(self._taken), data=dataset, ranks=ranks, shown=True,
            )  # fmt: skip
            self._tell_of_data()
            self.loop = OwnLoop(
                model, self.optimizer, dataset, units, self.steps, self.clipper,
                wrappers=wrappers, rows_per_example=numbers.rows_per_example, planned=plan.steps, folder=folder,
                on_asked=_weakly(self._asked),
                facts=partial(facts_of, self.device, run=identity, code=provenance.code_hash(), engine=engine),
            )  # fmt: skip
            self._open.callback(self.loop.close)
            self._open.callback(remembering(self.steps.parameters, self.ledger, folder))
            # whether a checkpoint waits for what the loop does behind its step
            self._due = False
            last = folder / "checkpoint"
            self.checkpoints = Checkpoints(
                last, identity, model, self.optimizer, self.policy, self.steps, self._kept, self.ledger, ranks,
            )  # fmt: skip
            if ranks.once((last / "latest.json").exists):
                self.load()
            else:
                # the first weights: a run that is cut off early begins with them again
                self.checkpoints.save(None, ranks)
        except BaseException:
            self._open.close()
            raise
        weakref.finalize(self, self._open.close)
        self._broken = False
        self._again = self.ledger.charged_again

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.steps.taken >= self.planned.plan.steps

    def save(self, folder: str | Path | None = None) -> None:
        """Write a checkpoint; see `dpexp.PrivacyEngine.save`."""
        self.loop.refuse_closed()
        if self.steps.together.sharded:
            self.checkpoints.save(folder, self.ranks)
        elif self.ranks.writes:
            self.checkpoints.save(folder, ALONE)

    def load(self, folder: str | Path | None = None) -> None:
        """Go on from a checkpoint; see `dpexp.PrivacyEngine.load`."""
        self.loop.refuse_closed()
        self.checkpoints.load(folder)
        self._due = False
        self.ranks.once(self._hold)

    def write_card(self, folder: Path) -> None:
        """Write PRIVACY.md; see `dpexp.PrivacyEngine.write_card`."""
        planned = self.planned
        if (note := also_tried(self._data, self.folder, planned.config.trials)) is not None:
            warnings.warn(note, stacklevel=3)
        of = planned.config, planned.plan, self.ledger, self.clipper, self.model, self.dataset
        write_card(summary_of(*of, copied=self.keys.copied, unproven=self.steps.unproven), folder)

    def close(self) -> None:
        """Give model, optimiser and folder back."""
        self._due, self.loop.closed = False, True
        self._open.close()

    def _tell_of_data(self) -> None:
        """Warn of what the weights, or the rows, may hold that the guarantee does not cover."""
        goes_on = self.folder if self.ledger.steps_charged else None
        before = learnt_before(self.model, getattr(self.model, "name_or_path", ""), goes_on)
        for note in (before, fitted_to_itself(tensors_of(self.dataset))):
            if note is not None:
                warnings.warn(f"not proven: {note}", stacklevel=5)
                self.clipper.notes.append(note)
        # their number is private: for the eyes of who holds the data
        by_user = self.planned.config.unit.name == "user"
        if not by_user and (copies := equal_rows(self.dataset)) is not None:
            warnings.warn(copies, stacklevel=5)

    def _taken(self) -> None:
        """After every step."""
        taken, every = self.steps.taken, self.planned.numbers.checkpoint_every
        taught(self._data, self.folder)
        # each told where the loop calls `engine.step`
        if taken == 1 and self.ranks.writes and (idle := self._idle()):
            warnings.warn(IDLE.format(name=idle[0], count=len(idle)), stacklevel=7)
        again = self.ledger.charged_again
        if again > self._again and self.ranks.writes:
            plan = self.planned.plan
            warnings.warn(
                f"step {taken} was charged a second time: since the interruption something has changed (code, data, "
                "machine, threads, number of processes, physical batch size), and it drew a fresh sample and fresh noise. "
                f"Epsilon is {upwards(self.ledger.epsilon(plan.delta, plan.accountant))} so far",
                stacklevel=7,
            )
        self._again = again
        if not self._broken and not math.isfinite(float(self.steps.sums.loss)):
            self._broken = True
            warnings.warn(not_finite(taken), stacklevel=7)
        if taken == 1:
            # the optimizer has a state by now: that it cannot be kept is known before the steps until the next checkpoint
            self.checkpoints.check()
        self._due = self.finished or bool(every and taken % every == 0)
        if self._due and (self.finished or not self._kept.objects):
            self.checkpoints.save(None, self.ranks)
        if self.finished:
            self.ranks.once(self._hold)

    def _asked(self, ended: bool = False) -> None:
        """When the loop asks for its next batch, or has none left: what it does behind a step (a learning rate, weights that it
        clamps, what it keeps) is done by now."""
        # behind a loop of some steps more may follow, such as a scheduler of epochs
        waits = ended and self._kept.objects and not self.finished
        if self._due and not waits and self.checkpoints.outdated():
            self.checkpoints.save(None, self.ranks)

    def _idle(self) -> list[str]:
        """Name what trains and met no example of the first batch; nothing where the clipper does not know the uses."""
        rows = self.clipper.coverage()
        idle = [row.parameter for row in rows if not (row.operation or row.method)]
        return idle if len(idle) < len(rows) else []

    def _hold(self) -> None:
        """Keep others out of the folder while there are steps to take; a notebook's cell may run again after the last one."""
        self._held.close()
        if not self.finished:
            self._held.enter_context(exclusive(self.folder))

    def _take_folder(self) -> Keys:
        self._held.enter_context(exclusive(self.folder))
        refuse_other_ledgers(self.folder)
        with disk_errors(self.folder):
            return open_keys(self.folder, self.planned.numbers.noise_seed)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method of an object that this does not keep alive: a run that is dropped gives its folder back at once."""
    weak = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        if (bound := weak()) is not None:
            bound(*given)

    return call
