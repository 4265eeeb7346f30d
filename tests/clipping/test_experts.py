"""Rows that a model picks by index, as experts get theirs: the formulas hold for them, and are as exact as the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpexp.clipping import attach
from dpexp.clipping.attach import Clipper
from dpexp.clipping.gradients import Grouped, merge
from dpexp.clipping.loop import LOOPED
from dpexp.clipping.survey.layouts import Owned
from dpexp.errors import UserError
from tests.clipping.naive import assert_exact, weighted_passes
from tests.clipping.test_gradients import indices, naive_outer, normal
from tests.versions import INSTALLED

D, EXPERTS, CLIP = 6, 4, 0.1


class Mixture(nn.Module):
    """Each token goes to the two best of four experts; ``whole``: what an expert does to the rows of all examples at once."""

    def __init__(self, whole: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.table, self.out, self.whole = nn.Embedding(20, D), nn.Linear(D, 3), whole
        self.router = nn.Linear(D, EXPERTS)
        self.make()

    def make(self) -> None:
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.LayerNorm(2 * D), nn.Linear(2 * D, D))
            for _ in range(EXPERTS)
        )

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return self.experts[e](rows)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, place = torch.where(chosen == e)
            rows = self.whole(self.expert(e, x[token])) * weights[token, place, None]
            mixed = mixed.index_add(0, token, rows.to(mixed.dtype))
        return self.out((x + mixed).unflatten(0, ids.shape).mean(1))


class Stacked(Mixture):
    """The same with one parameter for the weights of all experts, used as it is and transposed."""

    def make(self) -> None:
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * D, D) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * D, D) / 2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * D))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        # a number that a tensor holds, as transformers has it
        return F.linear(rows, self.up[torch.tensor(e)], self.bias[e]).tanh() @ self.down[e]


class Uncommon(Mixture):
    """Operations without a formula, and one that broadcasts; what is computed again on the way back."""

    def make(self) -> None:
        self.scales = nn.Parameter(torch.randn(EXPERTS, D))
        self.matrix = nn.Parameter(torch.randn(D, D) / 2)
        self.pairs = nn.ModuleList(nn.Bilinear(D, D, D) for _ in range(EXPERTS))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return checkpoint(self.inside, e, rows, use_reentrant=False)

    def inside(self, e: int, rows: Tensor) -> Tensor:
        rows = torch.einsum("rd,de->re", rows * self.scales[e], self.matrix).tanh()
        return self.pairs[e](rows, rows.sin())


class Adapted(Mixture):
    """Experts with adapters, the second matrix of which is zero at first, and lets no gradient through."""

    def make(self) -> None:
        self.first = nn.ModuleList(nn.Linear(D, 2, bias=False) for _ in range(EXPERTS))
        self.second = nn.ModuleList(nn.Linear(2, D, bias=False) for _ in range(EXPERTS))
        for each in self.second:
            nn.init.zeros_(each.weight)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return rows + self.second[e](self.first[e](rows))


def ids(examples: int, length: int = 5, seed: int = 0) -> Tensor:
    return indices(20, examples, length, seed=seed)


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), tokens[:, 0] % 3, reduction="none")


def naive(model: nn.Module, found: Tensor, clip: float = CLIP) -> dict[str, Tensor]:
    params = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    for loss in found:
        grads = torch.autograd.grad(loss, list(params.values()), retain_graph=True, materialize_grads=True)
        factor = min(1.0, clip / float(torch.cat([g.flatten() for g in grads]).norm()))
        for name, g in zip(params, grads, strict=True):
            sums[name] += factor * g
    return sums


def step(clipper: Clipper, model: nn.Module, found: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    clipper.backward(found)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [Mixture, Stacked, Uncommon, Adapted])
@pytest.mark.parametrize("engine", ["auto", "bk", "ghost"])
def test_experts_need_no_loop_and_are_exact(kind: type[Mixture], engine: str) -> None:
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=CLIP, engine=engine)
    clipper.may_begin_again()
    # one of few rows, where experts have none, too
    for number, examples in enumerate((7, 7, 2, 40, 1, 5)):
        tokens = ids(examples, 5 if examples > 2 else 1, seed=number)
        expected = naive(plain, losses(plain, tokens))
        torch.testing.assert_close(step(clipper, model, losses(model, tokens)), expected)
        assert LOOPED not in clipper.choices.values(), examples
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                p -= p.grad
                q.copy_(p)


def test_several_rows_of_each_example() -> None:
    torch.manual_seed(0)
    model = Mixture().double()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=CLIP, rows_per_example=2)
    for number in range(3):
        tokens = ids(8, seed=number)
        expected = naive(plain, losses(plain, tokens).view(4, 2).mean(1))
        torch.testing.assert_close(step(clipper, model, losses(model, tokens).view(4, 2).mean(1)), expected)
    assert LOOPED not in clipper.choices.values()


def test_in_16_bits() -> None:
    torch.manual_seed(0)
    model = Mixture()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=CLIP)
    for number in range(3):
        tokens = ids(7, seed=number)
        expected = naive(plain, losses(plain, tokens))
        with torch.autocast("cpu", torch.bfloat16):
            found = losses(model, tokens)
        for name, total in step(clipper, model, found).items():
            assert (total - expected[name]).norm() <= 0.1 * expected[name].norm() + 1e-3, name
        assert LOOPED not in clipper.choices.values()


def test_an_example_that_is_not_finite_costs_the_others_nothing() -> None:
    """It may stand first among the rows of an expert that others have no row at."""
    torch.manual_seed(0)
    model = Mixture().double()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=CLIP)
    step(clipper, model, losses(model, ids(7)))
    tokens, weights = ids(7, length=2, seed=1), torch.ones(7, dtype=torch.float64)
    weights[0] = torch.inf
    expected = naive(plain, losses(plain, tokens)[1:])
    torch.testing.assert_close(step(clipper, model, losses(model, tokens) * weights), expected)


@pytest.mark.parametrize(
    "whole", [lambda x: x - x.mean(0), lambda x: x / (1 + x.norm()), lambda x: x.flip(0)]
)
def test_experts_that_mix_their_rows_are_refused(whole: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Mixture(whole)
    clipper = attach(model)
    with pytest.raises(UserError, match="mixes examples"):
        step(clipper, model, losses(model, ids(7)))


@pytest.mark.parametrize("engine", ["auto", "bk", "ghost"])
def test_a_later_step_goes_back_once_more_than_the_engine_itself(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Mixture()
    clipper, asked = attach(model, engine=engine), weighted_passes(monkeypatch)
    clipper.may_begin_again()
    for number in range(4):
        asked.clear()
        step(clipper, model, losses(model, ids(12, seed=number)))
    assert asked == [True, False, *[False] * (engine == "ghost")]


def test_what_mixes_rows_in_a_later_step_is_refused_and_adds_nothing() -> None:
    mixes = False
    torch.manual_seed(0)
    model = Mixture(lambda x: x - x.mean(0) if mixes else x.tanh())
    clipper = attach(model)
    clipper.may_begin_again()
    for number in range(3):
        step(clipper, model, losses(model, ids(7, seed=number)))
    model.zero_grad()
    mixes = True
    for words in ("run this step again", "mixes examples"):
        with pytest.raises(UserError, match=words):
            clipper.backward(losses(model, ids(7)))
        assert all(p.grad is None for p in model.parameters())


def test_rows_that_stand_in_another_order_in_a_later_step() -> None:
    """In the first batches they were in order by chance."""

    class Sorting(Mixture):
        def forward(self, ids: Tensor) -> Tensor:
            order = ids[:, 0].argsort(stable=True)
            x = self.table(ids[order])
            return self.out(torch.tanh(self.router(x) @ self.router.weight)[order.argsort()].mean(1))

    torch.manual_seed(0)
    model = Sorting().double()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=CLIP)
    clipper.may_begin_again()
    for number in range(5):
        tokens = ids(7, seed=number)
        tokens = tokens if number > 2 else tokens[tokens[:, 0].argsort()]
        expected = naive(plain, losses(plain, tokens))
        found = step(clipper, model, losses(model, tokens))
        for name, total in found.items():
            torch.testing.assert_close(total, expected[name])


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
def test_experts_of_transformers(experts: str) -> None:
    transformers = pytest.importorskip("transformers")
    if INSTALLED < (2, 9):
        pytest.skip("transformers asks torch 2.8 for a product of experts that it has on GPUs alone")
    config = transformers.MixtralConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=EXPERTS, experts_implementation=experts,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=CLIP)

    def of_next_tokens(of: nn.Module, tokens: Tensor) -> Tensor:
        logits = of(input_ids=tokens, use_cache=False).logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)

    clipper.may_begin_again()
    for number in range(3):
        tokens = ids(5, seed=number)
        expected = naive(plain, of_next_tokens(plain, tokens))
        found = step(clipper, model, of_next_tokens(model, tokens))
        for name, total in expected.items():
            torch.testing.assert_close(found[name], total, rtol=1e-4, atol=1e-6)
        assert LOOPED not in clipper.choices.values()


sizes = st.integers(1, 4)


@settings(max_examples=25, deadline=None)
@given(sizes, st.integers(0, 5), sizes, sizes, sizes)
def test_gradients_of_stacked_matrices(examples: int, positions: int, p: int, d: int, count: int) -> None:
    a, g = normal(examples, positions, d), normal(examples, positions, p, seed=1)
    which = indices(count, examples, positions, seed=2)
    expected = torch.stack([naive_outer(a, g * (which == e).unsqueeze(2)) for e in range(count)], 1)
    gradient = Grouped(a, g, which, count)
    assert_exact(gradient, expected)
    assert_exact(gradient.transposed(), expected.mT)
    both = merge(gradient, Grouped(a, 2 * g, which, count))
    assert isinstance(both, Grouped)
    assert_exact(both, 3 * expected)


def test_rows_by_owner() -> None:
    found = Owned.of(torch.tensor([2, 0, -1, 2, 2]), 4)
    assert found.places.tolist() == [[1, 1, 1], [0, 0, 0], [0, 3, 4], [0, 0, 0]]
    assert found.real.int().tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]
    rows = torch.tensor([[torch.inf], [1.0], [2.0], [3.0], [4.0]])
    assert found.gathered(rows)[:6].flatten().tolist() == [1, 1, 1, 0, 0, 0]
    assert found.gradients(rows.nan_to_num(posinf=5.0)).flatten().tolist() == [1, *[0] * 5, 5, 3, 4, *[0] * 3]
    assert Owned.of(torch.tensor([], dtype=torch.long), 3).gathered(torch.ones(0, 2)).shape == (3, 2)


class Packed(nn.Module):
    """Reads images of any size as patches: of those that come first in one row, of the others in another one; its queries have
    a norm by heads, as NaViT's."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, heads * D), nn.Linear(heads * D, 3)
        self.scale = nn.Parameter(torch.rand(heads, 1, D) + 0.5)

    def forward(self, images: list[Tensor]) -> Tensor:
        cut = (len(images) + 1) // 2
        packs = [pack for pack in (images[:cut], images[cut:]) if pack]
        longest = sum(len(image) for image in images)
        rows, owners = (
            torch.zeros(len(packs), longest, 4, dtype=images[0].dtype),
            torch.full((len(packs), longest), -1),
        )
        for r, pack in enumerate(packs):
            at = 0
            for i, image in enumerate(pack, r * cut):
                rows[r, at : at + len(image)], owners[r, at : at + len(image)] = image, i
                at += len(image)
        # the longest first
        order = (owners >= 0).sum(1).argsort(descending=True)
        rows, owners = rows[order], owners[order]
        heads = self.first(rows).unflatten(-1, (-1, D)).transpose(1, 2)
        heads = F.normalize(heads, dim=-1) * self.scale
        apart = owners[:, None, :, None] != owners[:, None, None, :]
        mixed = (heads @ heads.mT).masked_fill(apart, -1e9).softmax(-1) @ heads
        found = self.out(mixed.transpose(1, 2).flatten(2))
        return torch.stack([found[owners == i].mean(0) for i in range(len(images))])


