"""A configured run with its model in stages: the loop, the steps and the releases of one process, of which each holds a part.

What is public, or noisy already, is the same everywhere: samples, thresholds, noise by place of the parameter. What travels
besides activations and their gradients is a digest of the sums and the counts of each group, once per step; the ledger has one
writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpexp import provenance
from dpexp.clipping import Report
from dpexp.errors import UserError
from dpexp.models.precision import autocast
from dpexp.parallel import ALONE, Ranks
from dpexp.pipeline.clipper import StageClipper, WholeModel
from dpexp.pipeline.runner import Pipeline, check_schedule
from dpexp.pipeline.split import keep_stage
from dpexp.pipeline.traffic import Traffic
from dpexp.training import state
from dpexp.training.clippers import choice_of, groups_of
from dpexp.training.loop import Trainer
from dpexp.training.progress import Progress
from dpexp.training.refusals import refuse_counted, refuse_shared
from dpexp.training.release import Release
from dpexp.training.steps import Steps

if TYPE_CHECKING:
    from dpexp.models import ModelBundle
    from dpexp.schemas import RunConfig

OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")
PEFT = ("full", "lora", "bitfit")


class StageRelease(Release):
    """Releases what all stages have summed, each adding the noise of its own parameters."""

    stage, ranks = 0, ALONE

    def _fingerprint(self, facts: dict[str, Any], counts: Tensor) -> str:
        """One for the sums of all stages: replicas of a stage must have the same."""
        of_facts, _, own = super()._fingerprint(facts, counts).partition("-")
        digests: dict[int, str] = {}
        for stage, digest in self.ranks.gather((self.stage, own)):
            if digests.setdefault(stage, digest) != digest:
                raise UserError(
                    f"two processes of stage {stage} have not the same sums: start them on machines of one kind, with one "
                    "version of the libraries"
                )
        together = "".join(digests[stage] for stage in sorted(digests))
        return f"{of_facts}-{hashlib.sha256(together.encode()).hexdigest()[:32]}"

    def _signal_and_noise(self, step: int) -> tuple[float, float]:
        """Of all stages together; replicas of a stage have the same."""
        of_stages = dict(self.ranks.gather((self.stage, super()._signal_and_noise(step))))
        signal, noise = (sum(part) for part in zip(*of_stages.values(), strict=True))
        return signal, noise


class StageSteps(Steps):
    """Steps whose pieces have been through the stages when they are added."""

    # [K] which groups this process counts
    mine: Tensor | None = None
    found: list[Report] | None = None
    counts_losses = False
    # what of this stage goes by how often it was called, and what its examples share of chance, in words
    counted = shared = ""
    # examples that go through the stages together
    microbatch = 0

    def add(self, losses: Tensor) -> bool:
        """Add what the schedule has found for a piece, or an empty one, and with the last one take the step."""
        reports, self.found = self.found, None
        if reports is None:
            return super().add(losses)
        if self.clipper is not None:
            self.counted = self.counted or self.clipper.counted
            self.shared = self.shared or self.clipper.shared
        part = self._no_sums()
        seen = losses if self.counts_losses else losses[:0]
        part.add(seen, self._whole(reports), self.policy)
        if self.mine is not None:
            for total, own in ((self.sums.counts, part.counts), (self.sums.norms, part.norms)):
                total += own * self.mine.to(own)
            self.sums.clipped += part.clipped * self.mine.to(part.clipped)
        self.sums.drawn += part.drawn
        self.sums.loss += part.loss
        self.piece = None
        self._left -= 1
        return not self._left and self._take()

    def _take(self) -> bool:
        told = self.counted, "" if self.settled else next(iter(self.around.values()), self.shared)
        self.counted = self.shared = ""
        # a stage that ended alone would leave the others waiting
        counted, shared = zip(*self.ranks.gather_for(f"step {self.taken}", told), strict=True)
        refuse_counted(next(filter(None, counted), ""))
        refuse_shared(next(filter(None, shared), ""))
        return super()._take()

    def _settled(self, size: int) -> bool:
        return self.microbatch == 1

    def _whole(self, reports: list[Report]) -> Report | None:
        clipper: Any = self.clipper
        if clipper is None or not reports:
            return None
        every = [clipper.whole(report) for report in reports]
        return Report(torch.cat([r.norms for r in every], 1), torch.stack([r.clipped for r in every]).sum(0))


class StageTrainer(Trainer):
    """Trains one stage of a model together with the processes of the others.

    Args:
        build: makes the whole model again: for an evaluation, and at the end.
        others: see `Trainer`.

    Raises:
        UserError: what has no stages, or is not exact in them, by name.
    """

    RELEASE = StageRelease
    STEPS = StageSteps

    def __init__(
        self,
        run: RunConfig,
        task: Any,
        bundle: ModelBundle,
        plan: Any,
        *,
        build: Callable[[], ModelBundle],
        ranks: Ranks,
        **others: Any,
    ):
        refuse_unstaged(run, task, ranks)
        self.build, self.bundle, self.traffic = build, bundle, Traffic()
        self.stages = run.runtime.stages or ranks.size
        self.stage, self.replica = ranks.rank % self.stages, ranks.rank // self.stages
        self.neighbours, self.norms, self.twins = _groups(ranks, self.stages)
        self.names = [name for name, p in bundle.model.named_parameters() if p.requires_grad]
        super().__init__(run, task, bundle, plan, ranks=ranks, **others)
        steps = self.stepper
        assert isinstance(steps, StageSteps)
        steps.together.replicas, steps.together.lockstep = self.twins, True
        steps.microbatch = run.runtime.microbatch
        steps.counts_losses = self.stage == self.stages - 1
        clipper: Any = self.clipper
        if clipper is not None:
            steps.mine = torch.zeros(len(clipper.groups), dtype=torch.bool)
            steps.mine[clipper.local] = True
            if self.shape.flat:
                steps.mine[:] = self.stage == 0
            release = steps.release
            assert isinstance(release, StageRelease)
            release.stage, release.ranks = self.stage, ranks
        self.pipeline = Pipeline(
            self.model, self.stage, self.stages, task.losses, self.neighbours,
            schedule=run.runtime.schedule,
            clipper=None if clipper is None else clipper.clipper,
            flat=run.runtime.flat if plan is not None and self.shape.flat else None,
            norms=self.norms, device=self.device, loss_scale=steps.loss_scale,
            context=lambda: autocast(run.runtime.precision, self.device),
            rematerialise=run.runtime.rematerialise, park=run.runtime.park, traffic=self.traffic,
        )  # fmt: skip

    @property
    def home(self) -> torch.device:
        """The CPU: the device has room for a stage."""
        return torch.device("cpu")

    def own_part(self, model: nn.Module) -> nn.Module:
        """Keep the stage, after a look at the whole, and move it to the device."""
        self.shape = WholeModel(model, groups_of(model, self.run.clip), self.stages)
        return keep_stage(model, self.stage, self.stages).to(self.device)

    def _attach(self) -> Any:
        clip, engine = self.run.clip, self.run.engine
        clipper = StageClipper(
            self.model,
            self.shape,
            rule=clip.rule,
            engine=engine.name,
            choice=choice_of(engine),
            memory_cap_mib=engine.memory_cap_mib,
            fixed_length=self.task.pad_to is not None,
            max_clip_scale=self.plan.max_clip_scale if self.plan is not None else 1.0,
        )
        if (memory := self.decisions.of_rank("engine")) is not None:
            clipper.recall(memory)
        return clipper

    def losses_of(self, piece: np.ndarray) -> Tensor:
        """Send a piece through the stages and back; the losses are those of the last stage."""
        batch = self.task.collate([self.task.train[int(i)] for i in piece])
        batch = self.task.augmented(batch, piece, self.run.seed, self.step)
        self.stepper.seeds.made()
        steps = self.stepper
        assert isinstance(steps, StageSteps)
        losses, steps.found = self.pipeline.run(batch, self.run.runtime.microbatch, steps.scales_of(piece))
        return losses

    def states(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The whole model's, as one process would keep them: a run goes on with another number of stages, or none."""
        # a tensor of a GPU would come out on that GPU in every process
        own = (state.model_state(self.model), self._numbered()) if self.replica == 0 else ({}, {})
        model: dict[str, Tensor] = {}
        kept: dict[int, Any] = {}
        for tensors, moments in self.ranks.gather(tree_map_only(Tensor, lambda tensor: tensor.cpu(), own)):
            model |= tensors
            kept |= moments
        (group,) = self.optimizer.state_dict()["param_groups"]
        order = list(range(len(self.names)))
        return model, {"state": dict(sorted(kept.items())), "param_groups": [group | {"params": order}]}

    def load_states(self, model: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Take this stage's part of what `states` gave, here or in one process."""
        state.load_model_state(self.model, {n: model[n] for n in state.model_state(self.model) if n in model})
        places = self._places()
        kept = {i: optimizer["state"][at] for i, at in enumerate(places) if at in optimizer["state"]}
        (group,) = optimizer["param_groups"]
        self.optimizer.load_state_dict(
            {"state": kept, "param_groups": [group | {"params": list(range(len(places)))}]}
        )

    def whole(self) -> nn.Module:
        """The whole model with the weights of all stages, on every process."""
        model, _ = self.states()
        whole = self.build().model.to(self.device)
        wanted = state.model_state(whole)
        state.load_model_state(whole, {name: model.get(name, tensor) for name, tensor in wanted.items()})
        return whole

    def evaluate(self, progress: Progress, *, final: bool = False) -> dict[str, float]:
        """As one process does, with the whole model, shared out over the processes."""
        stage, self.model = self.model, self.whole()
        try:
            return super().evaluate(progress, final=final)
        finally:
            self.model = stage

    def detach(self) -> None:
        """Put the whole model, trained, where the export looks for it."""
        if self.clipper is not None:
            self.clipper.detach()
        self.bundle.model = self.whole()

    def performance(self) -> dict[str, Any]:
        """As in one process; with the peak memory of each stage, and bytes sent in a step by kind."""
        found = super().performance()
        if not self.log.step_times:
            return found
        each = self.ranks.gather(provenance.peak_memory_mib(self.device))
        sent = self.ranks.gather(dict(self.traffic.bytes))
        kinds = sorted({kind for one in sent for kind in one})
        total = {kind: sum(one.get(kind, 0) for one in sent) for kind in kinds}
        return found | {
            "peak_memory_mib_of_stages": each[: self.stages],
            "bytes_per_step": {kind: count / len(self.log.step_times) for kind, count in total.items()},
        }

    def details(self) -> dict[str, Any]:
        """Beside what one process says: the stages."""
        return super().details() | {"pipeline": self._way()}

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"pipeline": self._way()}

    def _way(self) -> dict[str, Any]:
        """How the stages share a batch."""
        runtime = self.run.runtime
        return {
            "stages": self.stages,
            "replicas": self.ranks.size // self.stages,
            "schedule": runtime.schedule,
            "microbatch": runtime.microbatch,
            "flat": runtime.flat if self.pipeline.flat else None,
            "rematerialise": runtime.rematerialise,
            "park": runtime.park,
        }

    @property
    def batches_in_words(self) -> str:
        whole = self.physical_batch_size == self.task.num_examples
        return f"microbatches of {self.run.runtime.microbatch}" + (
            "" if whole else f", {super().batches_in_words}"
        )

    def _physical_batch_size(self) -> int:
        """Examples in one run of the schedule: the whole batch, unless it is told otherwise."""
        asked = str(self.run.runtime.physical_batch_size)
        return self.task.num_examples if asked == "auto" else int(asked)

    def _groups_with_norms(self) -> list[str]:
        """None: no norms of examples leave a stage."""
        return []

    def _places(self) -> list[int]:
        """Of each parameter that trains here, its number in the whole model."""
        place = {name: number for number, name in enumerate(self.names)}
        return [place[name] for name, p in self.model.named_parameters() if p.requires_grad]

    def _numbered(self) -> dict[int, Any]:
        own = self.optimizer.state_dict()["state"]
        return {at: own[i] for i, at in enumerate(self._places()) if i in own}


