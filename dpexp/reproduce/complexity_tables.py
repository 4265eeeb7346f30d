"""``python -m dpexp.reproduce.complexity_tables``: Tables 1, 4, 5, 8 and Figure 7 of Bu et al. beside what follows from their
own rules. Only shapes and arithmetic; docs/complexity.md has the derivations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from dpexp.reproduce.architectures import build
from dpexp.reproduce.complexity import (
    IMPLEMENTATIONS,
    Layer,
    costs,
    depth_threshold,
    norm_space,
    relative_speed,
    views,
)
from dpexp.reproduce.documents import Document, Rows, Section, table
from dpexp.reproduce.paper import paper_table, printed
from dpexp.reproduce.shapes import layers_of

NETWORKS = ("resnet18", "resnet34", "resnet50")
STAGES = ("conv1", "conv2_x", "conv3_x", "conv4_x", "conv5_x", "linear")


def printed_4(stage: str, network: str) -> tuple[str, str]:
    """(2T², pd) of Table 4 as transcribed; "3.7e4 x 4" is [3.7 × 10⁴] × 4."""
    label = f"{network.removeprefix('resnet')}-layer"
    found = {cell.column: cell.value for cell in paper_table("bu2023", "4") if cell.row == stage}
    pair = found[f"{label}, ghost norm 2T²"], found[f"{label}, per-sample grad instantiation pd"]
    ghost, instantiation = (text if " x " in text else f"{text} x 1" for text in pair)
    return ghost, instantiation


def printed_totals(network: str) -> tuple[str, str, str]:
    """2T², pd and the mixed minimum of the whole network in Table 4, in millions."""
    totals = [cell for cell in paper_table("bu2023", "4") if cell.unit == "million floats"]
    ghost, instantiation, mixed = (f"{c.value}M" for c in totals if c.settings["network"] == network)
    return ghost, instantiation, mixed


# by timm's names
_STAGES = dict(zip(("conv1", "layer1", "layer2", "layer3", "layer4", "fc"), STAGES, strict=True))
_NOTES_4 = {
    ("resnet34", "conv4_x"): "2.6e5 is a slip: 256 · 128 · 9 = 294,912, as for resnet18",
    ("resnet50", "conv5_x"): "its first 1 x 1 convolution still runs at 14 x 14, as in conv3_x and conv4_x;"
    " only so do the rows add to the printed 528M",
}

# Table 1: its row of each network; in parentheses there, the complexity relative to non-DP.
ROWS_1 = {
    "roberta-large": "QQP, RoBERTa-large (355M)",
    "gpt2-large": "E2E, GPT2-large (774M)",
    "beit_large": "CIFAR, BEiT-large (304M)",
}

# Figure 7: model, image, the depth that the text names.
FIGURE_7 = (("resnet18", 224, "9"), ("resnet18", 512, "17"), ("vgg11", 224, ""), ("vit_base", 224, ""))

# The networks that the paper names; tables 8 and 10 are not in the text that we have.
ZOO: tuple[tuple[str, dict[str, int]], ...] = (
    *((name, {"image": 224}) for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")),
    *((name, {"image": 224}) for name in ("vgg11", "vgg13", "vgg16", "vgg19")),
    *((name, {"image": 224}) for name in ("vit_base", "vit_large", "beit_base", "beit_large")),
    *((name, {"tokens": 100}) for name in ("gpt2", "gpt2-medium", "gpt2-large")),
    *((name, {"tokens": 256}) for name in ("roberta-base", "roberta-large")),
)
BATCH = 32  # of table 8: section 3.1 speaks of B = 32


@cache
def _layers(name: str, image: int | None = None, tokens: int | None = None) -> tuple[Layer, ...]:
    network = build(name, image=image, tokens=tokens)
    return tuple(layers_of(network.model, network.run))


def printed_1(network: str) -> str:
    """The complexity relative to non-DP in Table 1; "" for a network that is not there."""
    row = ROWS_1.get(network)
    return printed("bu2023", "1", row, "Relative Speed over non-DP, complexity") if row else ""


def table_4() -> Rows:
    """One row for each network and stage, then the totals without and with shortcut convolutions."""
    rows: Rows = []
    for name in NETWORKS:
        every = _layers(name, image=224)
        plain = [layer for layer in every if not layer.is_shortcut]
        for stage in STAGES:
            own = [layer for layer in plain if _STAGES[layer.name.partition(".")[0]] == stage]
            ghost, instantiation = printed_4(stage, name)
            rows.append(
                {
                    "network": name,
                    "stage": stage,
                    "printed 2T²": ghost,
                    "our 2T²": _powers((layer.ghost for layer in own), ghost),
                    "printed pd": instantiation,
                    "our pd": _powers((layer.instantiation for layer in own), instantiation),
                    "printed mixed": "",
                    "our mixed": "",
                    "note": _NOTES_4.get((name, stage), ""),
                }
            )
        rows.append(
            _total(name, "total", printed_totals(name), plain, "without shortcut convolutions, as printed")
        )
        rows.append(_total(name, "complete", ("", "", ""), every, "with shortcut convolutions"))
    return rows


def _total(
    name: str, stage: str, printed: tuple[str, str, str], layers: Sequence[Layer], note: str
) -> dict[str, str]:
    space = norm_space(layers)
    return {
        "network": name,
        "stage": stage,
        "printed 2T²": printed[0],
        "our 2T²": f"{space.ghost / 1e6:.1f}M",
        "printed pd": printed[1],
        "our pd": f"{space.instantiation / 1e6:.2f}M",
        "printed mixed": printed[2],
        "our mixed": f"{space.mixed / 1e6:.2f}M",
        "note": note,
    }


def _powers(values: Iterable[int], printed: str) -> str:
    """Two digits and a power of ten, equal values counted, in the printed order as far as it goes."""
    counted = Counter(_power(value) for value in values)
    shown = [f"{value} x {count}" for value, count in counted.items()]
    order = printed.split(", ")
    return ", ".join(sorted(shown, key=lambda x: order.index(x) if x in order else -1))


def _power(value: int) -> str:
    if value < 10:
        return str(value)
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


SPACE = (
    "Derived space is the sum of Table 3's modules, the weights and their gradient (2pd) among it. The printed column is no such"
    " sum in any row: it leaves pd out, once without privacy and twice with it, and but for FastGradClip has BTd once too often."
)


def table_5() -> Rows:
    """Every implementation: its modules, and the printed and derived formulas of one layer."""
    rows = []
    for implementation in IMPLEMENTATIONS:
        instantiating, ghost = implementation.modules
        time, space = implementation.printed_time, implementation.printed_space
        rows.append(
            {
                "implementation": implementation.name,
                "modules": instantiating if instantiating == ghost else f"⟨{instantiating}, {ghost}⟩",
                "printed time": str(time) if time else "",
                "derived time": str(implementation.time),
                "printed space": str(space) if space else "",
                "derived space": str(implementation.space),
                "note": implementation.note,
            }
        )
    return rows


def table_8() -> Rows:
    """The networks of the paper: space of the norms, and what every implementation costs relative to non-DP."""
    rows: Rows = []
    for name, size in ZOO:
        for view, layers in views(_layers(name, **size)).items():
            space = norm_space(layers)
            row = {
                "network": name,
                "input": " ".join(f"{value} {key}" for key, value in size.items()),
                "layers": view,
                "instantiation": str(space.instantiation),
                "ghost": str(space.ghost),
                "mixed": str(space.mixed),
                "last instantiated": str(depth_threshold(layers)),
                "non-DP / BK": f"{relative_speed(layers):.3f}",
                "printed": printed_1(name) if "blocks" in view else "",
            }
            for cost in costs(layers, BATCH):
                for key in ("time", "space"):
                    row[f"{cost['implementation']} {key}"] = f"{cost[f'{key}_relative']:.3f}"
            rows.append(row)
    return rows


def figure_7() -> Rows:
    """Space of the norm of one example, layer by layer, shortcut convolutions left out."""
    rows: Rows = []
    for name, image, _ in FIGURE_7:
        for number, layer in enumerate(_figure_layers(name, image), 1):
            rows.append(
                {
                    "network": name,
                    "image": str(image),
                    "layer": str(number),
                    "name": layer.name,
                    **{key: str(getattr(layer, key)) for key in ("T", "p", "d", "ghost", "instantiation")},
                    "choice": layer.choice,
                }
            )
    return rows


def _figure_layers(name: str, image: int) -> list[Layer]:
    return [layer for layer in _layers(name, image=image) if not layer.is_shortcut]


def thresholds() -> Rows:
    """The last layer that instantiates, beside the depth in section 3.3."""
    return [
        {
            "network": name,
            "image": str(image),
            "layers": str(len(layers := _figure_layers(name, image))),
            "printed depth": printed,
            "last layer that instantiates": str(depth_threshold(layers) or "none"),
        }
        for name, image, printed in FIGURE_7
    ]


# Pages.


def as_markdown(rows: Rows, columns: Sequence[str] | None = None) -> str:
    """The rows as a table."""
    return table(list(columns or rows[0]), rows, "---|") + "\n"


_FOOT = "\nRegenerate with `python -m dpexp.reproduce.complexity_tables`. Derivations: docs/complexity.md.\n"


def _page(name: str, title: str, rows: Rows, note: str, body: str, heading: str = "") -> Document:
    """A page whose Markdown is ``body`` below its title (or ``heading``); the site has ``note`` above all rows."""
    section = Section("", (note,), tuple(rows[0]), rows)
    return Document(name, title, "bu", (), (section,), markdown=f"# {heading or title}\n\n{body}{_FOOT}")


def page_4() -> Document:
    """Table 4."""
    rows = table_4()
    note = "Floats; `2.0e7 x 4` is four layers of 2.0 · 10⁷. A layer's norm takes the smaller of the two."
    title = "Bu et al., Table 4: space of per-example norms, one 224 x 224 image"
    return _page("complexity-bu-table4", title, rows, note, f"{note}\n\n{as_markdown(rows)}")


def page_5() -> Document:
    """Tables 2 and 5."""
    rows = table_5()
    pair = "⟨a, b⟩: a where gradients are instantiated, b where the ghost norm is taken (2T² < pd)."
    body = (
        f"{pair} Modules of Table 3: 1 forward, 2a output gradient, 2b parameter gradient, 3 ghost norm, 4 instantiation, 5"
        f" weighted sum. Empty: not printed.\n\n{SPACE}\n\n{as_markdown(rows)}"
    )
    title = "Bu et al., Tables 2 and 5: one layer, as printed and as derived"
    return _page("complexity-bu-table5", title, rows, f"{pair} {SPACE}", body)


def page_8() -> Document:
    """Whole networks."""
    rows = table_8()
    shown = [key for key in rows[0] if not key.endswith((" time", " space"))]
    methods = [x.name for x in IMPLEMENTATIONS if x.name not in ("non-DP", "TF-Privacy")]
    unseen = "Bu et al. refer to such tables as 8 and 10, which are not in the text that we have"
    body = (
        f"{unseen}; the column `printed` is the complexity in Table 1. Instantiation, ghost and mixed are floats for one example,"
        f" summed over layers, a tied weight once for each use.\n\n{as_markdown(rows, shown)}"
    )
    for what in ("Time", "Space"):
        columns = ["network", "layers", *(f"{name} {what.lower()}" for name in methods)]
        body += f"\n## {what} relative to non-DP, derived, B = {BATCH}\n\n{as_markdown(rows, columns)}"
    title = "Whole networks: space of per-example norms, {}every implementation relative to non-DP"
    note = f"{unseen}. Floats of one example."
    return _page("complexity-bu-table8", title.format(""), rows, note, body, title.format("and "))


def page_7() -> Document:
    """Figure 7."""
    note = "Shortcut convolutions left out, as in the paper."
    body = (
        f"{note} The CSV has every layer.\n\n{as_markdown(thresholds())}\nAt 512 x 512 the text says 17. The rule says 13:"
        " conv5_x has T = 256 and 2T² = 131,072, less than the 1,179,648 weights of its first layer.\n"
    )
    title = "Bu et al., Figure 7: from which depth on the ghost norm takes less space"
    return _page("complexity-bu-figure7", title, figure_7(), note, body)


PAGES: dict[str, Callable[[], Document]] = {
    "complexity-bu-table4": page_4,
    "complexity-bu-table5": page_5,
    "complexity-bu-table8": page_8,
    "complexity-bu-figure7": page_7,
}


def main(folder: Path) -> None:
    """Write the pages into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(page().as_markdown(), encoding="utf-8")
        (folder / f"{name}.csv").write_text(page().as_csv(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results/tables"))
