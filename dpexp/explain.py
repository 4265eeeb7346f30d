"""``python -m dpexp.explain``: which norm method suits which layer of a network, and what every implementation of private
training costs on it (Bu et al., Tables 3-5, 8). Only shapes are computed: no weights, no data, no training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig

from dpexp.clipping.choice import Methods
from dpexp.clipping.refusals import refusal
from dpexp.complexity.architectures import Network, build
from dpexp.complexity.formulas import Layer, costs, depth_threshold, norm_space, views
from dpexp.complexity.shapes import coverage, layers_of
from dpexp.config import hydra_entry
from dpexp.config.usage import print_out
from dpexp.errors import UserError, did_you_mean, first_line
from dpexp.schemas import EngineConfig, ModelConfig

_FORMATS = ("text", "json")
_CHOICES = ("rule", "measured")
# what of a model fixes the shapes of its layers
_SHAPES = ("name", "id", "family", "architecture", "config", "factory", "tokenizer")


@dataclass
class ExplainArguments:
    """The settings of ``conf/explain.yaml``."""

    # the name given as model=…
    network: str | None = None
    # what conf/model holds under that name, if it does
    model: ModelConfig = field(default_factory=ModelConfig)
    image: int | None = None
    tokens: int | None = None
    batch: int = 1
    leave_out: str | None = None
    choice: str = "rule"
    device: str = "cpu"
    memory_cap_mib: int = EngineConfig.memory_cap_mib
    format: str = "text"


def explain(arguments: ExplainArguments) -> dict[str, Any]:
    """What the command prints, as plain values.

    Raises:
        UserError: no such network, an input that it does not take, or settings that mean nothing.
    """
    _check(arguments)
    model = arguments.model
    name = model.id or arguments.network or ""
    network = build(name, model, image=arguments.image, tokens=arguments.tokens)
    every = layers_of(network.model, network.run)
    layers = _kept(every, arguments)
    parameters, listed, unlisted = coverage(network.model, every)
    measured = _measure(layers, arguments) if arguments.choice == "measured" else None
    return {
        "model": model.id or arguments.network,
        "source": network.source,
        "input": network.size,
        "batch": arguments.batch,
        "parameters": {"total": parameters, "weights_listed": listed, "weights_not_listed": unlisted},
        "notes": network.notes + _refusals(network),
        "layers": [
            {
                **{key: getattr(layer, key) for key in ("name", "kind", "T", "p", "d", "groups", "tied")},
                **{key: getattr(layer, key) for key in ("ghost", "instantiation", "choice")},
                **({"measured": measured[number]} if measured else {}),
            }
            for number, layer in enumerate(layers)
        ],
        "totals": {
            view: {
                "layers": len(chosen),
                "norm_space": asdict(norm_space(chosen)),
                "last_instantiated": depth_threshold(chosen),
                "implementations": costs(chosen, arguments.batch),
            }
            for view, chosen in views(layers).items()
        },
    }


def as_text(result: dict[str, Any]) -> str:
    """The result as aligned tables."""
    size = ", ".join(f"{key} {value}" for key, value in result["input"].items())
    parameters = result["parameters"]
    total, listed = parameters["total"], parameters["weights_listed"]
    lines = [f"{result['model']} ({result['source']}), {size}, batch {result['batch']}", ""]
    lines += _layer_table(result["layers"])
    share = listed / total if total else 0.0
    lines += [
        "",
        f"{listed:,} of {total:,} parameters ({share:.2%}) are weights of these layers; the others are biases, normalisation",
        "layers and bare parameters, whose per-example gradients cost next to nothing"
        + _examples(parameters["weights_not_listed"]),
        *(f"note: {note}" for note in result["notes"]),
    ]
    for view, found in result["totals"].items():
        space = found["norm_space"]
        lines += [
            "",
            f"{view}: {found['layers']}",
            f"  space of the norms, floats for one example: ghost {short(space['ghost'])}, instantiation"
            f" {short(space['instantiation'])}, mixed {short(space['mixed'])}",
            f"  the last layer that instantiates: {found['last_instantiated'] or 'none'}",
            "",
            *_cost_table(found["implementations"]),
        ]
    lines += [
        "",
        "T: positions of an example; d, p: inputs and outputs of one. The choice is the smaller of ghost norm and instantiation.",
        "Time in flops, space in floats, summed over layers: derived from the modules of Bu et al., Table 3;",
        "printed: by the formulas of their Tables 2 and 5. docs/complexity.md says why they differ.",
    ]
    return "\n".join(lines)


def short(number: float) -> str:
    """Four digits, two decimals at most, and a unit: 399934572 is 399.9M, 999498 is 1.00M."""
    for unit, size, least in (("T", 1e12, 1.0), ("G", 1e9, 1.0), ("M", 1e6, 0.999), ("k", 1e3, 10.0)):
        if (scaled := number / size) >= least:
            return f"{scaled:.{1 if scaled >= 100 else 2}f}{unit}"
    return f"{number:.0f}"


def _layer_table(layers: list[dict[str, Any]]) -> list[str]:
    columns = ["layer", "kind", "T", "p", "d", "ghost 2T²", "instantiate pd", "choice"]
    columns += ["measured"] if layers and "measured" in layers[0] else []
    rows = []
    for number, layer in enumerate(layers, 1):
        name = f"{number:3} {layer['name']}" + (f" (= {layer['tied']})" if layer["tied"] else "")
        kind = layer["kind"] + (f" / {layer['groups']}" if layer["groups"] > 1 else "")
        sizes = [f"{layer[key]:,}" for key in ("T", "p", "d")]
        costs_ = [short(layer[key]) for key in ("ghost", "instantiation")]
        row = [name, kind, *sizes, *costs_, layer["choice"]]
        rows.append(row + ([layer["measured"]] if "measured" in layer else []))
    return _aligned(columns, rows, left=(0, 1, 7, 8))


def _cost_table(rows: list[dict[str, Any]]) -> list[str]:
    relative = "/ non-DP"
    columns = ["implementation"] + [
        x for key in ("time", "printed", "space", "printed") for x in (key, relative)
    ]
    table = []
    for row in rows:
        cells = [row["implementation"]]
        for key in ("time", "printed_time", "space", "printed_space"):
            value = row[key]
            cells += ["-", "-"] if value is None else [short(value), f"{row[f'{key}_relative']:.3f}"]
        table.append(cells)
    return ["  " + line for line in _aligned(columns, table, left=(0,))]


def _aligned(columns: list[str], rows: list[list[str]], left: tuple[int, ...]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [columns, *rows]
    ]


def _examples(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"\nnot listed, though matrices: {names[0]}{more} (json lists them all)"


def _kept(layers: list[Layer], arguments: ExplainArguments) -> list[Layer]:
    patterns = [pattern for pattern in (arguments.leave_out or "").split("|") if pattern]
    for pattern in patterns:
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            names = ", ".join(layer.name for layer in layers[:3])
            raise UserError(f"leave_out={pattern} fits no layer; they are named {names}, …")
    kept = [layer for layer in layers if not any(fnmatchcase(layer.name, pattern) for pattern in patterns)]
    if not kept:
        raise UserError(f"no layer is left of model={arguments.network}")
    return kept


def _refusals(network: Network) -> list[str]:
    found: dict[str, list[str]] = {}
    for name, module in network.model.named_modules():
        if reason := refusal(module):
            found.setdefault(f"{type(module).__name__}: {reason}", []).append(name)
    return [
        f"{len(names)} modules ({names[0]}, …) cannot be clipped, {reason}" for reason, names in found.items()
    ]


def _measure(layers: list[Layer], arguments: ExplainArguments) -> list[str]:
    """The fastest norm method of each layer on this machine, one by one; equal shapes are measured once."""
    methods = Methods(arguments.memory_cap_mib << 20)
    found: list[str] = []
    with torch.device(arguments.device):
        for layer in layers:
            if layer.sample is None:
                found.append("loop")
                continue
            per_example = layer.sample(arguments.batch)
            found.append(methods.choose(per_example, "measured"))
    return found


def _check(arguments: ExplainArguments) -> None:
    if not arguments.network:
        raise UserError("not given: model=… (gpt2, roberta-large, resnet18, vit_base, a folder, …)")
    if arguments.network in ("hf", "causal_lm") and not arguments.model.id:
        raise UserError("not given: model.id=… (a folder with config.json, or a hub id)")
    if arguments.network == "custom" and not arguments.model.factory:
        raise UserError("not given: model.factory=… (package.module:function)")
    for key, choices in (("format", _FORMATS), ("choice", _CHOICES)):
        value = getattr(arguments, key)
        if value not in choices:
            raise UserError(f"{key}={value} is not a choice{did_you_mean(value, choices)}")
    for key in ("batch", "memory_cap_mib"):
        if (value := getattr(arguments, key)) < 1:
            raise UserError(f"{key}={value} must be 1 or larger")
    try:
        torch.empty(0, device=arguments.device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={arguments.device}: {first_line(error)}") from error
    if arguments.choice == "measured" and torch.device(arguments.device).type == "meta":
        raise UserError("device=meta computes nothing that could be measured: give cpu or cuda")


def _refuse_unread(overrides: Iterable[str]) -> None:
    """Refuse settings of a model that change no layer."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key.startswith("model.") and key.split(".")[1] not in _SHAPES:
            raise UserError(
                f"{key}={value} does nothing here: every layer is explained, with the network's own head, and no weights are "
                "read; leave it out (leave_out=PATTERN leaves layers out)"
            )


@hydra_entry("explain", ExplainArguments)
def main(arguments: ExplainArguments) -> None:
    """Print how each layer of a model is clipped best, and what every implementation of private training costs on it."""
    _refuse_unread(HydraConfig.get().overrides.task)
    result = explain(arguments)
    print_out(json.dumps(result) if arguments.format == "json" else as_text(result))


if __name__ == "__main__":
    main()
