"""The training loop of a configured run: its steps (`dpexp.training.learner`), evaluation, checkpoints, and lines of metrics."""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpexp import provenance, record
from dpexp.clipping.methods.whole import VectorClipper
from dpexp.errors import UserError
from dpexp.models import rgp
from dpexp.parallel.sharded import held_whole
from dpexp.parallel.shards import part_here
from dpexp.parallel.sharing import sharing
from dpexp.training import state
from dpexp.training.analysis import OutputAnalysis
from dpexp.training.best import Best
from dpexp.training.evaluation import evaluate
from dpexp.training.interrupt import Interrupts
from dpexp.training.learner import Learner
from dpexp.training.logbook import Logbook
from dpexp.training.progress import Progress
from dpexp.training.sums import Sums, not_finite

if TYPE_CHECKING:
    from dpexp.models import ModelBundle
    from dpexp.privacy.plan import Plan
    from dpexp.schemas import RunConfig
    from dpexp.tasks.base import Task


@dataclass
class Outcome:
    """How `Trainer.train` ended: `status` is ``finished`` or ``interrupted``."""

    status: str
    step: int
    wall_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    performance: dict[str, Any] = field(default_factory=dict)


class Trainer(Learner):
    """Trains one run from where its folder stands to the end, or to an interruption.

    Args:
        run, task, bundle, plan: see `Learner`.
        metrics: where lines go.
        others: see `Learner`.

    Raises:
        UserError: the model can't be clipped exactly, or the checkpoint is corrupt.
    """

    def __init__(
        self,
        run: "RunConfig",
        task: "Task",
        bundle: "ModelBundle",
        plan: "Plan | None",
        *,
        metrics: record.Metrics,
        **others: Any,
    ):
        super().__init__(run, task, bundle, plan, **others)
        self.metrics = metrics
        moved = self.averages.values if self.averages is not None else rgp.moved_tensors(self.model)
        self.best = Best(moved, run.task.metric) if run.optim.keep_best_every else None
        self.analysis: OutputAnalysis | None = None
        if plan is not None and run.analysis.output_specific_every:
            if self.ranks.several:
                raise UserError(
                    "analysis.output_specific_every looks at all losses in one place so far: start one process"
                )
            self.analysis = OutputAnalysis(run.analysis, plan, task.num_examples)
        self.log = Logbook(
            run, metrics, self.device, expected_batch=self.expected_batch, groups=self._groups_with_norms()
        )
        # of losses that are no numbers, once
        self.told_not_finite = False
        self._restore()

    def _restore(self) -> None:
        """Go on from the last checkpoint, where there is one."""
        folder = self.folder / "checkpoint"
        checkpoint = state.read_together(folder, self.signature, self.ranks, self.model, self.optimizer)
        if checkpoint is None:
            self.metrics.resume_at(0)
            return
        self.load_states(checkpoint.model, checkpoint.optimizer)
        state.put_back(checkpoint, self.policy, self.ledger, self._kept())
        self.stepper.taken = checkpoint.step
        self.log.wall_before, self.log.timings = checkpoint.wall_s, checkpoint.timings
        self.metrics.resume_at(self.step)

    def save(self) -> None:
        """Write a checkpoint of the present step.

        Raises:
            UserError: the weights are no numbers any more; the checkpoint before stays.
        """
        self.stepper.together.refuse_other_weights(self.stepper.taken)
        tensors, optimizer = self.states()
        here = [part_here(tensor)[0] for tensor in tensors.values()]
        if broken := max(self.ranks.gather(sum(not bool(torch.isfinite(part).all()) for part in here))):
            raise self.ranks.told_once(
                f"the run diverged: after step {self.step} {broken} of its {len(tensors)} tensors hold NaN or infinity. No "
                f"model was exported, and the steps stay charged: lower optim.lr={self.run.optim.lr:g}"
            )
        # how long steps took follows from how many rows were drawn
        strict = record.withheld(self.run)
        checkpoint = state.Checkpoint(
            step=self.step,
            model=tensors,
            optimizer=optimizer,
            signature=self.signature,
            wall_s=0.0 if strict else self.log.wall_s,
            timings={} if strict else self.performance(),
            **state.resting_on(self.policy, self.ledger, self._kept()),
        )
        state.save_together(self.folder / "checkpoint", checkpoint, self.ranks)

    def _kept(self) -> dict[str, Any]:
        """What this run has that a checkpoint keeps beside model, optimiser and thresholds."""
        method = self.clipper.method if isinstance(self.clipper, VectorClipper) else None
        parts = {
            "averages": self.averages,
            "best": self.best,
            "search": self.search,
            "feedback": self.feedback,
            "analysis": self.analysis,
            "method": method,
            "noise": self.stepper.correlated,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def states(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a checkpoint keeps of the model and of its optimiser."""
        return state.model_state(self.model), self.optimizer.state_dict()

    def load_states(self, model: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Write back what `states` gave."""
        state.load_model_state(self.model, model)
        self.optimizer.load_state_dict(optimizer)

    def train(self, progress: Progress) -> Outcome:
        """Run the steps that are left, evaluate, and write checkpoints; the folder can be resumed at any instant."""
        runtime = self.run.runtime
        metrics: dict[str, float] = {}
        saved_at = self.step
        with Interrupts() as interrupts:
            while self.step < self.steps and self.affordable() and not self.ranks.any(interrupts.requested):
                begun = time.perf_counter()
                if self.analysis is not None:
                    self.analysis.look(self.stepper, self.losses_of, self.physical_batch_size)
                self.stepper.keep_norms = self.log.wants_norms(self.step + 1, self.steps)
                self.stepper.keep_signal = self.log.wants_signal(self.step + 1)
                sums = self.take_step(interrupts)
                if sums is None:
                    # cut off before anything was released: this step has not happened
                    break
                self.log.took(begun)
                self._tell(sums, progress)
                if self.feedback is not None:
                    self.feedback.took(self.stepper, lambda: self.evaluate(progress))
                chosen = self.best is not None and self._is_candidate()
                looked = runtime.eval_every and self.step % runtime.eval_every == 0 and self.step < self.steps
                if chosen or looked:
                    metrics = self.evaluate(progress)
                if self.best is not None and chosen:
                    self.best.offer(self.step, metrics)
                if runtime.checkpoint_every and self.step % runtime.checkpoint_every == 0:
                    self.save()
                    saved_at = self.step
            if saved_at != self.step:
                self.save()
            if self.step < self.steps and self.affordable():
                return Outcome("interrupted", self.step, self.log.wall_s, metrics, self.performance())
        if self.best is not None:
            self.best.put_back()
        metrics = self.evaluate(progress, final=True)
        return Outcome("finished", self.step, self.log.wall_s, metrics, self.performance())

    def _is_candidate(self) -> bool:
        """Whether the weights of this step may be kept: those of every so many steps, and the last ones."""
        return self.step % self.run.optim.keep_best_every == 0 or not (
            self.step < self.steps and self.affordable()
        )

    def evaluate(self, progress: Progress, *, final: bool = False) -> dict[str, float]:
        """Metrics on the public dev set; written down as released, because the weights are.

        Predictions of a finished run are kept in the folder `predictions`.
        """
        runtime = self.run.runtime
        averaged = self.averages.in_place() if self.averages is not None else nullcontext()
        with averaged, sharing(self.ranks), held_whole(self.model) if self.sharded else nullcontext():
            metrics = evaluate(
                self.task,
                self.model,
                self.device,
                runtime.eval_batch_size,
                runtime.precision,
                progress.evaluation,
                final=final,
                folder=self.folder / "predictions",
            )
        self.metrics.write(self.step, {"dev": metrics})
        progress.evaluated(self.step, metrics)
        return metrics

    def performance(self) -> dict[str, Any]:
        """See `Logbook.performance`."""
        return self.log.performance()

    def details(self) -> dict[str, Any]:
        """Provenance for the summary, beside its fixed keys."""
        return {
            "signature": self.signature,
            "code": self.code,
            "hardware": provenance.hardware(self.device),
            "physical_batch_size": self.physical_batch_size,
            "clipping_groups": self.num_groups,
            "processes": self.ranks.size,
            "parallel": self.run.runtime.parallel if self.ranks.several else "none",
            "thresholds": self.policy.values.tolist(),
            "choices": getattr(self.clipper, "choices", None),
            "clipping_notes": self.stepper.unproven,
            "plan": self.plan.to_dict() if self.plan is not None else None,
            # whose weights these are, where not the last step's
            **({"kept_step": self.best.step} if self.best is not None else {}),
            **(
                {"output_specific": self.analysis.conclude(self.folder, self.ledger.steps_charged)}
                if self.analysis is not None and self.ledger is not None
                else {}
            ),
        }

    def _groups_with_norms(self) -> list[str]:
        """Names of the groups in which this process sees the norms of examples."""
        return [group.name for group in self.clipper.groups] if self.clipper is not None else []

    def _tell(self, sums: Sums, progress: Progress) -> None:
        """The lines of a step, and the progress bar."""
        loss = None if self.metrics.strict else float(sums.loss) / max(1, sums.drawn)
        if loss is not None and not math.isfinite(loss) and not self.told_not_finite:
            self.told_not_finite = True
            progress.say(f"note: {not_finite(self.step)}")
        # of a course that a filter ends, only the whole budget is guaranteed
        spent = None if self.plan is not None and self.plan.moves else self.ledger
        progress.step(self.step, loss, self.expected_batch / self.log.step_times[-1], spent)
        released: dict[str, Any] = {"lr": self.optimizer.param_groups[0]["lr"]}
        if self.search is not None:
            released["lr"] = self.search.chosen
            released["levels"] = [self.search.gradient_level, self.search.search_level]
        if self.feedback is not None:
            released["noise_level"] = self.feedback.level
        if self.policy.adaptive:
            released["thresholds"] = self.policy.values.tolist()
        self.log.write(self.step, self.steps, sums, released, loss)
