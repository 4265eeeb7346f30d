"""Whether a loop of one's own keeps its examples apart: when its batches are watched, and what is made of that.

The clipper proves that of the model, and of all that shows in gradients. What a loop mixes before the model and behind it
shows in none: batches divided by their own spread, targets ``[b]`` against outputs ``[b, 1]``, classes weighted by their
counts in the batch, other examples as negatives without a gradient, a running mean of earlier batches. `trace` sees them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.survey.layouts import due
from dpexp.errors import UserError
from dpexp.training.watching.beside import Beside
from dpexp.training.watching.layout import Layout
from dpexp.training.watching.lines import Marks
from dpexp.training.watching.redone import Mixture, told_by
from dpexp.training.watching.sizes import ENOUGH, goes_by_size
from dpexp.training.watching.trace import Trace

log = logging.getLogger(__name__)

# physical batches that are watched until so many have told something: what is counted in one may stay what it was with a half of
# the examples in the place of the others
PATIENCE, TOLD = 16, 4
# of a loop behind one of so many physical batches, as of a second epoch, which may begin something, so many are watched
EPOCH, AFRESH = 64, 2
# as many other numbers have stood in a place where one equals the size of its batch now and then, if it is drawn by chance (a
# timestep for a whole batch); a size that is held between two bounds is two others
DRAWN = 3

UNUSED = (
    "nothing of this batch reaches the model or the losses: epsilon is that of examples that engine.batches() has drawn, and not "
    "of rows that the loop takes by itself. Compute losses from the batch that engine.batches() yields. What C++ or torch.jit "
    "makes of it is not seen: call one of torch's own functions on it too"
)
SIZED = (
    "{name} scales losses by a number that goes by their batch ({first}, then {second}): how many examples it has, how long its "
    "rows are padded, or how many tokens were counted in it. So each weighs by what the others are. Take the number of its own "
    "tokens, (losses * mask).sum(1) / mask.sum(1), or a public one; the step divides by the expected size of the batch"
)
PADDED = (
    "losses, or what enters the model, go by padding (of rows of {lengths} columns): a softmax, a mean or a maximum over all "
    "positions, the last one, losses of padding. How much of it a row has goes by the longest of its batch. Leave it out (a "
    "mask, labels that are ignored), or let the collate function pad all batches to one length"
)
NOTE = "losses were not looked at for values that mix examples ({why}): engine.look_at_losses(losses, batch) asks for them again"

OPEN = (
    "the loop seems to mix examples. It may seem so because its batches have as many examples as there are of something else "
    "(classes, columns), and too few batches of another size have told: take another physical batch size, and see whether it is "
    "refused"
)
DRAWS = (
    "the loop draws for each row of its batch from a random generator of its own (generator=): under a seed that others can "
    "know, one example more changes what is drawn for all behind it, and no noise is for that. Leave the generator out: torch's, "
    "numpy's and Python's are seeded from the run's key for every batch"
)
UNSEEN = (
    "the loop makes something of its batch by other means than torch's functions in its own thread (numpy, torch.jit, C++), and "
    "nobody sees whether examples are mixed there: compute with torch, or in the data set, each example by itself"
)
BESIDE = (
    "the loop makes something else of one physical batch than of another one of the same step: {what} has changed (a coin, a "
    "place, a size or a level of noise that is drawn for the whole batch; a factor, a mean or a teacher that follows each batch; "
    "public rows that move on, or dropout on them). With one example more, others move into the next physical batch, and the sum "
    "by more than one example may: no noise is for that. Draw for each example, torch.rand(len(x)), or once for all of a step, "
    "random.Random(engine.steps_taken).random(); let what moves on do so where engine.step(losses) returns True; or give a "
    "physical batch size that holds every sample, with room to spare"
)


class LossWatch:
    """Watches physical batches of a loop: the first until four have told something; the 16th, the 64th and so on; the first two
    of a loop behind one of 64 or more.

    Before each of the latter it watches the one before, too, which may have left something behind. One example alone mixes
    nothing, and may meet what was left behind.

    Args:
        model: whose own forward is not looked into: the clipper does that.
        rows_per_example: rows that a batch may have of each example.
        notes: where it is said what could not be looked at.
        data: the tensors that the rows of the data set stand in, where it has some.

    Attributes:
        outside: parameters that batches went through and that are not the model's.
    """

    def __init__(self, model: nn.Module, rows_per_example: int, notes: list[str], data: Sequence[Tensor]):
        self.model, self.rows_per_example, self.notes, self.data = model, rows_per_example, notes, data
        self.outside = WeakIdKeyDictionary()
        self._batches = self._tried = self._told = self._alone = 0
        # in the present loop; and how many of its next ones are watched
        self._looped = self._afresh = 0
        # see `Sizes.scaled`
        self._scaled: dict[tuple[int, str, Hashable, int], int] = {}
        # see `Sizes.unlike`
        self._unlike: dict[tuple[int, str, Hashable], set[float]] = {}
        # see `Sizes.numbers`: by the size of the batch, NaN where there were several
        self._numbers: dict[tuple[int, str, int], dict[int, float]] = {}
        # see `Trace.felt`; as many classes as a batch has columns look like it
        self._felt: set[int] = set()
        self._trace: Trace | None = None
        # batches, by their size, in which examples seemed to be mixed, though rows may have been taken for what they are not
        self._doubted: set[int] = set()
        # how many batches of other sizes have told that they are not
        self._settled = 0
        # what stood beside batches of the present step
        self._step: Hashable = None
        self._beside: list[Beside] = []
        # see `Entering.moved`
        self._moved: set[str] = set()
        # what was found in this batch
        self._refused: UserError | None = None
        # of the batch that was watched last, and of those before it: their tensors, and what was made of them
        self._last, self._before = Marks(), Marks()

    def begin_loop(self) -> bool:
        """Note that another loop begins; return whether its first batches are watched, whatever earlier ones have told."""
        if self._looped >= EPOCH:
            self._afresh = AFRESH
        # which begins a step again that was cut off, maybe with other settings
        self._looped, self._step = 0, None
        return self._afresh > 0

    def begin(
        self,
        batch: Any,
        examples: int,
        layout: Callable[[], Layout],
        step: Hashable,
    ) -> None:
        """Watch what is done with a batch of a step from here on, if it is time to; ``layout``: of the batch."""
        self.end()
        self._batches += 1
        self._looped += 1
        self._refused = None
        self._alone += examples == 1
        watched = self._tried if examples > 1 else self._alone
        fractions, self._trace = [] if self._trace is None else self._trace.sizes.fractions, None
        if watched < PATIENCE or self._afresh or due(self._batches) or due(self._batches + 1):
            self._afresh = max(0, self._afresh - 1)
            self._before.join(self._last)
            self._trace = Trace(
                self.model,
                batch,
                examples,
                self.rows_per_example,
                self._before,
                self.outside,
                layout(),
                self.data,
                fractions,
                self._batches,
            )
            self._last = self._trace.known.private
            if step != self._step:
                self._step, self._beside = step, []
            self._trace.begin()

    def end(self) -> None:
        """Watch no longer."""
        if self._trace is not None:
            self._trace.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let something be done with the batch that is not the loop's."""
        trace = self._trace if self._trace is not None and self._trace.watching else None
        self.end()
        try:
            yield
        finally:
            if trace is not None:
                trace.begin()

    @contextmanager
    def public(self) -> Iterator[None]:
        """Take what enters the model for public, and refuse it where it is seen that it is not."""
        trace = self._trace
        if trace is not None:
            trace.public = True
        try:
            yield
        finally:
            if trace is not None:
                trace.public = False

    def follow(self, taken: bool) -> None:
        """Watch what is done with the batch behind its losses; ``taken``: whether the gradients hold noise by now."""
        if self._trace is not None:
            self._trace.follow(taken)

    def check(self, losses: Tensor, seeded: Callable[[Any], bool], last: bool = False) -> None:
        """Look at what was watched.

        Args:
            losses: of the batch.
            seeded: whether a random generator is seeded from the run's key.
            last: whether no other step comes that could tell more.

        Raises:
            UserError: what an example loses, or what enters the model for it, depends on others.
        """
        if self._refused is not None:
            raise self._refused
        trace = self._trace
        if trace is None:
            return
        if trace.elsewhere:
            self._note(UNSEEN)
        if trace.examples > 1 and not all(map(seeded, trace.drawn_by)):
            self._note(DRAWS)
        # who tries again after a refusal is watched again
        tried, self._tried = self._tried, 0
        try:
            # losses that were made while nobody watched, as after a refusal, tell nothing
            if not trace.used and (losses in trace.tape.numbers or losses in trace.known.rowed):
                raise UserError(UNUSED)
            beside = Beside.of(trace, losses, self._moved)
            told = self._told_by(trace, losses)
            for spot, others in trace.sizes.unlike.items():
                self._unlike[spot] = self._unlike.get(spot, set()) | others
            for place, size in trace.sizes.scaled.items():
                drawn = len(self._unlike.get(place[:3], ())) >= DRAWN
                if (first := self._scaled.setdefault(place, size)) != size and not drawn:
                    raise UserError(SIZED.format(name=place[1], first=first, second=size))
            self._refuse_sized(trace)
            self._felt |= trace.felt
            if len(self._felt) > 1:
                raise UserError(PADDED.format(lengths=", then ".join(map(str, sorted(self._felt)))))
            if trace.examples > 1:
                self._refuse_unlike(beside)
        except UserError as error:
            self._refused, self._trace = error, None
            raise
        if trace.examples == 1 or told is None:
            self._tried = tried
            self._note_open(last)
            return
        self._told += told
        self._settled += told and trace.examples not in self._doubted
        # what equals a number of the batch may be a constant: another batch tells
        doubted = (
            trace.sizes.scaled
            or trace.felt
            or beside.few
            or self._open
            or any(map(goes_by_size, self._numbers.values()))
        )
        sure = self._told >= TOLD and told and not doubted
        if not self._open:
            tried += 1
        self._tried = PATIENCE if sure else tried
        if not told and (trace.lasting or ((last or self._tried == PATIENCE) and not self._told)):
            self._note(NOTE.format(why=trace.failure or "nothing in them goes by the rows of the batch"))
        self._note_open(last)

    @property
    def _open(self) -> bool:
        """Whether examples seem to be mixed, and too few batches of other sizes have told."""
        return bool(self._doubted) and self._settled < TOLD

    def _note_open(self, last: bool) -> None:
        if last and self._open:
            self._note(OPEN)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            log.warning(note)

    def _refuse_sized(self, trace: Trace) -> None:
        """Refuse a number that has risen, or fallen, with the size of its batch so far."""
        for place, number in trace.sizes.numbers.items():
            seen = self._numbers.setdefault(place, {})
            if seen.setdefault(trace.examples, number) != number:
                seen[trace.examples] = math.nan
            if len(seen) >= ENOUGH and goes_by_size(seen):
                first, second = (f"{seen[size]:.4g}" for size in (min(seen), max(seen)))
                raise UserError(SIZED.format(name=place[1], first=first, second=second))

    def _refuse_unlike(self, beside: Beside) -> None:
        """Refuse what stands beside this batch, and not beside others of its step."""
        if what := next(filter(None, map(beside.unlike, self._beside)), ""):
            raise UserError(BESIDE.format(what=what))
        self._beside.append(beside)

    def _told_by(self, trace: Trace, losses: Tensor) -> bool | None:
        """Whether a batch has told that its examples are kept apart; None where a batch of another size is to say so.

        Raises:
            UserError: they are not. Where sizes leave it open which rows are whose, batches of two sizes have to say it.
        """
        try:
            return told_by(trace, losses)
        except Mixture as error:
            self._doubted.add(trace.examples)
            if error.sure or len(self._doubted) > 1:
                raise
            return None
