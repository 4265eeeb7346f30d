"""Reparametrised gradient perturbation (RGP): Yu et al. 2021, "Large Scale Private Learning via Low-rank Reparametrization".

A weight matrix W of [p, d] is written as L·R + (W - L·R) with two carriers, L of [p, r] with orthonormal columns and R of
[r, d] with orthonormal rows, and the residual held constant. The forward pass is that of W. With G = ∂loss/∂W,

    ∂L = G·Rᵀ   of [p, r],        ∂R = Lᵀ·G   of [r, d],

so that the gradients of the carriers are projections of G that never need G itself. They are ordinary per-example
gradients of two small linear layers: clipping and noise happen on them, (p + d)·r numbers instead of p·d. From the noisy,
averaged ∂L and ∂R the update of W is assembled:

    U = ∂L·R + L·∂R - L·Lᵀ·∂L·R,

without noise the orthogonal projection of G onto the matrices whose columns lie in the span of L plus those whose rows lie
in that of R (the last term takes back what the first two both contain). The optimiser sees U as the gradient of W. Then
new carriers are drawn: a Gaussian start, a power iteration, orthonormalised. They depend on weights that the mechanism has
released already and on public random numbers: post-processing, which costs no privacy.

What is decomposed: `weights`, W itself, as in the authors' code for language models, whose results Li et al. 2022 quote
(their App. K); or `history`, W - W₀, the historical update of the paper (W itself until the first update). As there, the
matrices of the blocks and a new head train, and everything else is frozen. That code adds the last term of U instead of
taking it off, and divides the gradient of the head by ten; neither stands in the paper, and neither is done here.

In code, `y = W·x + z - constant(z)` with `z = L·(R·constant(x))`. The value is W·x to the last bit, the gradient of the input is
that of W alone, and the carriers get ∂L and ∂R as above.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpexp.errors import UserError, either
from dpexp.models.structure import blocks, input_first, linear_layers, matrix, replace_module
from dpexp.models.trainable import train_only

if TYPE_CHECKING:
    from dpexp.schemas import PeftConfig

CARRIERS = ("weights", "history")
# Yu et al., section 3.3: one is enough
POWER_ITERATIONS = 1


class Carried(nn.Module):
    """A linear layer whose weight is a buffer that only assembled updates move; its carriers train.

    Args:
        base: `nn.Linear` or transformers' `Conv1D`; its bias is frozen.
        rank: r, at most the smaller side of W.
        seed, key: public; with the number of the draw they decide the random start of a decomposition.
        carriers: "weights" or "history".
    """

    draws: Tensor

    def __init__(self, base: nn.Module, rank: int, seed: int, key: str, carriers: str):
        super().__init__()
        self.rank, self.seed, self.key, self.carriers = rank, seed, key, carriers
        base.requires_grad_(False)
        weight = base._parameters.pop("weight")
        assert weight is not None
        # Frozen parameters come from the model's source again after a crash, buffers from the checkpoint.
        base.register_buffer("weight", weight.detach())
        self.initial = (
            nn.Parameter(weight.detach().clone(), requires_grad=False) if carriers == "history" else None
        )
        self.base = base
        outputs, inputs = matrix(base).shape
        self.right = nn.Linear(inputs, rank, bias=False, device=weight.device, dtype=weight.dtype)
        self.left = nn.Linear(rank, outputs, bias=False, device=weight.device, dtype=weight.dtype)
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        self.draw_carriers()

    @property
    def weight(self) -> Tensor:
        """W as the layer that is carried stores it; for whoever asks it for its dtype or shape."""
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """As the layer that is carried."""
        y: Tensor = self.base(x)
        if not torch.is_grad_enabled():
            return y
        z = self.left(self.right(x.detach()))
        return y + (z - z.detach())

    @torch.no_grad()
    def assemble(self) -> None:
        """Make the gradient of W of those of the carriers, and drop these."""
        left, right = self.left.weight, self.right.weight
        if left.grad is None or right.grad is None:
            raise RuntimeError(f"{self.key}: the carriers have no gradient to make an update of")
        of_left = left.grad @ right
        update = of_left + left @ right.grad - left @ (left.t() @ of_left)
        self.weight.grad = (update.t() if input_first(self.base) else update).contiguous()
        left.grad = right.grad = None

    @torch.no_grad()
    def draw_carriers(self) -> None:
        """New carriers of the weights as they are now."""
        target = matrix(self.base)
        if self.initial is not None:
            moved = self.weight - self.initial
            moved = moved.t() if input_first(self.base) else moved
            target = moved if bool(moved.any()) else target
        target = target.to(torch.promote_types(target.dtype, torch.float32))
        generator = torch.Generator().manual_seed(self._seed_of_draw())
        right = torch.randn(target.shape[1], self.rank, generator=generator, dtype=torch.float32).to(target)
        for _ in range(POWER_ITERATIONS):
            left = torch.linalg.qr(target @ right).Q
            right = torch.linalg.qr(target.t() @ left).Q
        self.left.weight.copy_(left)
        self.right.weight.copy_(right.t())
        self.draws += 1
        self.weight.grad = None

    def restored(self) -> nn.Module:
        """The plain layer with the trained weights; this one must not be used any more."""
        weight = self.base._buffers.pop("weight")
        assert weight is not None
        self.base.register_parameter("weight", nn.Parameter(weight))
        return self.base

    def extra_repr(self) -> str:
        return f"rank={self.rank}, carriers={self.carriers}"

    def _seed_of_draw(self) -> int:
        digest = hashlib.sha256(f"carriers {self.seed} {self.key} {int(self.draws)}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def add_carriers(
    model: nn.Module, peft: PeftConfig, head: list[str], seed: int
) -> tuple[nn.Module, list[str]]:
    """Put carriers on the linear layers of the repeated blocks; they and the new head train.

    Args:
        model: changed in place.
        peft: `rank` r; `carriers`; `targets`, last names of the layers (empty: all linear layers of the blocks).
        head: names of the parameters of a new head.
        seed: public.

    Returns:
        The model and the names of what trains.

    Raises:
        UserError: a rank that does not fit, no repeated blocks, or targets that name no linear layer in them.
    """
    if peft.carriers not in CARRIERS:
        raise UserError(f"peft.carriers={peft.carriers} is unknown: choose {either(CARRIERS)}")
    stack = blocks(model)
    inside = {
        f"{block}.{name}" if name else block: layer
        for block, module in stack.items()
        for name, layer in linear_layers(module)
    }
    there = sorted({name.rsplit(".", 1)[-1] for name in inside})
    if not inside:
        raise UserError(
            f"peft=rgp: the blocks of {type(model).__name__} have no linear layer; take another peft"
        )
    if unknown := sorted(set(peft.targets) - set(there)):
        raise UserError(
            f"peft.targets={list(peft.targets)}: {', '.join(unknown)} is no linear layer in the blocks of "
            f"{type(model).__name__}, which has: {', '.join(there)}"
        )
    chosen = {name: it for name, it in inside.items() if name.rsplit(".", 1)[-1] in (peft.targets or there)}
    for name, layer in chosen.items():
        outputs, inputs = matrix(layer).shape
        if not 1 <= peft.rank <= min(outputs, inputs):
            raise UserError(
                f"peft.rank={peft.rank}: {name} is a matrix of {outputs} x {inputs}; give a rank from 1 to "
                f"{min(outputs, inputs)}"
            )
        replace_module(model, name, Carried(layer, peft.rank, seed, name, peft.carriers))
    carriers = [f"{name}.{side}.weight" for name in chosen for side in ("right", "left")]
    return model, train_only(model, {*carriers, *head})


def carried_layers(model: nn.Module) -> Iterator[Carried]:
    """The layers with carriers, in the order of the modules."""
    return (module for module in model.modules() if isinstance(module, Carried))


def moved_tensors(model: nn.Module) -> list[Tensor]:
    """What an optimiser moves: the trainable parameters, where the weight of a carried layer stands for its carriers."""
    carriers = {id(side.weight) for layer in carried_layers(model) for side in (layer.left, layer.right)}
    weights = [layer.weight for layer in carried_layers(model)]
    return [*weights, *(p for p in model.parameters() if p.requires_grad and id(p) not in carriers)]


def follow(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Assemble the updates before every step of an optimiser of `moved_tensors`, and draw new carriers after it.

    Nothing is registered for a model without carriers.
    """
    layers = list(carried_layers(model))
    if not layers:
        return

    def before(*_: Any) -> None:
        for layer in layers:
            layer.assemble()

    def after(*_: Any) -> None:
        for layer in layers:
            layer.draw_carriers()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def restore_layers(model: nn.Module) -> None:
    """Replace every carried layer by the plain one with its trained weight: the architecture that was loaded."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Carried):
            replace_module(model, name, module.restored())
