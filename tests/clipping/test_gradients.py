"""The algebra of per-example gradients against explicit sums of outer products and one-hot vectors, in float64."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpexp import native
from dpexp.clipping import attach
from dpexp.clipping.gradients import (
    Conv,
    Dense,
    Geometry,
    Joined,
    Lookup,
    Outer,
    Pulled,
    Scratch,
    Tied,
    grams,
    instantiated,
    merge,
    numerics,
)
from dpexp.clipping.gradients.grams import gram_norms
from dpexp.clipping.loop import LOOPED
from dpexp.clipping.operations import linear
from tests.clipping.naive import assert_exact
from tests.tasks.test_cross_entropy import Largest

sizes = st.integers(1, 4)
fast = settings(max_examples=25, deadline=None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def indices(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def naive_outer(a: Tensor, g: Tensor) -> Tensor:
    grads = torch.zeros(a.shape[0], g.shape[2], a.shape[2], dtype=a.dtype)
    for i in range(a.shape[0]):
        for t in range(a.shape[1]):
            grads[i] += torch.outer(g[i, t], a[i, t])
    return grads


def naive_lookup(ids: Tensor, g: Tensor, rows: int, padding: int | None) -> Tensor:
    grads = torch.zeros(ids.shape[0], rows, g.shape[2], dtype=g.dtype)
    for i in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            if ids[i, t] != padding:
                grads[i, ids[i, t]] += g[i, t]
    return grads


@fast
@given(sizes, st.integers(0, 5), sizes, sizes)
def test_outer(examples: int, positions: int, p: int, d: int):
    a, g = normal(examples, positions, d), normal(examples, positions, p, seed=1)
    assert_exact(Outer(a, g), naive_outer(a, g))
    reshaped = Outer(a, g, (p, d, 1, 1))
    assert_exact(reshaped, naive_outer(a, g)[..., None, None])


@fast
@given(sizes, sizes, sizes)
def test_outer_of_several_calls(first: int, second: int, third: int):
    calls = [(normal(3, t, 4, seed=t), normal(3, t, 2, seed=10 + t)) for t in (first, second, third)]
    merged = reduce(merge, [Outer(*call) for call in calls[:3]])
    assert isinstance(merged, Outer)
    assert_exact(merged, sum(naive_outer(*call) for call in calls))


@pytest.mark.parametrize("positions", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("halves_from", [1, 2, 100])
@pytest.mark.parametrize("cap", [1, 200, 1 << 20])
def test_blocks_of_the_gram_matrix(
    positions: int, halves_from: int, cap: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grams, "HALVES_FROM", halves_from)
    a, g = normal(5, positions, 3), normal(5, positions, 2, seed=1)
    expected = naive_outer(a, g).square().sum((1, 2))
    norms, magnitudes = gram_norms(a, g, Scratch(cap))
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-12)
    without_signs = ((a @ a.mT) * (g @ g.mT)).abs().sum((1, 2))
    torch.testing.assert_close(magnitudes, without_signs, rtol=1e-9, atol=1e-12)


def test_chunks_under_the_cap_change_nothing():
    a, g = normal(7, 3, 4), normal(7, 3, 5, seed=1)
    grads = naive_outer(a, g)
    two_at_a_time = Scratch(2 * 4 * 5 * 8)
    seen = []

    def factors_of(norms: Tensor, where: slice) -> tuple[Tensor, None]:
        seen.append(where)
        return norms, None

    norms, total = Outer(a, g).within(two_at_a_time).norms_and_sum("instantiate", factors_of)
    assert [(s.start, s.stop) for s in seen] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    torch.testing.assert_close(norms, grads.square().sum((1, 2)))
    torch.testing.assert_close(total, torch.tensordot(norms, grads, 1))
    held = instantiated(Outer(a, g).within(two_at_a_time), "instantiate")
    torch.testing.assert_close(held.weighted_sum(norms), torch.tensordot(norms, grads, 1))


@fast
@given(
    sizes,
    st.integers(0, 6),
    sizes,
    sizes,
    st.sampled_from([None, 0, 1]),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_lookup(examples: int, positions: int, rows: int, d: int, padding: int | None, dtype: torch.dtype):
    padding = None if padding is None else padding % rows
    ids, g = indices(rows, examples, positions), normal(examples, positions, d)
    assert_exact(Lookup(ids.to(dtype), g, rows, padding), naive_lookup(ids, g, rows, padding))


def test_lookup_ignores_what_is_not_finite_at_the_padding_row():
    ids, g = torch.tensor([[0, 1, 1]]), normal(1, 3, 2)
    broken = g.clone()
    broken[0, 0] = torch.nan
    for method in ("ghost", "segments"):
        torch.testing.assert_close(
            Lookup(ids, broken, 3, 0).sq_norms(method), Lookup(ids, g, 3, 0).sq_norms(method)
        )
    torch.testing.assert_close(
        Lookup(ids, broken, 3, 0).weighted_sum(torch.ones(1)),
        Lookup(ids, g, 3, 0).weighted_sum(torch.ones(1)),
    )


@fast
@given(sizes, st.integers(0, 4), st.integers(0, 5), sizes, sizes, st.booleans())
def test_tied_head(examples: int, heads: int, lookups: int, rows: int, d: int, padded: bool):
    padding = 0 if padded else None
    h, gh = normal(examples, heads, d), normal(examples, heads, rows, seed=1)
    ids, ge = indices(rows, examples, lookups), normal(examples, lookups, d, seed=2)
    expected = naive_outer(h, gh) + naive_lookup(ids, ge, rows, padding)
    tied = merge(Outer(h, gh), Lookup(ids, ge, rows, padding))
    assert isinstance(tied, Tied)
    assert_exact(tied, expected)
    again = reduce(merge, [tied, Outer(h, gh), Lookup(ids, ge, rows, padding), tied])
    assert isinstance(again, Tied)
    assert_exact(again, 3 * expected)


@pytest.mark.parametrize("padding", [None, 0])
def test_no_gram_matrix_of_a_long_text_is_whole(padding: int | None):
    heads, lookups, rows, d = 1290, 1300, 7, 3
    h, gh = normal(2, heads, d), normal(2, heads, rows, seed=1)
    ids, ge = indices(rows, 2, lookups), normal(2, lookups, d, seed=2)
    lookup, outer = Lookup(ids, ge, rows, padding), Outer(h, gh)
    alone = naive_lookup(ids, ge, rows, padding)
    for per_example, expected in ((lookup, alone), (Tied(outer, lookup), alone + naive_outer(h, gh))):
        with Largest() as seen:
            found = per_example.within(Scratch(1)).sq_norms("ghost")
        torch.testing.assert_close(found, expected.square().sum((1, 2)))
        assert seen.numbers < lookups * heads / 2


def test_tied_norm_in_chunks():
    h, gh, ids, ge = normal(5, 3, 4), normal(5, 3, 6, seed=1), indices(6, 5, 7), normal(5, 7, 4, seed=2)
    expected = (naive_outer(h, gh) + naive_lookup(ids, ge, 6, None)).square().sum((1, 2))
    tied = Tied(Outer(h, gh), Lookup(ids, ge, 6))
    for cap in (1, 1000):
        torch.testing.assert_close(tied.within(Scratch(cap)).sq_norms("ghost"), expected)
        torch.testing.assert_close(tied.within(Scratch(cap)).sq_norms("instantiate"), expected)


@fast
@given(sizes, st.lists(sizes, max_size=3))
def test_dense(examples: int, shape: list[int]):
    grad = normal(examples, *shape)
    assert_exact(Dense(grad), grad)


@fast
@given(st.integers(0, 3), st.lists(st.lists(sizes, max_size=3), min_size=1, max_size=4))
def test_small_gradients_side_by_side(examples: int, shapes: list[list[int]]):
    parts = {str(i): Dense(normal(examples, *shape, seed=i)) for i, shape in enumerate(shapes)}
    joined, factors = Joined(parts), normal(examples, seed=9).abs()
    norms = sum(part.sq_norms("instantiate") for part in parts.values())
    torch.testing.assert_close(joined.sq_norms("instantiate"), norms, rtol=1e-12, atol=0)
    keep = torch.arange(examples) != 1
    for gradient, taken in ((joined, factors), (joined.finite(keep), factors * keep)):
        sums = dict(gradient.weighted_sums(taken))
        assert list(sums) == list(parts)
        for name, total in sums.items():
            torch.testing.assert_close(total, parts[name].weighted_sum(taken), rtol=1e-12, atol=1e-12)
            # each is the only one in its memory: it becomes a parameter's gradient
            assert total.untyped_storage().nbytes() == total.nbytes


def test_small_gradients_side_by_side_are_32_bits():
    parts = {"a": Dense(normal(3, 4).bfloat16()), "b": Dense(normal(3).float())}
    assert {total.dtype for _, total in Joined(parts).weighted_sums(torch.ones(3))} == {torch.float32}


def test_other_mixtures_are_instantiated_and_added():
    a, g, dense = normal(3, 2, 4), normal(3, 2, 5, seed=1), normal(3, 5, 4, seed=2)
    assert_exact(merge(Outer(a, g), Dense(dense)), naive_outer(a, g) + dense)
    ids, rows = indices(5, 3, 6), normal(3, 6, 4, seed=3)
    with_and_without = merge(Lookup(ids, rows, 5, 0), Lookup(ids, rows, 5))
    assert_exact(with_and_without, naive_lookup(ids, rows, 5, 0) + naive_lookup(ids, rows, 5, None))


def test_only_uses_of_one_parameter_and_batch_merge():
    with pytest.raises(ValueError, match="do not belong"):
        merge(Dense(normal(3, 4)), Dense(normal(2, 4)))
    with pytest.raises(ValueError, match="do not belong"):
        merge(Dense(normal(3, 4)), Dense(normal(3, 5)))


def test_pulled_back_through_a_linear_map():
    a, g, jacobian = normal(3, 2, 4), normal(3, 2, 5, seed=1), normal(20, 6, seed=2)
    pulled = Pulled(Outer(a, g), lambda grads: grads.flatten(1) @ jacobian, (6,))
    assert pulled.resolve("ghost") == "instantiate"
    assert_exact(pulled, naive_outer(a, g).flatten(1) @ jacobian)


def everything(examples: int) -> list:
    a, g, rows = normal(examples, 3, 4), normal(examples, 3, 5, seed=1), normal(examples, 6, 4, seed=3)
    ids = indices(5, examples, 6)
    geometry = Geometry((1, 1), (1, 1), (1, 1))
    conv = Conv(normal(examples, 2, 4, 4), normal(examples, 3, 4, 4), (3, 2, 3, 3), geometry, examples)
    outer = Outer(a, g)
    pulled = Pulled(outer, lambda grads: 2 * grads, (5, 4))
    return [
        outer,
        Lookup(ids, rows, 5, 0),
        Tied(outer, Lookup(ids, rows, 5)),
        Dense(normal(examples, 5)),
        conv,
        pulled,
    ]


@pytest.mark.parametrize("index", range(6))
def test_empty_batch(index: int):
    per_example = everything(0)[index]
    assert_exact(per_example, torch.zeros(0, *per_example.shape, dtype=torch.float64))


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_example_that_is_not_finite_adds_nothing(index: int, bad: float):
    """Neither in one go nor by mask and weighted sum; its norm says so."""
    good, broken = everything(3)[index], everything(3)[index]
    tensors = {
        "Outer": lambda c: c.parts[1],
        "Lookup": lambda c: c.g,
        "Tied": lambda c: c.lookup.g,
        "Dense": lambda c: c.grad,
        "Conv": lambda c: c.gy,
        "Pulled": lambda c: c.inner.parts[1],
    }
    tensors[type(broken).__name__](broken)[1] = bad
    keep = torch.tensor([True, False, True])
    expected = good.weighted_sum(keep.double())
    for method in broken.methods():
        norms = broken.sq_norms(method)
        assert torch.equal(norms.isfinite(), keep), method
        _, total = broken.norms_and_sum(
            method, lambda norms, _: (norms.isfinite().double(), norms.isfinite())
        )
        torch.testing.assert_close(total, expected)
    torch.testing.assert_close(broken.mask(keep).weighted_sum(keep.double()), expected)


class Halved(Outer):
    """A formula that is wrong by a factor."""

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        return super()._weighted_sum(factors, out) / 2


class OneForgotten(Outer):
    """A formula that is wrong in one of eight positions."""

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        a, g = self.parts
        return Outer(a[:, 1:], g[:, 1:])._weighted_sum(factors, out)


@pytest.mark.parametrize("wrong", [Halved, OneForgotten])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wrong_formula_is_not_used(dtype: torch.dtype, wrong: type[Outer], monkeypatch: pytest.MonkeyPatch):
    """The survey compares it with autograd's own gradient of the operation; one back-propagation per example takes its place."""
    monkeypatch.setattr(linear, "Outer", wrong)
    layer, x = nn.Linear(6, 5).to(dtype), normal(4, 8, 6).to(dtype)

    def losses(x: Tensor) -> Tensor:
        return layer(x).square().sum((1, 2))

    of_example = [torch.autograd.grad(losses(x[i : i + 1]).sum(), layer.weight)[0] for i in range(4)]
    clipper = attach(layer, groups="layer", clip_norm=1e9)
    report = clipper.backward(losses(x))
    assert clipper.choices["weight"] == LOOPED
    torch.testing.assert_close(layer.weight.grad, sum(of_example), rtol=1e-4, atol=1e-4)
    assert bool((report.norms[0] >= 0.999 * torch.stack([g.norm() for g in of_example])).all())


