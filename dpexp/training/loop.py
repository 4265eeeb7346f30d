"""The training loop: He et al., Algorithm 1, with centred counts, Poisson batches, and a ledger written ahead.

One step t, in this order:

1. draw the logical batch and cut it into physical batches;
2. per-example losses, `clipper.backward`: `p.grad` becomes the sum of the clipped gradients, counts are added up;
3. write the step to the ledger, on the disk, before any noise exists;
4. add noise to the sums and to the counts, divide by the expected batch size;
5. optimiser, thresholds.

Everything after 3 is post-processing of what the ledger has charged; nothing before 3 leaves the process. A step that
was cut off before 3 has not happened. One that was cut off after 3 is repeated: with the same noise, and not charged
again, where it is the same step to the last bit (`mechanism.fingerprint`); else as a new attempt, with a fresh sample and
fresh noise, and charged again.
"""

import hashlib
import hmac
import json
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpexp import record
from dpexp.clipping import attach
from dpexp.clipping.thresholds import FixedThresholds, QuantileThresholds
from dpexp.errors import UserError
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.noise import SecureGenerator, add_gaussian_
from dpexp.privacy.sampling import stream
from dpexp.training import mechanism, state
from dpexp.training.batching import automatic_size, physical_batches
from dpexp.training.evaluation import autocast, evaluate
from dpexp.training.interrupt import Interrupts
from dpexp.training.optim import build_optimizer, learning_rate
from dpexp.training.progress import Progress

if TYPE_CHECKING:
    from dpexp.config import RunConfig
    from dpexp.models import ModelBundle
    from dpexp.privacy.plan import Plan
    from dpexp.tasks.base import Task

FP16_LOSS_SCALE = (
    2.0**10
)  # static: a scale that reacted to an overflow would release, unnoised, that there was one


@dataclass
class Sums:
    """What the physical batches of one step add up to besides `p.grad`, before any noise: private."""

    counts: Tensor  # [K] centred counts, float64
    norms: Tensor  # [K] sums of the norms
    clipped: Tensor  # [K] how many examples were clipped
    loss: Tensor  # sum of the losses
    drawn: int = 0


