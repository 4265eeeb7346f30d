"""A forward without chance: random operations give constants that do not depend on the batch, and their order is turned round."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNTAGGED = {"random", "binomial", "sample_dirichlet"}
INDEXING = {"embedding", "index", "index_select", "gather"}
ORDERING = {"sort", "topk"}
READING = "local_scalar_dense"
DECIDING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# what is said of a tensor of comparisons of real numbers
COMPARED = "_dpexp_compared"


@dataclass(frozen=True)
class Chance:
    """What takes the place of chance in a run.

    level: the quantile that draws of several numbers give.
    seed: of Python's and numpy's generators, and of draws of one number, the first of which is at ``level``: a model that tosses
        a coin on whether to mix examples is seen on both sides of it. None: these are at ``level`` too.
    moved: draws, by their order, that are at the quantile ``other``.
    """

    level: float = 0.5
    seed: int | None = None
    moved: frozenset[int] = frozenset()
    other: float = 0.5


# Python's and numpy's generators give numbers near 0 or 1 first with these seeds: both low, both high, one of each
OTHERS = (Chance(0.01, 1751), Chance(0.99, 527), Chance(0.25, 849), Chance(0.75, 475))
# with those above, a draw from at most eight whole numbers gives each of them, by Python's and numpy's generators too
BETWEEN = (Chance(0.375, 27178), Chance(0.625, 15526), Chance(0.125, 3507), Chance(0.875, 14102))


class Draw(NamedTuple):
    """One random operation of a run: what it is called, how many numbers it gives, and whether they are a mask of dropout."""

    name: str
    size: int
    mask: bool


class WithoutChance(TorchDispatchMode):
    """While active, random operations give constants, whatever the batch; permutations are turned round.

    Indices out of range raise on GPUs as on CPUs, where they would end the process's use of the GPU.

    Attributes:
        met: whether anything was drawn.
        draws: all of them, in their order; but for those of a generator of their own, which may give the same ones each time.
        settled: whether what was done goes by shapes alone: no draw, and no number that Python, or a shape, goes by.
        drew: whether a draw gave something else than a mask of dropout, and may have decided which way the model goes.
        asked: whether Python read a real number, or compared one, and may have decided by it: a solver's error, a residual.
    """

    # what attention of one's own and control flow are made of; nothing is drawn in front of these
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # to keep the compiler away costs as much as all that is done here, for each operation, and replays compile nothing
        return False

    def __init__(self, chance: Chance):
        super().__init__()
        self.chance, self.met, self.drew, self.asked = chance, False, False, False
        self.settled = True
        self.draws: list[Draw] = []
        self._coins = None if chance.seed is None else random.Random(chance.seed)
        self._first = True

    @property
    def _is_moved(self) -> bool:
        """Whether the present draw is one of those that are moved."""
        return len(self.draws) in self.chance.moved

    def _level(self, x: Any) -> float:
        """The quantile that a draw gives, of so many numbers as ``x`` has."""
        if self._is_moved:
            return self.chance.other
        alone = isinstance(x, Tensor) and x.numel() == 1
        if not alone or self._coins is None or self._first:
            self._first = self._first and not alone
            return self.chance.level
        return self._coins.random()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # nearly all operations are plain ones, and each costs what is done here
        about = _about(func)
        result = self._special(func, about, args, kwargs) if about.special else func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype is torch.bool and any(map(_of_reals, args)):
            setattr(result, COMPARED, True)
        return result

    def _special(self, func: Any, about: About, args: Any, kwargs: Any) -> Any:
        name = about.name
        self.settled &= not about.decides
        if about.draws:
            self.met = True
            known = func._schema.arguments
            # what equals its default is left out of args
            given = {a.name: a.default_value for a in known if a.has_default_value()}
            given |= dict(zip([a.name for a in known], args, strict=False)) | kwargs
            result = self._constant(func, name, given)
            if given.get("generator") is None:
                drawn = next((x for x in (result, *given.values()) if isinstance(x, Tensor)), None)
                self.draws.append(Draw(name, 0 if drawn is None else drawn.numel(), _is_mask(name, given)))
            return result
        if name == READING:
            self.asked |= _of_reals(args[0])
        if name in INDEXING and args and isinstance(args[0], Tensor) and args[0].is_cuda:
            _check_indices(name, args)
        result = func(*args, **kwargs)
        return _turned(func, args, kwargs, result) if self.met and name in ORDERING else result

    def _constant(self, func: Any, name: str, given: dict[str, Any]) -> Any:
        """A random operation's result without chance."""
        x: Any = given.get("self", given.get("input"))
        if name in ("native_dropout", "fused_dropout"):
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        for key in ("dropout_p", "dropout"):
            if isinstance(given.get(key), float):
                return func(**(given | {key: 0.0}))
        if name in ("dropout", "alpha_dropout"):
            return x
        if name.startswith("rrelu"):
            return func(**(given | {"training": False}))
        if name == "multinomial":
            return x.topk(given["num_samples"], dim=-1, largest=not self._is_moved).indices
        result = func(**given)
        # without p: the probabilities are in x
        p = given.get("p", x)
        if name == "bernoulli" and not isinstance(p, Tensor):
            alone = result.numel() == 1
            self.drew |= alone
            if not alone or self.chance.seed is None:
                # the mask of a dropout; of one number it may be that, too, or a coin
                return result.fill_(float(p > 0))
        self.drew = True
        if name == "randperm":
            order = torch.arange(len(result), device=result.device)
            return result.copy_(order if self._is_moved else order.flip(0))
        value = _quantile(name, given, x, p, self._level(result))
        if isinstance(value, Tensor):
            return result.copy_(value)
        return result if value is None else result.fill_(value)


