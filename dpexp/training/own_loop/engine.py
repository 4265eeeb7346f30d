"""`PrivacyEngine`: a person's own training loop, made private by one object.

It owns everything that could be put together wrongly: plan, ledger, key, sampler, clipper, noise, attempts, thresholds and
checkpoints. The loop keeps what is its own: model, optimiser, data set, collate function, losses.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpexp.clipping.distributed import reducers_in, refuse_reducer
from dpexp.durable import make_folder
from dpexp.errors import UserError, did_you_mean
from dpexp.parallel.replicas import ranks_of, unwrapped
from dpexp.privacy.plan_checks import check_accountant
from dpexp.training.own_loop.arguments import (
    QUANTILE_BUDGET,
    QUANTILE_LR,
    Numbers,
    beneath_accelerate,
    check_dataset,
    check_optimizer,
    checked_flags,
    checked_folder,
    named,
)
from dpexp.training.own_loop.planned import Planned
from dpexp.training.own_loop.run import OwnRun
from dpexp.training.watching.functions import Losses, look_at_losses
from dpexp.training.watching.guards import Batches


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
            thresholds.
        quantile_budget: the share of every step's budget that this costs.
        quantile_lr: how fast thresholds follow.
        rescale: whether thresholds of several groups are rescaled so that all together stay C (App. A.1), and the noise what it
            is; False: each group is clipped at its own quantile, and the noise follows the thresholds.
        allocation: of the noise to the groups: ``global``, ``equal_budget`` or ``weighted``.
        accountant: ``rdp``, ``prv`` or ``pld``; it decides the noise.
        schedule: how the noise changes over time, see `dpexp.privacy.schedules`.
        bands: b, of noise that is correlated over b steps and adds up to less in the weights (`dpexp.privacy.correlated`); a step
            then draws from one of b parts of the data, in turn. 1: the noise of each step is its own; ``auto``: the best b.
        scheduler: of the learning rate; stepped once after every step of the optimiser, empty batches included.
        loss_scale: static, for autocast to fp16; the losses given to `step` are unscaled.
        rows_per_example: M, the model sees this many adjacent rows of each example.
        users: who gave each example of the data set, in its order: then whole users are the unit of privacy, and N and
            `batch_size` are of users. A batch holds M rows of every user that was drawn (others in each step where a user has
            more, repeated ones without weight where there are fewer); `step` takes a loss for each row.
        fixed_length: the promise, which is checked, that all batches of sequences are padded to one length, and of images to one
            size; for models to which padding is not nothing (`dpexp.clipping.attach`).
        checkpoint_every: steps between checkpoints; 0: none besides the first and the last.
        trials: from how many runs on the same data, this one included, it was chosen; PRIVACY.md then holds the ε of the choice
            too. It may be given when the run is finished: the same script writes the card anew.
        secure: the exact form of the noise, some hundred times slower (`dpexp.privacy.noise`).
        data_name: name and version of the data, where it cannot be hashed; see `dpexp.training.identity.data_identity`.
        keep: what the loop has of its own and goes on with, by name: an average of the weights, the best loss so far, a scheduler
            that it steps itself. Each is a dict, or has `state_dict` and `load_state_dict`; a checkpoint holds it as it is when
            the next batch is asked for, and it is put back when the run goes on.
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
        rescale: bool = True,
        allocation: str = "global",
        accountant: str = "rdp",
        schedule: str | Mapping[str, Any] = "constant",
        bands: int | str = 1,
        scheduler: Any = None,
        loss_scale: float = 1.0,
        rows_per_example: int = 1,
        users: Sequence[Hashable] | None = None,
        fixed_length: bool = False,
        checkpoint_every: int = 100,
        trials: int = 1,
        secure: bool = False,
        data_name: str | None = None,
        keep: Mapping[str, Any] | None = None,
        noise_seed: int | None = None,
    ):
        numbers = Numbers(
            batch_size=batch_size, epochs=epochs, steps=steps, epsilon=epsilon, noise_multiplier=noise_multiplier,
            clip_norm=clip_norm, target_quantile=target_quantile, quantile_budget=quantile_budget, quantile_lr=quantile_lr,
            loss_scale=loss_scale, rows_per_example=rows_per_example, checkpoint_every=checkpoint_every, trials=trials,
            noise_seed=noise_seed,
        )  # fmt: skip
        fixed_length, secure, rescale = checked_flags(
            fixed_length=fixed_length, secure=secure, rescale=rescale
        )
        self.folder = checked_folder(folder)
        self.model, self.dataset, self._fixed_length = unwrapped(model), dataset, fixed_length
        check_optimizer(self.model, optimizer)
        optimizer, scheduler = beneath_accelerate(optimizer), beneath_accelerate(scheduler)
        wrappers = reducers_in(model)
        self.ranks = ranks_of(wrappers)
        for wrapper in wrappers:
            refuse_reducer(wrapper)
        check_dataset(dataset, users)
        planned = Planned.of(
            numbers, dataset, users, delta=delta, accountant=accountant, schedule=schedule, groups=groups, rule=rule,
            rescale=rescale, allocation=allocation, secure=secure, bands=bands,
        )  # fmt: skip
        self._run = run = OwnRun(
            self.model, optimizer, dataset, self.folder, planned, scheduler=scheduler, wrappers=wrappers, ranks=self.ranks,
            engine=engine, fixed_length=fixed_length, data_name=data_name, keep=keep,
        )  # fmt: skip
        self._steps, self._loop = run.steps, run.loop
        self.plan, self.policy, self.device = planned.plan, run.policy, run.device
        self.clipper, self.ledger = run.clipper, run.ledger

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
        return self._run.finished

    @property
    def private_loss(self) -> float:
        """The sum of the losses in the last step, without noise: for the eyes of who holds the data."""
        return float(self._steps.sums.loss)

    @named
    def batches(
        self,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        physical_batch_size: int = 64,
        *,
        length: Callable[[int], int] | None = None,
        steps: int | None = None,
    ) -> Iterator[Any]:
        """Yield the physical batches of the steps that are left; `step` is called once for each.

        A logical batch is a Poisson sample, cut into physical batches of at most `physical_batch_size` examples. Where it is
        empty, or this process has no share of it, one example is yielded that adds nothing: each step is seen once, and what
        goes by their number is public. Who leaves the loop in the middle of a logical batch has
        released nothing of it, and the next loop begins it again. The random generators of torch, numpy and Python are
        seeded from the run's key for every physical batch, because dropout and random masks must be secret and repeatable.

        Args:
            collate_fn: a list of examples -> a batch; None: torch's `default_collate`.
            physical_batch_size: what fits in memory. It changes the sums by rounding alone.
            length: of the example with a number, so that examples of similar length come together.
            steps: at most this many steps; None: all that are left.

        Raises:
            UserError: `step` was not called for a batch, or another loop over `batches` was begun meanwhile.
        """
        collate = default_collate if collate_fn is None else collate_fn
        loop = self._loop.batches(collate, physical_batch_size, length, steps)
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
        self._steps.around.pop(name, None)
        with self._loop.unwatched():
            return look_at_losses(losses, self.model, batch, name, not self._fixed_length, self._steps.around)

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
        self._run.save(folder)

    def load(self, folder: str | Path | None = None) -> None:
        """Go on from a checkpoint of this run: its last one, or that in another folder; of several processes, all call this.

        Steps that are then taken otherwise (another learning rate) are charged again. Who goes back because of how good the
        weights are, on public data too, decides by them how many charges there are: what holds is ε of as many as there could be.

        Raises:
            UserError: there is none, it is damaged or of another run, the ledger has lost steps that it stands on, or the engine
                is closed.
        """
        self._run.load(folder)

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
        self._run.write_card(Path(folder))

    def close(self) -> None:
        """Give model, optimiser and folder back. The ledger stays readable, and no step can be taken any more."""
        self._run.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PrivacyEngine cannot be copied or pickled: it holds the key and the ledger of one run. Copy model.state_dict(); "
            "another run has an engine and a folder of its own"
        )

    def __enter__(self) -> "PrivacyEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
