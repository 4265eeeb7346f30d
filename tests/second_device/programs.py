"""What is tried on the second device, each beside the CPU: engine, own loop, trainer. ``python -m … LIBRARY FOLDER`` prints one
JSON object: name of a check -> "" or what was wrong."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.zoo import ZOO
from tests.second_device.device import NAME, register
from tests.training.own_loop import data, make, network, noise_by_number
from tests.training.tiny import make_trainer, tiny_run, train

# of a model, and the notes on its card
Weights = tuple[list[Tensor], list[str]]
CPU = torch.device("cpu")
MODELS = (
    "mlp", "linear_any_rank", "frozen_parts", "convolutions", "reused_module", "bare_parameters", "flattened_time_major",
    "time_first", "attention", "checkpointed", "parametrized_and_rare", "hf_gpt2", "hf_t5", "peft_lora", "experts",
)  # fmt: skip
RUNS = {
    "with thresholds that adapt": {"adaptive": True},
    "with fixed thresholds": {"adaptive": False},
    "without privacy": {"private": False, "adaptive": False},
}


def clipped(name: str, groups: str, device: torch.device) -> list[Tensor]:
    """The norms and the sums of two steps of a model of the zoo."""
    problem = ZOO[name]()
    model, batch = problem.model.to(device), {key: value.to(device) for key, value in problem.batch.items()}
    clipper = attach(model, groups=groups, clip_norm=0.5)
    norms = [clipper.backward(problem.losses(model, batch)).norms.cpu() for _ in range(2)]
    return [*norms, *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


def only_rounding(notes: list[str]) -> str:
    """Nothing, where a card notes 16 bits and nothing else."""
    return "" if len(notes) == 1 and "in 16 bits" in notes[0] else f"noted: {notes}"


def own_loop(
    folder: Path, device: torch.device, losses_of: Callable[..., Tensor], **settings: Any
) -> Weights:
    """The weights after a loop of one's own, which is interrupted once, and what its card notes."""
    with pytest.MonkeyPatch.context() as patch:
        noise_by_number(patch)()
        for steps in (2, None):
            model = network().to(device)
            engine = make(folder, model, **settings)
            for batch in engine.batches(physical_batch_size=8, steps=steps):
                engine.step(losses_of(model, *(part.to(device) for part in batch)))
            engine.close()
    return [p.detach().cpu() for p in model.parameters()], engine.clipper.notes


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def in_bf16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return F.cross_entropy(model(x), y, reduction="none").float()


def by_the_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = cross_entropy(model, x, y)
    return losses / losses.detach().mean()


def mixed_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, 0.7 * x + 0.3 * x.flip(0), y)


def seeded(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(7)
    return cross_entropy(model, x + 0.01 * torch.randn_like(x), y)


def trained(folder: Path, device: torch.device, **settings: Any) -> list[Tensor]:
    """The weights after a configured run."""
    with pytest.MonkeyPatch.context() as patch:
        noise_by_number(patch)()
        trainer = make_trainer(folder, tiny_run(**settings), device=device)
        train(trainer)
    return [p.detach().cpu() for p in trainer.model.parameters()]


def unlike(here: list[Tensor], there: list[Tensor], rounding: float) -> str:
    """What two lists differ by, in words."""
    if len(here) != len(there):
        return f"{len(here)} and {len(there)} tensors"
    far = [float((a - b).abs().max()) for a, b in zip(here, there, strict=True) if a.numel()]
    near = all(torch.allclose(a, b, rtol=rounding, atol=rounding) for a, b in zip(here, there, strict=True))
    return "" if near else f"they differ by {max(far)}"


def mixed(device: torch.device) -> str:
    """What is said of an operation with tensors of both."""
    torch.ones(3, device=device) + torch.ones(3)
    return ""


def checks(folder: Path, device: torch.device) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield names and what tries them; each returns what is wrong."""
    yield "mixed", partial(mixed, device)
    for name in MODELS:
        for groups in ("flat", "layer"):
            both = [partial(clipped, name, groups, where) for where in (CPU, device)]
            yield f"clipping {name} {groups}", lambda both=both: unlike(*(of() for of in both), rounding=1e-9)
    for kind, losses_of, settings in (
        ("plain", cross_entropy, {}),
        ("adaptive", cross_entropy, {"groups": "layer", "target_quantile": 0.5}),
        ("users", cross_entropy, {"users": [i // 2 for i in range(len(data()))]}),
    ):
        yield f"own loop {kind}", partial(alike, folder / f"loop {kind}", device, losses_of, settings)
    yield "own loop in bf16", lambda: only_rounding(own_loop(folder / "bf16", device, in_bf16)[1])
    yield "own loop with a collate function", partial(collated, folder / "collated", device)
    for wrong, why in {
        by_the_mean: "mixes examples",
        mixed_up: "mixes examples",
        seeded: "manual_seed(7)",
    }.items():
        name = wrong.__name__
        yield f"own loop {name}", partial(refused, folder / name, device, wrong, why)
    for kind, settings in RUNS.items():
        both = [
            partial(trained, folder / f"{kind} {where.type}", where, **settings) for where in (CPU, device)
        ]
        yield f"run {kind}", lambda both=both: unlike(*(of() for of in both), rounding=1e-5)


def on_the_way(rows: list) -> list[Any]:
    """Collate on the device: noise that is drawn there, and a list beside."""
    x, y = (torch.stack([row[part] for row in rows]) for part in range(2))
    there = x.to(f"{NAME}:0")
    return [there + 0.01 * torch.randn_like(there), y, list(there)]


def collated(folder: Path, device: torch.device) -> str:
    """Whether a collate function that works on the device is taken."""
    engine = make(folder, network().to(device))
    for x, y, _ in engine.batches(physical_batch_size=8, steps=2, collate_fn=on_the_way):
        engine.step(cross_entropy(engine.model, x, y.to(device)))
    engine.close()
    return str(engine.clipper.notes or "")


def alike(folder: Path, device: torch.device, losses_of: Callable[..., Tensor], settings: dict) -> str:
    """Whether a loop trains the same on both, and nothing is noted that could not be looked at."""
    (here, _), (there, notes) = (
        own_loop(Path(f"{folder} {where.type}"), where, losses_of, **settings) for where in (CPU, device)
    )
    return f"noted: {notes}" if notes else unlike(here, there, rounding=1e-5)


def refused(folder: Path, device: torch.device, losses_of: Callable[..., Tensor], why: str) -> str:
    """Whether a loop that is not private is refused, with these words."""
    try:
        own_loop(folder, device, losses_of)
    except UserError as error:
        return "" if why in str(error) else str(error)
    return "taken"


def main(library: str, folder: str) -> None:
    """Try everything."""
    device = register(Path(library))
    found = {}
    for name, tried in checks(Path(folder), device):
        try:
            found[name] = tried()
        except Exception:
            found[name] = traceback.format_exc(limit=-6)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
