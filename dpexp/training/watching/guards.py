"""What keeps a person's own loop from moving weights by gradients without noise, or from spoiling a sum half-way."""

import os
import threading
import warnings
from collections.abc import Container, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpexp.clipping.groups import trainable_parameters
from dpexp.clipping.independence.comparison import held_in, same_buffer
from dpexp.errors import UserError, first_line
from dpexp.training.watching.misfits import FLOATS, moved_by, refuse_misfits

TOUCHED = (
    "the gradient of {name} {what} in the middle of a batch: leave out zero_grad(), loss.backward(), clip_grad_norm_() and a "
    "GradScaler. engine.step(losses) does all of it; where that was cut off (Ctrl-C, out of memory), begin a new loop over "
    "engine.batches(), which begins the step again"
)


class OneAtATime:
    """Lets in one thread at a time, of the process that has made it: two that take the same step would count an example twice.

    Raises:
        UserError: another thread is inside, or this is a forked process.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        # a thread that Ctrl-C met on its way out comes in again
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            # whose messages to other ranks nobody hears, and for whose threads torch would wait
            raise UserError(
                "this process was forked after PrivacyEngine(...), and a run belongs to the process that began it: fork first, "
                "then make the engine where the loop is"
            )
        if not self._lock.acquire(blocking=False):
            raise UserError(
                "two threads use this PrivacyEngine at once: take batches and call step(losses) in one thread alone"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Batches(Iterator[Any]):
    """The batches of a loop, taken by one thread at a time."""

    def __init__(self, batches: Generator[Any, None, None], alone: OneAtATime, owner: object):
        self._batches, self._alone = batches, alone
        # which gives its folder back once nobody holds it
        self._owner = owner

    def __next__(self) -> Any:
        with self._alone:
            return next(self._batches)

    def close(self) -> None:
        """Leave the loop."""
        self._batches.close()


class GuardedOptimizer:
    """An optimiser that steps when the engine says so, and raises when anyone else does, with this optimiser or another one.

    Args:
        optimizer: of the model's trainable parameters, of all and of no others.
        scheduler: stepped after the optimiser; None where the learning rate is moved elsewhere.
        model: what trains.

    Raises:
        UserError: the optimiser does not fit the model, or needs what a private step does not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any, model: nn.Module):
        refuse_misfits(optimizer, scheduler, model)
        self.optimizer, self.scheduler = optimizer, scheduler
        self._open = False
        self._epoch = getattr(scheduler, "last_epoch", None)
        self._own = [p for p in model.parameters() if p.requires_grad]
        self._moved = moved_by(optimizer)
        own = {id(p) for p in self._own}
        self._frozen = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        # parameters of others that batches go through, see `LossWatch`
        self.outside: Container[Tensor] = ()
        self._hook = register_optimizer_step_pre_hook(self._refuse)

    def step(self) -> None:
        """Move the weights, then the learning rate."""
        self._open = True
        # of a backward from before they were frozen: it holds no noise, and an optimiser asks for nothing but a gradient
        for p in self._frozen:
            p.grad = None
        try:
            step_of(self.optimizer)
        finally:
            self._open = False
        if self.scheduler is not None:
            step_of(self.scheduler)
            self._epoch = getattr(self.scheduler, "last_epoch", None)

    def check(self) -> None:
        """Raise `UserError` where the loop has moved the learning rate too, or given the optimizer more to move."""
        if moved_by(self.optimizer) != self._moved:
            raise UserError(
                "the optimizer holds other parameters than when the engine was made (add_param_group?): it would move them by "
                "gradients without noise. Put all that trains into the model and the optimizer before PrivacyEngine(...)"
            )
        if getattr(self.scheduler, "last_epoch", None) != self._epoch:
            raise UserError(
                "scheduler.step() was called by the loop, and the engine calls it after every step: leave it out, or leave out "
                "scheduler= to step it yourself"
            )

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the optimiser's own state."""
        return {} if self.scheduler is None else {"scheduler": self}

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the scheduler's state back."""
        self.scheduler.load_state_dict(state)
        self._epoch = getattr(self.scheduler, "last_epoch", None)

    def load(self, optimizer: dict[str, Any]) -> None:
        """Put the optimiser's state back that a checkpoint holds, the learning rate included."""
        asked = _rates(self.optimizer.param_groups)
        here = [len(group["params"]) for group in self.optimizer.param_groups]
        # what wraps another optimizer may keep no groups of its own
        before = (
            [len(group["params"]) for group in optimizer["param_groups"]]
            if "param_groups" in optimizer
            else here
        )
        if before != here:
            raise UserError(
                f"the optimizer of the checkpoint has groups of {before} parameters, and this one of {here}: make it with the "
                "groups that the run was begun with (their learning rates may be others)"
            )
        self.optimizer.load_state_dict(optimizer)
        if (kept := _rates(self.optimizer.param_groups)) != asked:
            warnings.warn(
                f"this run goes on with the learning rate {kept} of its checkpoint, and not with {asked}: to change it, write to "
                "optimizer.param_groups after PrivacyEngine(...)",
                stacklevel=4,
            )

    def release(self) -> None:
        """Give the optimiser back."""
        self._hook.remove()

    def _refuse(self, optimizer: Any, *_: Any) -> None:
        """Before a step of any optimiser in this process."""
        if self._open:
            return
        moved = [p for group in optimizer.param_groups for p in group["params"]]
        if outside := [p for p in moved if p in self.outside]:
            raise UserError(
                f"private examples went through a parameter of shape {list(outside[0].shape)} that is not in the engine's model, "
                "and another optimizer is about to train it on them without noise: make one module of all that trains. What is "
                "not trained on them is called under torch.no_grad()"
            )
        own = {id(p) for p in self._own}
        if any(id(p) in own for p in moved):
            raise UserError(
                "optimizer.step() was called by the loop (or by a GradScaler), on gradients that hold no noise yet: leave it "
                "out. engine.step(losses) clips, and takes the optimizer's step itself once the batch is complete. Who trains "
                "on without privacy calls engine.close() first"
            )


