"""Printed numbers beside what arithmetic alone gives: the modules and implementations of Bu et al. (Tables 2, 3), the memory
ratios of Li et al. (section 4.2), the pipeline of He et al. (section 4), the memory model and the individual budgets of Monir et
al. (sections 4.3, 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from dpexp.complexity.formulas import (
    IMPLEMENTATIONS,
    NON_PRIVATE,
    SPACE,
    TIME,
    Implementation,
    Terms,
    term_sum,
)
from dpexp.complexity.pipeline import WAYS, Assumptions, cost
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import composed, step_event
from dpexp.reproduce.benchmarks import Measurement
from dpexp.reproduce.documents import Document, Rows, Section, agreement, as_rows, page
from dpexp.reproduce.paper import Cell, listed, paper_table, selected

# --- Bu et al., Tables 2 and 3 ---

_NAMES = {"Non-DP": "non-DP", "TF-privacy": "TF-Privacy", "BK (ours)": "BK"}


def table_bu_3() -> Document:
    """Table 3: cost of the six modules, printed and as our engine counts."""
    rows = []
    for cell in paper_table("bu2023", "3"):
        ours = term_sum((TIME if cell.row.startswith("Time") else SPACE)[cell.column.partition(" ")[0]])
        rows.append(_row(cell, ours.replace("BTd + BTp", "BT(p+d)")))
    return _compared("table-bu-3", rows)


def table_bu_2() -> Document:
    """Table 2: what each implementation instantiates, stores and back-propagates, derived from its modules."""
    by_name = {x.name: x for x in IMPLEMENTATIONS}
    cells = paper_table("bu2023", "2")
    used = [by_name[name] for name in dict.fromkeys(_NAMES.get(cell.column, cell.column) for cell in cells)]
    rows = [_row(cell, *_property(cell.row, by_name[_NAMES.get(cell.column, cell.column)])) for cell in cells]
    return _compared("table-bu-2", rows, modules="; ".join(f"{x.name}: {x.modules[0]}" for x in used))


def _property(row: str, implementation: Implementation) -> tuple[str, str]:
    """What Table 2 says in a row, derived, and a note."""
    modules = implementation.modules[0].split()
    loops = implementation.name == "TF-Privacy"
    first_norm = next((i for i, m in enumerate(modules) if m in ("3", "4", "5")), len(modules))
    overhead = Terms(implementation.space.ghost)
    overhead.subtract(NON_PRIVATE.space.ghost)
    more = Terms({k: v for k, v in overhead.items() if v > 0 and k != "pd"})
    words = listed("pages")["table-bu-2"]["cells"]
    return {
        "Instantiating per-sample grad": (_yes("4" in modules or loops), ""),
        "Storing every layer's grad": (_yes("4" in modules and "5" in modules), ""),
        "Instantiating non-DP grad": (_yes("2b" in modules[:first_norm]), ""),
        "Number of back-propagation": ("B" if loops else str(modules.count("2a")), ""),
        "Time Complexity of Clipping": (str(implementation.time), implementation.note),
        "Memory Overhead to non-DP": (term_sum(more), words["overhead"].get(implementation.name, "")),
    }.get(row, ("", words["others"]))


# --- Li et al., section 4.2; Monir et al., section 4.3 ---


def memory_li() -> Document:
    """Section 4.2: memory of the embedding of GPT-2, per-example gradients beside ghost norms."""
    V, p, T = 50257, 768, 1024
    passes = {x.name: x.modules[0].split().count("2a") for x in IMPLEMENTATIONS}
    ours = (10 * V * p * 4 / 1e9, 50_000 * p / (2 * T * T), passes["GhostClip"] - passes["non-DP"])
    section = (cell for cell in paper_table("li2022", "text") if cell.row.startswith("section 4.2, "))
    ten, saved = (cell.value for cell in section)
    return _numbers("memory-li", ours, ten=ten, saved=saved, V=V, p=p, ratio=V * p / (2 * T * T),
                    typical=V * p / (2 * 100 * 100))  # fmt: skip


def memory_monir(measured: Sequence[Measurement]) -> Document:
    """Section 4.3 and Figure 8: the memory model, as printed and exact, and beside what training was measured to take."""
    batch, layer = (cell.value for cell in paper_table("monir2023", "figure8"))
    ratios = [private / plain for plain, private in (memory(100, L) for L in (0.01, 100, 1e9, 1))]
    words = (listed("pages")["memory-monir"]["beside"],)
    beside = Section("Beside measured memory", words, rows=_beside(measured))
    printed = {"batch": batch, "layer": layer, "large": ratios[1]}
    return _numbers("memory-monir", (*reversed(memory(100)), *ratios), beside, **printed)


def memory(b: int, L: float = 1) -> tuple[float, float]:
    """Of per-layer clipping bC + 2L, as without privacy, and of mini-batch clipping bC + (1+b)L; C = 1."""
    return b + 2 * L, b + (1 + b) * L


def _beside(measured: Sequence[Measurement]) -> Rows:
    """A row for each network of a benchmark with both ways to clip: (b - 1)·L more than without privacy, and nothing more."""
    lines = []
    for measurement in measured:
        done = (row for row in measurement.content["rows"] if row["status"] == "ok")
        found = {(row["workload"], row["method"]): row for row in done}
        for (workload, method), row in found.items():
            plain, layers = found.get((workload, "nonprivate")), found.get((workload, "auto/layer"))
            if method != "opacus:flat" or plain is None or layers is None:
                continue
            size, b = row["trainable"] * 4 / 2**20, row["batch_size"]
            peaks = [one["peak_mib"] for one in (plain, row, layers)]
            formula = peaks[0] + (b - 1) * size
            lines.append({
                "network": workload, "b": f"{b:g}", "L, MiB": f"{size:.0f}", "non-private, MiB": f"{peaks[0]:.0f}",
                "formula, MiB": f"{formula:.0f}", "mini-batch clipping, MiB": f"{peaks[1]:.0f}",
                "measured / formula": f"{peaks[1] / formula:.2f}", "per-layer clipping, MiB": f"{peaks[2]:.0f}",
                "measured / non-private": f"{peaks[2] / peaks[0]:.2f}", "record": measurement.path,
            })  # fmt: skip
    return as_rows(lines)


# --- He et al., section 4: the model of `dpexp.complexity.pipeline` at its size, and what they claim in words ---


def communication_he() -> Document:
    """Section 4 of He et al.: per-device clipping beside flat clipping in its four ways, for each number of devices."""
    a, lines, said = Assumptions(), [], listed("pages")["communication-he"]
    for devices in said["devices"]:
        base = cost("per device", devices, a).seconds
        for way in WAYS:
            one = cost(way, devices, a)
            lines.append({
                "clipping": way, "devices": devices, "MB to a neighbour": f"{one.between / 1e6:.0f}",
                "KB of norms": f"{one.norms / 1e3:.2f}", "GB to the host and back": f"{one.host / 1e9:.1f}",
                "MB of sums to replicas": f"{one.sums / 1e6:.0f}", "waits": one.waits, "step, s": f"{one.seconds:.1f}",
                "step / per device": f"{one.seconds / base:.3f}", "He et al. say": said["say"][way],
            })  # fmt: skip
    epochs, examples = said["epochs"], said["examples"]
    steps = round(epochs * examples / a.batch)
    return page(
        "communication-he", [Section(rows=as_rows(lines))], a=a, billions=a.parameters / 1e9, tflops=a.flops / 1e12,
        between=a.between / 1e9, to_host=a.to_host / 1e9, latency=a.latency * 1e6, epochs=epochs, examples=examples, steps=steps,
        hours=steps * cost("per device", a.stages, a).seconds / 3600,
        full=2 * a.batch * a.parameters / a.stages * a.gradient / 1e12,
    )  # fmt: skip


# --- Monir et al., section 6.2 ---

# The paper gives neither B nor epochs nor C: inferred are 512, 30 and this.
MNIST_RATE, MNIST_STEPS, MNIST_C = 512 / 60000, 3516, 0.2
DELTA = 1e-5


def budgets() -> list[str]:
    """ε of each group, Table 9, case 1."""
    return [cell.value for cell in selected("monir2023", "9", "Case 1")]


@cache
def _printed(kind: str) -> tuple[list[float], float]:
    """Of section 6.2: the groups' sampling rates or thresholds, and σ."""
    values, sigma, _ = (c.value for c in paper_table("monir2023", "text") if c.has({"individual": kind}))
    return [float(value) for value in values.split(", ")], float(sigma)