@dataclass
class Outcome:
    """How `Trainer.train` ended: `status` is ``finished`` or ``interrupted``."""

    status: str
    step: int
    wall_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    performance: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains one run from where its folder stands to the end, or to an interruption.

    Args:
        run: the configuration.
        task: data, losses and metrics.
        bundle: the model; it is moved to `device`.
        plan: the privacy plan. None trains without privacy: same batches, same loop, nothing clipped and no noise.
        steps: number of steps; the plan's own where there is one.
        expected_batch: B. Sums are divided by it, private or not, so that the two differ in clipping and noise alone.
        sampler: `draw(step, attempt)` gives the indices of a step.
        key: the secret key of the run.
        signature: of the configuration.
        folder: the run's folder; this process holds it.
        device: where to compute.
        metrics: where lines go.

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
        steps: int,
        expected_batch: float,
        sampler: Any,
        key: bytes,
        signature: str,
        folder: Path,
        device: torch.device,
        metrics: record.Metrics,
    ):
        self.run, self.task, self.plan = run, task, plan
        self.steps, self.expected_batch = steps, expected_batch
        self.sampler, self.key, self.signature = sampler, key, signature
        self.folder, self.device, self.metrics = folder, device, metrics
        self.model = bundle.model.to(device).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(run.optim, self.parameters)
        self.decisions = state.Decisions(folder / "decisions.json", record.device_name(device))
        self.code = record.code_hash()
        self.ledger: Ledger | None = None
        self.charged: dict[int, list[str]] = {}
        self.clipper: Any = None
        self.policy: Any = FixedThresholds(torch.zeros(0))
        if plan is not None:
            self.ledger = Ledger(folder / "ledger.jsonl")
            self.charged = read_fingerprints(self.ledger.path)
            self._attach()
        self.step = 0
        self.wall_before, self.started = 0.0, time.perf_counter()
        self.step_times: list[float] = []
        self.timings: dict[str, Any] = {}
        self._restore()
        self.physical_batch_size = self._physical_batch_size()

    def _attach(self) -> None:
        """Attach the clipper and make the threshold policy."""
        clip, engine = self.run.clip, self.run.engine
        self.clipper = attach(
            self.model,
            groups=clip.groups,
            clip_norm=clip.clip_norm,
            rule=clip.rule,
            engine=engine.name,
            choice=None if engine.choice == "measured" else engine.choice,  # measured: each engine's own way
            memory_cap_mib=engine.memory_cap_mib,
        )
        if (memory := self.decisions.get("engine")) is not None and hasattr(self.clipper, "recall"):
            self.clipper.recall(memory)
        num_groups = len(self.clipper.groups)
        start = clip.clip_norm / math.sqrt(num_groups)
        if not clip.adaptive:
            self.policy = FixedThresholds(torch.full((num_groups,), start))
            return
        self.policy = QuantileThresholds(
            torch.full((num_groups,), start if clip.init_threshold is None else clip.init_threshold),
            clip.target_quantile,
            clip.quantile_lr,
            clip.threshold_floor,
            clip.clip_norm if clip.rescale else None,
        )

    def _restore(self) -> None:
        """Go on from the last checkpoint, where there is one."""
        checkpoint = state.load_checkpoint(self.folder / "checkpoint", self.signature)
        if checkpoint is None:
            self.metrics.resume_at(0)
            return
        state.load_model_state(self.model, checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.policy.load_state_dict(checkpoint.thresholds)
        if self.ledger is not None and self.ledger.next_step < checkpoint.step:
            raise UserError(
                f"{self.folder / 'ledger.jsonl'} has lost entries: it charges {self.ledger.next_step} steps, and the "
                f"checkpoint is at step {checkpoint.step}. Put the ledger back; without it no epsilon can be stated"
            )
        self.step, self.wall_before, self.timings = checkpoint.step, checkpoint.wall_s, checkpoint.timings
        self.metrics.resume_at(self.step)

    def save(self) -> None:
        """Write a checkpoint of the present step."""
        state.save_checkpoint(
            self.folder / "checkpoint",
            state.Checkpoint(
                step=self.step,
                model=state.model_state(self.model),
                optimizer=self.optimizer.state_dict(),
                thresholds=self.policy.state_dict(),
                signature=self.signature,
                wall_s=self.wall_s,
                timings=self.performance(),
            ),
        )

    @property
    def wall_s(self) -> float:
        """Seconds spent on the run so far, earlier sessions included as far as they reached a checkpoint."""
        return self.wall_before + time.perf_counter() - self.started

    @property
    def num_groups(self) -> int:
        """K; 0 without privacy."""
        return len(self.clipper.groups) if self.clipper is not None else 0

    def train(self, progress: Progress) -> Outcome:
        """Run the steps that are left, evaluate, and write checkpoints; the folder can be resumed at any instant."""
        runtime = self.run.runtime
        metrics: dict[str, float] = {}
        saved_at = self.step
        with Interrupts() as interrupts:
            while self.step < self.steps and not interrupts.requested:
                begun = time.perf_counter()
                sums = self._take_step(self.step, interrupts)
                if sums is None:
                    break  # cut off before anything was released: this step has not happened
                self.step += 1
                self.step_times.append(self._elapsed_since(begun))
                self._log(sums, progress)
                if runtime.eval_every and self.step % runtime.eval_every == 0 and self.step < self.steps:
                    metrics = self.evaluate(progress)
                if runtime.checkpoint_every and self.step % runtime.checkpoint_every == 0:
                    self.save()
                    saved_at = self.step
            if saved_at != self.step or self.step == self.steps:
                self.save()
            if self.step < self.steps:
                return Outcome("interrupted", self.step, self.wall_s, metrics, self.performance())
        metrics = self.evaluate(progress)
        return Outcome("finished", self.step, self.wall_s, metrics, self.performance())

    def evaluate(self, progress: Progress) -> dict[str, float]:
        """Metrics on the public dev set; written down as released, because the weights are."""
        runtime = self.run.runtime
        metrics = evaluate(
            self.task,
            self.model,
            self.device,
            runtime.eval_batch_size,
            runtime.precision,
            progress.evaluation,
        )
        self.metrics.write(self.step, {"dev": metrics})
        progress.evaluated(self.step, metrics)
        return metrics

    def performance(self) -> dict[str, Any]:
        """`examples_per_s`, `step_s`, `peak_memory_mib` and `device`.

        `step_s` is the median step of this session, without its first one (an engine may still be measuring then), and
        `examples_per_s` the *expected* batch over it: the drawn sizes are private. A session without a step passes on
        what an earlier one measured.
        """
        times = self.step_times[1:] or self.step_times
        if not times:
            return self.timings or {"device": record.device_name(self.device)}
        step_s = statistics.median(times)
        return {
            "examples_per_s": self.expected_batch / step_s,
            "step_s": step_s,
            "peak_memory_mib": record.peak_memory_mib(self.device),
            "device": record.device_name(self.device),
        }

    def details(self) -> dict[str, Any]:
        """Provenance for the summary, beside its fixed keys."""
        return {
            "signature": self.signature,
            "code": self.code,
            "hardware": record.hardware(self.device),
            "physical_batch_size": self.physical_batch_size,
            "clipping_groups": self.num_groups,
            "thresholds": self.policy.values.tolist(),
            "choices": getattr(self.clipper, "choices", None),
            "plan": self.plan.to_dict() if self.plan is not None else None,
        }

    def detach(self) -> None:
        """Give the model back as it was, trained."""
        if self.clipper is not None:
            self.clipper.detach()

    def _losses(self, examples: list[Any]) -> Tensor:
        """`[B]` losses of examples, in the precision of the run."""
        batch = {
            name: tensor.to(self.device, non_blocking=True)
            for name, tensor in self.task.collate(examples).items()
        }
        with autocast(self.run.runtime.precision, self.device):
            return self.task.losses(self.model, batch)

    def _backward(self, losses: Tensor) -> Any:
        """Add the sum of the (clipped) gradients to `p.grad`; returns the clipper's report, None without privacy."""
        fp16 = self.run.runtime.precision == "fp16"
        if self.clipper is not None:
            return self.clipper.backward(losses, **({"loss_scale": FP16_LOSS_SCALE} if fp16 else {}))
        if len(losses):
            (losses.sum() * (FP16_LOSS_SCALE if fp16 else 1.0)).backward()
        else:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        return None

    def _take_step(self, step: int, interrupts: Interrupts) -> Sums | None:
        """One step of the module's description. None where it was interrupted before it was charged."""
        if self.plan is None:
            sums, counts = self._accumulate(step, 0, interrupts), None
        else:
            sums, counts = self._private_sums(step, interrupts)
        if sums is None:
            return None
        fp16 = self.plan is None and self.run.runtime.precision == "fp16"
        torch._foreach_div_(self._gradients(), self.expected_batch * (FP16_LOSS_SCALE if fp16 else 1.0))
        optim = self.run.optim
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.steps, optim.lr, optim.lr_schedule, optim.warmup_ratio)
        self.optimizer.step()
        if counts is not None:
            self.policy.update(mechanism.noisy_fractions(counts, self.expected_batch))
        return sums

    def _private_sums(self, step: int, interrupts: Interrupts) -> tuple[Sums | None, Tensor | None]:
        """Points 1 to 4 but the division: leaves the noisy sum in `p.grad` and returns the noisy counts, `[K]`."""
        assert self.plan is not None and self.ledger is not None
        groups = self.clipper.groups
        stds = mechanism.noise_stds(
            self.policy.values, [g.size for g in groups], self.plan.sigma_new(step), self.run.clip.allocation
        ).tolist()
        count_std = self.plan.sigma_b(step, len(groups)) if self.policy.adaptive else None
        facts = self._facts(step) | {"stds": stds, "count_std": count_std}

        # A step that was charged before is repeated with the sample and the noise of that attempt, if it is the same one.
        charged = self.charged.setdefault(step, [])
        same_facts = mechanism.fingerprint_of_facts(self.key, facts)
        attempt = next((a for a, known in enumerate(charged) if known.startswith(same_facts)), len(charged))
        while True:
            sums = self._accumulate(step, attempt, interrupts)
            if sums is None:
                return None, None
            released = [p.grad for group in groups for p in group.params.values()]
            counts = sums.counts.cpu()
            found = mechanism.fingerprint(self.key, facts, [*released, counts])
            if attempt == len(charged) or charged[attempt] == found:
                break
            attempt = len(charged)  # equal facts, yet other sums: the runtime is not deterministic

        if hasattr(
            self.clipper, "remember"
        ):  # what the engine measured, so that a resumed run does not measure again
            self.decisions.keep("engine", self.clipper.remember())
        if self.ledger.begin_step(step, self.plan.step_event(step), found) != attempt:
            raise RuntimeError(f"the ledger does not agree that step {step} is in its attempt {attempt}")
        if attempt == len(charged):
            charged.append(found)

        per_tensor = [std for group, std in zip(groups, stds, strict=True) for _ in group.params]
        add_gaussian_(released, per_tensor, generator=self._generator("gradients", step, attempt))
        if count_std is None:
            return sums, None
        add_gaussian_([counts], count_std, generator=self._generator("counts", step, attempt))
        return sums, counts

    def _accumulate(self, step: int, attempt: int, interrupts: Interrupts) -> Sums | None:
        """Points 1 and 2: leaves the clipped sum in `p.grad`. None where an interruption was asked for before the end."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.clipper is not None:
            self.clipper.thresholds = self.policy.values
        zeros = torch.zeros(self.num_groups, dtype=torch.float64, device=self.device)
        sums = Sums(zeros.clone(), zeros.clone(), zeros.clone(), torch.zeros((), device=self.device))
        indices = self.sampler.draw(step, attempt)
        pieces = physical_batches(indices, self.task.length, self.physical_batch_size)
        for number, piece in enumerate(pieces):
            if interrupts.requested:
                self.optimizer.zero_grad(set_to_none=True)
                return None
            # Dropout of this piece depends on the public seed, the step and the piece alone: resuming needs no state.
            torch.manual_seed(_public_seed(self.run.seed, step, number))
            try:
                losses = self._losses([self.task.train[int(i)] for i in piece])
                self._add(sums, losses, self._backward(losses))
            except torch.OutOfMemoryError:
                raise UserError(
                    f"out of memory with {len(piece)} examples at once; nothing of this step was released. "
                    f"Run again with runtime.physical_batch_size={max(1, self.physical_batch_size // 2)}"
                ) from None
        if not pieces:  # the empty batch is a step like any other: zero sums, noise alone
            empty = torch.zeros(0, device=self.device)
            self._add(sums, empty, self._backward(empty))
        mechanism.all_reduce_sum_([*self._gradients(), sums.counts, sums.norms, sums.clipped, sums.loss])
        return sums

    def _add(self, sums: Sums, losses: Tensor, report: Any) -> None:
        sums.drawn += len(losses)
        sums.loss += losses.detach().sum().to(sums.loss)
        if report is not None:
            sums.counts += mechanism.centred_counts(report.norms, self.policy.estimates)
            sums.norms += report.norms.sum(1).to(sums.norms)
            sums.clipped += report.clipped.to(sums.clipped)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _generator(self, name: str, step: int, attempt: int) -> torch.Generator | SecureGenerator:
        """Where the noise called `name` comes from: a function of the secret key, the step and the attempt."""
        if self.run.privacy.secure:
            return SecureGenerator(
                hmac.digest(self.key, f"secure {name} {step} {attempt}".encode(), "sha256")
            )
        return torch.Generator().manual_seed(stream(self.key, name, step, attempt))

    def _facts(self, step: int) -> dict[str, Any]:
        """Everything but the sums themselves that makes a step what it is; see `mechanism.fingerprint`.

        The choices that an engine measured are missing on purpose: where they make a difference, it is in the sums, and
        a resumed run knows from the start what the first one found out on its way.
        """
        runtime = self.run.runtime
        return {
            "step": step,
            "config": self.signature,
            "seed": self.run.seed,
            "code": self.code,
            "data": self.task.data.sha256,
            "engine": self.run.engine.name,
            "physical_batch_size": self.physical_batch_size,
            "precision": runtime.precision,
            "device": record.device_name(self.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "secure": self.run.privacy.secure,
        }

    def _physical_batch_size(self) -> int:
        """As configured, or found once per machine and kept: a resumed run must add up the same pieces."""
        asked = str(self.run.runtime.physical_batch_size)
        if asked != "auto":
            return int(asked)
        if (known := self.decisions.get("physical_batch_size")) is not None:
            return int(known)
        public = [self.task.dev[i] for i in range(min(64, len(self.task.dev)))]

        def forward(count: int) -> Tensor:
            # Padded to the longest of all the public examples, then cut to size.
            longest = self.task.collate(public)
            repeats = -(-count // len(public))
            batch = {
                name: tensor.repeat(repeats, *[1] * (tensor.ndim - 1))[:count].to(self.device)
                for name, tensor in longest.items()
            }
            with autocast(self.run.runtime.precision, self.device):
                return self.task.losses(self.model, batch)

        size = automatic_size(forward, self._backward, self.parameters, self.device, self.expected_batch)
        self.decisions.keep("physical_batch_size", size)
        return size

    def _elapsed_since(self, begun: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def _log(self, sums: Sums, progress: Progress) -> None:
        """A released line and one that is not, and the progress bar."""
        strict = self.metrics.strict
        drawn = max(1, sums.drawn)
        loss = None if strict else float(sums.loss) / drawn
        rate = self.expected_batch / self.step_times[-1]
        progress.step(self.step, loss, rate, self.ledger)
        every = self.run.runtime.log_every
        if not every or (self.step % every and self.step != self.steps):
            return
        released: dict[str, Any] = {
            "lr": self.optimizer.param_groups[0]["lr"],
            "time_s": round(self.wall_s, 3),
        }
        if self.policy.adaptive:
            released["thresholds"] = self.policy.values.tolist()
        self.metrics.write(self.step, released)
        if not strict:
            private: dict[str, Any] = {"loss": loss, "drawn": sums.drawn}
            if self.clipper is not None:
                private |= {
                    "mean_norms": (sums.norms / drawn).tolist(),
                    "clipped_share": (sums.clipped / drawn).tolist(),
                }
            self.metrics.write(self.step, private, released=False)


def read_fingerprints(ledger: Path) -> dict[int, list[str]]:
    """Step -> the fingerprints of its attempts, from a ledger that `Ledger` has found to be sound."""
    charged: dict[int, list[str]] = {}
    for line in ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line, torn by a crash: not charged
        charged.setdefault(entry["step"], []).append(entry["fingerprint"])
    return charged


def _public_seed(seed: int, step: int, piece: int) -> int:
    digest = hashlib.sha256(f"dropout {seed} {step} {piece}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