class GradientGuard:
    """Notices when anyone but the engine writes to `p.grad` while a logical batch is being summed."""

    def __init__(self, model: nn.Module):
        self.parameters = trainable_parameters(model)
        self._seen: list[tuple[int, int] | None] = []

    def look(self) -> None:
        """The gradients are now as the engine left them."""
        self._seen = self._present()

    def check(self) -> None:
        """Raise `UserError` where a gradient is another one than at the last look."""
        for name, before, now in zip(self.parameters, self._seen, self._present(), strict=True):
            if before == now:
                continue
            what = "was set to None" if now is None else "was written to"
            raise UserError(TOUCHED.format(name=name, what=what))

    def _present(self) -> list[tuple[int, int] | None]:
        # of a sharded one its part here, which has a version of its own
        grads = (getattr(p.grad, "_local_tensor", p.grad) for p in self.parameters.values())
        return [None if grad is None else (id(grad), grad._version) for grad in grads]


def few_numbers(weight: Tensor) -> Tensor | None:
    """Return at most 64 numbers of what this process has of a weight, as a view; None where it has none."""
    local = next(reversed(held_in(weight.detach())), None)
    if local is None or not local.numel():
        return None
    # the first place along every other axis, whatever the strides
    return local[(0,) * (local.ndim - 1) + (slice(64),)] if local.ndim else local[None]