def individual_epsilon(kind: str, group: int, steps: int) -> float:
    """ε of a group (0, 1, 2) of section 6.2 after some steps, RDP, δ = 1e-5: its own q, or its own bound C_g in noise σ·C."""
    values, sigma = _printed(kind)
    if kind == "sampling":
        rate = values[group]
    else:
        rate, sigma = MNIST_RATE, sigma * MNIST_C / values[group]
    return epsilon(composed([(step_event(rate, [sigma]), steps)]), DELTA, "rdp")


def individual_monir() -> Document:
    """Section 6.2, Table 9 case 1: what the printed rates and thresholds spend."""
    rows = []
    for kind, letter in (("sampling", "q"), ("scaling", "C")):
        values, sigma = _printed(kind)
        for group, (value, budget) in enumerate(zip(values, budgets(), strict=True)):
            note = f"{letter} = {value}, σ = {sigma}"
            printed = (f"{kind}, group {group + 1}", "ε at the end", budget, note)
            rows.append(_number_row(printed, individual_epsilon(kind, group, MNIST_STEPS)))
    return _compared("individual-monir", rows, steps=MNIST_STEPS)


# --- Print beside ours ---

_COMPARED = ("row", "column", "paper", "ours", "agrees", "note")


def _compared(name: str, rows: Rows, *more: Section, **values: Any) -> Document:
    return page(name, [Section(rows=rows), *more], **agreement(rows), **values)


