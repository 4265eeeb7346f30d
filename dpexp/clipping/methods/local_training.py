"""DP-FedAvg (McMahan, Ramage, Talwar & Zhang 2018): what is clipped is what local training makes of the weights, user by user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpexp.clipping.distributed import Sums
from dpexp.clipping.groups import GroupsSpec
from dpexp.clipping.independence.state import State
from dpexp.clipping.methods.watched import WatchedClipper
from dpexp.errors import UserError

Batch = dict[str, Tensor]
WEIGHTS = "weights"
"""Of a user's rows in their loss, as `dpexp.tasks.users` names them."""
# so that a product in float32 is not longer than its threshold
ROUNDING = 2.0**-20


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Whatever forwards write to the model inside is lost: even their number says how many users were drawn."""
    with State(model).installed() as set_back:
        # to copies, which are written to in the place of what is there
        set_back()
        yield


class LocalClipper(WatchedClipper):
    """Trains a copy of the weights on one user, and clips the update Δ = θ_local - θ as one example's gradient is clipped.

        p.grad += -clip(Δ_k, C_k) in every group k,   so that SGD with learning rate 1 makes θ + (Σ clip(Δ) + noise)/B of it

    (their Algorithm 1 with w_k = 1 and the estimator f̃_f of a fixed denominator). One user more or less moves the sum by
    √(Σ C_k²) at most: a user's update depends on the weights before the step and on the user's own rows alone.

    Args:
        model: its trainable parameters train locally.
        losses: a batch of one user -> ``[1]``, the user's loss.
        epochs, batch_size, lr: of the local SGD; a ``batch_size`` of 0 takes all rows of the user at once.
        groups, clip_norm, rule: as for `dpexp.clipping.attach`; ``groups="layer"`` is their per-layer clipping.
    """

    whole = True

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Batch], Tensor],
        *,
        epochs: int,
        batch_size: int,
        lr: float,
        groups: GroupsSpec = "flat",
        clip_norm: float = 1.0,
        rule: str = "abadi",
    ):
        super().__init__(model, groups, clip_norm, rule)
        self.losses, self.epochs, self.batch_size, self.lr = losses, epochs, batch_size, lr
        self._batch: Batch | None = None

    @property
    def counted(self) -> str:
        """Nothing: whatever forwards write is lost."""
        return ""

    def see(self, batch: Batch) -> Tensor:
        """Keep the batch of one user for `backward`, and return the ``[1]`` loss under the weights before local training."""
        self._batch = batch
        with torch.no_grad(), kept(self.model):
            return self.losses(batch)

    def check_losses(self, losses: Tensor) -> None:
        """Refuse more than one user, or one whose batch was not seen."""
        if len(losses) > 1 or (len(losses) and self._batch is None):
            raise UserError("clip=fedavg trains on one user after the other: give it one at a time, by see()")

    def clipped(self, losses: Tensor, loss_scale: float) -> tuple[Tensor, Sums]:
        """Return the norms ``[K, 1]`` of the update of the user whose batch was seen last, and the clipped update with its sign
        turned.

        An update with a NaN or an infinity in it adds nothing. ``loss_scale`` is undone before the weights move.
        """
        batch, self._batch = self._batch, None
        assert batch is not None
        before = {name: p.detach().clone() for name, p in self.params.items()}
        try:
            with kept(self.model):
                for part in self._parts(batch):
                    gradients = self._gradients(self.losses(part).sum() * loss_scale)
                    with torch.no_grad():
                        for name, gradient in gradients.items():
                            self.params[name].sub_(gradient, alpha=self.lr / loss_scale)
            updates = {name: before[name] - p.detach() for name, p in self.params.items()}
        finally:
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(before[name])
        return self._shortened(updates, 1 - ROUNDING)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """The batches of the local epochs; each epoch has an order of its own, drawn from torch's generator."""
        weights, others = batch.get(WEIGHTS), {name: v for name, v in batch.items() if name != WEIGHTS}
        for _ in range(self.epochs):
            if not self.batch_size or weights is None:
                yield batch
                continue
            real = (weights[0] > 0).nonzero()[:, 0]
            real = real[torch.randperm(len(real)).to(real.device)]
            for rows in real.split(self.batch_size):
                some = {name: value[rows.to(value.device)] for name, value in others.items()}
                chosen = weights[:, rows]
                yield some | {WEIGHTS: chosen / chosen.sum()}
