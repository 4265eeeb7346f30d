"""The one place where a step is made: `dpexp.train` and `dpexp.PrivacyEngine` both take theirs here.

One step t (He et al., Algorithm 1, with centred counts, Poisson batches, and a ledger written ahead), in this order:

1. draw the logical batch and cut it into physical batches;
2. per-example losses, `clipper.backward`: `p.grad` becomes the sum of the clipped gradients, counts are added up;
3. write the step to the ledger, on the disk, before any noise exists;
4. add noise to the sums and to the counts, divide by the expected batch size;
5. optimiser, thresholds.

Everything after 3 is post-processing of what the ledger has charged; nothing before 3 leaves the process. A step that
was cut off before 3 has not happened. One that was cut off after 3 is repeated: with the same noise, and not charged
again, where it is the same step to the last bit (`privacy.fingerprint`); else as a new attempt, with a fresh
sample and fresh noise, and charged again.
"""

import hmac
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.clipping import Report
from dpexp.clipping.base import AnyClipper, Rows
from dpexp.clipping.methods.microbatches import MicrobatchClipper
from dpexp.clipping.thresholds import FixedThresholds
from dpexp.errors import LateError, UserError
from dpexp.models import precision
from dpexp.parallel import ALONE, Ranks
from dpexp.privacy.correlated import CorrelatedNoise
from dpexp.privacy.fingerprint import checksum
from dpexp.privacy.sampling import stream
from dpexp.privacy.sensitivity import noisy_fractions, noisy_means
from dpexp.training.batching import Sampler, microbatches, physical_batches
from dpexp.training.decisions import Decisions
from dpexp.training.refusals import goes_together, refuse_counted, refuse_narrow, refuse_shared
from dpexp.training.release import Release
from dpexp.training.searches.base import StepSearch
from dpexp.training.seeding import Seeds
from dpexp.training.sums import Sums
from dpexp.training.together import Together
from dpexp.training.watching.guards import few_numbers, step_of


