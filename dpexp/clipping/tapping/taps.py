"""Taps: where the output gradient of an operation meets what the operation had been given.

An operation on the batch runs with detached parameters, so ordinary autograd carries the gradient of its input and computes none
of the parameters. Its output then passes through an identity (`node.Tap`) whose backward hands the saved tensors and the output
gradient to whoever visits the graph (`Visit`). Nothing is stored on parameters or modules.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from dpexp.clipping.sharding import Shards
from dpexp.clipping.tapping.dataflow import DataFlow
from dpexp.clipping.tapping.donation import donating, used_again
from dpexp.clipping.tapping.forwards import Entered, ForwardPass, tensors_in
from dpexp.clipping.tapping.messages import EARLIER, NESTED, OTHERWISE, OUTSIDE, TORCH_SAYS
from dpexp.clipping.tapping.node import BY_TAP, Tap
from dpexp.clipping.tapping.roots import NodeKey, Roots, kind_of, node_key
from dpexp.clipping.tapping.uses import Template, Use
from dpexp.errors import LateError, UserError

OnUse = Callable[[ForwardPass, Use, tuple[Tensor, ...], Tensor], None]


class Recorder:
    """Joins the forward passes of one clipper with the visits of its backward passes.

    The anchor is a scalar leaf that every tap takes as an input: asking autograd for the gradient of the anchor visits every
    tap, and no parameter's accumulation node.

    Args:
        params: trainable parameters by their first name.
        roles: decided in earlier passes; shared with the survey, which fills it.
        shards: where the parameters are sharded.
    """

    def __init__(
        self, params: dict[str, nn.Parameter], roles: dict[str, str], shards: Shards | None = None
    ) -> None:
        self.params, self.roles, self.shards = params, roles, shards
        self.names = {id(p): name for name, p in params.items()}
        self.anchor = torch.zeros((), device="cpu", requires_grad=True)
        self.current: ForwardPass | None = None
        # the one that ended last, for whoever backs several forwards in another order; its graph keeps it alive
        self.last: Callable[[], ForwardPass | None] = lambda: None
        self.loose: ForwardPass | None = None
        self.alive: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        # the last passes that were watched and wait for their backward
        self.watched: deque[ForwardPass] = deque(maxlen=64)
        self.visiting: Visit | None = None
        self.flow: DataFlow | None = None
        # how an operation runs that was seen before, by its key
        self.templates: dict[str, Template] = {}
        # whether what runs repeats a forward, or is none of training, see `independence`: nothing of it is recorded
        self.quiet = False
        # how many forwards of modules with parameters are running
        self.inside = 0
        # which of the shapes that enter is the batch, once a backward pass has shown it
        self.batch: int | None = None
        # what the compiler was told before the forward that runs, see `donation`
        self._donating: bool | None = None
        # the last back-propagation of others that came through here, see `asked`
        self._asked: tuple[int, bool] = (-1, True)

    def open(self, given: Entered, watch: bool) -> None:
        """Begin the root's forward. ``watch``: follow which tensors are computed from what is given."""
        if self._donating is None:
            # proofs, and engines of two passes, back-propagate what is compiled here more than once
            self._donating = donating(False)
        guess = given.first if self.batch is None else self.batch
        self.current = ForwardPass(given.shapes, guess if guess < len(given.shapes) else 0)
        self.current.begun = torch._C._autograd._get_sequence_nr()
        # a forward that this one interrupts, or that was left by an interrupt
        self._stop_watching()
        if watch:
            rows = self.current.rows
            in_list = self.current.batch < given.first
            # what all examples share is no batch: a single row, where there are several; in a list each may have its own
            own = rows == 1 or given.first
            followed = [t for t in given.tensors if own or t.dim() == 0 or t.shape[0] != 1]
            self.flow = DataFlow(followed, [t for t in followed if in_list or t.shape[:1] == (rows,)])
            self.flow.__enter__()
        else:
            self.watched.clear()

    def new_batch(self) -> None:
        """Let no losses come from the forwards so far; what was computed outside of the root's forward may be anybody's."""
        for owner in self.alive:
            owner.earlier = bool(owner.shapes)

    def is_followed(self, param: Any, name: str) -> bool:
        """Tell whether what stands in a module is the attached parameter; of a shard, whether it is the whole one."""
        return param is (self.params[name] if self.shards is None else self.shards.whole(name))

    def leaf(self, name: str) -> nn.Parameter:
        """Return a parameter as autograd knows it: of a shard, the whole one."""
        whole = self.shards.whole(name) if self.shards is not None else None
        return self.params[name] if whole is None else whole

    def name_of(self, leaf: Tensor) -> str | None:
        """Return the name of a parameter as autograd knows it (`leaf`); None of any other tensor."""
        name = self.names.get(id(leaf))
        return self.shards.name_of(leaf) if name is None and self.shards is not None else name

    def close(self, output: Any = None) -> None:
        """End the root's forward, which returns ``output``."""
        if self.current is not None:
            if self.flow is not None:
                made = [t for t in tensors_in(output) if t.grad_fn is not None and self.flow.of_examples([t])]
                self.current.returned = {node_key(t.grad_fn, t.output_nr) for t in made}
                self.current.picked = self.flow.picked
                for use in self.current.uses:
                    if use.from_batch is False:
                        # copies of parameters may have gone wherever rows were picked
                        use.routed |= self.flow.picked
                self.watched.append(self.current)
            self.last = weakref.ref(self.current)
            self.current.ended = torch._C._autograd._get_sequence_nr()
        self.current, self.inside = None, 0
        self._stop_watching()
        if self._donating is not None:
            donating(self._donating)
            self._donating = None

    def _stop_watching(self) -> None:
        if self.flow is not None:
            self.flow.__exit__(None, None, None)
            self.flow = None

    @property
    def following(self) -> bool:
        """Whether who reads a parameter now gets a followed value: inside of a forward, or while one is recomputed."""
        inside = self.current is not None or self.inside > 0 or self.visiting is not None
        return inside and not self.quiet

    def forward_pass(self) -> ForwardPass:
        """Return the pass that a tap belongs to. Modules called outside of the root's forward share a loose one."""
        if self.current is not None:
            return self.current
        if self.loose is None or self.loose.consumed:
            self.loose = ForwardPass()
        return self.loose

    def known_role(self, key: str) -> str | None:
        """Return what was decided of an operation in this pass or before; None where it was never seen."""
        if self.visiting is not None:
            # a recomputation of a pass that was watched, where another role may have been found than before
            for owner in self.visiting.passes:
                if key in owner.roles:
                    return owner.roles[key]
        return self.roles.get(key)

    def place(self, key: str) -> tuple[str, int]:
        """Return the key of a use: the place in the model, and which of the uses there this is in the pass."""
        if self.visiting is not None:
            # a recomputation: its use is not registered
            return (key, 0)
        ordinals = self.forward_pass().ordinals
        ordinals[key] = ordinals.get(key, -1) + 1
        return (key, ordinals[key])

    @property
    def rows(self) -> int | None:
        """Rows of the batch that is in the model now; while a forward is recomputed, of that one."""
        if self.current is not None:
            return self.current.rows
        if self.visiting is not None:
            known = [p.rows for p in self.visiting.passes]
            return self.visiting.rows if self.visiting.rows in known else next(iter(known), None)
        return None

    def tap(self, y: Tensor, use: Use, saved: tuple[Tensor, ...]) -> Tensor:
        """Register the use and return ``y`` with a tap on it."""
        owner = self.forward_pass()
        # else this is a recomputation, registered before
        if self.visiting is None:
            owner.uses.append(use)
            owner.consumed = False
            self.alive.add(owner)
        return Tap.apply(y, self.anchor, self, owner, use, *saved)

    def asked(self) -> bool:
        """Tell whether the running back-propagation, which is none of ours, is to end at parameters of the attached model.

        It does not where somebody asks for the gradients of other tensors alone: of an input, for an adversarial example, or of
        a generator in front of this model.
        """
        task = torch._C._current_graph_task_id()
        if self._asked[0] != task:
            leaves = (self.anchor, *map(self.leaf, self.params))
            self._asked = task, any(_is_due(leaf) is not False for leaf in leaves)
        return self._asked[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        """Record for a copied model alone; graphs in flight stay with the original."""
        memo[id(self)] = twin = Recorder(copy.deepcopy(self.params, memo), copy.deepcopy(self.roles, memo))
        twin.batch = self.batch
        return twin


def _is_due(leaf: Tensor) -> bool | None:
    """Tell whether the running back-propagation ends at a leaf; None where it is an ``autograd.grad`` that was asked for it."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node))
    except RuntimeError:
        # which is all that torch says of such a one
        return None


class Visit:
    """The back-propagations of one ``clipper.backward``.

    Args:
        recorder: of the clipper.
        roots: where it begins.
        rows_per_example: rows of the batch that belong to one example.

    Attributes:
        passes: the forward passes that the roots were computed by, of those that wait for their backward.
        arrived: those of them that a gradient has reached.
        input_gradients: of the roots' inputs, from the last visit that asked for them.
    """

    def __init__(self, recorder: Recorder, roots: Roots, rows_per_example: int):
        self.recorder, self.roots = recorder, roots
        self.num_examples = roots.num_examples
        self.rows = self.num_examples * rows_per_example
        waiting = recorder.alive if roots.owner is None else [roots.owner]
        waiting = [p for p in waiting if not p.consumed and p.uses]
        # one that waits alone is it; a way through the graph tells which of several are, as some are kept for a log
        alone = len(waiting) == 1 and waiting[0].may_have(self.rows)
        self.passes = (
            waiting if alone else [p for p in waiting if any(id(use) in self.reached for use in p.uses)]
        )
        if any(owner.earlier for owner in self.passes):
            raise UserError(EARLIER)
        self.uses = [use for owner in self.passes for use in owner.uses]
        self.arrived: set[ForwardPass] = set()
        self.input_gradients: tuple[Tensor | None, ...] = ()
        self._on_use: OnUse | None = None
        # the back-propagation that this visit makes, among autograd's
        self._task = -1

    @cached_property
    def returned(self) -> dict[NodeKey, GradientEdge]:
        """What watched forwards have returned of rows of examples, as far as the roots were computed from it."""
        return self.roots.made_of({key for owner in self.recorder.watched for key in owner.returned})

    @cached_property
    def reached(self) -> set[int]:
        """Ids of the uses behind the roots; not of a head whose output nobody took."""
        return {id(node.use) for node in self.roots.graph() if isinstance(node, BY_TAP)}

    @cached_property
    def way(self) -> int:
        """What tells two ways through the model apart: the nodes behind the roots.

        Of those in a forward, one by one; of the others, which there are, for losses may be computed one after the other.
        """
        made, rows = [(owner.begun, owner.ended) for owner in self.passes], {self.rows, self.num_examples}
        inside: list[Any] = []
        outside: set[Any] = set()
        for node in self.roots.graph():
            kind, number = kind_of(node, rows), node._sequence_nr()
            if any(begun <= number < ended for begun, ended in made):
                inside.append(kind)
            else:
                outside.add(kind)
        return hash((tuple(inside), frozenset(outside)))

    # whose the rows of a use are, as far as shapes tell

    @cached_property
    def loose(self) -> set[int]:
        """Ids of the uses in forwards that nothing with the batch in front has entered: blocks hold for one batch alone."""
        return {id(use) for owner in self.passes if not owner.has_in_front(self.rows) for use in owner.uses}

    @cached_property
    def ragged(self) -> set[int]:
        """Ids of the uses of rows that may have entered end to end: here, too, blocks hold for one batch alone."""
        shapes = (
            (owner, use, use.input_shape or use.output_shape) for owner in self.passes for use in owner.uses
        )
        return {id(use) for owner, use, shape in shapes if shape and owner.is_ragged(shape[0], self.rows)}

    @cached_property
    def of_examples(self) -> set[int]:
        """Ids of the uses each of whose rows must be one example's, whatever their layout."""
        known = (owner for owner in self.passes if not owner.mistook(self.rows))
        return self.loose | {id(use) for owner in known for use in owner.uses if use.of_examples}

    @cached_property
    def columns(self) -> list[int]:
        """The second dimensions of what entered."""
        return [shape[1] for owner in self.passes for shape in owner.shapes if len(shape) > 1]

    def back_propagate(
        self,
        on_use: OnUse,
        *,
        retain: bool,
        weights: Tensor | None = None,
        params: Sequence[Tensor | GradientEdge] = (),
        inputs: bool = False,
    ) -> list[Tensor | None]:
        """Visit every tap once.

        Args:
            on_use: called with the forward pass, the use, its saved tensors and its output gradient.
            retain: keep the graph for another visit.
            weights: ``[B]`` factors of the losses; 1 where not given.
            params: what autograd is asked for besides; not parameters alone.
            inputs: ask for the gradients of the roots' inputs too; they are in `input_gradients` then.

        Returns:
            The gradients that reached ``params`` by ways that no tap covers.
        """
        leaves, tensors = self.roots.inputs if inputs else (), cast(Sequence[Tensor], self.roots.tensors)
        self.recorder.visiting, self._on_use = self, on_use
        try:
            with used_again(self.roots) if retain else nullcontext():
                grads = torch.autograd.grad(
                    tensors, cast(Sequence[Tensor], [self.recorder.anchor, *params, *leaves]), self.roots.weighted(weights),
                    retain_graph=retain, allow_unused=True,
                )  # fmt: skip
        except RuntimeError as error:
            for said, meant in TORCH_SAYS.items():
                if said in str(error):
                    raise UserError(meant) from error
            if isinstance(error, CheckpointError):
                raise LateError(OTHERWISE) from error
            raise
        finally:
            self.recorder.visiting, self._on_use = None, None
        if inputs:
            self.input_gradients = grads[1 + len(params) :]
        return list(grads[1 : 1 + len(params)])

    def arrive(self, owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> None:
        """Take an output gradient that has reached a tap."""
        if owner not in self.passes and not owner.shapes:
            raise UserError(f"{use.owner} ({use.label}) {OUTSIDE}")
        if owner not in self.passes:
            self.refuse_others(owner)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            if _is_due(self.recorder.anchor) is not None:
                raise UserError(f"{use.owner} ({use.label}) {NESTED}")
            self._task = task
        self.arrived.add(owner)
        assert self._on_use is not None
        self._on_use(owner, use, saved, gy)

    def refuse_others(self, owner: ForwardPass) -> NoReturn:
        """Refuse losses that are not those of the examples in a forward."""
        raise UserError(
            f"losses have {self.num_examples} examples, but the model's forward saw inputs of shape "
            f"{[list(shape) for shape in owner.shapes]}…: pass the losses of exactly the examples that entered the model"
        )

    def finish(self) -> bool:
        """Mark the passes as done. Returns whether the batch was another input than assumed in the forward."""
        moved = False
        for owner in self.arrived:
            owner.consumed = True
            if owner.mistook(self.rows):
                moved = True
                # for the next forward
                self.recorder.batch = [shape[0] for shape in owner.shapes].index(self.rows)
        waiting = [p for p in self.recorder.watched if p.returned.isdisjoint(self.returned)]
        self.recorder.watched = deque(waiting, self.recorder.watched.maxlen)
        return moved
