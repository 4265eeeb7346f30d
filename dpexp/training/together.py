"""What the processes that take a step do together: they compare what they go by, and add up what each of them has."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp.clipping.survey.layouts import due
from dpexp.parallel import Ranks
from dpexp.parallel.shards import is_sharded
from dpexp.privacy.fingerprint import checksum
from dpexp.training.refusals import refuse_processes, refuse_shards
from dpexp.training.sums import Sums


class Together:
    """The processes of a run, as its steps need them.

    Args:
        ranks: all of them.
        parameters: what a step sums gradients of.
        exact: whether the sums are rounded to a grid before the noise, which shards do not know.
        private: whether what a step sums is clipped and noised.

    Attributes:
        replicas: those among which examples are shared out: all, but where a model is spread over processes.
        sharded: whether a parameter is. Gathering it takes all ranks at once: they go through the model equally often.
        lockstep: whether ranks meet within a piece already.

    Raises:
        UserError: there are several processes, and ``ranks`` does not know of them. Each would draw the same batch, and the sum
            of their sums would hold every example several times, under noise for one.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor], *, exact: bool, private: bool):
        if not ranks.several:
            refuse_processes()
        self.ranks = self.replicas = ranks
        self.parameters, self.private = parameters, private
        self.sharded = ranks.several and any(map(is_sharded, parameters))
        if self.sharded:
            refuse_shards(ranks, parameters, exact=exact)
        self.lockstep = self.sharded
        self._told: tuple[Mapping[str, Any], dict[str, Any]] | None = None

    def facts(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """How many ranks, and on which machines, decides the order of additions: it makes a step what it is, to the last bit."""
        if not self.ranks.several:
            return facts
        if self._told is None or self._told[0] != facts:
            # the machines may differ, and what runs on them may not
            self.ranks.agree("the program", {name: facts.get(name) for name in ("code", "torch", "numpy")})
            self._told = facts, {"ranks": self.ranks.gather(dict(facts))}
        return self._told[1]

    def sum_(self, sums: Sums) -> None:
        """Add up the gradients of all ranks, and what else a step sums, on each of them."""
        if not self.ranks.several:
            return
        if not self.private and not self.sharded:
            # a parameter that nobody used stays without a gradient, as in one process
            used = self.replicas.gather([p.grad is not None for p in self.parameters])
            for parameter, anywhere in zip(self.parameters, map(any, zip(*used, strict=True)), strict=True):
                if anywhere and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        # else FSDP has added them up
        if not self.sharded:
            self.replicas.sum_([p.grad for p in self.parameters if p.grad is not None])
        sums.sum_(self.ranks)

    def refuse_ways_apart(self, step: int, sample: str, settings: Sequence[Mapping[str, Any]]) -> None:
        """Raise `UserError` where ranks would move by one sum in several ways: from then on they would train several models.

        Or where they have drawn several samples (another version of numpy, another kind of machine): their shares overlap, and
        an example that is in two of them counts twice.

        Args:
            step: which.
            sample: what tells one from another.
            settings: of the groups of the optimiser.
        """
        if not self.ranks.several:
            return
        plain = (bool, int, float, str, tuple)
        ways = {"sample": sample} | {
            f"{name} of group {number} of the optimizer": str(value)
            for number, group in enumerate(settings)
            for name, value in group.items()
            if isinstance(value, plain) or (name != "params" and isinstance(value, Tensor))
        }
        self.ranks.agree(f"step {step}", ways)
        if due(step + 1):
            self.refuse_other_weights(step)

    def refuse_other_weights(self, step: int) -> None:
        """Raise `UserError` where whole weights are not those of all replicas: a loop has changed them on some of them alone."""
        whole = [p for p in self.parameters if not is_sharded(p)]
        if self.replicas.several and whole:
            self.replicas.agree(
                f"the checksum of the weights after step {step} (a loop changes weights on all processes alike, or not at "
                "all; the machines are of one kind)",
                checksum(whole).hex(),
            )
