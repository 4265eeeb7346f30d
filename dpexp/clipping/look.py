"""One look at one forward: is what an example gets the same in other batches, and which module is the first to differ?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.dataflow import tensors_in
from dpexp.clipping.padding import FIXED, Padding
from dpexp.clipping.replay import Inputs, Replay, changed
from dpexp.errors import UserError

# of inputs whose batch dimension the shapes leave open
READINGS = 12
# numbers of one output that are compared; of larger ones every n-th feature
LARGE = 1 << 22
# factor of floating-point inputs in rows that are replaced
SCALE = 3.0
# largest difference, relative to the largest number that an example gets: of 32 bits and more, and of 16
ROUNDING, ROUNDING_16 = 1e-4, 0.05

MIXES = (
    "mixes examples: what an example gets out of it changes {when}, though no gradient shows it (a statistic under no_grad, one "
    "quantisation scale for the whole batch, a running statistic, an expert's capacity, attention that goes by the batch). "
    "This voids any guarantee. {way}"
)
WAY = (
    "Compute it for each example alone, or freeze it before training, on public data. (An input that all examples share, and "
    "that has as many rows as the batch, looks like this too: use another batch size)"
)
WRITTEN = (
    "its forward writes what depends on the batch into the {kind} {what!r} (running statistics, an observer's range, a cache). "
    "That is no noisy sum, and reaches later steps, checkpoints and exports as it is. Freeze it before training, on public data "
    "(eval() of this module, observers off), or use a module that keeps nothing"
)

# (example, whether its floating-point values are scaled) for every place of a batch
Rows = list[tuple[int, bool]]


@dataclass
class Variant:
    """Another batch. ``same``: (place before, place here) of the examples that must get the same; ``first``: what goes before."""

    when: str
    rows: Rows
    same: list[tuple[int, int]]
    first: Rows | None = None


@dataclass
class Difference:
    """What an example got was another thing: in which runs, and how their tensors are compared."""

    when: str
    way: str
    runs: tuple[list[Inputs], list[Inputs]]
    differs: Callable[[Tensor, Tensor], bool | None]


class Look:
    """Runs one forward again on other batches.

    Args:
        replay: the forward.
        num_examples: B.
        rows_per_example: adjacent rows of each.
        autocast: whether to compute in 16 bits where the forward did.

    Attributes:
        told: whether the outputs depended on the examples at all; zero weights of a new head hide everything behind them.
        compared: whether anything could be compared, and `failure` why not, in words.
    """

    def __init__(self, replay: Replay, num_examples: int, rows_per_example: int, autocast: bool):
        self.replay, self.autocast = replay, autocast
        self.examples, self.multiple = num_examples, rows_per_example
        self.told = self.compared = False
        self.failure = "no input has the size of the batch"
        self._axes: dict[int, int] = {}
        low = any(torch.finfo(p.dtype).bits < 32 for p in replay.model.parameters() if p.is_floating_point())
        self.tolerance = ROUNDING_16 if low or autocast else ROUNDING

    def run(self, padding: bool) -> None:
        """Look, with more padding too if asked for.

        Raises:
            UserError: names the first module that mixes examples, or writes them into a buffer.
        """
        before = _fingerprints(self.replay.model)
        try:
            self.once, self.twice, self.buffers = self._results([self.replay.inputs] * 2)
        except Exception as error:
            self.failure = _told(error)
            return
        for name, value in _fingerprints(self.replay.model).items():
            if not torch.allclose(value, before[name], rtol=0, atol=0, equal_nan=True):
                owner, _, local = name.rpartition(".")
                raise UserError(f"{self._name(owner)}: {WRITTEN.format(kind='parameter', what=local)}")
        found: list[Difference] | None = None
        for reading, sure in self._readings():
            if found is not None and not sure:
                break
            tried = self._tried(reading)
            found = found if tried is None else tried[:1]
            if tried == []:
                break
        if found is None:
            found = self._tried_without_resizing()
        self.compared = found is not None
        if not found and self.compared and padding:
            found = self._padded()
        if found:
            self._refuse(found[0])

    # -- other batches ------------------------------------------------------------------------------------------------

    def _readings(self) -> Iterator[tuple[list[int | None], bool]]:
        """Which dimension of every input is the batch (None: shared by all); whether the shapes themselves suggest it."""
        parts = [(*self._possible(part), None) for part in self._parts()]
        readings = [list(r) for r in product(*parts) if any(axis is not None for axis in r)]
        readings.sort(key=lambda r: sum(axes.index(a) for axes, a in zip(parts, r, strict=True)))
        for sure in (True, False):
            for reading in readings[:READINGS]:
                shared = any(axes == (0, None) and a is None for axes, a in zip(parts, reading, strict=True))
                if shared != sure:
                    yield reading, sure

    def _parts(self) -> list[Any]:
        found: list[Any] = []
        changed(self.replay.inputs, lambda name, part: found.append(part), self._is_list)
        return found

    def _tried(self, reading: Sequence[int | None], resize: bool = True) -> list[Difference] | None:
        """Differences under one reading of the inputs; None where the model does not run or nothing can be compared.

        Raises:
            UserError: a buffer depends on the batch.
        """
        try:
            return self._differences(reading, resize)
        except UserError:
            raise
        except Exception as error:
            self.failure = _told(error)
            return None

    def _tried_without_resizing(self) -> list[Difference] | None:
        """For models that run with one size of the batch only, where the shapes leave no doubt."""
        parts = [self._possible(part) for part in self._parts()]
        if not any(parts) or any(axes not in ((), (0,)) for axes in parts):
            return None
        return self._tried([0 if axes else None for axes in parts], resize=False)

    def _possible(self, part: Any) -> tuple[int, ...]:
        rows = self.examples * self.multiple
        if self._is_list(part):
            return (0,)
        if not isinstance(part, Tensor):
            return ()
        return tuple(axis for axis in (0, 1) if part.dim() > axis and part.shape[axis] == rows)

    def _is_list(self, value: Any) -> bool:
        """Whether a list has one entry for each row."""
        if not isinstance(value, list | tuple) or len(value) != self.examples * self.multiple:
            return False
        if all(isinstance(item, Tensor) for item in value):
            return not all(item.dim() and item.shape[0] == len(value) for item in value)
        return all(isinstance(item, str | int | float) for item in value)

    def _variants(self) -> list[Variant]:
        num = self.examples
        if num == 1:
            beside = [(0, False), (0, True)]
            return [
                Variant("when another example stands beside it", beside, [(0, 0)]),
                Variant("after another batch", [(0, False)], [(0, 0)], first=[(0, True)]),
            ]
        cut = (num + 1) // 2
        front, back = list(range(cut)), list(range(cut, num))
        replaced, alone = "when the other rows of the batch are replaced", "when a part of the batch is gone"
        # neighbours, mirror images and other regular partners should not stay together
        order = torch.randperm(num, generator=torch.Generator().manual_seed(20221201)).tolist()
        kept = sorted(order[:cut]), sorted(order[cut:])
        mixed: list[Rows] = []
        for own in kept:
            others = iter(own * 2)
            mixed.append([(i, False) if i in own else (next(others), True) for i in range(num)])
        whole = [(i, False) for i in range(num)]
        return [
            Variant(alone, whole[:cut], [(i, i) for i in front]),
            Variant(alone, whole[cut:], [(i, i - cut) for i in back]),
            Variant(replaced, mixed[0], [(i, i) for i in kept[0]]),
            Variant(replaced, mixed[1], [(i, i) for i in kept[1]]),
            Variant("after another batch", whole, [(i, i) for i in range(num)], mixed[0]),
        ]

    def _differences(self, reading: Sequence[int | None], resize: bool) -> list[Difference]:
        for variant in self._variants():
            resized = len(variant.rows) != self.examples
            if resized and (self.replay.by_chance or not resize):
                continue
            differs = self._comparison(variant)
            before = self.once if variant.first is None else self.twice
            for scale in (SCALE, 1.0):
                here = [self._batch(reading, rows, scale) for rows in (variant.first, variant.rows) if rows]
                try:
                    results = self._results(here)
                except Exception:
                    if scale == 1.0:
                        raise
                    continue
                if scale == 1.0 or all(bool(leaf.isfinite().all()) for leaf in results[1]):
                    break
            pairs = list(zip(before, results[1], strict=True))
            verdicts = [differs(a, b, leaf) for leaf, (a, b) in enumerate(pairs)]
            if all(verdict is None for verdict in verdicts):
                raise ValueError("no output has the size of the batch")
            if any(verdicts):
                runs = [self.replay.inputs] * len(here), here
                return [Difference(variant.when, WAY, runs, differs)]
            self._compare_buffers(results[2], resized)
            if not resized and variant.first is None:
                others = set(range(self.examples)) - {j for _, j in variant.same}
                rest = self._comparison(Variant("", variant.rows, [(j, j) for j in others]))
                self.told |= any(rest(a, b, leaf) for leaf, (a, b) in enumerate(pairs))
        return []

    def _batch(self, reading: Sequence[int | None], rows: Rows, scale: float) -> Inputs:
        axes = iter(reading)
        places = [i * self.multiple + m for i, _ in rows for m in range(self.multiple)]
        scaled = [other for _, other in rows for _ in range(self.multiple)]

        def take(name: str, part: Any) -> Any:
            axis = next(axes)
            if axis is None:
                return part
            if not isinstance(part, Tensor):
                return type(part)(part[i] for i in places)
            taken = part.index_select(axis, torch.tensor(places, device=part.device))
            if part.is_floating_point() and not _is_mask(part):
                factor = torch.tensor([scale if s else 1.0 for s in scaled], device=part.device)
                taken = taken * factor.to(part).reshape([-1 if d == axis else 1 for d in range(part.dim())])
            return taken

        return changed(self.replay.inputs, take, self._is_list)

    def _results(
        self, batches: list[Inputs]
    ) -> tuple[list[Tensor], list[Tensor], dict[tuple[str, str], Any]]:
        """Outputs of the first batch and of the second one after it, and the buffers after the first."""
        found = []
        with self.replay.begun(self.autocast):
            for number, batch in enumerate(batches):
                found.append([_thin(leaf) for leaf in _outputs(self.replay.run(batch))])
                if number == 0:
                    buffers = {
                        (name, key): (b.detach().clone(), key not in module._non_persistent_buffers_set)
                        for name, module in self.replay.model.named_modules()
                        for key, b in module._buffers.items()
                        if b is not None
                    }
        return found[0], found[-1], buffers

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _comparison(self, variant: Variant) -> Callable[..., bool | None]:
        count, count_here = self.examples * self.multiple, len(variant.rows) * self.multiple
        pairs = [
            (i * self.multiple + m, j * self.multiple + m)
            for i, j in variant.same
            for m in range(self.multiple)
        ]

        def differs(a: Tensor, b: Tensor, leaf: int | None = None) -> bool | None:
            known = None if leaf is None else self._axes.get(leaf)
            verdicts = []
            for axis, times in _batch_axes(a, b, count, count_here, known):
                for strided in (False, True) if times > 1 else (False,):
                    rows = [_rows(t, axis, n, strided) for t, n in ((a, count), (b, count_here))]
                    verdict = self._unequal(*(r[[p[k] for p in pairs]] for k, r in enumerate(rows)))
                    verdicts.append(verdict)
                if leaf is not None and count != count_here and not all(verdicts):
                    self._axes[leaf] = axis
            return None if not verdicts else all(verdicts)

        return differs

    def _unequal(self, a: Tensor, b: Tensor) -> bool:
        """Whether two ``[rows, …]`` differ by more than rounding in any row."""
        a, b = (t.reshape(t.shape[0], -1).to(torch.promote_types(t.dtype, torch.float32)) for t in (a, b))
        if not a.numel():
            return False
        known = a.isfinite()
        if not torch.equal(known, b.isfinite()):
            return True
        a, b = torch.where(known, a, 0.0), torch.where(known, b, 0.0)
        size = a.abs().amax(1)
        size = torch.maximum(size, 1e-3 * size.max())
        return bool(((a - b).abs().amax(1) > self.tolerance * size).any())

    def _compare_buffers(self, here: dict[tuple[str, str], Any], resized: bool) -> None:
        for place, (before, persistent) in self.buffers.items():
            if resized and not persistent:
                # its shape may go by the size of the batch
                continue
            now, _ = here.get(place, (None, True))
            same = now is not None and now.shape == before.shape
            if same and before.is_floating_point():
                same = torch.allclose(now, before, rtol=1e-5, atol=1e-7, equal_nan=True)
            elif same:
                same = torch.equal(now, before)
            if not same:
                raise UserError(f"{self._name(place[0])}: {WRITTEN.format(kind='buffer', what=place[1])}")

    # -- padding ------------------------------------------------------------------------------------------------------

    def _padded(self) -> list[Difference]:
        plan = Padding.of(self.replay, self.examples * self.multiple)
        for short, long, differs in plan.pairs(self._unequal) if plan is not None else ():
            try:
                results = [self._results([batch])[0] for batch in (short(), long())]
            except Exception:
                # longer than the model can read, or a length that it does not take
                continue
            if any(differs(a, b) for a, b in zip(*results, strict=True)):
                return [Difference("when its batch is padded further", FIXED, ([short()], [long()]), differs)]
        return []

    # -- naming -------------------------------------------------------------------------------------------------------

    def _refuse(self, difference: Difference) -> None:
        name = self._first_module(difference)
        raise UserError(f"{self._name(name)}: {MIXES.format(when=difference.when, way=difference.way)}")

    def _name(self, name: str) -> str:
        module = self.replay.model.get_submodule(name)
        return f"{name or '(root)'} ({type(module).__name__})"

    def _first_module(self, difference: Difference) -> str:
        """The first module that got the same and gave another thing."""
        try:
            before, here = (self._recorded(run) for run in difference.runs)
        except Exception:
            return ""

        def differ(a: list[Tensor], b: list[Tensor]) -> bool:
            return len(a) == len(b) and any(difference.differs(x, y) for x, y in zip(a, b, strict=True))

        for place, (entered, left) in before.items():
            if place in here and differ(left, here[place][1]) and not differ(entered, here[place][0]):
                return place[0]
        return ""

    def _recorded(self, batches: list[Inputs]) -> dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]:
        """What went into and came out of every call of every module, in the order of their ends, for the last of the batches."""
        calls: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = {}
        entered: list[list[Tensor]] = []
        times: dict[str, int] = {}

        def enter(module: Any, args: tuple, kwargs: dict) -> None:
            entered.append([leaf.clone() for leaf in _outputs((args, kwargs))])

        def leave(name: str) -> Any:
            def note(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
                times[name] = times.get(name, -1) + 1
                calls[name, times[name]] = (entered.pop(), [leaf.clone() for leaf in _outputs(output)])

            return note

        with self.replay.begun(self.autocast):
            for batch in batches[:-1]:
                self.replay.run(batch)
            handles = []
            try:
                for name, module in self.replay.model.named_modules():
                    handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                    handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
                self.replay.run(batches[-1])
            finally:
                for handle in handles:
                    handle.remove()
        return calls


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _outputs(value: Any) -> list[Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point() and t.layout == torch.strided]


def _fingerprints(model: nn.Module) -> dict[str, Tensor]:
    """Two numbers for each parameter: a forward that writes to one, again and again, changes them."""
    return {
        name: torch.stack([p.detach().sum(), p.detach().abs().amax()])
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.numel()
    }


def _thin(leaf: Tensor) -> Tensor:
    """A copy of an output, of a very large one every n-th feature."""
    if leaf.numel() > LARGE and leaf.dim() > 2:
        leaf = leaf[..., :: -(-leaf.numel() // LARGE)]
    return leaf.detach().clone()


def _is_mask(part: Tensor) -> bool:
    return bool(((part == 0) | (part == 1) | ~part.isfinite()).all())


def _batch_axes(
    a: Tensor, b: Tensor, count: int, count_here: int, known: int | None
) -> list[tuple[int, int]]:
    """The dimensions of two outputs that may be the batch, and how many rows each row of the batch has there."""
    if a.dim() != b.dim():
        return []
    fits = [
        (axis, a.shape[axis] // count)
        for axis in range(a.dim())
        if a.shape[axis] and a.shape[axis] % count == 0 and b.shape[axis] == a.shape[axis] // count * count_here
        and a.shape[:axis] + a.shape[axis + 1 :] == b.shape[:axis] + b.shape[axis + 1 :]
    ]  # fmt: skip
    if count != count_here:
        return fits
    if known is not None:
        return [(axis, times) for axis, times in fits if axis == known]
    likely = [
        [fit for fit in fits if fit[1] == 1 and fit[0] < 2],
        [fit for fit in fits if fit[1] == 1],
        [fit for fit in fits if fit[0] == 0],
    ]
    return next((tier for tier in likely if tier), [])


def _rows(tensor: Tensor, axis: int, count: int, strided: bool) -> Tensor:
    """``[count, …]`` of an output whose rows of one example are adjacent, or ``count`` apart."""
    major = tensor.movedim(axis, 0)
    if strided:
        return major.unflatten(0, (-1, count)).transpose(0, 1)
    return major.unflatten(0, (count, -1))
