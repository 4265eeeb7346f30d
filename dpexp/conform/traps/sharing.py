"""Parameters that are shared, derived, frozen, idle, or used outside of a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.conform.case import Case
from dpexp.conform.traps.base import C, D, Family, T, Then, V, floats, on, words

trap = Family()
TRAPS = trap.traps


def next_word(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """``[B]`` negative log-likelihoods of the words after the first."""
    logits = model(batch["ids"])
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none").sum(1)


class Language(nn.Module):
    """A table of words, positions, and a head that may be the table itself."""

    def __init__(self, head: str, positions: str = "row", padding_idx: int | None = None):
        super().__init__()
        self.words, self.places = nn.Embedding(V, D, padding_idx=padding_idx), nn.Embedding(16, D)
        self.body = nn.Linear(D, D)
        self.positions, self.how = positions, head
        if head != "functional":
            self.head = nn.Linear(D, V, bias=False)
        if head == "tied":
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        at = {"row": at[None], "flat": at, "full": at.expand(len(ids), -1)}[self.positions]
        x = torch.tanh(self.body(self.words(ids) + self.places(at)))
        return F.linear(x, self.words.weight) if self.how == "functional" else self.head(x)


@trap("tied embedding and head")
def _() -> Case:
    return Case(Language("tied", "full"), words(), next_word)


@trap("head tied by hand, with F.linear")
def _() -> Case:
    return Case(Language("functional", "full"), words(), next_word)


@trap("position table looked up once, [1, T]")
def _() -> Case:
    return Case(Language("own", "row"), words(), next_word)


@trap("position table looked up once, [T]")
def _() -> Case:
    return Case(Language("own", "flat"), words(), next_word)


@trap("positions as many as examples")
def _() -> Case:
    return Case(Language("own", "flat"), words(length=4), next_word)


@trap("padding_idx of an embedding")
def _() -> Case:
    return Case(Language("tied", "full", padding_idx=1), words(), next_word)


class Repeated(nn.Module):
    def __init__(self, times: int, norm: bool):
        super().__init__()
        self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)
        self.norm = nn.LayerNorm(D) if norm else nn.Identity()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(x + torch.tanh(self.inner(x)))
        return self.out(x)


@trap("a layer called twice")
def _() -> Case:
    return on(Repeated(2, norm=False))


@trap("a block called three times, with positions")
def _() -> Case:
    return on(Repeated(3, norm=True), floats(T, D))


@trap("two layers that share a weight")
def _() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    model[2].weight = model[0].weight
    return on(model)


@trap("a weight and a bias that are one parameter")
def _() -> Case:
    norm = nn.LayerNorm(D)
    norm.bias = norm.weight
    return on(Then(norm))


@trap("a weight used transposed as well")
def _() -> Case:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.encode(x)), self.encode.weight.t())

    return on(Autoencoder())


class Bare(nn.Module):
    """Class token, position table, layer scale, hand-written RMSNorm, temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, T + 1, D))
        self.scale, self.gain = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.heat, self.inner, self.out = nn.Parameter(torch.tensor(0.7)), nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places[:, : x.shape[1] + 1]
        x = x + self.scale * torch.tanh(self.inner(x))
        x = self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.out(x) * self.heat.exp()


@trap("bare parameters")
def _() -> Case:
    return on(Bare(), floats(T, D))


@trap("a matrix multiplied without a layer")
def _() -> Case:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(D, C)), nn.Parameter(torch.randn(C))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("btd,dc->btc", x, self.weight) + self.bias

    return on(ByHand(), floats(T, D))


@trap("a copy of a weight written to in place")
def _() -> Case:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, D))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.clone()
            weight[torch.ones(D, D).triu(1) == 1] = 0
            weight *= 2
            return F.linear(x, weight)

    return on(Masked())


@trap("a frozen bias")
def _() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C))
    model[0].bias.requires_grad_(False)
    return on(model)


@trap("a frozen weight whose bias trains")
def _() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C))
    model[0].weight.requires_grad_(False)
    return on(model)


@trap("a frozen first layer")
def _() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C))
    model[0].requires_grad_(False)
    return on(model)


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.out = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


@trap("a layer that is never used")
def _() -> Case:
    return on(Idle())


@trap("a layer that only some batches use")
def _() -> Case:
    class Sometimes(Idle):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.unused(x)) if x.shape[1] == 2 else x)

    return on(Sometimes(), floats(T, D), then=[floats(2, D), floats(T, D)])


@trap("a parameter unfrozen after the library was attached")
def _() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C))
    model[0].requires_grad_(False)

    def losses(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = (net(batch["x"]) - 0.3).pow(2).sum(1)
        next(net.parameters()).requires_grad_(True)
        return found

    return Case(model, floats(D), losses)


@trap("weight norm")
def _() -> Case:
    return on(Then(nn.utils.parametrizations.weight_norm(nn.Linear(D, D))))


@trap("an orthogonal parametrisation")
def _() -> Case:
    return on(Then(nn.utils.parametrizations.orthogonal(nn.Linear(D, D))))


@trap("a parametrisation by hand")
def _() -> Case:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).mT

    layer = nn.Linear(D, D)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return on(Then(layer), floats(T, D))


@trap("spectral norm")
def _() -> Case:
    return on(Then(nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))), tolerance=1e-5)


@trap("a pruned weight")
def _() -> Case:
    class Pruned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(C, D))
            self.register_buffer("mask", (torch.rand(C, D) > 0.4).float())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.mask.to(x.dtype))  # type: ignore[operator]

    return on(Pruned())


@trap("functional_call with derived weights")
def _() -> Case:
    class Fast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            tripled = {name: 3 * p for name, p in self.layer.named_parameters()}
            return torch.func.functional_call(self.layer, tripled, (x,))

    return on(Fast())


@trap("a prompt network that every example shares")
def _() -> Case:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix, self.out = nn.Embedding(4, D), nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            prompt = torch.tanh(self.mix(self.table(torch.arange(4))))
            return self.out(torch.cat([prompt[None].expand(len(x), -1, -1), x], 1) * prompt.mean())

    return on(Prompt(), floats(T, D))


@trap("a regulariser of the weights in every loss")
def _() -> Case:
    def losses(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        decay = torch.stack([p.square().sum() for p in net.parameters()]).sum()
        return (net(batch["x"]) - 0.3).pow(2).sum(1) + 0.01 * decay

    return Case(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C)), floats(D), losses)


@trap("LoRA by hand, on a frozen layer")
def _() -> Case:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(D, D).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(D, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a.t() @ self.b.t()

    return on(Lora(), floats(T, D))
