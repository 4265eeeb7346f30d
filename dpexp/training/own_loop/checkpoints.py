"""Checkpoints of a run in a loop of one's own."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpexp.clipping.thresholds import FixedThresholds
from dpexp.durable import make_folder
from dpexp.errors import UserError
from dpexp.parallel import Ranks
from dpexp.privacy.ledger import Ledger
from dpexp.training import state
from dpexp.training.identity import checksum_of_any
from dpexp.training.own_loop.keeping import Kept
from dpexp.training.steps import Steps
from dpexp.training.watching.guards import GuardedOptimizer

KEPT = "keep"
"""The part of a checkpoint that is the loop's own, see `Kept`."""


def give_own_memory(model: nn.Module) -> None:
    """Copy those tensors of a model that are a part of a larger tensor: torch saves all of it with them.

    A buffer with a few public rows of a tensor would take its private ones into every file of the model.
    """
    lying = defaultdict[int, list[Tensor]](list)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # on a GPU it keeps its weights in one piece of memory, and may leave gaps
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
            if plain and not tensor.is_meta:
                lying[tensor.untyped_storage().data_ptr()].append(tensor)
    for tensors in lying.values():
        # where each begins, and how far it reaches
        spans = {(t.data_ptr(), _reach(t)) for t in tensors}
        if sum(reach for _, reach in spans) < tensors[0].untyped_storage().nbytes():
            copies = {(t.data_ptr(), t.shape, t.stride()): t.detach().clone() for t in tensors}
            for tensor in tensors:
                tensor.data = copies[tensor.data_ptr(), tensor.shape, tensor.stride()]


def _reach(tensor: Tensor) -> int:
    """Bytes from the first number to the last one."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps))


class Checkpoints:
    """Writes the state of a run, and puts it back.

    Args:
        folder: where they lie, unless another one is given.
        identity: of the run, see `identity.recognise`.
        model, optimizer, policy, steps, kept: what has a state.
        ledger: on which it rests.
        ranks: the processes that train together.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        model: nn.Module,
        optimizer: GuardedOptimizer,
        policy: FixedThresholds,
        steps: Steps,
        kept: Kept,
        ledger: Ledger,
        ranks: Ranks,
    ):
        self.folder, self.identity = folder, identity
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.steps, self.ledger, self.ranks = steps, ledger, ranks
        parts = {**optimizer.parts, KEPT: kept if kept.objects else None, "noise": steps.correlated}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._written = ""

    def check(self) -> None:
        """Raise `UserError` where one of now could not be read again."""
        state.refuse_unreadable(self._present())

    def outdated(self) -> bool:
        """Whether the loop has changed something since the last one of the run's own folder; all ranks ask together."""
        return self.ranks.any(self._written != self._content())

    def save(self, folder: str | Path | None, ranks: Ranks) -> None:
        """Write one; these ranks do it together."""
        folder = Path(folder or self.folder)
        ranks.agree("save()", self.steps.taken)
        if ranks.several:
            self.steps.together.refuse_other_weights(self.steps.taken)
        ranks.once(lambda: make_folder(folder, "save(folder)"))
        with state.disk_errors(folder):
            state.save_together(folder, self._present(), ranks)
        if folder == self.folder:
            self._written = self._content()

    def load(self, folder: str | Path | None) -> None:
        """Go on from one; all ranks do it together.

        Raises:
            UserError: see `dpexp.PrivacyEngine.load`.
        """
        folder = Path(folder or self.folder)
        self.ranks.agree("load()", self.steps.taken)
        optimizer = self.optimizer.optimizer
        checkpoint = state.read_together(folder, self.identity, self.ranks, self.model, optimizer)
        if checkpoint is None:
            raise UserError(f"there is no checkpoint in {folder}")
        state.put_back(checkpoint, self.policy, self.ledger, self._parts)
        state.load_model_state(self.model, checkpoint.model)
        self.optimizer.load(checkpoint.optimizer)
        self.steps.clear()
        self.steps.taken = checkpoint.step

    def _present(self) -> state.Checkpoint:
        return state.Checkpoint(
            step=self.steps.taken,
            model=state.model_state(self.model),
            optimizer=self.optimizer.optimizer.state_dict(),
            signature=self.identity,
            **state.resting_on(self.policy, self.ledger, self._parts),
        )

    def _content(self) -> str:
        """What tells the state of now from others."""
        present = self._present()
        leaves = tree_leaves([present.model, present.optimizer, present.kept])
        tensors = checksum_of_any(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return f"{tensors.hex()} {[leaf for leaf in leaves if not isinstance(leaf, Tensor)]}"