def test_general_names_stand_for_what_a_kind_has():
    outer, lookup, _, dense, conv, pulled = everything(2)
    assert [c.resolve("ghost") for c in (outer, lookup, dense, conv)] == [
        "ghost",
        "ghost",
        "instantiate",
        "ghost",
    ]
    rows = "cores" if native.kernels() else "loop"
    assert [c.resolve("instantiate") for c in (lookup, dense, conv)] == ["segments", "instantiate", rows]
    assert [c.resolve("loop") for c in (outer, lookup, dense, pulled)] == [
        "loop",
        "segments",
        "instantiate",
        "loop",
    ]
    assert not lookup.instantiates("instantiate")
    with pytest.raises(ValueError, match="no norm method 'magic'"):
        outer.resolve("magic")


def test_norm_of_a_long_float32_vector():
    """Numbers added one after the other in float32 stop counting; an underestimated norm is a broken guarantee."""
    x = torch.full((1, 1 << 24), 0.1)
    naive = torch.linalg.vector_norm(x[0]).double().square()
    square = x[0, 0].double().square()
    assert naive < 0.999 * square * (1 << 24)
    for shape in ((1 << 24,), (1 << 10, 1 << 14), (1 << 14, 1 << 5, 1 << 5), (3, 4194301)):
        view = x[:, : math.prod(shape)].view(1, *shape)
        expected = square[None] * view.numel()
        torch.testing.assert_close(numerics.squared_norms(view).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", range(6))
def test_norms_and_sums_of_16_bit_inputs_are_float32(index: int, low: torch.dtype):
    """Against float64 on the same rounded inputs: only convolutions round their gradients to 16 bits."""
    exact = everything(3)[index]
    a, g = (x.to(low) for x in (normal(3, 3, 4), normal(3, 3, 5, seed=1)))
    ids, rows = indices(5, 3, 6), normal(3, 6, 4, seed=3).to(low)
    x, gy = normal(3, 2, 4, 4).to(low), normal(3, 3, 4, 4).to(low)
    dense = normal(3, 5).to(low)
    geometry = Geometry((1, 1), (1, 1), (1, 1))

    def build(dtype: torch.dtype) -> list:
        outer = Outer(a.to(dtype), g.to(dtype))
        lookup = Lookup(ids, rows.to(dtype), 5, 0)
        conv = Conv(x.to(dtype), gy.to(dtype), (3, 2, 3, 3), geometry, 3)
        pulled = Pulled(outer, lambda grads: 2 * grads, (5, 4))
        return [outer, lookup, Tied(outer, lookup), Dense(dense.to(dtype)), conv, pulled]

    per_example, exact = build(low)[index], build(torch.float64)[index]
    factors = torch.tensor([0.3, 1.0, 1e-3])
    rtol = 2e-2 if isinstance(per_example, Conv) else 1e-5
    for method in per_example.methods():
        norms = per_example.sq_norms(method)
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms.double(), exact.sq_norms(method), rtol=rtol, atol=rtol)
    total, expected = per_example.weighted_sum(factors), exact.weighted_sum(factors.double())
    torch.testing.assert_close(total.double(), expected, rtol=3e-2, atol=3e-2)


