"""What happens in a person's own loop between a batch and its losses: `PrivacyEngine.batches` and `PrivacyEngine.step`.

A logical batch is drawn and cut by `Steps`. Here its pieces become batches of the loop's own making, which are watched until
their losses arrive; then the losses are checked and handed on.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpexp.clipping import Clipper
from dpexp.clipping.distributed import refuse_reducer, silence
from dpexp.clipping.given import check_losses
from dpexp.errors import UserError
from dpexp.training.own_loop.arguments import check_numbers
from dpexp.training.own_loop.units import Units
from dpexp.training.steps import Steps
from dpexp.training.watching.collating import Collation
from dpexp.training.watching.guards import GradientGuard, GuardedOptimizer, OneAtATime, StepGuard
from dpexp.training.watching.layout import layout_of
from dpexp.training.watching.reading import reading_alone
from dpexp.training.watching.watch import LossWatch

Collate = Callable[[list[Any]], Any]
Length = Callable[[int], int]


class OwnLoop:
    """The batches of a loop, one after the other, and what is looked at in each.

    Args:
        model: without wrappers.
        optimizer: steps when `Steps` says so.
        dataset: see `dpexp.PrivacyEngine`.
        units: the units of privacy, and which rows of the data set they have.
        steps: takes the steps.
        clipper: of the model.
        wrappers: every DistributedDataParallel around the model, or in it.
        rows_per_example: rows that a batch may have of each example.
        planned: how many steps the run has.
        facts: what makes two computations of a step equal, from ``physical_batch_size`` and ``by_length``.
        folder: of the run, for its errors.
        on_asked: called when the loop asks for a batch and has all of those before, and when it asks behind the last one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: GuardedOptimizer,
        dataset: Any,
        units: Units,
        steps: Steps,
        clipper: Clipper,
        *,
        wrappers: Sequence[DistributedDataParallel],
        rows_per_example: int,
        planned: int,
        facts: Callable[..., Mapping[str, Any]],
        folder: Path,
        on_asked: Callable[..., None],
    ):
        self.dataset, self.units, self.steps, self.clipper = dataset, units, steps, clipper
        self.optimizer, self.wrappers, self.planned = optimizer, wrappers, planned
        self.facts, self.folder, self.on_asked = facts, folder, on_asked
        self.alone = OneAtATime()
        self.closed = False
        # whether the batch that was given last has had its losses
        self._served = False
        # whether a step was taken here, and not by an earlier process alone
        self._trained = False
        self._gradients = GradientGuard(model)
        self._unmoved = StepGuard(model, optimizer.optimizer)
        # a part of a TensorDataset may stand beside one that is public
        parts = dataset.tensors if type(dataset) is TensorDataset else (dataset,)
        data = [part for part in parts if isinstance(part, Tensor)]
        self._watch = LossWatch(model, rows_per_example, clipper.notes, data)
        optimizer.outside = self._watch.outside
        self._collation = Collation(clipper, units.ordered, steps.around)
        # which of the loops over batches is the present one
        self._present: object = None

    def batches(
        self, collate_fn: Collate, physical_batch_size: int, length: Length | None, steps: int | None
    ) -> Generator[Any, None, None]:
        """Yield physical batches; see `dpexp.PrivacyEngine.batches`."""
        self.refuse_closed()
        if not callable(collate_fn):
            raise UserError(
                f"collate_fn={collate_fn!r} is no function: give the size as physical_batch_size={collate_fn!r}"
            )
        if not (length is None or callable(length)):
            raise UserError(
                f"length={length!r} is no function: give one of an example's number, such as lambda i: len(rows[i])"
            )
        check_numbers(physical_batch_size=physical_batch_size, steps=steps or None)
        size = int(physical_batch_size)
        last = self.planned if steps is None else min(self.planned, self.steps.taken + steps)
        if self._trained and self.steps.taken >= self.planned:
            warnings.warn(
                f"all {self.planned} steps of this run are taken: engine.batches() goes through all epochs by itself, and this "
                "loop does nothing. Leave the loop over epochs out, or give engine.batches(steps=...) a part",
                stacklevel=3,
            )
        facts = self.facts(physical_batch_size=size, by_length=length is not None)
        length = None if length is None else self.units.length(length)
        self._present = present = object()
        if self._watch.begin_loop():
            self._collation.forget()
        try:
            while self.steps.taken < last:
                self.on_asked()
                self.refuse_wrappers()
                for piece in self.steps.pieces(size, facts, length):
                    yield self._begin(collate_fn, piece, alone=size == 1)
                    self._watch.end()
                    if self._present is not present:
                        raise UserError("another loop over engine.batches() was begun: keep to one of them")
                    if self.steps.piece is not None:
                        raise UserError(
                            "engine.step(losses) was not called for the last batch: call it once for every batch, and before the "
                            "next one is read (no loader that reads ahead, as Lightning's Trainer does without a length). Leave "
                            "out no batch: an example whose loss is NaN or infinite adds nothing"
                        )
            self.on_asked(True)
        finally:
            if self._present is present:
                self._watch.end()
                # a sum without noise is not left lying about
                self.steps.clear()

    def _begin(self, collate_fn: Collate, piece: Any, alone: bool) -> Any:
        """Make the batch of a piece, and watch what becomes of it."""
        numbers, count = self.units.rows(piece, self.steps.key, self.steps.taken), len(piece)
        # as torch's DataLoader does: data sets that read several rows at once are faster so
        several = getattr(self.dataset, "__getitems__", None)
        examples = several(numbers) if several else [self.dataset[i] for i in numbers]
        if several and (not hasattr(examples, "__len__") or len(examples) != len(numbers)):
            raise UserError(
                f"__getitems__ of the data set ({type(self.dataset).__name__}) was asked for {len(numbers)} examples and gave no "
                "list of as many: let it return one example for each number, in their order, and collate_fn make the batch"
            )
        read = (lambda places: several([numbers[place] for place in places])) if several else None
        known = self._collation.knows(collate_fn)
        with nullcontext() if known else reading_alone(self.dataset, numbers):
            batch = self._collation.of(collate_fn, examples, count, alone, read)
        if not self.steps.sums.drawn:
            # of the first piece: all gradients are None
            self._gradients.look()
            self._unmoved.forget()
        made = collate_fn, examples, count, batch
        # before the watch notes where the generators stand
        self.steps.seeds.made()
        step = self.steps.taken, self.steps.attempt
        self._watch.begin(batch, count, partial(layout_of, *made), step)
        self._served = False
        return batch

    def step(self, losses: Tensor) -> bool:
        """Check the losses of the present batch and add up its clipped gradients; see `dpexp.PrivacyEngine.step`."""
        self.refuse_closed()
        self._watch.end()
        if self.steps.piece is None and self._served:
            raise UserError(
                "engine.step(losses) was called again for the same batch, and each example counts once: add up what an example "
                "loses, engine.step(first_losses + second_losses), and call it once for each batch of engine.batches()"
            )
        if self.steps.piece is None:
            raise UserError(
                "engine.step(losses) has no batch to go with: call it once for each batch of engine.batches(). After "
                "engine.load() the next batch is the first one of the step that was loaded"
            )
        check_losses(losses)
        if len(losses) != self.units.due:
            raise UserError(
                f"{len(losses)} losses for a batch of {self.units.due} examples: one loss per example is needed, in the same "
                "order (does the collate function drop examples, or pack several into one row?)"
            )
        if self.clipper.reducer not in (None, *self.wrappers):
            raise UserError(
                "DistributedDataParallel was put around the model after PrivacyEngine(...), which could not keep it from adding "
                "up by itself: wrap first, and give the engine the wrapped model"
            )
        # before the watch draws for itself
        self.steps.check_seeds()
        last = self.steps.taken + 1 >= self.planned
        self._watch.check(losses, self.steps.seeds.knows, last)
        self._gradients.check()
        self._unmoved.check()
        self.optimizer.check()
        self._served = True
        taken = self.steps.add(self.units.losses(losses))
        # not where that was cut off (Ctrl-C, out of memory): the sums may hold the batch, and once more would count it twice
        self._gradients.look()
        if taken:
            self._trained = True
            self._unmoved.forget()
        else:
            self._unmoved.look()
        self._watch.follow(taken)
        return taken

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let something be done with the present batch that is not the loop's."""
        with self._watch.paused(), self.clipper.elsewhere():
            yield

    @contextmanager
    def public(self) -> Iterator[None]:
        """Let the model be given public rows; see `dpexp.PrivacyEngine.public`."""
        with self._watch.public(), self.clipper.public():
            yield

    def close(self) -> None:
        """Watch no longer, and leave no sum without noise behind."""
        self._watch.end()
        self.steps.clear()

    def refuse_wrappers(self) -> None:
        """Raise `UserError` where a DistributedDataParallel would talk to other ranks by itself."""
        # an engine that was made under no_sync() was heard again behind it
        silence(self.wrappers)
        for wrapper in self.wrappers:
            refuse_reducer(wrapper)

    def refuse_closed(self) -> None:
        """Raise `UserError` where the engine has given its folder back."""
        if self.closed:
            raise UserError(
                f"this engine is closed, and another one may use {self.folder} by now: make a new PrivacyEngine with the same "
                "arguments, which goes on from the last checkpoint"
            )