class StepGuard:
    """Notices when the loop changes the model, or a setting of the optimizer, between two pieces of one logical batch: trained
    weights, frozen ones (a teacher that follows) and saved buffers.

    Which examples share a piece, and how many pieces there are, follows from who was drawn. It may show in nothing that moves
    the weights: with a learning rate that falls after every piece, one example more would change the whole step.

    Args:
        model: what trains.
        optimizer: of its weights.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._weights = [p for p in model.parameters() if p.dtype in FLOATS]
        # by name: they may be assigned anew
        self._kept = [
            (module, name, f"{path}.{name}" if path else name)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self._optimizer = optimizer
        self._seen: tuple[list[Tensor], dict[str, Any]] | None = None

    def look(self) -> None:
        """Keep what the pieces that follow have to find again, unless it is kept already."""
        if self._seen is None:
            self._seen = self._some_numbers(), self._settings()

    def forget(self) -> None:
        """Let everything be changed: no piece is added yet, or the step is taken."""
        self._seen = None

    def check(self) -> None:
        """Raise `UserError` where something is another than at the look."""
        if self._seen is None:
            return
        weights, settings = self._seen
        now = self._settings()
        changed = [name for name, value in now.items() if settings.get(name, value) != value]
        if changed:
            name = changed[0]
            raise UserError(
                f"{name} of the optimizer was changed from {settings[name]} to {now[name]} in the middle of a batch, and would "
                "tell how many pieces the batch has, which is private: where a scheduler or the loop does that after every "
                "piece, do it where engine.step(losses) returns True, or give PrivacyEngine(..., scheduler=...)"
            )
        different = [
            a.shape == b.shape and not same_buffer(a, b, 0, 0)
            for a, b in zip(weights, self._some_numbers(), strict=True)
        ]
        of_weights = len(different) - len(self._kept)
        if any(different[:of_weights]):
            raise UserError(
                "the weights were changed in the middle of a batch (a decay by hand, load_state_dict, averaged weights that were "
                "not taken out again, a teacher that follows): which examples meet which weights is private, as is how many "
                "pieces a batch has, and no noise is for that. Do it where engine.step(losses) returns True"
            )
        for (_, _, name), other in zip(self._kept, different[of_weights:], strict=True):
            if other:
                raise UserError(
                    f"the saved buffer {name} was changed in the middle of a batch: how many pieces a batch has is private, as "
                    "is how long they are, and no noise is for that. Where the loop does it, do it where engine.step(losses) "
                    "returns True; where the model's forward does (a mask, positions), register it with persistent=False"
                )

    def _some_numbers(self) -> list[Tensor]:
        """A few of every weight, also of what was written as ``p.data``, which changes no version: a tensor for each device and
        dtype; and of every buffer."""
        taken: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for row in map(few_numbers, self._weights):
            if row is not None:
                taken.setdefault((row.device, row.dtype), []).append(row)
        buffers = (module._buffers.get(name) for module, name, _ in self._kept)
        kept = [None if buffer is None else few_numbers(buffer) for buffer in buffers]
        empty = torch.zeros(0)
        return [torch.cat(rows) for rows in taken.values()] + [
            empty if row is None else row.clone() for row in kept
        ]

    def _settings(self) -> dict[str, Any]:
        """What the optimizer's groups say besides their parameters."""
        return {
            name if number == 0 else f"{name} (group {number})": value.tolist()
            if isinstance(value, Tensor)
            else value
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }


def step_of(mover: Any) -> None:
    """Call the step() of an optimizer or a scheduler, and say whose it was where it fails."""
    try:
        mover.step()
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"step() of {type(mover).__name__} failed ({first_line(error)}), behind a step that is charged: mend it, or choose "
            "another one, and run the same script again (the same sums get the same noise, and are not charged twice; another "
            "optimizer needs another folder)"
        ) from error


def _rates(groups: Sequence[dict[str, Any]]) -> str:
    """The learning rates that an optimizer was made with, before a scheduler moved them; None where it finds its own."""
    rates = [group.get("initial_lr", group["lr"]) for group in groups if "lr" in group]
    return ", ".join("None" if rate is None else f"{float(rate):g}" for rate in rates)