def test_float16_factors_neither_overflow_nor_vanish():
    a = torch.full((2, 1, 3), 2.0**-10, dtype=torch.float16)
    g = torch.full((2, 1, 5), 2.0**-10, dtype=torch.float16)
    factors = torch.tensor([1e6, 2e6])
    torch.testing.assert_close(Outer(a, g).weighted_sum(factors), torch.full((5, 3), 3e6 * 2.0**-20))


def test_mixed_dtypes_meet_in_the_lower_one():
    a, g = normal(3, 2, 4).bfloat16(), normal(3, 2, 5, seed=1).float()
    low = Outer(a, g.bfloat16())
    for per_example in (Outer(a, g), Outer(a.float(), g.bfloat16())):
        torch.testing.assert_close(per_example.sq_norms("ghost"), low.sq_norms("ghost"))
    assert numerics.align(a, g.half())[0].dtype == torch.float32


def test_scratch_grows_and_is_reused():
    scratch = Scratch(100)
    first = scratch.take((4, 4), torch.float32, torch.device("cpu"))
    again = scratch.take((2, 4), torch.float32, torch.device("cpu"))
    assert first is not None
    assert again is not None
    assert first.data_ptr() == again.data_ptr()
    assert scratch.chunk(30, torch.device("cpu")) == 3
    assert scratch.chunk(1000, torch.device("cpu")) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(low: torch.dtype):
    """16-bit products come back in float32: as exact as the inputs, not as their dtype."""
    a, g = normal(3, 7, 16).to(low), normal(3, 7, 8, seed=1).to(low)
    expected = naive_outer(a.double(), g.double())
    factors = torch.tensor([0.5, 1.0, 0.25])
    outer = Outer(a.cuda(), g.cuda())
    for method in outer.methods():
        norms, total = outer.norms_and_sum(method, lambda _, where: (factors.cuda()[where], None))
        assert norms.dtype == total.dtype == torch.float32
        torch.testing.assert_close(norms.cpu().double(), expected.square().sum((1, 2)), rtol=1e-3, atol=0)
        torch.testing.assert_close(
            total.cpu().double(), torch.tensordot(factors.double(), expected, 1), rtol=1e-2, atol=1e-2
        )