class Steps:
    """Takes the steps of a run, one after the other.

    Args:
        model: in training mode; its trainable parameters are what a step sums gradients of.
        optimizer: anything whose `step()` moves them.
        sampler: `draw(step, attempt)` gives the indices of a step.
        key: the run's secret; it decides dropout.
        expected_batch: B. Sums are divided by it, private or not, so that the two differ in clipping and noise alone.
        policy: thresholds to clip with, and estimates to count against.
        release: charges and noises a step. None trains without privacy: same batches, nothing clipped and no noise.
        decisions: where what the engine measured is kept before the first release; a resumed run need not measure again.
        loss_scale: static, for fp16: a scale that reacted to an overflow would release, unnoised, that there was one.
        clip_scales: `[N]`, the factor of each example's thresholds; None where it is 1 for all.
        search: moves the weights in the place of the optimiser, and may release more of the same sample, as the plan says.
        public: per-example gradients of public examples, for the methods that ask for them (`dpexp.clipping.methods.whole`).
        on_taken: called after each step.
        data: what makes the examples: a data set, a task.
        ranks: the processes that take the steps together. Each computes its share of every logical batch; the sums are added
            up over ranks once, behind the last piece, and every rank then adds the same noise to the same sum.
        shown: whether every step has a piece on every rank, if only of one example without weight: a loop of a person's own does
            something with each step, and how many of them it has seen may not follow from who was drawn.

    Raises:
        UserError: there are several processes, and `ranks` does not know of them. Each would draw the same batch, and the sum
            of their sums would hold every example several times, under noise for one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        sampler: Sampler,
        key: bytes,
        expected_batch: float,
        policy: FixedThresholds,
        release: Release | None,
        decisions: Decisions,
        loss_scale: float = 1.0,
        clip_scales: Tensor | None = None,
        search: StepSearch | None = None,
        public: Callable[[], Rows] | None = None,
        on_taken: Callable[[], None] | None = None,
        data: Any = None,
        ranks: Ranks = ALONE,
        shown: bool = False,
    ):
        if ranks.several and search is not None:
            raise UserError(
                "a line search measures losses of the whole batch, and each of several processes has a share of it: start one "
                "process, or choose an optimizer without a search"
            )
        self.ranks, self.optimizer, self.sampler, self.key = ranks, optimizer, sampler, key
        self.expected_batch, self.policy, self.release = expected_batch, policy, release
        self.decisions, self.loss_scale, self.clip_scales = decisions, loss_scale, clip_scales
        self.on_taken, self.search, self.shown = on_taken, search, shown
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.public, clipper = public, self.clipper
        if clipper is not None:
            self.parameters += clipper.extra
        exact = release is not None and release.secure
        self.together = Together(ranks, self.parameters, exact=exact, private=release is not None)
        # weights of 16 bits, whose sums have 32 until the noise is in them
        self.narrow = [p for p in self.parameters if p.dtype.itemsize < 4] if release is not None else []
        if self.narrow:
            refuse_narrow(self.narrow, clipper)
        self.taken = 0
        # standard deviation of the noise in the mean gradient of each parameter in the last step, by `id`
        self.stds: dict[int, float] = {}
        # of every example, for the next step; what is written of them is marked not private
        self.keep_norms = self.keep_signal = False
        self.sums = self._no_sums()
        self.attempt = 0
        # those that a step began with; None between steps
        self._thresholds: Tensor | None = None
        self.piece: np.ndarray | None = None
        self._facts: dict[str, Any] = {}
        if clipper is not None and not self.together.lockstep:
            clipper.may_begin_again()
        self.borrowed = 0
        self._lent = False
        # pieces that are still to be added; and how many there were when the step last had to begin again
        self._left, self._stuck = 0, math.inf
        self._drawn: list[np.ndarray] = []
        # whether who goes with whom does not follow from who was drawn
        self.settled = True
        # what shares chance around the model -> what it shares, in words
        self.around: dict[str, str] = {}
        # keyed, of all examples of the present step
        self._sample = ""
        self.seeds = Seeds(self.device, key, model, data)
        if clipper is not None:
            # behind fork_rng() and autocast they are no longer seen
            clipper.behind_forwards(self._forward_ended)
        self._dtypes = {p.dtype for p in model.parameters()}

    @property
    def clipper(self) -> AnyClipper | None:
        """None where nothing is clipped."""
        return self.release.clipper if self.release is not None else None

    @property
    def correlated(self) -> CorrelatedNoise | None:
        """What a checkpoint must know of the noise so far; None where each step's noise is its own."""
        return self.release.correlated if self.release is not None else None

    @property
    def unproven(self) -> list[str]:
        """What of the model and its losses could not be proven, in words, here or in a process that took earlier steps."""
        earlier = (self.decisions.of_rank("engine") or {}).get("unproven", ())
        return list(dict.fromkeys([*earlier, *(self.clipper.notes if self.clipper is not None else ())]))

    @property
    def gradients(self) -> list[Tensor]:
        """The sums of gradients."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def pieces(
        self, size: int, facts: Mapping[str, Any], length: Callable[[int], int] | None = None
    ) -> Iterator[np.ndarray]:
        """Yield the physical batches of the next step until it is taken; `add` is called once for each.

        The step is taken within the last `add`. An empty batch yields nothing and is a step like any other, taken here, unless
        every step is `shown`.
        A step that turns out to be another computation than the one that is charged begins again, with a fresh sample.
        Whoever stops in the middle has released nothing: the next call begins the same step again.

        Args:
            size: examples per physical batch.
            facts: what makes two computations of a step equal, besides its number and its noise.
            length: of an example, to put examples of similar length together; None leaves them in the order of the data.
        """
        step = self.taken
        self.attempt, self._stuck = 0, math.inf
        if self.release is not None:
            self._facts = {**self.together.facts(facts), "step": step, "noise": self.release.noise(step)}
            self._facts["weights"] = self._weights()
            if self.search is not None:
                self._facts["search"] = self.search.facts()
            self.attempt = self.release.likely_attempt(step, self._facts)
        while self.taken == step:
            pieces = self.begin(step, self.attempt, size, length)
            for number, piece in enumerate(pieces):
                self.seeds.begin(step, self.attempt, number * self.ranks.size + self.ranks.rank)
                if self.clipper is not None:
                    self.clipper.new_batch()
                self.piece, self._lent = piece, number >= len(pieces) - self.borrowed
                yield piece
                if not self._left:
                    break
            if not pieces:
                self.add(torch.zeros(0, device=self.device))

    def begin(
        self, step: int, attempt: int, size: int, length: Callable[[int], int] | None = None
    ) -> list[np.ndarray]:
        """Draw the batch of a step, cut it, and forget all sums."""
        self.clear()
        for parameter in self.narrow:
            parameter.grad_dtype = torch.float32
        self.borrowed, self._lent = 0, False
        self.sums, self.attempt = self._no_sums(), attempt
        if self.clipper is not None:
            self.clipper.thresholds = self.policy.values
            self._thresholds = self.clipper.thresholds.clone()
        if hasattr(self._mover, "ahead"):
            self._mover.ahead()
        if self.release is not None and self.release.plan.grows:
            if getattr(self.sampler, "rate_of", None) is None:
                raise UserError(
                    "optim.batch_growth needs a sampler whose rate follows the plan: train with dpexp.train"
                )
            self.expected_batch = self.release.plan.rate(step) * self.release.plan.num_examples
        drawn = self.sampler.draw(step, attempt)
        self.seeds.find()
        cut: list[np.ndarray] = []
        replicas = self.together.replicas
        if isinstance(self.clipper, MicrobatchClipper) and self.release is not None:
            count = max(1, round(self.expected_batch / self.clipper.size))
            seed = stream(self.key, "microbatches", step, attempt)
            cut = microbatches(drawn, self.release.plan.num_examples, count, seed)
            pieces = cut[replicas.rank :: replicas.size]
        else:
            pieces = physical_batches(drawn, length, size, replicas.rank, replicas.size)
        whole = b"/".join(part.tobytes() for part in (drawn, *cut))
        self._sample = hmac.digest(self.key, whole, "sha256").hex()[:16]
        if self.together.lockstep:
            # what comes next waits for all without a word
            self.ranks.agree("a step", {"number": step, "physical_batch_size": size, "sample": self._sample})
        if self.clipper is not None:
            self.clipper.prepare(stream(self.key, "projections", step, attempt), self._public)
        self._drawn = pieces
        self.settled = self._settled(size)
        count = max(len(pieces), int(self.shown))
        if self.together.sharded and len(drawn):
            # of rank 0, whose share is the largest
            most = -(-len(drawn) // self.ranks.size)
            count = -(-most // size)
        # an example of the batch, or any where it is empty, fills the gap without weight
        self.borrowed = count - len(pieces)
        pieces = pieces + [drawn[:1] if len(drawn) else np.zeros(1, np.int64)] * self.borrowed
        self._left = max(1, len(pieces))
        return pieces

    def _settled(self, size: int) -> bool:
        """Whether one example more moves none of the others into another physical batch."""
        if size == 1 or self.release is None or isinstance(self.clipper, MicrobatchClipper):
            return True
        plan = self.release.plan
        most = round(self.expected_batch) if plan.sampling == "fixed" else plan.num_examples
        return not self.ranks.several and goes_together(size, self.expected_batch, most)

    def _forward_ended(self) -> None:
        self.check_seeds()
        if self.release is not None and (note := precision.rounded(self.device, self._dtypes)) is not None:
            notes = self.release.clipper.notes
            notes += [note] if note not in notes else []

    def check_seeds(self) -> None:
        """Raise `UserError` where the present piece has drawn from another seed than the engine's."""
        if self.release is not None and self.piece is not None:
            self.seeds.check()

    def add(self, losses: Tensor) -> bool:
        """Add a physical batch to the sums, and with the last one take the step.

        Args:
            losses: `[b]`, one for each example of the piece, in the same order.

        Returns:
            Whether the step is taken.
        """
        scales = self.scales_of(self.piece)
        if self._lent:
            scales = torch.zeros(len(losses), device=losses.device)
        try:
            report = self.backward(losses, scales)
        except LateError:
            if self.together.lockstep or self._left >= self._stuck:
                raise
            # nothing of the step has left, and what was not known is: it begins again
            self._stuck, self._left, self.piece = self._left, 0, None
            return False
        if not self._lent:
            self.sums.add(losses, report, self.policy)
        self.piece = None
        self._left -= 1
        return not self._left and self._take()

    def scales_of(self, piece: np.ndarray | None) -> Tensor | None:
        """`[b]` factors of the thresholds; None where they are 1."""
        if self.clip_scales is None or piece is None:
            return None
        return self.clip_scales[torch.from_numpy(piece)]

    def backward(self, losses: Tensor, clip_scales: Tensor | None = None) -> Report | None:
        """Add the sum of the gradients, clipped or plain, to `p.grad`; plain ones still carry the loss scale."""
        if self.clipper is not None:
            if self._thresholds is not None and not torch.equal(self.clipper.thresholds, self._thresholds):
                raise UserError(
                    "the clipper's thresholds were changed in the middle of a step, whose noise is for those that it began with: "
                    "leave them to the engine (clip_norm, target_quantile)"
                )
            report = self.clipper.backward(losses, clip_scales, loss_scale=self.loss_scale)
            refuse_counted(self.clipper.counted)
            if not self.settled:
                refuse_shared(next(iter(self.around.values()), self.clipper.shared))
            return report
        if len(losses):
            weight = 0.0 if self._lent else self.loss_scale
            (losses.sum() * weight).backward()
        else:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return None

    def clear(self) -> None:
        """Drop the gradients, and with them a step that is not taken yet: who still goes through its pieces begins again."""
        self.piece, self._thresholds, self._left = None, None, 0
        if hasattr(self._mover, "back"):
            self._mover.back()
        for parameter in self.parameters:
            parameter.grad = None
        for parameter in self.narrow:
            parameter.grad_dtype = parameter.dtype

    def _take(self) -> bool:
        """Points 3 to 5. False where the sums are not those that this attempt was charged for: nothing is done then."""
        step, counts = self.taken, None
        self.together.refuse_ways_apart(step, self._sample, getattr(self._mover, "param_groups", ()))
        self.together.sum_(self.sums)
        if self.release is None:
            if self.loss_scale != 1.0:
                torch._foreach_div_(self.gradients, self.loss_scale)
        else:
            memory = self.release.clipper.remember() | {"unproven": self.unproven}
            self.decisions.keep_of_ranks("engine", memory)
            raw = self.sums.counts.cpu()
            if not self.release.charge(step, self.attempt, self._facts, raw):
                self.attempt = self.release.likely_attempt(step, self._facts, tried=self.attempt)
                return False
            if self.keep_signal:
                self.sums.signal_to_noise = self.release.signal_to_noise(step)
            stds = self.release.stds(step)
            self.stds = {number: std / self.expected_batch for number, std in stds.items()}
            counts = self.release.add_noise(step, self.attempt, raw)
            # an optimiser that corrects for the noise is told how much of it there is: a public number
            if hasattr(self._mover, "tell_noise"):
                self._mover.tell_noise(self.stds)
        torch._foreach_div_(self.gradients, self.expected_batch)
        # methods that clip something else than gradients make gradients of the noisy means
        if self.release is not None:
            self.release.clipper.finish(self.stds)
        for parameter in self.narrow:
            # released, and rounded as the optimiser expects it
            mean, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if mean is None else mean.to(parameter.dtype)
        if self.search is None:
            step_of(self.optimizer)
        else:
            self.search.move(step, self.attempt, self._drawn)
        if counts is not None:
            bounds = self.policy.bounds
            self.policy.update(
                noisy_fractions(counts, self.expected_batch)
                if bounds is None
                else noisy_means(counts, bounds, self.expected_batch)
            )
        self.taken += 1
        self.seeds.leave()
        if self.on_taken is not None:
            self.on_taken()
        return True

    def _public(self) -> Rows:
        if self.public is None:
            raise UserError("this way of clipping needs public examples, and the task has no dev set")
        return self.public()

    @property
    def _mover(self) -> Any:
        """The optimiser itself, where something guards it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _weights(self) -> list[str]:
        """What tells whether a step begins with the weights that it was charged for; noise is in each of their numbers.

        Other weights may have the same sums (an empty batch, gradients of zero), and whether they have goes by the data. It must
        not decide whether noise is drawn anew: two results show whether it was.
        """
        rows = [row.contiguous() for row in map(few_numbers, self.parameters) if row is not None]
        # each rank may have a part of them
        return self.ranks.gather_for("a step", checksum(rows, self.key).hex())

    def _no_sums(self) -> Sums:
        num_groups = len(self.clipper.groups) if self.clipper is not None else 0
        return Sums.none(num_groups, self.device, every=self.keep_norms)