class NotingDraws(TorchDispatchMode):
    """While active, random operations are noted, and give what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _about(func).draws:
            self.draws.append((_about(func).name, sum(t.numel() for t in tree_leaves(result))))
        return result


class About(NamedTuple):
    """What is known of an operation.

    Attributes:
        draws: whether it is a random one.
        decides: whether what a model does next may go by its result, and not by shapes alone.
        special: whether it is looked at at all.
    """

    name: str
    draws: bool
    decides: bool
    special: bool


@functools.cache
def _about(func: Any) -> About:
    if isinstance(func, HigherOrderOperator):
        return About("", False, True, True)
    name = func.overloadpacket.__name__.strip("_")
    draws = torch.Tag.nondeterministic_seeded in func.tags or name in UNTAGGED
    decides = draws or name == READING or not DECIDING.isdisjoint(func.tags)
    return About(name, draws, decides, decides or name in INDEXING | ORDERING)


def _is_mask(name: str, given: dict[str, Any]) -> bool:
    """Whether what is drawn is a mask of dropout that leaves something out."""
    shares = [given.get(key) for key in ("p", "dropout_p", "dropout")]
    return name.startswith("rrelu") or any(isinstance(p, float) and 0 < p < 1 for p in shares)


def _of_reals(x: Any) -> bool:
    """Whether these are real numbers, or follow from comparing such: no mask of padding, which many models ask for."""
    return isinstance(x, Tensor) and (x.is_floating_point() or hasattr(x, COMPARED))


def _turned(func: Any, args: tuple, kwargs: dict, result: Any) -> Any:
    """The order of random numbers is a permutation. Of those here all are equal, and in their own order nobody meets another."""
    x, places = args[0], result[1]
    at = next(i for i, known in enumerate(func._schema.arguments) if known.name == "dim")
    dim = args[at] if len(args) > at else kwargs.get("dim", -1)
    if x.dim() and x.shape[dim] and torch.equal(x, x.narrow(dim, 0, 1).expand_as(x)):
        places.copy_(x.shape[dim] - 1 - places.sort(dim).values)
    return result


def _quantile(name: str, given: dict[str, Any], x: Any, p: Any, level: float) -> Any:
    """A number, or a tensor, that a random operation may give; None where its own result has to do."""
    low: Any = given.get("from", given.get("low")) or 0
    high: Any = given.get("to", given.get("high"))
    if name == "bernoulli":
        hit = p >= 1 - level
        return hit if isinstance(p, Tensor) else float(hit and p > 0)
    if name.startswith(("randint", "random")):
        return 0 if high is None else min(high - 1, int(low + (high - low) * level))
    if name.startswith("rand"):
        return level
    if name == "uniform":
        return given["from"] + (given["to"] - given["from"]) * level
    if name.startswith("normal"):
        return given["mean"] + (level - 0.5 or 0.5) * given["std"]
    if name == "binomial":
        return given["count"] * given["prob"]
    if name in ("exponential", "geometric", "cauchy", "log_normal"):
        return 1
    return x if name in ("poisson", "standard_gamma", "sample_dirichlet") else None


def _check_indices(name: str, args: tuple) -> None:
    table, indices = args[0], args[2] if name in ("index_select", "gather") else args[1]
    along = args[1] if name in ("index_select", "gather") else 0
    for dim, index in enumerate(indices if isinstance(indices, list | tuple) else [indices]):
        if not isinstance(index, Tensor) or index.dtype in (torch.bool, torch.uint8) or not index.numel():
            continue
        size = table.shape[dim if name == "index" else along] if table.dim() else 1
        if int(index.max()) >= size or int(index.min()) < -size:
            raise IndexError(f"{name}: an index is out of range for {size} rows")
