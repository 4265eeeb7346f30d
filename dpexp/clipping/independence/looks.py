"""When a clipper looks whether examples influence each other through values, and what it makes of that."""

from __future__ import annotations

import copy
import gc
import logging
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel

from dpexp.clipping.gradients.memory import give_back_freed_memory
from dpexp.clipping.independence.arguments import leaves, positional_names
from dpexp.clipping.independence.batches import Arrangement, Batches, arrangements
from dpexp.clipping.independence.chance import BETWEEN, OTHERS, Chance
from dpexp.clipping.independence.comparison import Places, places_of, rows_of_one
from dpexp.clipping.independence.look import Look
from dpexp.clipping.independence.replay import Earlier, Replay, switches
from dpexp.clipping.survey import layouts
from dpexp.clipping.tapping.forwards import tensors_in
from dpexp.clipping.tapping.node import BY_TAP
from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError

log = logging.getLogger(__name__)

# forwards that are kept until their backward; and where more of them differ in shapes, other arguments or modes
WAITING, KINDS = 4, 16
# modes that are looked at; all others are one
MODES = 64
# backward passes in a row that look, while the outputs do not depend on the examples yet; of an example alone, which has nobody
# to be mixed with, and whose outputs cannot tell, and of a model that decides by numbers, fewer
PATIENCE, ALONE = 16, 4
# batches that stand for all where there are many choices to look at: halves, and halves replaced
FEW = 4
UNSEEN = "the losses use something that the attached model's forward does not return, or returns without a row for each example"
WHOLE = (
    "the attached model's forward returns, without a gradient, something that has no row for each example and goes by the whole "
    "batch: the losses may not use it"
)
MANY = f"more than {KINDS} forwards that differ wait for one backward"
NOT_ENTERED = "the attached model's own forward was not called, or inside one compiled graph"
NOTE = "not looked at: whether examples influence each other through values that have no gradient ({why})"
ONE_WAY = (
    "not looked at: whether the gradient of what an example gets depends on the others of its batch ({why})"
)

SUPPOSED = (
    "rows of this batch end in the same id, and more of it changes what an example gets. If that is padding, an example depends "
    "on the longest one beside it: give the model an attention mask, or its configuration a pad_token_id, and it is looked at. "
    "If all batches have one length, say so: fixed_length=True"
)


