"""Time and space of every implementation of private training, from the shapes of a network's layers alone (Bu et al.,
Tables 1-5, 8, Figure 7).

A generalised linear layer maps ``[B, T, d]`` to ``[B, T, p]``. Its costs are sums of few terms (``BTpd``, ``BT²``, …),
so an implementation is a formula, printed or derived from the modules of Table 3, and a network's cost is the sum over
its layers. ``docs/complexity.md`` says where printed and derived formulas differ and why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpexp.reproduce.paper import printed

Terms = Counter[str]  # {"BTpd": 6, "Bpd": 2} is 6BTpd + 2Bpd


@dataclass(frozen=True)
class Layer:
    """One use of a weight.

    Attributes:
        name: of the module, or of the parameter where no module of its own uses it.
        kind: "linear", "convolution" or "embedding".
        T: positions (tokens, output pixels; input pixels of a transposed convolution) of one example.
        p, d: outputs and inputs of one position; an embedding has d rows of width p. ``p * d`` is the number of weights.
        groups: of a convolution; d counts the inputs of one group.
        tied: the name of an earlier layer with the same weight, or None.
        sample: makes a random per-example gradient of this layer for B examples (a `PerExampleGradient`), for measuring
            norm methods; None where the clipping engine has none but its per-example loop.
    """

    name: str
    kind: str
    T: int
    p: int
    d: int
    groups: int = 1
    tied: str | None = None
    sample: Callable[[int], Any] | None = field(default=None, compare=False, repr=False)

    @property
    def ghost(self) -> int:
        """Floats of the ghost norm of one example: two ``T x T`` Gram matrices (of each group)."""
        return 2 * self.T**2 * self.groups

    @property
    def instantiation(self) -> int:
        """Floats of one example's gradient."""
        return self.p * self.d

    @property
    def prefers_ghost(self) -> bool:
        """The layerwise rule of section 3.2, ``2T² < pd``; with groups, each has Gram matrices of its own."""
        return self.ghost < self.instantiation

    @property
    def choice(self) -> str:
        return "ghost" if self.prefers_ghost else "instantiate"

    @property
    def is_shortcut(self) -> bool:
        """Whether it is the convolution on the shortcut of a residual block, as timm and transformers name them."""
        return self.kind == "convolution" and ("downsample" in self.name or "shortcut" in self.name)

    @property
    def in_block(self) -> bool:
        """Whether it belongs to one of several numbered blocks."""
        return any(part.isdecimal() for part in self.name.split("."))

    def terms(self, batch: int) -> dict[str, int]:
        """The value of every term.

        A lookup multiplies nothing: an embedding has no products, its Gram matrix of one-hot vectors is a comparison
        of indices, and its input is T indices.
        """
        B, T, p, d = batch, self.T, self.p, self.d
        lookup = self.kind == "embedding"
        seen = 0 if lookup else d * self.groups
        return {
            "BTpd": 0 if lookup else B * T * p * d,
            "BT²(p+d)": B * T * T * (p + seen),
            "Bpd": B * p * d,
            "pd": p * d,
            "BTd": B * T * (1 if lookup else seen),
            "BTp": B * T * p,
            "BT²": B * T * T * self.groups,
        }


# Table 3. A test holds these against what torch counts, and against what the engine knows of its norms.
TIME: dict[str, Terms] = {
    "1": Terms({"BTpd": 2}), "2a": Terms({"BTpd": 2}), "2b": Terms({"BTpd": 2}), "3": Terms({"BT²(p+d)": 2}),
    "4": Terms({"BTpd": 2}), "5": Terms({"Bpd": 2}),
}  # fmt: skip
SPACE: dict[str, Terms] = {
    "1": Terms({"pd": 1, "BTd": 1}), "2a": Terms({"BTd": 1, "BTp": 1}), "2b": Terms({"pd": 1}), "3": Terms({"BT²": 2}),
    "4": Terms({"Bpd": 1}), "5": Terms(),
}  # fmt: skip
_TERMS = ("BTpd", "BT²(p+d)", "BT²", "Bpd", "pd", "BTd", "BTp")