@pytest.mark.parametrize("engine", ["auto", "onepass"])
@pytest.mark.parametrize("heads", [2, 3])
def test_several_examples_in_one_row(heads: int, engine: str) -> None:
    torch.manual_seed(0)
    model = Packed(heads).double()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=CLIP, engine=engine)
    for lengths in ((3, 5, 2, 4, 2), (2, 3, 4), (4, 1)):
        images = [torch.randn(n, 4, dtype=torch.float64) for n in lengths]
        expected = naive(plain, plain(images).square().sum(1))
        for name, found in step(clipper, model, model(images).square().sum(1)).items():
            torch.testing.assert_close(found, expected[name])


class Scaled(nn.Module):
    """One scale, in place: of the numbers above zero, however many there are, as one row; or with times in front."""

    def __init__(self, picks: bool) -> None:
        super().__init__()
        self.scale, self.picks = nn.Parameter(torch.tensor([1.5])), picks

    def forward(self, x: Tensor) -> Tensor:
        if not self.picks:
            return x.t().tanh().mul_(self.scale).t()
        keep = x > 0
        return torch.zeros_like(x).masked_scatter(keep, x[keep].tanh().mul_(self.scale))


@pytest.mark.parametrize("picks", [True, False])
def test_one_scale_for_numbers_of_several_examples(picks: bool) -> None:
    model = Scaled(picks).double()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=CLIP)
    x = torch.tensor([[-1, 1.0], [2, 0.5], [1, 1.5], [-2, 0.3]], dtype=torch.float64)
    for batch in (x, x[1:], x.reshape(2, 4)):
        expected = naive(plain, plain(batch).square().sum(1))
        for name, found in step(clipper, model, model(batch).square().sum(1)).items():
            torch.testing.assert_close(found, expected[name])
