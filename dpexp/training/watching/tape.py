"""What is known of the tensors of a loop of one's own, and the functions that those of its batch went through, written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.independence.chance import Chance, WithoutChance
from dpexp.clipping.operations.others import BROADCASTING
from dpexp.clipping.tapping.dataflow import FEW, in_order
from dpexp.errors import UntoldError
from dpexp.training.watching.lines import (
    PLAIN,
    WHOLE,
    ByMemory,
    Call,
    Line,
    Marks,
    Number,
    Slot,
    address_of,
    name_of,
    storage_of,
    tensors_of,
    version_of,
)
from dpexp.training.watching.memory import Memory
from dpexp.training.watching.owned import Owned
from dpexp.training.watching.places import EndToEnd, Place, Places, is_order
from dpexp.training.watching.sizes import Sizes

# what they return is real, whole numbers though they are given
DIVIDING = {"div", "divide", "true_divide", "truediv", "rtruediv"}
# functions that are written down for one batch
LONGEST = 5000
# bytes that are held for it
LARGEST = 1 << 28


class Known:
    """What each tensor holds, as far as that is known; a tensor may be in several of these.

    Args:
        before: `private` of an earlier batch.
        own: the tensors of the model.
        data: the tensors that the rows of the data set stand in, where it has some.

    Attributes:
        private: the tensors of the batch, and what was made of their values.
        before: what earlier batches have left behind.
        rowed: what has the rows of the batch and was made by nothing that is written down.
        returned: what the model has returned -> in which of its calls.
        within: what the model's own forward has made of the batch -> in which of its calls.
        listed: what stands in lists with an entry for each example -> whose it is.
        told: what ranks have told each other, which other examples are in.
        left: whether numpy was given values of the batch.
        came: whether something with rows of the batch came from elsewhere afterwards.
        drawn: what torch has made of no tensor: noise, zeros, an order.
    """

    def __init__(self, before: Marks, own: Owned, data: Iterable[Tensor]):
        self.private, self.before = Marks(), before
        self.rowed, self.returned = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.within, self.told = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.listed = WeakIdKeyDictionary()
        self.left = self.came = False
        self.drawn = WeakIdKeyDictionary()
        self._own = own
        self._data = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in data if t.is_contiguous()]

    def mark(self, tensor: Any, written: bool = False) -> None:
        """Remember that a tensor holds values of the batch; ``written``: and so does what else lies in its memory."""
        if type(tensor) not in PLAIN or tensor in self._own:
            return
        if written:
            self.private.mark_written(tensor)
        else:
            self.private[tensor] = None

    def is_old(self, tensor: Tensor) -> bool:
        """Whether a tensor that is not of this batch holds what an earlier one has left behind, or rows of the data set."""
        if tensor in self.before:
            return True
        return bool(self._data) and any(first <= address_of(tensor) < last for first, last in self._data)


class Tape:
    """What was done with one batch, in order: enough to do it again (`redone`).

    Args:
        known: of its tensors.
        rows: where examples may stand in them.
        sizes: numbers that go by the batch.
        examples: how many it has.

    Attributes:
        lines: the calls.
        numbers: tensor -> its number in them.
        held: number -> the tensor, where it was made by nothing that is written down; its value before it was written to.
        places: number -> where the examples stand in what is held.
        written: numbers of what is held and was written to later.
        returned: number -> in which of its calls the model has returned it.
        untold: number -> why nobody can say which dimension is the batch.
        entries: number -> whose entry of a list it is.
        own: tensor -> the example that it is made of, where it is one alone, and how often its memory was written to by then.
        old: numbers of what earlier batches have left behind.
        beside: numbers of what is held and has nothing to do with any batch, as far as is known.
        memory: what is written to and was made by nothing that is written down.
        table: which function has made a table of examples by examples, in words.
        single: numbers of what is one real number, or one truth, of several examples, and of whole numbers that these go by.
        unsure: numbers of what has rows neither in front nor where somebody has said. A number of features may equal that of the
            examples, and of nodes of graphs end to end, or of parts of a batch, no size tells whose they are.
    """

    def __init__(self, known: Known, rows: Places, sizes: Sizes, examples: int):
        self._known, self._rows, self._sizes, self._examples = known, rows, sizes, examples
        self.lines: list[Line] = []
        self.numbers = WeakIdKeyDictionary()
        self.held: dict[int, Tensor] = {}
        self.places: dict[int, Place | EndToEnd] = {}
        self.written: set[int] = set()
        self.returned: dict[int, int] = {}
        self.untold: dict[int, str] = {}
        self.entries: dict[int, int] = {}
        self.own = WeakIdKeyDictionary()
        self.old: set[int] = set()
        self.beside: set[int] = set()
        self.unsure: set[int] = set()
        self.single: set[int] = set()
        self._whole_numbers: set[int] = set()
        self.table = ""
        self._count = self._bytes = 0
        self.memory = Memory()
        # the numbers of all that lies in one place
        self._lying = ByMemory()

    def line_of(self, call: Call) -> Line:
        """A call and what it is given, which is held as it is now.

        Raises:
            UntoldError: why it cannot be written down.
        """
        name, args, kwargs = call.name, call.args, call.kwargs
        given, written = call.given, call.written
        for tensor in written:
            self._lay_flat(tensor)
        slots = tree_map_only(Tensor, lambda t: Slot(self._number(t)), (args, kwargs))
        places = {storage_of(tensor) for tensor in written}
        for number, held in self.held.items():
            if storage_of(held) in places:
                self.held[number] = held.clone()
                self.written.add(number)
        kept = {self.numbers[t] for t in call.running}
        self.held |= {number: self.held[number].clone() for number in kept & self.held.keys()}
        self.written |= kept
        kind = given[0].device.type
        on = torch.is_autocast_enabled(kind)
        numbers = [Number(n) for n in tree_leaves((args, kwargs)) if type(n) in (int, float)]
        numbers += [n for t in given for n in self._constant(t)]
        own = self.owner_of(given)
        counted = self._sizes.made(numbers, own) or any(t in self._known.told for t in given)
        real = any(t.is_floating_point() for t in given) or name.strip("_") in DIVIDING
        if name.strip("_") in BROADCASTING and real:
            for which, n in enumerate(numbers):
                self._sizes.note(len(self.lines), name, n, own)
                if own is None and not n.by_row:
                    self._sizes.numbers[len(self.lines), name, which] = n.value
        autocast = (kind, torch.get_autocast_dtype(kind)) if on else None
        repeats = self._repeats(name, *in_order(args, kwargs))
        bases = [tensor._base for tensor in written if tensor._base is not None]
        targets = {self.numbers[tensor] for tensor in (*written, *bases) if tensor in self.numbers}
        for tensor in written:
            if not self.memory.holds(tensor):
                # views that were made before, ``t.data``, ``t.detach()``
                targets |= self._lying.get(tensor) or set()
        filled = self.memory.filled_by(call, self._is_public)
        read = self.memory.read_by(call, self._is_public)
        grad = torch.is_grad_enabled()
        return Line(
            call.func, slots, [], autocast, grad, counted, repeats, targets, kept, filled, read, own=own
        )

    def add(self, line: Line, given: list[Tensor], made: list[Tensor]) -> None:
        """Write down a call that was made, what it was given, and what it returned.

        Raises:
            UntoldError: there are too many.
        """
        if made and not line.targets and all(self.memory.holds(tensor) for tensor in made):
            # views, which are written down by where they lie
            for tensor in made:
                self._number(tensor)
            return
        for place, tensor in enumerate(made):
            whose = self._row_of(line, given[0], place) if line.own is None else line.own
            self.own[tensor] = whose, version_of(tensor)
            if tensor not in self.numbers:
                self.numbers[tensor] = self._count = self._count + 1
            line.made.append(self.numbers[tensor])
            self._lying.setdefault(tensor, set()).add(self.numbers[tensor])
            if not self.table and sum(size == self._examples for size in tensor.shape) > 1:
                self.table = f" ({name_of(line.func)} makes a table {list(tensor.shape)})"
            if self.memory.has_moved(tensor, self.numbers[tensor]):
                # resized or transposed in place
                del self.numbers[tensor]
        if "out" in line.given[1]:
            # as long as it is now
            line.filled = self.memory.filled_as_out(made)
        self._note_single(line, given, made)
        returned = given[:1] if name_of(line.func) == "__setitem__" else made
        line.together = self._is_batch(returned) and self._is_batch(given)
        self.lines.append(line)
        if len(self.lines) > LONGEST:
            raise UntoldError(f"the loop calls more than {LONGEST} functions")

    def _note_single(self, line: Line, given: list[Tensor], made: list[Tensor]) -> None:
        """Note what a call has made one number of; a part of what it was given is an example's own, or one of many."""
        private, places = self._known.private, {storage_of(t) for t in given}
        if any(t.dtype not in WHOLE for t in made):
            self.single |= self._whole_numbers.intersection(line.slots)
        if line.own is None and any(t.numel() > 1 and t in private for t in given):
            for tensor, number in zip(made, line.made, strict=True):
                if tensor.numel() == 1 and tensor in private and storage_of(tensor) not in places:
                    (self._whole_numbers if tensor.dtype in WHOLE else self.single).add(number)

    def owner_of(self, tensors: Iterable[Tensor]) -> int | None:
        """Whose all of the batch is that these tensors hold, where it is of one example alone."""
        listed = self._known.listed
        found = {listed[t] if t in listed else self._owner(t) for t in tensors if t in self._known.private}
        return found.pop() if len(found) == 1 else None

    def _owner(self, tensor: Tensor) -> int | None:
        whose, version = self.own.get(tensor, (None, 0))
        # also by another name: views count together
        return whose if version_of(tensor) == version else None

    def _row_of(self, line: Line, rows: Tensor, place: int) -> int | None:
        """Which example's row a call returns in one place, if it takes one, or each by itself."""
        args, name = line.given[0], name_of(line.func)
        front = any(fit.axis == 0 and fit.times == 1 for fit in self._rows.fits(rows))
        if not front or (name != "__getitem__" and args[1:2] not in ((), (0,))):
            return None
        if name == "unbind":
            return place
        index = args[1] if name == "__getitem__" else args[2] if name == "select" and len(args) > 2 else None
        index = index[0] if isinstance(index, tuple) and index else index
        return index % self._examples if type(index) is int else None

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is written down how a tensor was made, or where it lies in memory that was written to."""
        return tensor in self.numbers or self.memory.holds(tensor)

    def as_it_is(self, tensor: Tensor) -> int:
        """The number of a tensor that `knows`, with its values of now, whatever is written to its memory later."""
        number = self._number(tensor)
        return self._made_of(torch.clone, number) if number in self.memory.parts else number

    def note_arrival(self, tensor: Tensor) -> bool:
        """Note a tensor of which nothing is known, if numpy may have made it of the batch; return if it may have its rows."""
        known = self._known
        rows = bool(self._rows.fits(tensor)) and tensor not in known.drawn and not self._constant(tensor)
        known.came |= known.left and rows
        return rows

    def take_over(self, tensor: Tensor, other: Tensor) -> None:
        """Let a tensor be what another one is, whose memory it has got (``tensor.data = other``)."""
        self.numbers[tensor] = self._number(other)

    def behind(self, numbers: Iterable[int], needed: set[int] | None = None) -> set[int]:
        """Which lines tensors were computed by; ``needed`` is given the numbers of all that these use."""
        needed, found = set[int]() if needed is None else needed, set[int]()
        needed.update(self.memory.of(numbers))
        for i, line in reversed(list(enumerate(self.lines))):
            if needed.intersection(self.memory.of(line.written)):
                needed.update(self.memory.of(line.uses))
                found.add(i)
        return found

    def again(
        self,
        number: int,
        there: dict[int, Tensor],
        by: Sequence[int] = (),
        moved: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    ) -> tuple[Tensor, Sequence[Tensor], bool]:
        """Do again what a tensor is made by; return it, the gradients of its sum, and whether chance was met.

        Args:
            number: of the tensor.
            there: what stands in the place of what is held; all that is made is added to it, and dropped after its last use.
            by: numbers of the tensors that it is differentiated by.
            moved: numbers of what is made -> what to make of that.
        """
        leaves = {n: there[n].detach().requires_grad_() for n in by}
        there |= leaves
        # a gradient may go by what is written later; a value does not, and all the rest may be the loss of a language model
        lines = self.lines if by else self.lines[: max(self.behind([number]), default=-1) + 1]
        # a part is a part, whatever else is done with it
        calls = [line for line in lines if self.memory.parts.keys().isdisjoint(line.made) or line.targets]
        read = {slot for line in calls for slot in line.slots}
        there |= {n: self.memory.copy_of(n, there[n], read) for n in self.written if n in there}
        last = {used: i for i, line in enumerate(lines) for used in line.slots}
        cuda = [t.device for t in there.values() if t.is_cuda][:1]
        with torch.random.fork_rng(cuda), torch.set_grad_enabled(bool(by)), WithoutChance(Chance()) as chance:
            for i, line in enumerate(lines):
                args, kwargs = line.with_tensors(there)
                kind, dtype = line.autocast or ("cpu", torch.bfloat16)
                with (
                    torch.set_grad_enabled(bool(by) and line.differentiated),
                    torch.autocast(kind, dtype=dtype, enabled=line.autocast is not None, cache_enabled=False),
                ):
                    result = line.func(*args, **kwargs)
                there.update(zip(line.made, tensors_of(result), strict=True))
                there |= {n: moved[n](there[n]) for n in moved.keys() & line.made}
                for used in line.slots:
                    if last[used] == i and used != number:
                        there.pop(used, None)
            found = there[number]
            gradients: Sequence[Tensor] = ()
            if leaves:
                gradients = torch.autograd.grad(
                    found.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
                )
        return found.detach(), gradients, chance.met

    def forget(self) -> None:
        """Let go of all that is held."""
        self.held.clear()
        self.lines.clear()

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor; what was made elsewhere is held."""
        if tensor not in self.numbers:
            if tensor not in self._known.rowed:
                if self.memory.holds(tensor):
                    return self._part(tensor)
                if self._known.private.shares_memory(tensor):
                    raise UntoldError(
                        "values of the batch were written to a part of a tensor by way of another one"
                    )
            self.numbers[tensor] = self._count = self._count + 1
            with torch._C.DisableTorchFunctionSubclass():
                self.held[self._count] = tensor.detach()
            self._lying.setdefault(tensor, set()).add(self._count)
            if tensor in self._known.rowed:
                self._bytes += tensor.nbytes
                self._place(self._count, tensor)
                if tensor in self._known.listed:
                    self.entries[self._count] = self._known.listed[tensor]
                    # or as many tensors as there are examples, of which one has a row for each
                    if tensor.shape[:1] == (self._examples,):
                        self.unsure.add(self._count)
                if tensor in self._known.returned:
                    self.returned[self._count] = self._known.returned[tensor]
            elif self._known.is_old(tensor):
                self.old.add(self._count)
            else:
                self.note_arrival(tensor)
                if tensor not in self._known.private:
                    self.beside.add(self._count)
        return self.numbers[tensor]

    def _is_batch(self, tensors: list[Tensor]) -> bool:
        """Whether one of these begins with rows of all examples, or of noise for them."""
        return any(
            (tensor in self._known.private or self.numbers.get(tensor, 0) not in {0, *self.held})
            and place.axis == 0
            for tensor in tensors
            for place in self._rows.fits(tensor)
        )

    def _is_public(self, tensor: Tensor) -> bool:
        return tensor not in self._known.private and not self._known.is_old(tensor)

    def _lay_flat(self, tensor: Tensor) -> None:
        """Hold all the memory that a tensor is written to in, if nothing that is written down has made it."""
        if not address_of(tensor) or self.memory.holds(tensor):
            return
        place = storage_of(tensor)
        elsewhere = tensor not in self.numbers or any(storage_of(t) == place for t in self.held.values())
        if not elsewhere or any(storage_of(t) == place for t in self._known.rowed):
            return
        alike = [t for t in self.numbers if storage_of(t) == place]
        self._count += 1
        old = self._known.is_old(tensor) or any(self.numbers[t] in self.old for t in alike)
        self.held[self._count] = self.memory.add(tensor, self._count, old)
        self.written.add(self._count)
        for other in alike:
            # from here on it is a part of what is written to
            del self.numbers[other]

    def _part(self, tensor: Tensor) -> int:
        """Write down that a tensor is a part of memory that is written to, and return its number."""
        part = self.memory.part_of(tensor)
        self.numbers[tensor] = number = self._made_of(torch.as_strided, *part)
        self.memory.parts[number] = part
        return number

    def _made_of(self, func: Any, number: int, *rest: Any) -> int:
        """Write down a call that the loop itself has not made, and return the number of what it gives."""
        self._count += 1
        self.lines.append(Line(func, ((Slot(number), *rest), {}), [self._count], None))
        return self._count

    def _place(self, number: int, tensor: Tensor) -> None:
        """Find the dimension that is the batch, and how many rows each example has there."""
        if self._examples == 1:
            # no other could stand in its place
            return
        fits, sure = self._rows.likely(tensor, tensor in self._known.returned)
        if not sure:
            self.unsure.add(number)
        if len(fits) > 1:
            why = f"a tensor of {tensor.dim()} dimensions may have its examples in several of them"
            if tensor not in self._known.returned:
                raise UntoldError(why)
            # what has entered may tell
            self.untold[number] = why
        if self._bytes > LARGEST:
            raise UntoldError(f"they are computed from more than {LARGEST >> 20} MiB")
        if is_order(tensor):
            # rows that are replaced still go where they went; of few examples, labels may look like an order
            if fits and self._examples < FEW:
                raise UntoldError("whole numbers of the batch may be labels or an order")
        elif len(fits) == 1:
            self.places[number] = fits[0]

    def _constant(self, tensor: Tensor) -> list[Number]:
        """The number that a tensor holds in all its places, where it is not made of values of the batch."""
        if type(tensor) not in PLAIN or tensor in self._known.private or tensor in self._known.within:
            return []
        if not tensor.numel() or tensor.dtype == torch.bool or tensor.is_complex() or tensor.is_meta:
            return []
        with torch._C.DisableTorchFunction():
            value = tensor.detach().reshape(-1)
            if not bool((value == value[0]).all()):
                return []
            error = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
            # rows that the loop has made in Python, as of lengths, may be alike in one batch
            return [Number(value[0].item(), error, tensor.numel() > 1 and tensor not in self.numbers)]

    def _repeats(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether as many rows as there are examples are taken, and some of them twice."""
        if name not in ("__getitem__", "index_select") or args[0] not in self._known.private:
            return False
        names = ("dim", "index") if name == "index_select" else ("index",)
        given = dict(zip(names, args[1:], strict=False)) | kwargs
        rows, index = len(args[0]) if args[0].dim() else 0, given["index"]
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        along = given.get("dim", 0) == 0
        takes = along and rows == self._examples and isinstance(index, Tensor) and index.shape == (rows,)
        return takes and index.dtype != torch.bool and len(index.unique()) < rows
