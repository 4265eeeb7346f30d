"""`PrivacyEngine`: a person's own training loop, made private by one object.

It owns everything that could be put together wrongly: plan, ledger, key, sampler, clipper, noise, attempts, thresholds and
checkpoints. The loop keeps what is its own: model, optimiser, data set, collate function, losses.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpexp import provenance
from dpexp.clipping import attach
from dpexp.clipping.distributed import reducers_in, refuse_reducer, silent
from dpexp.durable import make_folder
from dpexp.errors import UserError, did_you_mean
from dpexp.parallel import ALONE, Ranks
from dpexp.parallel.replicas import made_same, ranks_of, unwrapped
from dpexp.privacy.caveats import pointless
from dpexp.privacy.keys import LEDGER, Keys, open_keys
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.plan import make_plan
from dpexp.privacy.plan_checks import check_accountant
from dpexp.privacy.sampling import PoissonSampler
from dpexp.privacy.shown import upwards
from dpexp.schemas import ClipConfig, PrivacyConfig, RunConfig
from dpexp.training import state
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
from dpexp.training.own_loop.arguments import (
    QUANTILE_BUDGET,
    QUANTILE_LR,
    Numbers,
    check_dataset,
    check_flags,
    check_optimizer,
    check_rule,
    checked_folder,
    checked_schedule,
    named,
)
from dpexp.training.own_loop.loop import OwnLoop
from dpexp.training.own_loop.rows import equal_rows, fitted_to_itself, tensors_of
from dpexp.training.own_loop.units import units_of
from dpexp.training.release import Release, build_policy
from dpexp.training.steps import Steps
from dpexp.training.sums import not_finite
from dpexp.training.watching.functions import Losses, look_at_losses
from dpexp.training.watching.guards import Batches, GuardedOptimizer
from dpexp.training.watching.reading import refuse_other_rows


class PrivacyEngine:
    """Train a model privately in an ordinary loop.

        engine = PrivacyEngine(model, optimizer, dataset, folder="runs/mine", batch_size=1024, epochs=3, epsilon=8, delta=1e-5)
        for batch in engine.batches(physical_batch_size=64):
            losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
            engine.step(losses)
        print(engine.epsilon())

    The folder keeps the ledger, the secret key and checkpoints. The same script run again goes on where it was interrupted,
    also by kill -9, and ends with the same weights; a folder of other data, another model or other settings is refused. Once
    nothing is left to do, `dpexp.privacy.keys.delete_key(folder)` makes the noise irretrievable.

    Under torchrun the same script trains on all processes together, within
    ``with dpexp.parallel.joined():``: each computes its share of every batch (docs/many_processes.md). The folder is
    rank 0's; a run may go on with another number of processes.

    Args:
        model: any module, also inside DistributedDataParallel; its trainable parameters at this moment are
            clipped. Random weights need no fixed seed: a run that goes on gets its first weights back.
        optimizer: of the trainable parameters.
        dataset: has a length N, which is public, and examples at 0 … N - 1; the unit of privacy is one of them.
        folder: of this run alone.
        batch_size: B, the expected size of a batch. Each step sees a Poisson sample: every example with probability B/N.
        epochs, steps: exactly one; an epoch is N/B steps.
        epsilon, noise_multiplier: exactly one; the noise follows from ε, δ and the number of steps.
        delta: a number or a rule, see `dpexp.privacy.plan_checks.resolve_delta`.
        clip_norm: C, the norm to which each example's gradient is clipped.
        groups: ``flat``, ``layer``, ``block`` or a mapping, see `dpexp.clipping.attach`.
        rule: ``abadi``, ``automatic`` (AUTO-S) or ``normalized`` (AUTO-V).
        engine: how the clipped sum is computed; see `dpexp.clipping.attach`.
        target_quantile: let each threshold follow this quantile of the norms (He et al. 2023, Algorithm 1); None: fixed
            thresholds. With several groups they are rescaled so that all together stay C (App. A.1).
        quantile_budget: the share of every step's budget that this costs.
        quantile_lr: how fast thresholds follow.
        allocation: of the noise to the groups: ``global``, ``equal_budget`` or ``weighted``.
        accountant: ``rdp``, ``prv`` or ``pld``; it decides the noise.
        schedule: how the noise changes over time, see `dpexp.privacy.schedules`.
        scheduler: of the learning rate; stepped once after every step of the optimiser, empty batches included.
        loss_scale: static, for autocast to fp16; the losses given to `step` are unscaled.
        rows_per_example: M, the model sees this many adjacent rows of each example.
        users: who gave each example of the data set, in its order: then whole users are the unit of privacy, and N and
            `batch_size` are of users. A batch holds M rows of every user that was drawn (others in each step where a user has
            more, repeated ones without weight where there are fewer); `step` takes a loss for each row.
        fixed_length: the promise, which is checked, that all batches of sequences are padded to one length; for models to which
            padding is not nothing (`dpexp.clipping.attach`).
        checkpoint_every: steps between checkpoints; 0: none besides the first and the last.
        trials: from how many runs on the same data, this one included, it was chosen; PRIVACY.md then holds the ε of the choice
            too. It may be given when the run is finished: the same script writes the card anew.
        secure: the exact form of the noise, some hundred times slower (`dpexp.privacy.noise`).
        data_name: name and version of the data, where it cannot be hashed; see `dpexp.training.identity.data_identity`.
        noise_seed: for tests; the guarantee then holds only while it is secret.

    Raises:
        UserError: what cannot be done privately or exactly, with the way out.
    """

    @named
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        folder: str | Path,
        batch_size: float,
        epochs: float | None = None,
        steps: int | None = None,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: str | float = "n_pow_-1.1",
        clip_norm: float = 1.0,
        groups: Any = "flat",
        rule: str = "abadi",
        engine: str = "auto",
        target_quantile: float | None = None,
        quantile_budget: float = QUANTILE_BUDGET,
        quantile_lr: float = QUANTILE_LR,
        allocation: str = "global",
        accountant: str = "rdp",
        schedule: str | Mapping[str, Any] = "constant",
        scheduler: Any = None,
        loss_scale: float = 1.0,
        rows_per_example: int = 1,
        users: Sequence[Hashable] | None = None,
        fixed_length: bool = False,
        checkpoint_every: int = 100,
        trials: int = 1,
        secure: bool = False,
        data_name: str | None = None,
        noise_seed: int | None = None,
    ):
        given = Numbers(
            batch_size=batch_size, epochs=epochs, steps=steps, epsilon=epsilon, noise_multiplier=noise_multiplier,
            clip_norm=clip_norm, target_quantile=target_quantile, quantile_budget=quantile_budget, quantile_lr=quantile_lr,
            loss_scale=loss_scale, rows_per_example=rows_per_example, checkpoint_every=checkpoint_every, trials=trials,
            noise_seed=noise_seed,
        )  # fmt: skip
        check_flags(fixed_length=fixed_length, secure=secure)
        self.folder = checked_folder(folder)
        given_model, model = model, unwrapped(model)
        check_optimizer(model, optimizer)
        self._wrappers = reducers_in(given_model)
        self.ranks = ranks = ranks_of(self._wrappers)
        for wrapper in self._wrappers:
            refuse_reducer(wrapper)
        check_dataset(dataset, users)
        check_rule(rule, allocation)
        self._units = units_of(len(dataset), users, given.rows_per_example)
        refuse_other_rows(dataset, users)
        adaptive = given.target_quantile is not None
        self.model, self.dataset = model, dataset
        self.checkpoint_every, self._fixed_length = given.checkpoint_every, fixed_length
        self.plan = make_plan(
            num_examples=self._units.count,
            unit=self._units.config.name,
            expected_batch_size=given.batch_size,
            steps=given.steps_of(self._units.count),
            delta=delta,
            accountant=accountant,
            epsilon=given.epsilon,
            noise_multiplier=given.noise_multiplier,
            quantile_budget=given.quantile_budget if adaptive else 0.0,
            schedule=checked_schedule(schedule),
        )
        for sentence in pointless(self.plan):
            warnings.warn(sentence, stacklevel=3)
        self._run = RunConfig(
            clip=ClipConfig(
                groups=groups,
                clip_norm=given.clip_norm,
                rule=rule,
                allocation=allocation,
                adaptive=adaptive,
                target_quantile=given.target_quantile or 0.5,
                quantile_lr=given.quantile_lr,
            ),
            privacy=PrivacyConfig(noise_seed=given.noise_seed, release="strict", secure=secure),
            unit=self._units.config,
            trials=given.trials,
        )
        self._optimizer = GuardedOptimizer(optimizer, scheduler, model)
        self._open = ExitStack()
        self._held = self._open.enter_context(ExitStack())
        self._open.callback(self._optimizer.release)
        try:
            self._keys = ranks.once(lambda: self._take_folder(given.noise_seed))
            key = self._keys.draws
            self._open.enter_context(silent(self._wrappers))
            made_same(ranks, model)
            self._data = data_identity(dataset, data_name)
            settings = settings_of(
                self.plan, self._run.clip, model, optimizer, self._data + self._units.identity, self._keys.run
            )
            ranks.agree("what is trained on what", settings)
            check_optimizers(ranks, optimizer, model)
            if data_name is not None:
                # which says nothing of their order
                check_examples(ranks, dataset, self._keys.run)
            # what cannot be clipped leaves no settings behind, with which a mended model would be compared
            self.clipper = attach(
                model, groups, given.clip_norm, rule, engine,
                rows_per_example=given.rows_per_example, fixed_length=fixed_length,
            )  # fmt: skip
            self.clipper.reduces = False
            self._open.callback(self.clipper.detach)
            with state.disk_errors(self.folder):
                self._identity = ranks.once(lambda: recognise(self.folder, settings))
            self.device = next(p for p in model.parameters() if p.requires_grad).device
            self.ledger = Ledger(
                self.folder / LEDGER, self._keys.run, ranks if ranks.several else None, times=False
            )
            self.policy = build_policy(self._run.clip, len(self.clipper.groups))
            machine = provenance.device_name(self.device)
            decisions = Decisions(self.folder / "decisions.json", machine, ranks=ranks)
            if (memory := decisions.of_rank("engine")) is not None:
                self.clipper.recall(memory)
            self._steps = Steps(
                model, self._optimizer,
                sampler=PoissonSampler(self.plan.num_examples, self.plan.sample_rate, key),
                key=key, expected_batch=self.plan.expected_batch_size, policy=self.policy,
                release=Release(self.plan, self.clipper, self.policy, self.ledger, key=key, allocation=allocation, secure=secure),
                decisions=decisions, loss_scale=given.loss_scale, on_taken=_weakly(self._taken), ranks=ranks,
            )  # fmt: skip
            goes_on = self.folder if self.ledger.steps_charged else None
            before = learnt_before(model, getattr(model, "name_or_path", ""), goes_on)
            for note in (before, fitted_to_itself(tensors_of(dataset))):
                if note is not None:
                    warnings.warn(f"not proven: {note}", stacklevel=3)
                    self.clipper.notes.append(note)
            # their number is private: for the eyes of who holds the data
            if users is None and (copies := equal_rows(dataset)) is not None:
                warnings.warn(copies, stacklevel=3)
            self._loop = OwnLoop(
                model, self._optimizer, dataset, self._units, self._steps, self.clipper,
                wrappers=self._wrappers, rows_per_example=given.rows_per_example, planned=self.plan.steps, folder=self.folder,
                facts=partial(facts_of, self.device, run=self._identity, code=provenance.code_hash(), engine=engine),
            )  # fmt: skip
            self._open.callback(self._loop.close)
            self._open.callback(remembering(self._steps.parameters, self.ledger, self.folder))
            if ranks.once((self.folder / "checkpoint" / "latest.json").exists):
                self.load()
            else:
                # the first weights: a run that is cut off early begins with them again
                self._save(None, ranks)
        except BaseException:
            self._open.close()
            raise
        weakref.finalize(self, self._open.close)
        self._broken = False
        self._again = self.ledger.charged_again

    @property
    def steps(self) -> int:
        """How many steps the run has."""
        return self.plan.steps

    @property
    def steps_taken(self) -> int:
        """How many of them are taken."""
        return self._steps.taken

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.steps_taken >= self.steps

    @property
    def private_loss(self) -> float:
        """The sum of the losses in the last step, without noise: for the eyes of who holds the data."""
        return float(self._steps.sums.loss)

    @named
    def batches(
        self,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        physical_batch_size: int = 64,
        *,
        length: Callable[[int], int] | None = None,
        steps: int | None = None,
    ) -> Iterator[Any]:
        """Yield the physical batches of the steps that are left; `step` is called once for each.

        A logical batch is a Poisson sample, cut into physical batches of at most `physical_batch_size` examples. An empty
        one yields nothing: its step is taken here. Who leaves the loop in the middle of a logical batch has
        released nothing of it, and the next loop begins it again. The random generators of torch, numpy and Python are
        seeded from the run's key for every physical batch, because dropout and random masks must be secret and repeatable.

        Args:
            collate_fn: a list of examples -> a batch.
            physical_batch_size: what fits in memory. It changes the sums by rounding alone.
            length: of the example with a number, so that examples of similar length come together.
            steps: at most this many steps; None: all that are left.

        Raises:
            UserError: `step` was not called for a batch, or another loop over `batches` was begun meanwhile.
        """
        loop = self._loop.batches(collate_fn, physical_batch_size, length, steps)
        return Batches(loop, self._loop.alone, owner=self)

    def step(self, losses: Tensor) -> bool:
        """Clip the gradients of a physical batch and add them up; with the last one of a logical batch, take the step.

        The step: ledger, noise, division by the expected batch size, optimiser, scheduler, thresholds, checkpoint.

        Args:
            losses: `[b]`, one for each example of the batch and of that example alone, unreduced and unscaled; with `users`,
                one for each of the M rows of every user.

        Returns:
            Whether the optimiser has moved.

        Raises:
            UserError: no batch is waiting for its losses, there are more or fewer losses than examples, what an example loses
                depends on the others (`watching`), the loop has written to the gradients, or another thread takes the step.
        """
        with self._loop.alone:
            return self._loop.step(losses)

    # type checkers know the names
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Refuse what has another name in other libraries, and say where its counterpart stands."""
            names = [known for known in dir(type(self)) if not known.startswith("_")]
            raise AttributeError(
                f"PrivacyEngine has no {name}{did_you_mean(name, names)}. The calls of Opacus and fastDP: docs/from_opacus.md"
            )

    def public(self) -> AbstractContextManager[None]:
        """Give the model public rows that have a part in every loss: a rehearsal, prototypes, a regulariser.

            with engine.public():
                rehearsal = F.cross_entropy(model(public_x), public_y)
            engine.step(F.cross_entropy(model(x), y, reduction="none") + 0.1 * rehearsal)

        Every example's gradient then holds that of the public term, and is clipped with it. This takes a back-propagation per
        example. What enters there must be public, which is looked at for the first batches alone.
        """
        return self._loop.public()

    def look_at_losses(self, losses: Losses, batch: Any) -> None:
        """Refuse a function of the loop's own whose losses go by their batch, which no gradient shows.

        Classes weighted by their counts in the batch, mining of hard examples, a norm of the losses: such a loop runs, and its
        epsilon is wrong. Call this once, before the loop.

        Args:
            losses: ``(model, batch) -> [b]``, as the loop computes them.
            batch: of two examples or more, on the model's device; its tensors begin with the batch.

        Raises:
            UserError: what an example loses depends on the others; or that cannot be told, and why.
        """
        note = self._look_at_losses(losses, batch, getattr(losses, "__name__", "the losses"))
        if note is not None:
            raise UserError(note)

    def _look_at_losses(self, losses: Losses, batch: Any, name: str) -> str | None:
        """See `functions.look_at_losses`: what is computed on other batches is not the loop's."""
        with self._loop.unwatched():
            return look_at_losses(losses, self.model, batch, name, padding=not self._fixed_length)

    def epsilon(self, accountant: str | None = None) -> float:
        """ε of everything released so far, at the plan's δ, computed from the ledger.

        Where the loop is left before its last step because of how good the weights are, on public data too, that many steps were
        not fixed beforehand, and what holds is ε of the whole plan: `plan.epsilon()`.

        Raises:
            UserError: the accountant is none (a δ, say), or gives no bound (``gdp``).
        """
        if isinstance(accountant, Number):
            raise UserError(
                f"epsilon({accountant}): δ is the plan's, {self.plan.delta:g}, as PrivacyEngine(delta=...) says; leave it out"
            )
        accountant = accountant or self.plan.accountant
        check_accountant(accountant, allow_clt=False)
        return self.ledger.epsilon(self.plan.delta, accountant)

    def save(self, folder: str | Path | None = None) -> None:
        """Write a checkpoint, to the run's folder unless another one is given.

        Of several processes rank 0 writes a whole model, whether the others call this or not. Of a sharded one each has a part:
        all call it.

        Raises:
            UserError: the engine is closed, the folder cannot be made, the disk is full, or a process with a part does something
                else.
        """
        self._loop.refuse_closed()
        if self._steps.sharded:
            self._save(folder, self.ranks)
        elif self.ranks.writes:
            self._save(folder, ALONE)

    def _save(self, folder: str | Path | None, ranks: Ranks) -> None:
        """Write a checkpoint; these ranks do it together."""
        folder = Path(folder or self.folder / "checkpoint")
        ranks.agree("save()", self.steps_taken)
        if ranks.several:
            self._steps.refuse_other_weights()
        ranks.once(lambda: make_folder(folder, "save(folder)"))
        checkpoint = state.Checkpoint(
            step=self.steps_taken,
            model=state.model_state(self.model),
            optimizer=self._optimizer.optimizer.state_dict(),
            signature=self._identity,
            **state.resting_on(self.policy, self.ledger, self._optimizer.parts),
        )
        with state.disk_errors(folder):
            state.save_together(folder, checkpoint, ranks)

    def load(self, folder: str | Path | None = None) -> None:
        """Go on from a checkpoint of this run: its last one, or that in another folder; of several processes, all call this.

        Raises:
            UserError: there is none, it is damaged or of another run, the ledger has lost steps that it stands on, or the engine
                is closed.
        """
        self._loop.refuse_closed()
        folder = Path(folder or self.folder / "checkpoint")
        self.ranks.agree("load()", self.steps_taken)
        optimizer = self._optimizer.optimizer
        checkpoint = state.read_together(folder, self._identity, self.ranks, self.model, optimizer)
        if checkpoint is None:
            raise UserError(f"there is no checkpoint in {folder}")
        state.put_back(checkpoint, self.policy, self.ledger, self._optimizer.parts)
        state.load_model_state(self.model, checkpoint.model)
        self._optimizer.load(checkpoint.optimizer)
        self._steps.clear()
        self._steps.taken = checkpoint.step
        self.ranks.once(self._hold)

    def write_card(self, folder: str | Path) -> None:
        """Write PRIVACY.md, what is guaranteed about the training data, beside a saved model; rank 0 does.

        Raises:
            UserError: the folder is not there, and cannot be made; or no step was taken, and the card would say ε = 0 of what
                comes later.
        """
        if not self.ledger.steps_charged:
            raise UserError(
                "no step was taken yet, and a card would say epsilon = 0: call write_card(folder) after the loop"
            )
        if not self.ranks.writes:
            return
        make_folder(Path(folder), "write_card(folder)")
        if (note := also_tried(self._data, self.folder, self._run.trials)) is not None:
            warnings.warn(note, stacklevel=2)
        of = self._run, self.plan, self.ledger, self.clipper, self.model, self.dataset
        summary = summary_of(*of, copied=self._keys.copied, unproven=self._steps.unproven)
        write_card(summary, Path(folder))

    def close(self) -> None:
        """Give model, optimiser and folder back. The ledger stays readable, and no step can be taken any more."""
        self._loop.closed = True
        self._open.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PrivacyEngine cannot be copied or pickled: it holds the key and the ledger of one run. Copy model.state_dict(); "
            "another run has an engine and a folder of its own"
        )

    def __enter__(self) -> "PrivacyEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _taken(self) -> None:
        """After every step."""
        taught(self._data, self.folder)
        again = self.ledger.charged_again
        if again > self._again and self.ranks.writes:
            warnings.warn(
                f"step {self.steps_taken} was charged a second time: since the interruption something has changed (code, data, "
                "machine, threads, number of processes, physical batch size), and it drew a fresh sample and fresh noise. "
                f"Epsilon is {upwards(self.epsilon())} so far",
                stacklevel=3,
            )
        self._again = again
        if not self._broken and not math.isfinite(self.private_loss):
            self._broken = True
            warnings.warn(not_finite(self.steps_taken), stacklevel=3)
        if self.finished or (self.checkpoint_every and self.steps_taken % self.checkpoint_every == 0):
            self._save(None, self.ranks)
        if self.finished:
            self.ranks.once(self._hold)

    def _hold(self) -> None:
        """Keep others out of the folder while there are steps to take; a notebook's cell may run again after the last one."""
        self._held.close()
        if not self.finished:
            self._held.enter_context(state.exclusive(self.folder))

    def _take_folder(self, noise_seed: int | None) -> Keys:
        self._held.enter_context(state.exclusive(self.folder))
        refuse_other_ledgers(self.folder)
        with state.disk_errors(self.folder):
            return open_keys(self.folder, noise_seed)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method of an object that this does not keep alive: an engine that is dropped gives its folder back at once."""
    weak = weakref.WeakMethod(method)

    def call() -> None:
        if (bound := weak()) is not None:
            bound()

    return call
