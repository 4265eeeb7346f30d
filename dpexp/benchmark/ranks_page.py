"""What `dpexp.benchmark.ranks` has measured, as a table, a page and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from dpexp.complexity.pipeline import WAYS, Assumptions, cost
from dpexp.durable import write_atomic
from dpexp.reproduce.documents import Document, Rows, Section, grouped
from dpexp.reproduce.drawing import COLOURS, draw


def _trained(row: dict[str, Any]) -> str:
    return f"LoRA {row['lora']}" if row["lora"] else "all"


def _case(row: dict[str, Any]) -> tuple[int, int]:
    """Of model and texts, what differs between the sizes of one measurement."""
    return row["length"], row["lora"]


def _columns(row: dict[str, Any], base: dict[str, Any]) -> dict[str, str]:
    """One row in words; ``base``: the same runtime without privacy."""
    return {
        "tokens in a text": str(row["length"]), "trained": _trained(row), "runtime": row["runtime"], "clipping": row["method"],
        "step, s": f"{row['wall_s']:.3f}", "noise, s": f"{row['noise_s']:.3f}", "wall time ratio": f"{row['wall_ratio']:.3f}",
        "without noise": f"{(row['wall_s'] - row['noise_s']) / base['wall_s']:.3f}",
        "processor time ratio": f"{row['cpu_ratio']:.3f}",
        "bytes in a step": ", ".join(f"{kind} {count:,}" for kind, count in row["bytes"].items()),
    }  # fmt: skip


def _in_words(rows: list[dict[str, Any]]) -> Rows:
    bases = {(_case(row), row["runtime"]): row for row in rows if row["method"] == "nonprivate"}
    return [_columns(row, bases[_case(row), row["runtime"]]) for row in rows]


def ranks_table(rows: list[dict[str, Any]]) -> Table:
    """Show the rows of `measure_ranks` on a terminal."""
    shown = _in_words(rows)
    table = Table(*shown[0])
    for row in shown:
        table.add_row(*row.values())
    return table


def write_ranks(rows: list[dict[str, Any]], out: Path) -> None:
    """Write OUT.md, the rows in words, and OUT.svg: the measured ratios, and beside them a model of He et al.'s machine."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out.with_suffix(".md"), ranks_page(rows))
    write_atomic(out.with_suffix(".svg"), ranks_plot(rows))


def ranks_page(rows: list[dict[str, Any]]) -> str:
    """Say in Markdown what `measure_ranks` found."""
    models = dict.fromkeys(f"{row['parameters']:,} parameters ({_trained(row)} trained)" for row in rows)
    made = (
        f"Made by `python -m dpexp.bench bench=ranks`: GPT-2 of {' and of '.join(models)}, on {rows[0]['processes']} processes "
        "of one core each. A step is forward, backward, clipping, sums over processes, noise and SGD. Ratios are to the same "
        "runtime without privacy (each process alone with its share, DistributedDataParallel, `fully_shard`, a 1F1B pipeline) on "
        "the same model and texts, medians of turns. The processor's time is that of the slowest process; other programs disturb "
        "it least. Bytes are what all processes hand to others in one step."
    )
    load = max(row["load_average"] for row in rows)
    below = (
        f"Load of the machine at the end of a measurement (number of busy programs): up to {load:.1f}.",
        "The right half of the plot is a model, not a measurement: GPT-3 (175B parameters) in 16 stages on 16 to 512 devices, "
        "with the assumptions of [communication-he](../tables/communication-he.md).",
    )
    sections = Section(rows=_in_words(rows)), Section(paragraphs=below)
    return Document("ranks", "What privacy costs over processes", (made,), sections, foot="").as_markdown()


def ranks_plot(rows: list[dict[str, Any]]) -> str:
    """Draw the processor's time relative to no privacy, and the modelled step of a large pipeline; SVG."""
    private = [row for row in rows if row["method"] != "nonprivate"]
    given = Assumptions()
    devices = [given.stages * 2**k for k in range(6)]

    def plot(axes: Any) -> None:
        left, right = axes
        cases = grouped(private, _case).values()
        height = 0.8 / len(cases)
        for number, (some, color) in enumerate(zip(cases, COLOURS, strict=False)):
            places = [place + height * ((len(cases) - 1) / 2 - number) for place in range(len(some))]
            left.barh(
                places,
                [row["cpu_ratio"] for row in some[::-1]],
                height,
                color=color,
                label=f"texts of {some[0]['length']} tokens, {_trained(some[0])} trained",
            )
            left.set_yticks(range(len(some)), [f"{row['runtime']}: {row['method']}" for row in some[::-1]])
        left.legend()
        left.axvline(1.0, color="0.3", linewidth=0.8)
        left.set_xlabel("processor time of a step, relative to no privacy")
        left.set_title(f"measured, {private[0]['processes']} processes")
        for way in WAYS:
            times = [cost(way, count, given).seconds for count in devices]
            right.plot(devices, times, marker="o", markersize=3, label=way)
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        right.set_xlabel("devices")
        right.set_ylabel("seconds of a step")
        right.set_title("model: GPT-3 in 16 stages, LoRA")
        right.legend()

    return draw(plot, 2)
