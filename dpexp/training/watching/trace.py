"""What a loop of one's own does with one batch, written down: every torch function that its tensors go through.

The model's own forward is left out, into which the clipper looks. What is written down (`tape`) is enough to do it all again
(`redone`), and to tell what holds values of the batch when a later one begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.tapping.forwards import tensors_in
from dpexp.errors import UntoldError, UserError, without_data
from dpexp.training.generators import Drawn
from dpexp.training.watching.aliases import Aliases
from dpexp.training.watching.entering import Entering
from dpexp.training.watching.flows import EARLIER, REPEATED
from dpexp.training.watching.layout import Layout
from dpexp.training.watching.lines import (
    COMING,
    DIFFERENTIATING,
    DRAWING,
    LEAVING,
    PLAIN,
    READING_SHAPES,
    SETTING,
    WHOLE,
    Call,
    Line,
    Marks,
    Number,
    tensors_of,
    version_of,
)
from dpexp.training.watching.listening import listening
from dpexp.training.watching.modes import put_below, unwrapped
from dpexp.training.watching.owned import Owned
from dpexp.training.watching.places import Places, entries
from dpexp.training.watching.sizes import Sizes
from dpexp.training.watching.tape import Known, Tape

# as many numbers as somebody counts; shards of a model have more
HANDFUL = 16
SCALERS = torch.amp.GradScaler.scale.__code__.co_filename
Made = TypeVar("Made")

NOT_PUBLIC = (
    "within engine.public() the model is given values of the private batch, of an earlier one, or rows of the data set: give it "
    "public rows alone there"
)
SCALED = (
    "a GradScaler has scaled the losses: every gradient would be clipped as if it were that much longer. Leave it out: bf16 "
    "needs none, and for fp16 PrivacyEngine(..., loss_scale=...) takes a fixed scale, which is taken off before clipping"
)


class Trace(TorchFunctionMode):
    """What is done with one batch.

    Args:
        model: whose own forward is not looked into.
        batch: what the collate function has made.
        examples: how many it has.
        rows_per_example: rows that it may have of each.
        before: `Known.private` of an earlier trace.
        outside: parameters are added to it that the batch goes through and that are not the model's.
        layout: of the batch.
        data: the tensors that the rows of the data set stand in, where it has some.
        fractions: of the batch before, see `Sizes`.
        turn: number of the batch; each is cut in other halves, as what is even in one of them is not in all.

    Attributes:
        felt: the lengths to which rows are padded whose padding changes the losses.
        used: whether anything has read values of the batch, as far as that can be seen.
        sizes: numbers that go by the batch.
        failure: why nothing can be said, in words.
        lasting: whether it goes by what the loop does, and no other batch would tell more.
        opaque: whether the loop has made something of the batch of which nobody says in which order its rows are.
        known: what its tensors hold.
        drawn_by: generators that were asked by name, for as many rows as it has.
        drawn, chance: how many random numbers the loop has taken from torch; and what counts those of Python and numpy.
        shapes: of the tensors of the batch.
        tape: what was written down.
        watching: whether it does so now.
        public: whether the loop says of what enters the model now that it is public.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        examples: int,
        rows_per_example: int,
        before: Marks,
        outside: WeakIdKeyDictionary,
        layout: Layout,
        data: Iterable[Tensor],
        fractions: Sequence[float],
        turn: int,
    ):
        super().__init__()
        self.padding = layout.padding
        self.felt: set[int] = set()
        self.drawn_by: list[torch.Generator] = []
        self.drawn, self.chance = 0, Drawn()
        self.model, self.examples, self.turn = model, examples, turn
        # which dimensions may be the batch
        self.rows = Places(examples, rows_per_example, layout.axes, layout.ends)
        self.sizes = Sizes(examples, rows_per_example, fractions)
        self.failure, self.lasting = "", False
        self.watching, self.opaque, self.public = False, False, False
        self._own = Owned(model, outside)
        self.known = Known(before, self._own, data)
        self.tape = Tape(self.known, self.rows, self.sizes, examples)
        # what the loop has made and gives to the model, by its calls
        self.calls: list[list[int]] = []
        # those with the rows of all examples
        self.entering: list[Entering] = []
        self._call: Entering | None = None
        # whether rows of the batch enter the model in the order in which they came
        self.as_it_came = False
        # whether anything of the batch has entered the model, and anything with its rows of which nothing is known
        self._met = self._strange = False
        # nodes of the graphs of what a generator gives to the model, which private examples have not gone through
        self._invented: list[Any] = []
        # calls of the model that are not over
        self._inside = 0
        self._of_batch, self._old_inside = True, False
        self._open = ExitStack()
        self.shapes = [tensor.shape for tensor in tensors_in(batch)]
        placed = WeakIdKeyDictionary(layout.axes | layout.ends)
        self.known.listed.update(dict(entries(batch, examples, self.sizes.times, placed)))
        self._have_rows(tensors_in(batch))
        self._batch = WeakIdKeyDictionary(dict.fromkeys(tensors_in(batch)))
        # of what else a batch may hold, nobody sees what is read
        self.whole = all(isinstance(leaf, Tensor) for leaf in tree_leaves(batch))
        self.used = not self._batch or not self.whole
        known, told = self.known, (self.rows.axes, self.rows.ends)
        facts = self.known.listed, self.known.returned, self._batch, *told
        self._told = (self.tape.numbers, known.rowed, known.within, known.told)
        self._aliases = Aliases([*self._told, known.private, *facts])
        for tensor in tensors_in(batch):
            self._aliases.add(tensor, whole=False)
            if not tensor.dim():
                # a constant of the collate function; or what it has counted
                self.known.private.pop(tensor, None)
                if tensor.dtype in WHOLE:
                    self.sizes.add_count(int(tensor))

    @property
    def elsewhere(self) -> bool:
        """Whether the loop seems to make something of the batch by what is not seen."""
        whole = bool(self._batch) and self.whole
        return self.known.came or (whole and self._strange and not self._met)

    def __deepcopy__(self, memo: Any) -> Trace:
        """Return itself: hooks go with a copy of the model, which is another one."""
        return self

    # -- watching -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Watch from here on."""
        self.watching = True
        if "torch._dynamo" in sys.modules:
            # no compiled code of the loop is to carry what watches it
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
        # in front of its other hooks, as hooks of all modules are, of which torch.compile warns
        self._open.callback(self.model.register_forward_pre_hook(self._enter, prepend=True).remove)
        self._open.callback(
            self.model.register_forward_hook(self._leave, prepend=True, always_call=True).remove
        )
        self._open.callback(self.model.register_forward_pre_hook(self._entered, with_kwargs=True).remove)
        self._own.look_for_sums()
        if dist.is_available() and dist.is_initialized():
            self._open.enter_context(listening(self._hear))
        self._open.enter_context(put_below(self))

    def end(self) -> None:
        """Watch no longer."""
        self.watching = False
        self._open.close()

    def follow(self, taken: bool) -> None:
        """Watch on behind the losses: writes to the model, and what holds values of the batch when the next one begins."""
        self._forget("the losses are there")
        self.begin()
        if taken:
            self._own.forget_sums()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += module is self.model

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what the loop has made of its batch, or kept of an earlier one, and gives to the model."""
        if self._inside > 1 or module is not self.model:
            return
        # what the loop has made of the batch and hung on the model enters it, too
        hung = [t for module in self.model.modules() for t in vars(module).values() if isinstance(t, Tensor)]
        entering = [*tensors_in((args, kwargs)), *(t for t in hung if self.tape.knows(t))]
        self._adopt(entering)
        self.used |= any(tensor in self._batch for tensor in entering)
        self._invented += [
            t.grad_fn for t in entering if t.grad_fn is not None and t not in self.known.private
        ]
        self._old_inside = False
        # before the losses all that comes out counts as the batch's, behind them what it was made of: a generator is trained on
        # what the model says of its own pictures
        self._of_batch = not self.failure or any(tensor in self.known.private for tensor in entering)
        if self.public:
            self._of_batch = False
            if any(tensor in self.known.private or self.known.is_old(tensor) for tensor in entering):
                raise UserError(NOT_PUBLIC)
        self.calls.append([])
        if self.failure:
            return
        self._call = call = Entering.of(self.model, (args, kwargs), entering)
        of_batch = [t for t in entering if t in self.known.rowed or self.tape.knows(t)]
        self._met |= bool(of_batch)
        if any(place.axis == 0 for tensor in of_batch for place in self.rows.fits(tensor)):
            self.entering.append(call)
        for tensor in entering:
            ends = tensor in self.rows.ends
            if tensor in self.known.rowed and tensor not in self.tape.numbers and not ends:
                self.as_it_came |= len(self.rows.fits(tensor)) == 1
            elif ends or self.tape.knows(tensor):
                if (number := self._tried(self.tape.as_it_is, tensor)) is not None:
                    self.calls[-1].append(number)
            elif self.known.is_old(tensor):
                if torch.is_grad_enabled():
                    raise UserError(EARLIER.format(what="what enters the model depends"))
                # evaluated: what comes of it may not enter losses
                self._of_batch = False
                self._old_inside = True
            else:
                call.beside.append(tensor)
                self._strange |= self.tape.note_arrival(tensor)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.model:
            if self._of_batch:
                returned = list(tensors_in(output, depth=1))
                # a table of weights that is returned beside the outputs is nothing of the batch
                within, private = self.known.within, self.known.private
                made = [t for t in returned if t in within or t in private or self.rows.fits(t)]
                self._have_rows(made or returned)
                if self._inside == 1:
                    if self._call is not None:
                        self._call.leave(module)
                    self.known.returned.update(dict.fromkeys(made or returned, len(self.calls) - 1))
                    for tensor in made or returned:
                        self._aliases.add(tensor, whole=False)
            elif self._old_inside and self._inside == 1:
                self.known.before.update(dict.fromkeys(tensors_in(output, depth=1)))
            self._inside -= 1

    def _adopt(self, given: list[Tensor]) -> None:
        """Know of tensors what is known of others in their places."""
        for tensor in given:
            known = any(tensor in told for told in self._told) or self.tape.memory.holds(tensor)
            if known or self.failure:
                continue
            try:
                self._aliases.adopt(tensor)
            except UntoldError as error:
                self._stop(str(error), lasting=True)

    def _have_rows(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if type(tensor) in PLAIN and tensor not in self.tape.numbers:
                # an entry of a list is as large as its own example
                if tensor not in self.known.rowed and tensor not in self.known.listed:
                    self.sizes.add_shape(tensor.shape)
                self.known.rowed[tensor] = None
                self.known.mark(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        given = call.given
        if func in DIFFERENTIATING:
            self._own.refuse_differentiated(given)
            roots = [t.grad_fn for t in given] if any(t in self.known.private for t in given) else []
            self._own.look_at_leaves(roots, self._invented, self.known.private, self.rows.fits)
        self._adopt(given)
        self.used |= any(t in self._batch for t in call.values) and call.name not in READING_SHAPES
        if self._inside:
            return self._made_within(call)
        written = call.written
        for tensor in written:
            self._own.refuse_written_sum(tensor)
        if "c10d" in str(func) or str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            # not done again, which all ranks would have to do at once
            result = self._made(call)
            self._hear(given, tensors_in(result))
            return result
        if self.failure:
            return self._followed(call)
        known = (*self._told, self.known.private)
        inner = [unwrapped(t) for t in given]
        if any(t is not wrapped for t, wrapped in zip(inner, given, strict=True)) and any(
            t in tensors for t in inner for tensors in known
        ):
            self._stop("torch.func (vmap, grad) is not looked into", lasting=True)
            return self._followed(call)
        # what a later batch finds there is told by what is written over now
        renews = any(self.known.is_old(t) for t in written)
        if not renews and not any(t in tensors for t in given for tensors in known):
            return self._of_earlier(call)
        self._refuse_scaled(given)
        self._have_kept(given)
        # differentiated by the loop itself, or of somebody's own kind: what comes out has the rows, too
        opaque = func is torch.autograd.grad or any(
            type(t) not in PLAIN and t not in self.known.told for t in given
        )
        before = [version_of(t) for t in given]
        # what is written to is noted as it was
        line = None if opaque or not (written or call.running) else self._tried(self.tape.line_of, call)
        result = self._followed(call)
        made = tensors_of(result)
        if opaque:
            self.opaque = True
            if func is torch.autograd.grad:
                self._hear_of_all(result, call)
            self._have_rows(t for t in made if t not in self.known.told)
        elif line is not None:
            self._tried(self.tape.add, line, given, made)
        elif func == SETTING:
            self._tried(self.tape.take_over, *given)
        elif any(version_of(t) != v for t, v in zip(given, before, strict=True)):
            self._stop(f"{call.name} writes to what it is given", lasting=True)
        elif made and not self.failure:
            line = self._tried(self.tape.line_of, call)
            if (
                line is not None
                and call.name == "mean"
                and made[0].numel()
                and self._is_by_row(line, call, made)
            ):
                elements = Number(given[0].numel() // made[0].numel())
                self.sizes.note(len(self.tape.lines), "mean", elements, line.own, averaged=True)
            self._tried(self.tape.add, line, given, made)
        for tensor in made:
            if tensor in self.known.private:
                self._aliases.add(tensor)
        return result

    def _is_by_row(self, line: Line, call: Call, made: list[Tensor]) -> bool:
        """Whether rows stay apart in a mean; one over all shows by itself, or is of a part that is as long as its example."""
        front = made[0].shape[:1] == call.given[0].shape[:1] != ()
        return line.own is not None or front or bool(self.rows.fits(made[0]))

    def _followed(self, call: Call) -> Any:
        """Make a call, and remember which tensors and numbers hold values of the batch."""
        private = any(t in self.known.private for t in call.values)
        if private:
            self._own.look_at_parameters(call, self.known.private)
            self.known.left |= call.name in LEAVING and self.examples > 1
        result = self._made(call)
        if private:
            self.sizes.add_count(result, self.tape.owner_of(call.given))
            for tensor in tree_leaves(result):
                self.known.mark(tensor)
            for tensor in call.changed:
                self.known.mark(tensor, written=True)
        return result

    def _made(self, call: Call) -> Any:
        """Make a call, and note who draws as many rows as the batch has."""
        result, generator = call.make(), call.kwargs.get("generator")
        if isinstance(generator, torch.Generator) and any(self.rows.fits(t) for t in tensors_of(result)):
            self.drawn_by.append(generator)
        if call.name in DRAWING and not self._inside:
            self.drawn += sum(t.numel() for t in tensors_of(result))
        return result

    def _made_within(self, call: Call) -> Any:
        """Make a call inside of the model's own forward, which is not written down."""
        result = self._made(call)
        if any(t in self.known.private or t in self.known.within for t in call.values):
            self.sizes.add_count(result)
            for tensor in (*tree_leaves(result), *call.written):
                if type(tensor) in PLAIN:
                    self.known.within[tensor] = len(self.calls) - 1
                    self.known.mark(tensor)
        return result

    def _have_kept(self, given: list[Tensor]) -> None:
        """Treat what the model's own forward has kept, or a hook has taken from it, as what it has returned."""
        within, returned = self.known.within, self.known.returned
        kept = [t for t in given if t in within and t not in self.tape.numbers and t not in returned]
        returned.update({t: within[t] for t in kept})
        self._have_rows(kept)

    def _hear(self, said: list[Tensor], heard: list[Tensor]) -> None:
        """Note what ranks have told each other, of their batches or as a few numbers: these may be counts."""
        of_batch = any(t in self.known.private for t in said) or all(t.numel() <= HANDFUL for t in said)
        if self._inside or not of_batch or all(t in self._own for t in said):
            return
        for tensor in heard:
            self.known.told[tensor] = None
            self.known.mark(tensor)

    def _hear_of_all(self, gradients: Any, call: Call) -> None:
        """Note gradients of what no row of the batch is added to, or stands in: they are sums over all examples."""
        asked = call.kwargs["inputs"] if "inputs" in call.kwargs else call.args[1]
        for gradient, tensor in zip(tree_leaves(gradients), tree_leaves(asked), strict=False):
            own = tensor in self.known.private or self.examples == 1
            if isinstance(gradient, Tensor) and not own and not self.rows.fits(gradient):
                self.known.told[gradient] = None
                self.known.mark(gradient)

    def _of_earlier(self, call: Call) -> Any:
        """Make a call of nothing in this batch; what it makes of what an earlier one has left behind is left behind, too."""
        old = any(self.known.is_old(t) for t in call.values)
        result = self._made(call)
        if all(t in self.known.drawn for t in call.given) and call.name not in COMING:
            self.known.drawn.update(dict.fromkeys(tensors_in(result)))
        if old:
            self.known.before.update({t: None for t in tree_leaves(result) if type(t) in PLAIN})
            for tensor in call.changed:
                if type(tensor) in PLAIN:
                    self.known.before.mark_written(tensor)
        return result

    def _refuse_scaled(self, given: list[Tensor]) -> None:
        """Refuse what a scaler does with a loss for each example; other losses are not the engine's."""
        if sys._getframe(2).f_code.co_filename == SCALERS and given[0].shape[:1] == (self.examples,):
            raise UserError(SCALED)

    def _tried(self, action: Callable[..., Made], *arguments: Any) -> Made | None:
        """What goes wrong here is no concern of the loop."""
        try:
            return action(*arguments)
        except Exception as error:
            self._stop(without_data(error))
            return None

    def _stop(self, why: str, lasting: bool = False) -> None:
        if any(line.repeats for line in self.tape.lines):
            # what becomes of them is not seen any more
            raise UserError(REPEATED)
        self.lasting = lasting
        self._forget(why)

    def _forget(self, why: str) -> None:
        self.failure = self.failure or why
        self.tape.forget()