@dataclass(frozen=True)
class Formula:
    """What one layer costs: where its gradients are instantiated, and where it takes the ghost norm."""

    instantiate: Terms
    ghost: Terms

    def of(self, layers: Iterable[Layer], batch: int) -> int:
        """The sum over layers, each by the layerwise rule."""
        total = 0
        for layer in layers:
            values = layer.terms(batch)
            chosen = self.ghost if layer.prefers_ghost else self.instantiate
            total += sum(factor * values[term] for term, factor in chosen.items())
        return total

    def __str__(self) -> str:
        """As the paper writes: ``6BTpd + ⟨2Bpd, 2BT²(p+d)⟩``, instantiation first."""
        common = self.instantiate & self.ghost
        instantiate, ghost, shared = map(term_sum, (self.instantiate - common, self.ghost - common, common))
        return shared if (instantiate, ghost) == ("0", "0") else f"{shared} + ⟨{instantiate}, {ghost}⟩"

    @classmethod
    def read(cls, text: str) -> Formula:
        """A printed one: ``<a, b>`` is a where gradients are instantiated, ``min{b, a}`` has the ghost norm first."""
        choice = re.search(r"(<|min\{)(.*), (.*)[>}]", text)
        common = _terms(text.replace(choice[0], "") if choice else text)
        first, second = (_terms(choice[2]), _terms(choice[3])) if choice else (Terms(), Terms())
        instantiate, ghost = (second, first) if choice and choice[1] == "min{" else (first, second)
        return cls(common + instantiate, common + ghost)


def _terms(text: str) -> Terms:
    found = re.findall(rf"(\d*)({'|'.join(map(re.escape, _TERMS))})", text)
    return Terms({term: int(factor or 1) for factor, term in found})


def term_sum(terms: Terms) -> str:
    """ "6BTpd + 2Bpd"."""
    shown = [f"{'' if terms[term] == 1 else terms[term]}{term}" for term in _TERMS if terms[term]]
    return " + ".join(shown) or "0"


@dataclass(frozen=True)
class Implementation:
    """One way to get the private gradient.

    Attributes:
        ways: modules of Table 3 in the order of execution, where gradients are instantiated and under the ghost norm; one
            where an implementation knows only one way.
        note: where printed and derived differ, or what a count assumes.
        elsewhere: its time and space, where Table 5 does not print them.
    """

    name: str
    ways: tuple[str, ...]
    note: str = ""
    elsewhere: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, str]:
        """Of both ways."""
        return self.ways[0], self.ways[-1]

    @property
    def printed_time(self) -> Formula | None:
        """The paper's formula, None where it prints none."""
        return self._printed("Time complexity", self.elsewhere[:1])

    @property
    def printed_space(self) -> Formula | None:
        """The paper's formula, None where it prints none."""
        return self._printed("Space complexity", self.elsewhere[1:])

    def _printed(self, column: str, elsewhere: Sequence[str]) -> Formula | None:
        row = {"non-DP": "Non-DP", "BK": "BK (ours)"}.get(self.name, self.name)
        found = elsewhere if self.elsewhere else (printed("bu2023", "5", row, column),)
        return Formula.read(found[0]) if found else None

    @property
    def time(self) -> Formula:
        """Flops, derived: every module as often as it runs."""
        return Formula(*(_total(TIME[m] for m in modules.split()) for modules in self.modules))

    @property
    def space(self) -> Formula:
        """Floats, derived: every module once (a second back-propagation takes the place of the first), and the summed
        gradient, for which Table 3 gives module 5 no space."""
        found = []
        for modules in self.modules:
            distinct = dict.fromkeys(modules.split())
            terms = _total(SPACE[m] for m in distinct)
            found.append(terms if "2b" in distinct else terms + Terms({"pd": 1}))
        return Formula(*found)


