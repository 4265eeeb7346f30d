"""Bottleneck adapters: Houlsby et al. 2019, "Parameter-Efficient Transfer Learning for NLP", section 2.1.

A small network behind each of the two sublayers of a block, before its result is added to the residual stream:
`h + W_up·act(W_down·h + b_down) + b_up` with a bottleneck of m units. It begins as nearly the identity. The adapters,
the norms of the blocks and a new head train (their section 2). With one adapter a block, behind the feed-forward
sublayer, and frozen norms, it is the placement of Pfeiffer et al. 2021, "AdapterFusion", section 3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpexp.errors import UserError, either
from dpexp.models.structure import blocks, matrix, replace_module, sublayer_outputs
from dpexp.models.trainable import train_only

if TYPE_CHECKING:
    from dpexp.schemas import PeftConfig

PLACEMENTS = ("both", "feed_forward")
# Houlsby et al., section 3.6: anything below that trains as well
INITIAL_STD = 1e-2
WEIGHTS, DESCRIPTION = "adapters.safetensors", "adapters.json"


class Adapted(nn.Module):
    """A linear layer with a bottleneck adapter behind it.

    Args:
        base: gives `[..., width]`.
        width: of the block.
        bottleneck: m.
    """

    def __init__(self, base: nn.Module, width: int, bottleneck: int):
        super().__init__()
        weight = matrix(base)
        self.base = base
        self.down = nn.Linear(width, bottleneck, device=weight.device, dtype=weight.dtype)
        self.up = nn.Linear(bottleneck, width, device=weight.device, dtype=weight.dtype)
        for layer in (self.down, self.up):
            nn.init.trunc_normal_(layer.weight, std=INITIAL_STD, a=-2 * INITIAL_STD, b=2 * INITIAL_STD)
            nn.init.zeros_(layer.bias)

    @property
    def weight(self) -> Tensor:
        """Of the layer in front; for whoever asks it for its dtype or shape."""
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., width]`."""
        h: Tensor = self.base(x)
        return h + self.up(nn.functional.gelu(self.down(h)))


def add_adapters(model: nn.Module, peft: PeftConfig, head: list[str]) -> tuple[nn.Module, list[str]]:
    """Put adapters into every block.

    Args:
        model: changed in place; the adapters are drawn from torch's global generator.
        peft: `rank`, the bottleneck m; `placement`, "both" (Houlsby: norms train as well) or "feed_forward" (Pfeiffer).
        head: names of the parameters of a new head.

    Returns:
        The model and the names of what trains.

    Raises:
        UserError: a bottleneck below one, an unknown placement, or blocks without an attention and a feed-forward sublayer.
    """
    if peft.rank < 1:
        raise UserError(
            f"peft.rank={peft.rank}: an adapter needs a bottleneck of at least 1, as in peft.rank=64"
        )
    if peft.placement not in PLACEMENTS:
        raise UserError(f"peft.placement={peft.placement} is unknown: choose {either(PLACEMENTS)}")
    stack = blocks(model)
    added: list[str] = []
    for block, module in stack.items():
        outputs = sublayer_outputs(module)
        widths = {matrix(module.get_submodule(name)).shape[0] for name in outputs}
        if len(outputs) != 2 or len(widths) != 1:
            raise UserError(
                f"peft=adapters: {block} of {type(model).__name__} is no transformer block with an attention and a "
                "feed-forward sublayer of one width; take another peft"
            )
        for name in outputs if peft.placement == "both" else outputs[1:]:
            replace_module(module, name, Adapted(module.get_submodule(name), widths.copy().pop(), peft.rank))
            added.append(f"{block}.{name}")
    small = {
        f"{name}.{part}" for name in added for part in ("down.weight", "down.bias", "up.weight", "up.bias")
    }
    norms = _norms(stack) if peft.placement == "both" else set()
    return model, train_only(model, {*small, *norms, *head})


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer is `Adapted`."""
    return any(isinstance(module, Adapted) for module in model.modules())


def save_adapters(model: nn.Module, folder: Path, network: str) -> None:
    """Write all that was trained to `adapters.safetensors`, and `adapters.json` beside it.

    Args:
        model: with adapters.
        folder: exists.
        network: where the weights below the adapters come from; for the description.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}
    trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    save_file(trained, str(folder / WEIGHTS))
    described = {
        "network": network,
        "bottleneck": next(iter(layers.values())).down.out_features,
        "layers": list(layers),
    }
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def load_adapters(model: nn.Module, folder: Path) -> nn.Module:
    """Put the adapters that `save_adapters` wrote onto the network they were trained on.

    Args:
        model: the same pretrained network with the same head; changed in place.
        folder: of the export.

    Raises:
        UserError: the files are not there, or do not belong to this network.
    """
    if not (folder / WEIGHTS).is_file() or not (folder / DESCRIPTION).is_file():
        raise UserError(
            f"{folder} holds no {WEIGHTS} with its {DESCRIPTION}: is it the export of peft=adapters?"
        )
    described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    trained = load_file(str(folder / WEIGHTS))
    for name in described["layers"]:
        try:
            base = model.get_submodule(name)
            width = matrix(base).shape[0]
        except AttributeError:
            raise UserError(
                f"{folder}: {type(model).__name__} has no linear layer {name}: it is another network"
            ) from None
        replace_module(model, name, Adapted(base, width, described["bottleneck"]))
    mine = dict(model.named_parameters())
    odd = [name for name, tensor in trained.items() if name not in mine or mine[name].shape != tensor.shape]
    if odd:
        raise UserError(
            f"{folder}: {odd[0]} does not fit {type(model).__name__}: it is another network or head"
        )
    with torch.no_grad():
        for name, tensor in trained.items():
            mine[name].copy_(tensor)
    return model


def _norms(stack: dict[str, nn.Module]) -> set[str]:
    """The parameters of the norms inside the blocks."""
    return {
        f"{block}.{name}.{local}"
        for block, module in stack.items()
        for name, child in module.named_modules()
        if "norm" in type(child).__name__.lower() and not list(child.children())
        for local, _ in child.named_parameters(recurse=False)
    }
