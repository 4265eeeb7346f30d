"""One look at one forward: is what an example gets the same in other batches, and which module is the first to differ?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from dpexp.clipping.gradients.memory import give_back_freed_memory
from dpexp.clipping.independence.arguments import Inputs, positional_names
from dpexp.clipping.independence.backwards import Backwards
from dpexp.clipping.independence.batches import Arrangement, Batches, Reading, Variant
from dpexp.clipping.independence.blame import first_module
from dpexp.clipping.independence.canvas import ONE_SIZE, Canvas
from dpexp.clipping.independence.comparison import Comparison, Places, bits_of, same_buffer
from dpexp.clipping.independence.end_to_end import Ends
from dpexp.clipping.independence.padding import BROKEN, FIXED, Padding, Pairs
from dpexp.clipping.independence.replay import Replay, fingerprints
from dpexp.clipping.independence.runs import LIST, Buffers, Run, Runs
from dpexp.clipping.independence.shared import shared_draws
from dpexp.clipping.refusals import refusal
from dpexp.errors import UntoldError, UserError, without_data

MIXES = (
    "mixes examples: what an example gets out of it changes {when}, though no gradient shows it. This voids any guarantee. "
    "{way}"
)
BACKWARDS = (
    "{name}: the gradient of what one example gets out of the model changes when others of its batch are gone, though what it "
    "gets does not (a backward of its own, a hook, or a factor of a gradient, that goes by the number of rows or by other rows). "
    "This voids any guarantee. Write it for each example alone, or with a public number"
)
WAY = (
    "Look for a statistic under no_grad, one quantisation scale for the whole batch, a running statistic, an expert's capacity, "
    "attention that goes by the batch. Compute it for each example alone, or freeze it before training, on public data. (An "
    "input that all examples share, and that has as many rows as the batch, looks like this too: use another batch size)"
)
UNUSED = (
    "The losses take no gradient from the output that differs: if they do not use it at all, let the model return what they use, "
    "and nothing that compares examples, as CLIP's logits of all pairs do. "
)
WRITTEN = (
    "its forward writes what depends on the batch into the {kind} {what!r} (running statistics, an observer's range, a cache). "
    "That is no noisy sum, and reaches later steps, checkpoints and exports as it is. Freeze it before training, on public data "
    "(eval() of this module, observers off), set it back at the end of each forward (a membrane of spiking neurons, a state of a "
    "recurrent layer), or use a module that keeps nothing"
)


# parameters of a model of which there is memory for a copy in 64 bits
LARGEST = 1 << 29


@dataclass
class Difference:
    """What an example got was another thing: in which runs, and how their tensors are compared."""

    when: str
    way: str
    runs: tuple[list[Inputs], list[Inputs]]
    differs: Callable[..., bool | None]


class Look:
    """Runs one forward again on other batches.

    Args:
        replay: the forward.
        arrangement: of the rows that enter.
        token: see `Padding.of`; None: the model may say it.
        most: at most so many other batches; None: all.
        places: of some outputs, see `places_of`.
        lengths: columns of the shortest and the longest batch that others have looked at.

    Attributes:
        told: whether the outputs depended on the examples at all; zero weights of a new head hide everything behind them.
        compared: whether anything could be compared, and `failure` why not, in words.
        seen: the outputs of which nothing is left to compare, by number.
        counted: what goes by how often the model was called, in words; "" if nothing does.
        shared: what the examples share of chance, in words; "" if nothing.
        one_way: why gradients could not be compared although outputs were, in words; "" if they were.
    """

    def __init__(
        self,
        replay: Replay,
        arrangement: Arrangement,
        token: int | float | None = None,
        most: int | None = None,
        places: Mapping[int, Places] | None = None,
        lengths: tuple[int, int] = (sys.maxsize, 0),
    ):
        self.replay, self.token, self.most, self.lengths = replay, token, most, lengths
        self.examples, self.rows = arrangement.examples, arrangement.examples * arrangement.times
        self.told = self.compared = False
        self.seen: set[int] = set()
        self.failure = "no input has the size of the batch"
        self.one_way = self.counted = self.shared = ""
        bags = any(isinstance(module, torch.nn.EmbeddingBag) for module in replay.model.modules())
        self.batches = Batches(replay.inputs, arrangement, positional_names(replay.model), bags)
        bits = 16 if replay.narrow else bits_of(replay.model.parameters())
        self.comparison = Comparison(arrangement, bits, places)
        self.runs = Runs(replay, self.rows)
        # an id in which rows end, and nothing says whether it is padding, where more of it changes what an example gets
        self.supposed: int | None = None

    @property
    def missed(self) -> bool:
        """Whether the losses use something of the forward that was not compared."""
        return self.compared and (self.replay.used_else or not self.replay.used <= self.seen)

    @property
    def whole(self) -> bool:
        """Whether it returns something of the batch as a whole, without a gradient, that losses would be constant in."""
        return (
            self.compared
            and LIST not in self.once
            and not self.once.keys() <= self.seen | self.replay.ends.keys()
        )

    def run(self, padding: bool) -> None:
        """Look, with more padding too if asked for.

        Raises:
            UserError: names the first module that mixes examples, or writes them into a buffer.
        """
        with self.replay.around():
            self._run(padding)

    def _run(self, padding: bool) -> None:
        self.parameters = fingerprints(self.replay.model)
        for keeps in (self.replay.keeps, True):
            self.replay.keeps = keeps
            try:
                (self.once, self.twice), (self.buffers, later) = self.runs.of([self.replay.inputs] * 2)
                break
            except Exception as error:
                self.failure = without_data(error)
        else:
            return
        drawn = bool(self.replay.draws) or self.replay.drawn_by_others
        self.counted = self._counted(later)
        self._compare_parameters()
        found: list[Difference] | None = None
        for reading, sure in self.batches.readings():
            if found is not None and not sure:
                break
            tried = self._tried(reading)
            found = found if tried is None else tried[:1]
            if tried == []:
                self._compare_gradients(reading)
                if drawn and self.replay.chance.seed is None:
                    self._find_shared(reading)
                break
        if found is None and (plain := self.batches.plain_reading()) is not None:
            # a model that runs with one size of the batch only
            found = self._tried(plain, resize=False)
        self.compared = found is not None
        if not found and self.compared and padding:
            found = self._padded()
        if found:
            self._refuse(found[0])

    # -- other batches ------------------------------------------------------------------------------------------------

    def _tried(self, reading: Reading, resize: bool = True) -> list[Difference] | None:
        """Differences under one reading of the inputs; None where the model does not run or nothing can be compared.

        Raises:
            UserError: a buffer depends on the batch.
        """
        try:
            return self._differences(reading, resize)
        except UserError:
            raise
        except Exception as error:
            self.failure = without_data(error)
            return None

    def _differences(self, reading: Reading, resize: bool) -> list[Difference]:
        self.constant = set(self.once)
        compared = 0
        for variant in self.batches.variants(self.replay.asked)[: self.most]:
            resized = len(variant.rows) != self.examples
            if resized and (self.replay.by_chance or not resize):
                continue
            if (run := self._run_of(reading, variant)) is None:
                continue
            if compared < 2:
                # a parameter that keeps a row changes where another row stands in its place
                self._compare_parameters()
                compared += 1
            if found := self._compared(reading, variant, run):
                return found
        if LIST in self.seen:
            self.seen |= self.replay.used
        # what no batch changes is no output of examples, such as a table of the model's
        self.seen |= self.constant
        return []

    def _run_of(self, reading: Reading, variant: Variant) -> Run | None:
        """A run of a variant with the first factor that leaves it finite; None where none does."""
        rows = [variant.rows] if variant.first is None else [variant.first, variant.rows]
        for scale in variant.sizes:
            batches = [self.batches.made(reading, each, scale) for each in rows]
            try:
                found, (buffers, *_) = self.runs.of(batches)
            except Exception:
                if scale == 1.0:
                    raise
                continue
            if scale == 1.0 or all(bool(leaf.isfinite().all()) for leaf in found[-1].values()):
                return Run(batches, found[-1], buffers)
        return None

    def _compared(self, reading: Reading, variant: Variant, run: Run) -> list[Difference]:
        """What differs in a run of a variant, if anything does."""
        resized = len(variant.rows) != self.examples
        differs = self.comparison.of(variant, [ends for ends in reading if isinstance(ends, Ends)])
        before = self.once if variant.first is None else self.twice
        if before.keys() != run.outputs.keys():
            raise UntoldError("another batch gives another number of outputs")
        pairs = {leaf: (before[leaf], there) for leaf, there in run.outputs.items()}
        verdicts = {leaf: differs(a, b, leaf) for leaf, (a, b) in pairs.items()}
        if all(verdict is None for verdict in verdicts.values()):
            raise UntoldError("no output has the size of the batch")
        self.seen |= {leaf for leaf, verdict in verdicts.items() if verdict is not None}
        self.constant -= {
            leaf
            for leaf, (a, b) in pairs.items()
            if leaf in self.constant and (a.shape != b.shape or self.comparison.unequal(a[None], b[None]))
        }
        if any(verdicts.values()):
            if resized and self.replay.by_chance:
                # a mask with a number for each example looks like a coin where one is alone
                return []
            runs = [self.replay.inputs] * len(run.batches), run.batches
            if not self._is_rounding(runs, differs):
                return [Difference(variant.when, self._way(verdicts), runs, differs)]
        self._compare_buffers(run.buffers, resized)
        if not resized and variant.first is None and not self.told:
            others = set(range(self.examples)) - {j for _, j in variant.same}
            rest = self.comparison.of(Variant("", variant.rows, [(j, j) for j in others]))
            self.told = any(rest(a, b, leaf) for leaf, (a, b) in pairs.items())
        return []

    def _way(self, verdicts: Mapping[int, bool | None]) -> str:
        """What to do about outputs that differ, of which the losses may use none."""
        different = {leaf for leaf, verdict in verdicts.items() if verdict}
        unused = different <= self.replay.ends.keys() - self.replay.used and bool(self.replay.used)
        return UNUSED + WAY if unused else WAY

    def _is_rounding(
        self, runs: tuple[list[Inputs], list[Inputs]], differs: Callable[..., bool | None]
    ) -> bool:
        """Whether what differs is the same in 64 bits."""

        def alike() -> bool:
            before, here = (self.runs.of(batches)[0][-1] for batches in runs)
            return before.keys() == here.keys() and not any(
                differs(t, here[leaf], leaf) for leaf, t in before.items()
            )

        return self._holds_widely(alike)

    def _holds_widely(self, holds: Callable[[], bool]) -> bool:
        """Whether something holds in 64 bits, which did not before: large weights, as of a training that diverges, make much of
        rounding, and so do rectifiers near their kinks, of a gradient."""
        size = sum(p.numel() for p in self.replay.model.parameters())
        if self.comparison.bits == 64 or self.replay.narrow or size > LARGEST:
            return False
        self.replay.wide = True
        try:
            return holds()
        except Exception:
            # what names its bits itself
            return False
        finally:
            self.replay.wide = False

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _counted(self, later: Buffers) -> str:
        """Name what the same batch leaves behind, or gets, otherwise the second time; "" where nothing is. It goes by how many
        forwards there were."""
        for (owner, name), (before, persistent) in self.buffers.items():
            if persistent and not same_buffer(before, later.get((owner, name), (None, True))[0]):
                return f"{name!r} of {self._name(owner)}"
        for leaf, before in self.once.items():
            now = self.twice.get(leaf, before)
            rounding = self.comparison.same_size
            if before.shape == now.shape and self.comparison.unequal(before[None], now[None], rounding):
                return f"what {self._name('')} returns"
        return ""

    def _compare_parameters(self) -> None:
        for name, value in fingerprints(self.replay.model).items():
            if not same_buffer(self.parameters.get(name, value), value, 0, 0):
                owner, _, local = name.rpartition(".")
                raise UserError(f"{self._name(owner)}: {WRITTEN.format(kind='parameter', what=local)}")

    def _compare_gradients(self, reading: Reading) -> None:
        """Compare what goes back for a half of the batch with what goes back for it alone."""
        if self.replay.chance.seed is not None or self.replay.by_chance:
            return
        kept = self.replay.keeps
        parts = [v for v in self.batches.variants() if len(v.rows) != self.examples][:2]
        backwards = Backwards(self.replay, self.comparison)
        for variant in parts:
            name = ""
            # a graph is large, and what was freed is in pieces
            give_back_freed_memory()
            try:
                self.replay.keeps = True
                batch = self.batches.made(reading, variant.rows, 1.0)
                name = backwards.parameter_that_differs(variant, batch)
                if name and self._holds_widely(partial(backwards.agree, variant, batch)):
                    name = ""
            except Exception as error:
                # a graph that cannot be gone through so, or too little memory
                self.one_way = without_data(error)
            finally:
                self.replay.keeps = kept
            if name:
                raise UserError(BACKWARDS.format(name=name))

    def _find_shared(self, reading: Reading) -> None:
        other = next(v for v in self.batches.variants() if len(v.rows) != self.examples)
        # a model that runs with one size of the batch only
        with contextlib.suppress(Exception):
            resized = self.batches.made(reading, other.rows, 1.0)
            self.shared = shared_draws(
                self.replay, self.runs, self.replay.inputs, resized, self.comparison.unequal
            )

    def _compare_buffers(self, here: Buffers, resized: bool) -> None:
        for place, (before, persistent) in self.buffers.items():
            # the shape of what is not kept may go by the size of the batch
            kept = persistent or not resized
            if kept and not same_buffer(before, here.get(place, (None, True))[0]):
                owner = self.replay.model.get_submodule(place[0])
                kind = "parameter" if place[1] in owner._parameters else "buffer"
                raise UserError(f"{self._name(place[0])}: {WRITTEN.format(kind=kind, what=place[1])}")

    # -- padding ------------------------------------------------------------------------------------------------------

    def _padded(self) -> list[Difference]:
        if plan := Padding.of(self.replay, self.rows, self.token):
            pairs = plan.pairs(self.comparison.unequal, self.lengths)
            found = self._felt(pairs, "one longer example", FIXED)
            if found and plan.told:
                return found
            if found:
                self.supposed = plan.tokens
        # what sequences are padded with says nothing of images beside them
        if canvas := Canvas.of(self.replay, self.rows, None if plan else self.token):
            return self._felt(canvas.pairs(self.comparison.unequal), "one larger image", ONE_SIZE)
        return []

    def _felt(self, pairs: Pairs, who: str, way: str) -> list[Difference]:
        """What more padding has changed."""
        for short, long, differs in pairs:
            try:
                first, second = short(), long()
                # the batch itself has run
                (there,), _ = self.runs.of([second])
                here = self.once if first is self.replay.inputs else self.runs.of([first])[0][0]
            except Exception:
                # longer than the model can read, or a length that it does not take
                continue
            runs = [first], [second]
            different = any(differs(a, there[leaf]) for leaf, a in here.items())
            if different and not self._is_rounding(runs, differs):
                finite = all(bool(leaf.isfinite().all()) for leaf in there.values())
                return [
                    Difference(
                        f"when its batch is padded further, as {who} would do",
                        way if finite else BROKEN + way,
                        runs,
                        differs,
                    )
                ]
        return []

    # -- naming -------------------------------------------------------------------------------------------------------

    def _refuse(self, difference: Difference) -> None:
        name = first_module(self.replay, difference.runs, difference.differs)
        # a batch norm whose model was put back into training mode, for one
        known = refusal(self.replay.model.get_submodule(name))
        raise UserError(
            f"{self._name(name)}: {known or MIXES.format(when=difference.when, way=difference.way)}"
        )

    def _name(self, name: str) -> str:
        module = self.replay.model.get_submodule(name)
        return f"{name or '(root)'} ({type(module).__name__})"
