"""Which norm method is chosen, and why."""

from __future__ import annotations

import pytest
import torch

from dpexp import native
from dpexp.clipping import attach, choice
from dpexp.clipping.choice import Methods
from dpexp.clipping.gradients import Conv, Dense, Geometry, Lookup, Outer, PerExampleGradient, Tied
from dpexp.errors import UserError

CAP = 1 << 30


def choose(per_example: PerExampleGradient, mode: str, cap: int = CAP, fused: bool = False) -> str:
    return Methods(cap).choose(per_example, mode, fused)


def outer(examples: int, positions: int, p: int, d: int) -> Outer:
    return Outer(torch.zeros(examples, positions, d), torch.zeros(examples, positions, p))


@pytest.mark.parametrize(
    ("positions", "p", "d", "expected"),
    [
        (3, 4, 5, "ghost"),
        (3, 2, 9, "instantiate"),
        (4, 4, 4, "instantiate"),
        (1, 2, 1, "instantiate"),
        (1, 3, 1, "ghost"),
    ],
)
def test_the_rule_of_the_paper(positions: int, p: int, d: int, expected: str):
    """Ghost if and only if 2T² < pd, for any batch size."""
    for examples in (1, 5):
        assert choose(outer(examples, positions, p, d), "rule") == expected


def test_forced_methods():
    conv = Conv(
        torch.zeros(2, 3, 9, 9), torch.zeros(2, 4, 7, 7), (4, 3, 3, 3), Geometry((1, 1), (0, 0), (1, 1)), 2
    )
    for mode, expected in (("ghost", "ghost"), ("instantiate", "instantiate"), ("loop", "loop")):
        assert choose(outer(2, 3, 4, 5), mode) == expected
        assert choose(Dense(torch.zeros(2, 3)), mode) == "instantiate"
    assert [choose(conv, mode) for mode in ("ghost", "instantiate", "loop")] == [
        "ghost",
        "cores" if native.kernels() else "loop",
        "loop",
    ]
    assert choose(Tied(outer(2, 3, 9, 4), lookup(9)), "instantiate") == "instantiate"


def lookup(positions: int) -> Lookup:
    return Lookup(torch.zeros(2, positions, dtype=torch.int64), torch.zeros(2, positions, 4), 9)


def test_embeddings_compare_with_the_rows_they_touched():
    assert choose(lookup(1), "rule") == "ghost"
    assert choose(lookup(5), "rule") == "segments"


def test_the_cap_excludes_what_does_not_fit_into_it():
    large = outer(2, 100, 64, 64)
    assert large.workspace("ghost") > large.workspace("instantiate")
    assert "ghost" not in choice.affordable(large, large.workspace("instantiate"))
    assert choice.affordable(large, 1) == ["instantiate"]
    assert choose(large, "measured", 1) == "instantiate"


def test_measurements_are_remembered_by_shape(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def measured(per_example, tried, fused):
        calls.append((per_example.signature(), fused))
        return tried[-1]

    monkeypatch.setattr(choice, "fastest", measured)
    methods = Methods(CAP)
    assert methods.choose(outer(4, 100, 64, 64), "measured") == "loop"
    assert methods.choose(outer(4, 100, 64, 64), "measured") == "loop"
    assert len(calls) == 1
    # nearly the same sizes: Poisson batches come in every size
    methods.choose(outer(5, 110, 64, 70), "measured")
    assert len(calls) == 1
    methods.choose(outer(4, 200, 64, 64), "measured")
    methods.choose(outer(4, 100, 64, 64), "measured", fused=True)
    assert len(calls) == 3
    assert methods.choose(outer(4, 3, 4, 5), "measured") == "ghost"
    assert len(calls) == 3


@pytest.mark.parametrize("fused", [False, True])
def test_the_fastest_warm_run_wins(fused: bool, monkeypatch: pytest.MonkeyPatch):
    """Cold runs do not count, except that a hopeless one is not repeated."""
    script = {"ghost": [9.0, 2.0], "instantiate": [5.0, 1.0], "loop": [4.0]}
    order = []

    def seconds(*_):
        return script[order.pop(0)].pop(0)

    monkeypatch.setattr(choice, "_seconds", seconds)
    order = ["ghost", "ghost", "instantiate", "instantiate", "loop"]
    assert choice.fastest(outer(2, 3, 4, 5), ["ghost", "instantiate", "loop"], fused) == "instantiate"
    assert not order


def test_a_real_measurement():
    assert choose(outer(4, 100, 64, 64), "measured") in ("ghost", "instantiate", "loop")
    assert choose(outer(4, 100, 64, 64), "measured", fused=True) in ("ghost", "instantiate", "loop")


def test_unknown_mode():
    with pytest.raises(UserError, match="choice='best' is not known; choose measured"):
        attach(torch.nn.Linear(2, 2), choice="best")