def _numbers(name: str, ours: Sequence[float], *more: Section, **values: Any) -> Document:
    """A page of the rows that ``pages.yaml`` has for it, each beside one of our numbers."""
    texts = (tuple(text.format(**values) for text in row) for row in listed("pages")[name]["rows"])
    rows = [_number_row(text, value) for text, value in zip(texts, ours, strict=True)]
    return _compared(name, rows, *more)


def _row(cell: Cell, ours: str, note: str = "") -> dict[str, str]:
    """Print beside ours; what differs in form alone is read as equal: ``≈``, ``O(…)`` with its constant spelt out."""
    value = cell.value
    simple = value.replace("≈ ", "").replace("O(BT²)", "2BT²(p+d)")
    plain = ours.partition(" + 2BT²(p+d)")[0] if value.startswith("≈") else ours
    agrees = _yes(simple == plain or value == ours) if value and ours else ""
    texts = (cell.row, cell.column, value or "-", ours, agrees, note)
    return dict(zip(_COMPARED, texts, strict=True))


def _number_row(printed: tuple[str, ...], ours: float) -> dict[str, str]:
    """Agrees where ours, rounded as in print, is what is printed; ours is shown with two digits more."""
    row, column, paper, note = printed
    digits = len(paper.partition(".")[2])
    shown = f"{ours:g}" if float(ours).is_integer() else f"{ours:.{digits + 2}f}"
    texts = (row, column, paper, shown, _yes(f"{ours:.{digits}f}" == paper), note)
    return dict(zip(_COMPARED, texts, strict=True))


def _yes(value: bool) -> str:
    return "yes" if value else "no"