@dataclass
class Independence:
    """The looks of one clipper: `enter` in every training forward, `check` in every backward pass.

    Args:
        model: the attached model.
        rows_per_example: adjacent rows of each example.
        fixed_length: the caller promises batches of one length, so that padding is the same for all: that is checked then,
            and padding is not varied.

    Attributes:
        notes: what could not be looked at, in words.
        token: see `Padding.of`; None: the model may say it.
        losses_seen: whether the caller has looked at what stands behind the outputs.
        looks: by mode, how many there were, and `PATIENCE` once they have told something. A mode is what is switched on (see
            `switches`): a batch norm that begins to use the batch's statistics, because somebody called ``model.train()``, makes
            another model. Another one is where an input is empty: edges between nodes that are no neighbours; and where batches
            are longer, or shorter, than any before, as a model may go another way from some length on. Beside it stands
            whether an example was alone.
    """

    model: nn.Module
    rows_per_example: int = 1
    fixed_length: bool = False
    notes: list[str] = field(default_factory=list)
    token: int | float | None = None
    # what goes by how often the model was called, in words
    counted: str = ""
    # by mode, what the examples of a batch share of chance, in words; and the modes of the present batch
    shares: dict[int, str] = field(default_factory=dict)
    modes: set[int] = field(default_factory=set)
    losses_seen: bool = False
    backwards: int = 0
    looks: dict[tuple[int, bool], int] = field(default_factory=dict)
    mode: int = 0
    # whether one example entered, as far as the shapes tell; and how many rows since the last backward pass
    alone: bool = False
    entered: int = 0
    # whether a look is late: its backward pass came to a forward that was entered before the look was due
    owed: bool = False
    looking: bool = False
    waiting: deque[Replay] = field(default_factory=deque)
    # forwards to look at whose own backward pass has not come yet, those that another one has looked at among them
    begun: int = 0
    running: Replay | None = None
    # the last forward without gradients since the last backward pass
    passed: Earlier | None = None
    lengths: dict[str, torch.Size] = field(default_factory=dict)
    # columns of the shortest and of the longest batch: that entered, and that were there when a look was taken last
    span: tuple[int, int] = (sys.maxsize, 0)
    looked: tuple[int, int] = (sys.maxsize, 0)
    # what is around a way back of a look
    silence: Callable[[], AbstractContextManager[None]] = nullcontext
    # called where a forward of training has ended
    on_left: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.model.module

    def __deepcopy__(self, memo: dict[int, Any]) -> Independence:
        """Look at a copied model alone; forwards that wait for their backward stay with the original."""
        memo[id(self)] = twin = object.__new__(type(self))
        left = {"waiting": deque(), "begun": 0, "running": None, "passed": None, "on_left": None}
        vars(twin).update(copy.deepcopy(vars(self) | left, memo))
        return twin

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, forwards are not looked at: they repeat one, or what enters them is public."""
        before, self.looking = self.looking, True
        try:
            # nor is what a back-propagation of theirs computes again
            with self.silence():
                yield
        finally:
            self.looking = before

    @property
    def due(self) -> bool:
        """Whether the next backward pass looks: the first of each mode until one has told something; the 16th, the 64th …"""
        return not self._known or self.owed or layouts.due(self.backwards + 1)

    @property
    def shared(self) -> str:
        """What the examples of the present batch share of chance, in words, as far as looks have shown; "" if nothing."""
        return next(filter(None, (self.shares.get(mode) for mode in self.modes)), "")

    def new_batch(self) -> None:
        """Forget what was said of the last batch."""
        self.counted = ""
        self.modes.clear()

    @property
    def _known(self) -> bool:
        return self.looks.get((self.mode, self.alone), 0) >= PATIENCE

    def enter(self, args: tuple, kwargs: dict, rows: int) -> None:
        """The model's forward begins; of so many rows, as far as the shapes tell.

        Raises:
            UserError: another length than before, though ``fixed_length`` was promised.
        """
        if self.fixed_length:
            self._check_lengths(args, kwargs)
        empty = any(not tensor.numel() for tensor in tensors_in((args, kwargs)))
        self.alone, self.entered = rows == self.rows_per_example, self.entered + rows
        self.mode = hash((*switches(self.model, args, kwargs), empty, *self._doublings(args, kwargs, rows)))
        if len(known := {mode for mode, _ in self.looks}) >= MODES and self.mode not in known:
            # a word that is another one in every step is no switch
            self.mode = 0
        self.modes.add(self.mode)
        self.running = Replay(self.model, args, kwargs, self.mode) if self.due else None
        if self.running is not None:
            if self.passed is not None and self.passed.rows == rows:
                self.running.earlier = self.passed
            self.begun += 1
            self._keep(self.running)

    def pass_by(self, args: tuple, kwargs: dict, rows: int) -> None:
        """The model's forward begins without gradients: what it keeps, the next one may use."""
        if self.running is None and self.due:
            self.passed = Earlier(self.model, args, kwargs, rows)

    def _keep(self, replay: Replay) -> None:
        """Let a forward wait for its backward, and give up one that is like another where there are too many."""
        self.waiting.append(replay)
        if len(self.waiting) > WAITING:
            kinds = Counter(waiting.kind for waiting in self.waiting)
            alike = (waiting for waiting in self.waiting if kinds[waiting.kind] > 1)
            given_up = next(alike, self.waiting[0] if len(self.waiting) > KINDS else None)
            if given_up is not None:
                self.waiting.remove(given_up)
                if kinds[given_up.kind] == 1:
                    self._note(NOTE, MANY)

    def leave(self, output: object) -> None:
        """The model's forward has ended."""
        if self.looking:
            return
        if self.running is not None:
            self.running.left(output)
            self.running = None
        if self.on_left is not None:
            self.on_left()

    def begin(self, roots: Roots, attached: Iterable[Tensor]) -> None:
        """A backward pass begins, and the graph behind ``roots`` is still there.

        Raises:
            UserError: a trainable parameter outside of the attached model would get no gradient.
        """
        if not roots.num_examples or not self.due or (self._known and not self.waiting):
            return
        refuse_foreign(roots, attached)
        for replay in self.waiting:
            replay.find_used(roots)
            names = positional_names(replay.model)
            if len(self.waiting) > 1:
                self._find_own(replay, roots)
            if Batches(replay.inputs, self._usual(roots.num_examples), names).ambiguous:
                self._find_places(replay, roots)

    def returned(self, roots: Roots) -> list[GradientEdge]:
        """What the forwards that are to be looked at have returned, as far as the roots were computed from it."""
        return [edge for replay in self.waiting for edge in replay.returned(roots).values()]

    def _find_own(self, replay: Replay, roots: Roots) -> None:
        """Let the gradients say whether a forward beside others has rows of examples of its own: shapes do not tell."""
        number = torch.arange(1.0, roots.num_examples + 1, device=roots.device)
        edges = replay.returned(roots)
        plain, weighted = (_gradients(roots, edges, weights) for weights in (None, number))
        times = self.rows_per_example
        found = (rows_of_one(g, weighted[leaf], times) for leaf, g in plain.items() if leaf in weighted)
        replay.own = next((rows for rows in found if rows is not None), None)

    def _find_places(self, replay: Replay, roots: Roots) -> None:
        """Let the gradients of half of the losses say which rows of the outputs belong to which example."""
        order = layouts.fixed_order(roots.num_examples)
        chosen = order < (len(order) + 1) // 2
        rows = chosen.repeat_interleave(self.rows_per_example)
        for leaf, gradient in _gradients(roots, replay.returned(roots), chosen).items():
            if places := places_of(gradient, rows.to(gradient.device)):
                replay.places[leaf] = places

    def check(self, num_examples: int) -> None:
        """Look, where that is due, at the forwards that this backward pass may belong to.

        Raises:
            UserError: what one example gets depends on others, or a buffer does. Names the module.
        """
        due, replays = self.due, list(self.waiting)
        # fewer rows than examples, whichever forward they are in: some of them are of several
        in_parts = len(replays) > 1 and self.entered >= num_examples * self.rows_per_example
        self.waiting.clear()
        self.entered, self.passed = 0, None
        if not num_examples:
            return
        self.backwards += 1
        # several forwards wait for their backward, as in a pipeline: the next one is looked at
        self.owed = due and not replays and (self._known or self.begun > 0)
        self.begun = max(0, self.begun - 1)
        if not due or self.owed:
            return
        # what the last step left free is in pieces that a look does not fit into
        give_back_freed_memory()
        try:
            with self.elsewhere():
                looks = [self._look(replay, num_examples, in_parts) for replay in replays]
        except UserError:
            # who goes on is looked at again
            self.looks.pop((self.mode, self.alone), None)
            raise
        finally:
            give_back_freed_memory()
        self.looked = self.span
        told = num_examples > 1 and any(look.told for look in looks)
        # of a model that was seen to tell: alone nothing but the size of the batch is another one
        told |= self.alone and self.looks.get((self.mode, False), 0) >= PATIENCE
        # what decides by a number goes one way in one batch, and another way in the next
        asked = any(replay.asked for replay in replays)
        told &= not asked
        more = PATIENCE // ALONE if asked or (self.alone and num_examples == 1) else 1
        mode = self.mode, self.alone
        self.looks[mode] = PATIENCE if told else self.looks.get(mode, 0) + more
        if not any(look.compared for look in looks):
            self._note(NOTE, looks[0].failure if looks else NOT_ENTERED)
        elif not self.losses_seen and any(look.missed for look in looks):
            self._note(NOTE, UNSEEN)
        elif not self.losses_seen and any(look.whole for look in looks):
            self._note(NOTE, WHOLE)
        for look in looks:
            if look.supposed is not None:
                self._note(SUPPOSED, "")
        if counted := next((look.counted for look in looks if look.counted), ""):
            # who goes on is looked at again
            self.counted = counted
            self.looks.pop(mode, None)
        if any(look.compared for look in looks):
            self.shares[self.mode] = next((look.shared for look in looks if look.shared), "")
        for why in [look.one_way for look in looks if look.one_way]:
            self._note(ONE_WAY, why)

    def _usual(self, num_examples: int) -> Arrangement:
        return Arrangement(num_examples, self.rows_per_example)

    def _look(self, replay: Replay, num_examples: int, in_parts: bool) -> Look:
        """Look at a forward, and refuse it where its rows, whosever they may be, are not kept apart; ``in_parts``: see
        `arrangements`.

        Raises:
            UserError: names the module.
        """
        usual = self._usual(num_examples)
        times = self.rows_per_example
        if replay.own is not None and replay.own != usual.examples * times:
            # the rows are those of some examples, and there is no doubt that what mixes them mixes examples
            look = self._look_at(replay, Arrangement(replay.own // times, times), None)
            if look.compared:
                return look
        refused: dict[Arrangement, UserError] = {}
        for arrangement in arrangements(replay.inputs, usual, in_parts):
            try:
                look = self._look_at(replay, arrangement, replay.places if arrangement == usual else None)
            except UserError as error:
                refused[arrangement] = error
                continue
            if look.compared:
                if (both := replay.with_earlier()) is not None:
                    self._look_at(both, arrangement, None)
                return look
        # of what an example alone has, or each as many as it has, nobody knows whether it is rows
        if usual in refused or (num_examples > 1 and len(refused) > 1):
            raise refused.get(usual) or next(iter(refused.values()))
        return look

    def _look_at(self, replay: Replay, arrangement: Arrangement, places: Mapping[int, Places] | None) -> Look:
        replay.chance = Chance()
        # 16 bits round away what is looked for: as the user computes only where 32 bits do not run
        for narrow in (False, True) if replay.autocast else (False,):
            replay.narrow = narrow
            look = Look(replay, arrangement, self.token, places=places, lengths=self.looked)
            look.run(padding=not self.fixed_length)
            if look.compared:
                break
        if look.compared and replay.drew:
            # what a coin decides is looked at on both sides of it, and a choice of several in each
            for chance in OTHERS + BETWEEN:
                replay.chance = chance
                most = FEW if chance in BETWEEN else None
                other = Look(replay, arrangement, most=most, places=places)
                other.run(padding=False)
                look.told |= other.told
        return look

    def _note(self, what: str, why: str) -> None:
        note = what.format(why=why)
        # an error tells the sizes of each batch
        if re.sub(r"\d+", "", note) not in [re.sub(r"\d+", "", known) for known in self.notes]:
            self.notes.append(note)
            log.warning(note)

    def _doublings(self, args: tuple, kwargs: dict, rows: int) -> tuple[int, int]:
        """How short and how long batches have become so far, in powers of two."""
        plain = (t for t in tensors_in((args, kwargs)) if t.layout == torch.strided and not t.is_nested)
        columns = max((t.shape[1] for t in plain if t.dim() > 1 and t.shape[0] == rows), default=0)
        if columns:
            self.span = min(self.span[0], columns), max(self.span[1], columns)
        return self.span[0].bit_length(), self.span[1].bit_length()

    def _check_lengths(self, args: tuple, kwargs: dict) -> None:
        for name, part in leaves((args, kwargs), names=positional_names(self.model)):
            if isinstance(part, Tensor) and part.dim() > 1:
                before, now = self.lengths.setdefault(name, part.shape[1:]), part.shape[1:]
                if before != now:
                    columns, was = (" x ".join(map(str, shape)) for shape in (now, before))
                    raise UserError(
                        f"the input {name or 'of the model'} has {columns} columns now and had {was} before, but "
                        "fixed_length=True promises batches of one length: pad them all alike"
                    )


def _gradients(roots: Roots, edges: Mapping[int, GradientEdge], weights: Tensor | None) -> dict[int, Tensor]:
    """The gradients of weighted losses with respect to outputs, by number; none where a graph cannot be used twice."""
    if not edges:
        return {}
    try:
        found = torch.autograd.grad(
            cast(Any, roots.tensors),
            list(edges.values()),
            roots.weighted(weights),
            retain_graph=True,
            allow_unused=True,
        )
    except RuntimeError:
        return {}
    return {leaf: g for leaf, g in zip(edges, found, strict=True) if g is not None}


def refuse_foreign(roots: Roots, attached: Iterable[Tensor]) -> None:
    """Refuse losses behind which a trainable parameter of another module stands, like a head beside the attached model: it would
    train on nothing, without a word.

    Args:
        roots: the losses with their graph, which is walked.
        attached: the parameters that are clipped.

    Raises:
        UserError: names the first such parameter by its shape; its module is not known here.
    """
    own = {id(p) for p in attached}
    for node in roots.graph():
        if isinstance(node, BY_TAP) and own.isdisjoint(map(id, node.recorder.params.values())):
            raise UserError(
                "behind the losses stand two models with a clipper each, and each would clip a part of an example's gradient: "
                "put both into one nn.Module and attach to that"
            )
        # a leaf's node knows its tensor
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            # Made within a forward (``nn.Parameter(frozen.T)`` asks for a gradient by default) and dropped again: its graph alone
            # still holds it. What is to train lies in a module, or in an optimizer's list.
            if not gc.get_referrers(leaf):
                continue
            raise UserError(
                f"the losses also depend on a trainable parameter of shape {list(leaf.shape)} that is not in the attached model "
                "(a head beside it?): it would get no gradient. Put both into one nn.Module and attach to that, or freeze it "
                "with requires_grad_(False)"
            )