def _total(parts: Iterable[Terms]) -> Terms:
    return sum(parts, start=Terms())


NON_PRIVATE = Implementation("non-DP", ("1 2a 2b",))
_IN_TABLE_2 = "printed in Table 2 (no memory overhead); B back-propagations, each counted for one example"
_LEFT_OUT = "2Bpd of module 5 left out"
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    NON_PRIVATE,
    Implementation("TF-Privacy", ("1 2a 2b 5",), _IN_TABLE_2, ("6BTpd", "pd + 3BTd + BTp")),
    Implementation("Opacus", ("1 2a 2b 4 5",), _LEFT_OUT),
    Implementation("FastGradClip", ("1 2a 4 2a 2b",), "its own modules are five products, not four"),
    Implementation("GhostClip", ("1 2a 2b 3 2a 2b",)),
    Implementation("BK", ("1 2a 3 2b",)),
    Implementation(
        "MixGhostClip",
        ("1 2a 2b 4 2a 2b", "1 2a 2b 3 2a 2b"),
        "two whole back-propagations and a forward pass are ten, not eight",
    ),
    Implementation("BK-MixGhostClip", ("1 2a 4 2b", "1 2a 3 2b")),
    Implementation("BK-MixOpt", ("1 2a 4 5", "1 2a 3 2b"), _LEFT_OUT),
    Implementation("improved Opacus", ("1 2a 4 5",), _LEFT_OUT, ("6BTpd",)),
    Implementation(
        "improved FastGradClip", ("1 2a 4 2b",), "its own modules are four products, not three", ("6BTpd",)
    ),
)


@dataclass(frozen=True)
class NormSpace:
    """Floats for the norms of one example, summed over layers as in Table 4."""

    ghost: int
    instantiation: int
    mixed: int


def norm_space(layers: Sequence[Layer]) -> NormSpace:
    """Every layer by the ghost norm, every layer instantiated, and each layer's smaller one."""
    return NormSpace(
        sum(layer.ghost for layer in layers),
        sum(layer.instantiation for layer in layers),
        sum(min(layer.ghost, layer.instantiation) for layer in layers),
    )


def depth_threshold(layers: Sequence[Layer]) -> int:
    """The number of the last layer, from 1, that instantiates; every later one takes the ghost norm. 0: all do."""
    return max((number for number, layer in enumerate(layers, 1) if not layer.prefers_ghost), default=0)


def views(layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    """All layers, and the selections that the paper's figures are for, where they differ from all."""
    found = {"all layers": list(layers)}
    if any(layer.is_shortcut for layer in layers):
        found["without shortcut convolutions (as Table 4)"] = [x for x in layers if not x.is_shortcut]
    if blocks := [x for x in layers if x.kind == "linear" and x.in_block]:
        found["linear layers of the blocks (as Table 1)"] = blocks
    return found


def costs(layers: Sequence[Layer], batch: int) -> list[dict[str, Any]]:
    """Time (flops) and space (floats) of every implementation, printed and derived, and relative to non-DP.

    Raises:
        ValueError: no layers, so nothing to be relative to.
    """
    if not layers:
        raise ValueError("a network without layers has no cost to compare with")
    rows = []
    for implementation in IMPLEMENTATIONS:
        row: dict[str, Any] = {"implementation": implementation.name}
        for key in ("printed_time", "time", "printed_space", "space"):
            formula: Formula | None = getattr(implementation, key)
            plain: Formula = getattr(NON_PRIVATE, key)
            value = formula.of(layers, batch) if formula else None
            row[key] = value
            row[f"{key}_relative"] = None if value is None else value / plain.of(layers, batch)
        rows.append(row)
    return rows


def relative_speed(layers: Sequence[Layer]) -> float:
    """Non-DP flops over those of BK: what Table 1 prints in parentheses."""
    (bk,) = (x for x in IMPLEMENTATIONS if x.name == "BK")
    return NON_PRIVATE.time.of(layers, 1) / bk.time.of(layers, 1)
