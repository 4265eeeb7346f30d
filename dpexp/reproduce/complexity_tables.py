"""Tables 1, 4, 5, 8 and Figure 7 of Bu et al. beside what follows from their own rules. Only shapes and arithmetic;
docs/complexity.md has the derivations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import zip_longest

from dpexp.complexity.architectures import build
from dpexp.complexity.formulas import (
    IMPLEMENTATIONS,
    Layer,
    costs,
    depth_threshold,
    norm_space,
    relative_speed,
    views,
)
from dpexp.complexity.shapes import layers_of
from dpexp.reproduce.documents import PART, Document, Rows, Section, Verdict, as_rows, page
from dpexp.reproduce.paper import listed, paper_table, printed, selected
from dpexp.reproduce.statistics import CONTRADICTS, SUPPORTS

NETWORKS = ("resnet18", "resnet34", "resnet50")
# Figure 7: model and image.
FIGURE_7 = (("resnet18", 224), ("resnet18", 512), ("vgg11", 224), ("vit_base", 224))
# of table 8: section 3.1 speaks of B = 32
BATCH = 32


@cache
def _layers(name: str, image: int | None = None, tokens: int | None = None) -> tuple[Layer, ...]:
    network = build(name, image=image, tokens=tokens)
    return tuple(layers_of(network.model, network.run))


def printed_1(network: str) -> str:
    """The complexity relative to non-DP in Table 1; "" for a network that is not there."""
    cells = selected("bu2023", "1", "Relative Speed over non-DP, complexity", model=network.replace("-", "_"))
    return cells[0].value if cells else ""


def printed_4(stage: str, network: str) -> Iterator[str]:
    """2T² and pd of Table 4 as transcribed; "3.7e4 x 4" is [3.7 × 10⁴] × 4."""
    for what in ("ghost norm 2T²", "per-sample grad instantiation pd"):
        text = printed("bu2023", "4", stage, f"{network.removeprefix('resnet')}-layer, {what}")
        yield text if " x " in text else f"{text} x 1"


def printed_totals(network: str) -> list[str]:
    """2T², pd and the mixed minimum of the whole network in Table 4, in millions."""
    totals = [cell for cell in paper_table("bu2023", "4") if cell.unit == "million floats"]
    return [f"{cell.value}M" for cell in totals if cell.settings["network"] == network]


def complexity_bu_table4() -> Document:
    """Table 4: one row for each network and stage, then the totals without and with shortcut convolutions."""
    rows: Rows = []
    said = listed("pages")["complexity-bu-table4"]
    for name in NETWORKS:
        plain = _plain_layers(name, 224)
        for timm_name, stage in said["stages"].items():
            own = [layer for layer in plain if layer.name.partition(".")[0] == timm_name]
            shown = [*printed_4(stage, name)]
            costs_of = ((getattr(layer, kind) for layer in own) for kind in ("ghost", "instantiation"))
            note = said["cells"].get(name, {}).get(stage, "")
            rows.append(_beside(name, stage, shown, [*map(_powers, costs_of, shown)], note))
        for stage, totals, layers, note in (
            ("total", printed_totals(name), plain, "without shortcut convolutions, as printed"),
            ("complete", (), _layers(name, image=224), "with shortcut convolutions"),
        ):
            space = norm_space(layers)
            parts = ((space.ghost, 1), (space.instantiation, 2), (space.mixed, 2))
            ours = [f"{floats / 1e6:.{digits}f}M" for floats, digits in parts]
            rows.append(_beside(name, stage, totals, ours, note))
    return page("complexity-bu-table4", [Section(rows=rows)])


def _beside(
    network: str, stage: str, printed: Sequence[str], ours: Sequence[str], note: str
) -> dict[str, str]:
    row = {"network": network, "stage": stage}
    for what, theirs, own in zip_longest(("2T²", "pd", "mixed"), printed, ours, fillvalue=""):
        row |= {f"printed {what}": theirs, f"our {what}": own}
    return row | {"note": note}


def _powers(values: Iterable[int], printed: str) -> str:
    """Two digits and a power of ten, equal values counted, in the printed order as far as it goes."""
    # "2.0e7" of 20000000
    texts = (re.sub(r"e\+0?", "e", f"{value:.1e}") if value >= 10 else str(value) for value in values)
    counted = Counter(texts)
    shown = [f"{value} x {count}" for value, count in counted.items()]
    order = printed.split(", ")
    return ", ".join(sorted(shown, key=lambda x: order.index(x) if x in order else -1))


def complexity_bu_table5() -> Document:
    """Tables 2 and 5: of every implementation its modules, and the printed and derived formulas of one layer."""
    rows = as_rows(
        {
            "implementation": x.name, "modules": x.ways[0] if len(x.ways) == 1 else f"⟨{', '.join(x.ways)}⟩",
            "printed time": x.printed_time, "derived time": x.time,
            "printed space": x.printed_space, "derived space": x.space, "note": x.note,
        }
        for x in IMPLEMENTATIONS
    )  # fmt: skip
    return page("complexity-bu-table5", [Section(rows=rows)])


def complexity_bu_table8() -> Document:
    """The networks of the paper: space of the norms, and what every implementation costs relative to non-DP."""
    rows: Rows = []
    inputs = listed("pages")["complexity-bu-table8"]["inputs"]
    for size, name in ((size, name) for size, names in inputs.items() for name in names.split()):
        number, kind = size.split()
        for view, layers in views(_layers(name, **{kind: int(number)})).items():
            space = norm_space(layers)
            row = {
                "network": name, "input": size, "layers": view, "instantiation": str(space.instantiation),
                "ghost": str(space.ghost), "mixed": str(space.mixed), "last instantiated": str(depth_threshold(layers)),
                "non-DP / BK": f"{relative_speed(layers):.3f}", "printed": printed_1(name) if "blocks" in view else "",
            }  # fmt: skip
            for cost in costs(layers, BATCH):
                for key in ("time", "space"):
                    row[f"{cost['implementation']} {key}"] = f"{cost[f'{key}_relative']:.3f}"
            rows.append(row)
    shown = tuple(key for key in rows[0] if not key.endswith((" time", " space")))
    sections = [Section(columns=shown, rows=rows)]
    for what in ("time", "space"):
        heading = f"{what.capitalize()} relative to non-DP, derived, B = {BATCH}"
        methods = (f"{x.name} {what}" for x in IMPLEMENTATIONS if x.name not in ("non-DP", "TF-Privacy"))
        sections.append(Section(heading, (), ("network", "layers", *methods), rows, in_csv=False))
    return page("complexity-bu-table8", sections)


def figure_7() -> Rows:
    """Space of the norm of one example, layer by layer, shortcut convolutions left out."""
    own = ("name", "T", "p", "d", "ghost", "instantiation", "choice")
    return as_rows(
        {"network": name, "image": image, "layer": number} | {key: getattr(layer, key) for key in own}
        for name, image in FIGURE_7
        for number, layer in enumerate(_plain_layers(name, image), 1)
    )


def _plain_layers(name: str, image: int) -> list[Layer]:
    return [layer for layer in _layers(name, image=image) if not layer.is_shortcut]


def figure_6() -> Verdict:
    """Figure 6 as far as arithmetic goes: what a training step takes by the ghost norm alone and by the hybrid (Table 5)."""
    space = {
        name: {
            cost["implementation"]: cost["space_relative"] for cost in costs(_layers(name, image=224), BATCH)
        }
        for name in ("vgg11", "beit_large")
    }
    told = {name: (own["BK"], own["BK-MixOpt"]) for name, own in space.items()}
    # fails: a batch that trains without privacy takes more than ten times its memory; alike: to one percent
    (ghost, hybrid), (base, like) = told["vgg11"], told["beit_large"]
    holds = ghost > 10 and hybrid < 2 and abs(base / like - 1) < 0.01
    ours = "; ".join(f"{name}: {ghost:.2f} and {hybrid:.2f}" for name, (ghost, hybrid) in told.items())
    where = "space of a step beside non-private, ghost norms alone and hybrid"
    return Verdict(
        where, f"{SUPPORTS if holds else CONTRADICTS}{PART}memory, by arithmetic at B = {BATCH}", ours
    )


def depth_thresholds() -> dict[tuple[str, int], int | str]:
    """(network, image) -> the last layer that instantiates, of which section 3.3 speaks; "none" where all take the ghost norm."""
    return {key: depth_threshold(_plain_layers(*key)) or "none" for key in FIGURE_7}
