"""A configured run's model, and how it takes one step: what `dpexp.training.loop` repeats until the end."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp import provenance, record
from dpexp.clipping.base import AnyClipper, Rows
from dpexp.clipping.methods.local_training import LocalClipper
from dpexp.clipping.methods.whole import VectorClipper
from dpexp.clipping.thresholds import FixedThresholds
from dpexp.errors import UserError
from dpexp.importing import file_of
from dpexp.models import rgp
from dpexp.models.precision import autocast
from dpexp.models.trainable import evaluation_mode, train_mode
from dpexp.parallel import ALONE, Ranks
from dpexp.parallel.replicas import made_same
from dpexp.parallel.sharded import filled, held_whole, shard, skeleton_of
from dpexp.privacy.keys import LEDGER, Keys
from dpexp.privacy.ledger import Ledger
from dpexp.training.clippers import build_clipper
from dpexp.training.decisions import Decisions, machine_file, machine_name
from dpexp.training.earlier import learnt_before
from dpexp.training.feedback import Feedback, build_feedback
from dpexp.training.identity import facts_of
from dpexp.training.interrupt import Interrupts
from dpexp.training.optimizers.averaging import Averages
from dpexp.training.optimizers.choice import build_optimizer, learning_rate
from dpexp.training.physical import UNTRIED, automatic_size, public_losses
from dpexp.training.release import BudgetSpentError, Release, build_policy
from dpexp.training.searches.base import StepSearch
from dpexp.training.searches.choice import SEARCHES
from dpexp.training.steps import Steps
from dpexp.training.sums import Sums
from dpexp.training.watching.functions import look_at_task

if TYPE_CHECKING:
    from dpexp.models import ModelBundle
    from dpexp.privacy.plan import Plan
    from dpexp.schemas import RunConfig
    from dpexp.tasks.base import Task

log = logging.getLogger(__name__)

FP16_LOSS_SCALE = 2.0**10
# kinds of tasks whose losses are looked at as a whole: a person's own, and those that may leave the model before its end
LOOKED_AT = ("custom", "generation")


class Learner:
    """Takes the steps of one run, and knows nothing of the loop around them.

    Args:
        run: the configuration.
        task: data, losses and metrics.
        bundle: the model; it is moved to `device`.
        plan: the privacy plan. None trains without privacy: same batches, same loop, nothing clipped and no noise.
        steps: number of steps; the plan's own where there is one.
        sampler: `draw(step, attempt)` gives the indices of a step.
        keys: the secrets of the run.
        signature: of the configuration.
        folder: the run's folder; this process holds it.
        device: where to compute.
        groups: `[N]`, which budget each example has; None where all have the same.
        ranks: the processes that train this run together; rank 0 holds the folder and writes.

    Raises:
        UserError: the model can't be clipped exactly.
    """

    RELEASE: type[Release] = Release
    STEPS: type[Steps] = Steps

    def __init__(
        self,
        run: "RunConfig",
        task: "Task",
        bundle: "ModelBundle",
        plan: "Plan | None",
        *,
        steps: int,
        sampler: Any,
        keys: Keys,
        signature: str,
        folder: Path,
        device: torch.device,
        groups: np.ndarray | None = None,
        ranks: Ranks = ALONE,
    ):
        self.ranks = ranks
        self.run, self.task, self.plan = run, task, plan
        self.steps, self.expected_batch = steps, run.optim.batch_size
        self.keys, self.key, self.signature = keys, keys.draws, signature
        self.folder, self.device = folder, device
        self.model = train_mode(bundle.model.to(self.home))
        made_same(ranks, self.model)
        # what could not be proven, in words
        self.notes: list[str] = []
        # what the examples of a batch share of chance in the task, see `Steps.around`
        self.shared: dict[str, str] = {}
        if plan is not None:
            self._note(learnt_before(self.model, bundle.source, folder))
        self.clipper: AnyClipper | None = None
        # while every process has a whole model, and may ask it as often as it likes
        self._losses_seen = plan is not None and run.task.kind in LOOKED_AT and self._look_at_losses()
        self.sharded = run.runtime.parallel == "fsdp" and ranks.several
        if self.sharded:
            self.skeleton = skeleton_of(self.model)
            shard(self.model)
        self.model = self.own_part(self.model)
        self.optimizer = build_optimizer(run.optim, rgp.moved_tensors(self.model))
        rgp.follow(self.model, self.optimizer)
        decay = None if run.optim.uniform_average else run.optim.ema_decay
        self.averages = None if decay == 0 else Averages(rgp.moved_tensors(self.model), decay)
        self.decisions = Decisions(folder / "decisions.json", provenance.device_name(device), ranks=ranks)
        if plan is not None and run.privacy.bands == "auto":
            self._hold_bands(plan.bands)
        self.machine = Decisions(machine_file(), machine_name(device), ranks=ranks)
        self.code = provenance.code_hash()
        named = map(file_of, (run.clip.rule, run.optim.factory, run.model.factory, run.task.factory))
        self.own_code = provenance.own_code(filter(None, named))
        self.ledger: Ledger | None = None
        self.policy = FixedThresholds(torch.zeros(0))
        self.search: StepSearch | None = None
        self.feedback: Feedback | None = None
        # whether a filter has no budget for a step that came up again
        self.exhausted = False
        release = self._private_side(plan) if plan is not None else None
        self.stepper = self.STEPS(
            self.model, self.optimizer,
            sampler=sampler, key=self.key, expected_batch=self.expected_batch, policy=self.policy, release=release,
            decisions=self.decisions, loss_scale=FP16_LOSS_SCALE if run.runtime.precision == "fp16" else 1.0,
            clip_scales=clip_scales_of(plan, groups), ranks=ranks, search=self.search, public=self._public_rows, data=task,
        )  # fmt: skip
        self.stepper.around = self.shared
        self.physical_batch_size = self._physical_batch_size()

    def _hold_bands(self, bands: int) -> None:
        """Keep what ``auto`` has found: with another number, an example could be drawn twice in so many steps."""
        if (begun := self.decisions.get("bands")) not in (None, bands):
            raise UserError(
                f"privacy.bands=auto finds {bands} bands now, and this run has begun with {begun}: other versions of the "
                f"accountants are installed. Install those that it began with, or start a new run with privacy.bands={begun}"
            )
        self.decisions.keep("bands", bands)

    def _private_side(self, plan: "Plan") -> Release:
        """Clip, count and pay by the plan."""
        run, ranks = self.run, self.ranks
        self.ledger = Ledger(
            self.folder / LEDGER,
            self.keys.run,
            ranks if ranks.several else None,
            times=not record.withheld(run),
        )
        self.clipper = self._attach()
        if self._losses_seen:
            self.clipper.losses_are_seen()
        self.clipper.notes += self.notes
        self.notes = self.clipper.notes
        self.policy = build_policy(run.clip, len(self.clipper.groups))
        if run.clip.method != "norm" and not run.clip.adaptive:
            self.policy = FixedThresholds(self.clipper.thresholds)
        release = self.RELEASE(
            plan, self.clipper, self.policy, self.ledger,
            key=self.key, allocation=run.clip.allocation, secure=run.privacy.secure,
        )  # fmt: skip
        self.feedback = build_feedback(plan.schedule, release, run.task.metric)
        if plan.search is not None:
            # it asks for losses without dropout, in a mode that clipping never sees
            with evaluation_mode(self.model):
                self._look_at_losses()
            self.search = SEARCHES[run.search.name](
                run.search, release, self.model, self.losses_of,
                expected_batch=self.expected_batch, largest=run.optim.lr,
            )  # fmt: skip
        return release

    @property
    def home(self) -> torch.device:
        """Where the whole model lies before this process takes its own part."""
        return self.device

    def own_part(self, model: nn.Module) -> nn.Module:
        """What this process trains of the model: all of it."""
        return model

    def _attach(self) -> AnyClipper:
        clipper = build_clipper(
            self.model, self.run.clip, self.run.engine, self.task, self.losses,
            expected_batch=self.expected_batch,
            max_clip_scale=self.plan.max_clip_scale if self.plan is not None else 1.0,
        )  # fmt: skip
        if self.run.clip.method != "norm":
            return clipper
        if (memory := self.decisions.of_rank("engine")) is not None:
            clipper.recall(memory)
        elif (choices := self.machine.get("choices")) is not None:
            # two runs on one machine then add up in the same order
            clipper.recall({"choices": choices})
        return clipper

    def _look_at_losses(self) -> bool:
        """Look at the losses of the task as a whole, what stands behind the model's outputs included.

        Returns:
            Whether they could be compared.

        Raises:
            UserError: what an example loses depends on the others.
        """
        by_user = self.run.unit.name == "user"
        with nullcontext() if self.clipper is None else self.clipper.elsewhere():
            note = look_at_task(self.task, self.model, self.run.seed, self.steps, by_user, self.shared)
        self._note(note)
        return note is None

    def _note(self, note: str | None) -> None:
        if note is not None and note not in self.notes:
            self.notes.append(note)
            log.warning("not proven: %s", note)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self.stepper.taken

    @property
    def num_groups(self) -> int:
        """K; 0 without privacy."""
        return len(self.clipper.groups) if self.clipper is not None else 0

    @property
    def batches_in_words(self) -> str:
        """How a logical batch is cut."""
        return f"physical batch {self.physical_batch_size}"

    def affordable(self) -> bool:
        """Whether the budget covers the next step: always, but where the noise moves with the run."""
        mover = self.search or self.feedback
        if mover is None or self.ledger is None:
            return True
        # what is charged already costs nothing where it is repeated as it was; another attempt of it asks `Release.charge`
        charged = self.step < self.ledger.next_step and not self.exhausted
        return charged or mover.release.plan.affords(self.ledger.event(), self.step)

    def take_step(self, interrupts: Interrupts) -> Sums | None:
        """The next step. None where it was interrupted before it was charged, or the budget does not cover it."""
        step, optim = self.step, self.run.optim
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.steps, optim.lr, optim.lr_schedule, optim.warmup_ratio)
        while (taken := self._tried(interrupts)) is None:
            self._shrink()
        if not taken:
            return None
        if self.averages is not None:
            self.averages.update(step)
        return self.stepper.sums

    def _tried(self, interrupts: Interrupts) -> bool | None:
        """Whether the next step is taken; None where it did not fit into memory.

        The error is gone when this returns, and with it the graph that did not fit.
        """
        try:
            for piece in self.stepper.pieces(self.physical_batch_size, self._facts(), self.task.length):
                # several ranks stop together, behind the step
                if interrupts.requested and not self.ranks.several:
                    self.stepper.clear()
                    return False
                losses = self.losses_of(piece)
                self.stepper.check_seeds()
                self.stepper.add(losses)
        except torch.OutOfMemoryError:
            return None
        except BudgetSpentError:
            self.stepper.clear()
            self.exhausted = True
            return False
        return True

    def losses_of(self, piece: np.ndarray) -> Tensor:
        """`[b]` losses of training examples, as the present step sees them."""
        batch = self.on_device(self.task.collate([self.task.train[int(i)] for i in piece]))
        batch = self.task.augmented(batch, piece, self.run.seed, self.step)
        self.stepper.seeds.made()
        if isinstance(self.clipper, LocalClipper):
            return self.clipper.see(self.on_device(batch))
        return self.losses(batch)

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """`[b]` losses of a collated batch, in the precision of the run."""
        with autocast(self.run.runtime.precision, self.device):
            return self.task.losses(self.model, self.on_device(batch))

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch where the model is."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def _public_rows(self) -> Rows:
        """Gradients of the first examples of the dev set, which is public; without dropout."""
        assert isinstance(self.clipper, VectorClipper)
        count = min(self.run.clip.public_examples, len(self.task.dev))
        if not count:
            raise UserError(f"clip={self.run.clip.name} needs public examples, and the task has no dev set")
        batch = self.on_device(self.task.collate([self.task.dev[i] for i in range(count)]))
        with evaluation_mode(self.model):
            losses = self.losses(self.task.augmented(batch, np.arange(count), self.run.seed, 0))
            return self.clipper.rows(losses)

    def _shrink(self) -> None:
        """Take smaller physical batches. Nothing of this step has been released, so it can be begun again."""
        half = self.physical_batch_size // 2
        if self.run.runtime.physical_batch_size != "auto" or not half or self.ranks.several:
            raise UserError(
                f"out of memory with {self.physical_batch_size} examples at once; nothing of this step was released. "
                + (f"Try runtime.physical_batch_size={half}" if half else "Take a smaller model")
            )
        self.stepper.clear()
        torch.cuda.empty_cache()
        self.physical_batch_size = half
        self.decisions.keep("physical_batch_size", half)

    def _facts(self) -> dict[str, Any]:
        """Everything but the sums themselves that makes a step what it is; see `privacy.fingerprint`.

        The choices that an engine measured are missing on purpose: where they make a difference, it is in the sums, and
        a resumed run knows from the start what the first one found out on its way.
        """
        return facts_of(
            self.device, config=self.signature, seed=self.run.seed, code=self.code, own_code=self.own_code,
            data=self.task.data.sha256, engine=self.run.engine.name, physical_batch_size=self.physical_batch_size,
            precision=self.run.runtime.precision,
        )  # fmt: skip

    def _physical_batch_size(self) -> int:
        """As configured, or found once per machine and kept: a resumed run must add up the same pieces."""
        if isinstance(self.clipper, LocalClipper):
            # they are trained one after the other, and no user's texts are padded to another's
            return 1
        asked = str(self.run.runtime.physical_batch_size)
        if asked != "auto":
            return int(asked)
        if self.sharded and self.device.type == "cuda":
            # a size is tried by going back, which takes all ranks at once
            return UNTRIED
        if (known := self.decisions.get("physical_batch_size")) is None:
            stepper = self.stepper
            if self.clipper is not None:
                # some ways of clipping go back within a step alone; each step prepares anew, with a seed of its own
                self.clipper.prepare(0, self._public_rows)
            with held_whole(self.model) if self.sharded else nullcontext():
                size = automatic_size(
                    public_losses(self.task, self.run.seed, self.losses),
                    stepper.backward, stepper.parameters, self.device, self.expected_batch,
                )  # fmt: skip
            known = min(self.ranks.gather(size))
            self.decisions.keep("physical_batch_size", known)
        return int(known)

    def detach(self) -> None:
        """Give the model back as it was, trained: with the averages of its weights, where these were asked for."""
        if self.averages is not None:
            self.averages.apply()
        if self.clipper is not None:
            if choices := self.clipper.remember().get("choices"):
                self.machine.keep("choices", (self.machine.get("choices") or {}) | choices)
            self.clipper.detach()

    def gathered(self, bundle: "ModelBundle") -> "ModelBundle":
        """The bundle with the trained model whole again, on rank 0; all ranks call it, after `detach`."""
        if not self.sharded:
            return bundle
        whole = filled(self.skeleton, self.model, self.ranks.writes)
        return bundle if whole is None else replace(bundle, model=whole)


def clip_scales_of(plan: "Plan | None", groups: np.ndarray | None) -> Tensor | None:
    """`[N]` factors of the thresholds, float64; None where they are 1 for every example."""
    if plan is None or plan.budgets is None or groups is None or set(plan.budgets.scales) == {1.0}:
        return None
    return torch.tensor(plan.budgets.scales, dtype=torch.float64)[torch.from_numpy(groups)]