def refuse_unstaged(run: RunConfig, task: Any, ranks: Ranks) -> None:
    """Refuse what is not exact in stages.

    Raises:
        UserError: by name, with the way out.
    """
    runtime, way = run.runtime, "; use runtime=ddp, or one process"
    stages = runtime.stages or ranks.size
    check_schedule(runtime.schedule)
    if stages < 2 or ranks.size % stages:
        raise UserError(
            f"runtime.stages={stages} does not divide the {ranks.size} processes: start a multiple of it, and two stages at least"
        )
    if task.head != "causal_lm":
        raise UserError(
            f"task={run.task.name} trains no causal language model, which alone is cut into stages{way}"
        )
    if task.rows_per_example != 1:
        raise UserError(
            f"task={run.task.name} has several rows for each example, and a stage knows of one{way}"
        )
    if run.optim.name not in OPTIMIZERS:
        raise UserError(
            f"optim={run.optim.name} looks at all parameters together, and each stage has some: choose "
            f"{', '.join(OPTIMIZERS)}{way}"
        )
    if run.engine.name == "opacus":
        raise UserError(
            f"engine=opacus goes back from losses alone, and a stage has none: choose engine=auto{way}"
        )
    if run.peft.name not in PEFT:
        raise UserError(f"peft={run.peft.name} has no stages: choose {', '.join(PEFT)}{way}")
    if run.clip.method != "norm":
        raise UserError(f"clip={run.clip.name} needs the whole gradient of an example in one place{way}")
    if (
        run.search.name != "none"
        or run.optim.ema_decay
        or run.optim.uniform_average
        or run.optim.keep_best_every
    ):
        raise UserError(
            f"line searches, averages and a choice of the weights look at all parameters together{way}"
        )


def _groups(ranks: Ranks, stages: int) -> tuple[Any, Any, Ranks]:
    """This process's pipeline, a second group of the same for norms, and those that hold the same stage."""
    own: tuple[Any, Any] = (None, None)
    for first in range(0, ranks.size, stages):
        members = list(range(first, first + stages))
        made = dist.new_group(members), dist.new_group(members)
        if ranks.rank in members:
            own = made
    twins = ALONE
    for stage in range(stages):
        members = list(range(stage, ranks.size, stages))
        group = dist.new_group(members)
        if ranks.rank in members and len(members) > 1:
            twins = Ranks.of(group)
    return *own, twins
