"""The processes that train together, as each of them sees them.

Ranks own whole examples, every rank can draw the sample and the noise of a step by itself, and rank 0 alone writes files. What
is left to be said is little: sums of clipped gradients, one small message a step, and what rank 0 has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpexp.errors import UserError
from dpexp.parallel.shards import is_sharded, replicas_of

T = TypeVar("T")

# as in DistributedDataParallel
BUCKET_BYTES = 25 << 20
# a message of this size is worth sending by itself: to copy it into a bucket and back costs more
MESSAGE_BYTES = 1 << 20


class ToldElsewhere(UserError):
    """An error that rank 0 prints; the others end with it, and say nothing."""

    told = True


@dataclass(frozen=True)
class Ranks:
    """Some processes that work together, this one among them.

    Args:
        rank: of this process in the group, from 0.
        size: how many there are.
        group: what sums tensors where they are computed; None alone.
        control: what passes small messages on the CPU; None alone.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    control: Any = None

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """Take the processes of a process group; None: the default one.

        Every process of the default group must call this, with the groups in the same order (`torch.distributed.new_group`).
        """
        group = dist.group.WORLD if group is None else group
        if dist.get_world_size(group) == 1:
            return cls()
        members = dist.get_process_group_ranks(group)
        gloo = "gloo" in dist.get_backend_config(group)
        control = group if gloo else dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return cls(dist.get_rank(group), len(members), group, control)

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files: rank 0."""
        return self.rank == 0

    def broadcast(self, value: Any = None) -> Any:
        """Return what rank 0 gives; any value that can be pickled."""
        if not self.several:
            return value
        box = [value]
        with _waiting():
            dist.broadcast_object_list(box, group=self.control, group_src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return what every rank gives, in the order of the ranks, on all of them."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.size
        with _waiting():
            dist.all_gather_object(found, value, group=self.control)
        return found

    def told_once(self, text: str) -> UserError:
        """Make the error that all ranks raise together; rank 0 prints it."""
        return UserError(text) if self.writes else ToldElsewhere(text)

    def once(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0 alone, and return its result everywhere.

        Raises:
            UserError: what it raised there; the other ranks raise `ToldElsewhere`.
        """
        if not self.several:
            return function()
        if not self.writes:
            failed, result = self.broadcast()
            if failed is not None:
                raise ToldElsewhere(failed)
            return result
        try:
            result = function()
        except BaseException as error:
            self.broadcast((f"rank 0: {error}", None))
            raise
        self.broadcast((None, result))
        return result

    def first(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0, and then on the others: they find what it has downloaded, or kept in a cache.

        Raises:
            UserError: what it raised on rank 0; see `once`.
        """
        found: list[T] = []
        self.once(lambda: found.append(function()))
        return found[0] if self.writes else function()

    def gather_for(self, what: str, value: T) -> list[T]:
        """As `gather`; whoever asks for something else meanwhile is told so, and nobody waits for him.

        Raises:
            UserError: on all ranks, where one does.
        """
        asked, found = map(list, zip(*self.gather((what, value)), strict=True))
        if strays := [rank for rank, theirs in enumerate(asked) if theirs != asked[0]]:
            raise self.told_once(
                f"rank {strays[0]} has come to {asked[strays[0]]}, and rank 0 to {asked[0]}: all processes must go through the "
                "same loop, and make the same calls"
            )
        return found

    def agree(self, what: str, value: Any) -> None:
        """Raise `UserError` on all ranks unless they all give an equal value; of dicts, the first odd entry is named."""
        found = self.gather_for(what, value)
        odd = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if odd is None:
            return
        theirs, ours = found[odd], found[0]
        names = []
        while isinstance(ours, dict) and isinstance(theirs, dict):
            names.append(next(name for name in ours | theirs if ours.get(name) != theirs.get(name)))
            theirs, ours = theirs.get(names[-1]), ours.get(names[-1])
        what += f" ({'.'.join(names)})" if names else ""
        raise self.told_once(
            f"{what} of rank {odd} differs from that of rank 0: {_short(theirs)}, and not {_short(ours)}. All processes of a run "
            "must be started with the same program, settings, data and libraries"
        )

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any rank."""
        if not self.several:
            return flag
        box = torch.tensor([int(flag)], dtype=torch.int32)
        with _waiting():
            dist.all_reduce(box, dist.ReduceOp.MAX, group=self.control)
        return bool(box.item())

    @torch.no_grad()
    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in place; the same tensors in the same order everywhere.

        Large ones travel from where they are; small ones in buckets, as those of DistributedDataParallel do. After it the
        ranks hold the same bits.
        """
        if not self.several:
            return
        for _, alike in groupby(tensors, lambda t: (t.dtype, t.device)):
            for bucket in _buckets(list(alike)):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    with _waiting():
                        dist.all_reduce(bucket[0], group=self.group)
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                with _waiting():
                    dist.all_reduce(flat, group=self.group)
                parts = flat.split([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    @torch.no_grad()
    def copy_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite each tensor with rank 0's. Of a sharded one each rank keeps its part, and replicas of it get the first's."""
        for tensor in tensors if self.several else ():
            part, groups = replicas_of(tensor) if is_sharded(tensor) else (tensor, [self.group])
            whole = part if part.is_contiguous() else part.contiguous()
            for group in groups:
                # as bytes: not every backend knows complex numbers, or those of 8 bits
                dist.broadcast(whole.reshape(-1).view(torch.uint8), group=group, group_src=0)
            if whole is not part:
                part.copy_(whole)


ALONE = Ranks()


@contextmanager
def said_who_is_gone() -> Iterator[None]:
    """Say in words what messages of torch (FSDP2's own, those between stages) raise once another process has ended."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no class of its own
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            raise _gone(error) from error
        raise


@contextmanager
def _waiting() -> Iterator[None]:
    """Say in words that who is waited for will not come."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _gone(error) from error


def _gone(error: RuntimeError) -> UserError:
    return UserError(
        "another process of this run has ended, or does not come: if it has met an error, it has told that itself. All "
        f"processes must go through the same loop, and make the same calls ({_short(error)})"
    )


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets = [[tensor] for tensor in tensors if tensor.nbytes >= MESSAGE_BYTES]
    size = BUCKET_BYTES
    for tensor in tensors:
        if tensor.nbytes >= MESSAGE_BYTES:
            continue
        if size + tensor.nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return buckets


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "…"
