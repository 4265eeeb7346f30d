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
from dpexp.reproduce.documents import Document, Rows, Section, as_rows, page
from dpexp.reproduce.paper import Cell, listed, paper_table, printed

# --- Bu et al., Tables 2 and 3 ---

_NAMES = {"Non-DP": "non-DP", "TF-privacy": "TF-Privacy", "BK (ours)": "BK"}
_SCALABLE = "the paper's judgement: follows from the memory overhead, no number of its own"


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
    bk = "the ghost norm takes 2T² of each example; BTpd is what no module has"
    return {
        "Instantiating per-sample grad": (_yes("4" in modules or loops), ""),
        "Storing every layer's grad": (_yes("4" in modules and "5" in modules), ""),
        "Instantiating non-DP grad": (_yes("2b" in modules[:first_norm]), ""),
        "Number of back-propagation": ("B" if loops else str(modules.count("2a")), ""),
        "Time Complexity of Clipping": (str(implementation.time), implementation.note),
        "Memory Overhead to non-DP": (
            term_sum(Terms({k: v for k, v in overhead.items() if v > 0 and k != "pd"})),
            bk if implementation.name == "BK" else "",
        ),
    }.get(row, ("", _SCALABLE))


# --- Li et al., section 4.2; Monir et al., section 4.3 ---


def memory_li() -> Document:
    """Section 4.2: memory of the embedding of GPT-2, per-example gradients beside ghost norms."""
    V, p, T = 50257, 768, 1024
    gigabytes = 10 * V * p * 4 / 1e9
    ratio, rounded, typical = V * p / (2 * T * T), 50_000 * p / (2 * T * T), V * p / (2 * 100 * 100)
    passes = {x.name: x.modules[0].split().count("2a") for x in IMPLEMENTATIONS}
    for_ten = printed(
        "li2022", "text", "section 4.2, footnote 3", "per-example gradients of the embedding for ten examples"
    )
    saved = printed("li2022", "text", "section 4.2, GPT-2 embedding", "memory saved")
    return _compared("memory-li", [
        _number_row("footnote 3", "GB for per-example gradients of the embedding, ten examples, fp32", for_ten, gigabytes,
                    f"10 · {V} · {p} floats"),
        _number_row("section 4.2", "pd / 2T² at T = 1024: the memory saved at least", saved, rounded,
                    f"with the stated d ≈ 50,000 and p = {p}; {ratio:.1f} with d = {V}; {typical:.0f} at the typical T = 100"),
        _number_row("section 4.2", "back-propagations that ghost clipping adds", "1", passes["GhostClip"] - passes["non-DP"],
                    "10/6 of the products of a non-private step (docs/complexity.md)"),
    ])  # fmt: skip


def memory_monir(measured: Sequence[Measurement]) -> Document:
    """Section 4.3 and Figure 8: the memory model, as printed and exact, and beside what training was measured to take."""

    def private(b: float, L: float, C: float) -> float:
        return b * C + (1 + b) * L

    def plain(b: float, L: float, C: float) -> float:
        return b * C + 2 * L

    def ratio(b: float, L: float, C: float) -> float:
        return private(b, L, C) / plain(b, L, C)

    large = ratio(100, 100, 1)
    batch, layer = (cell.value for cell in paper_table("monir2023", "figure8"))
    rows = [
        _number_row("Figure 8", "mini-batch clipping, b = 100, L = C = 1", batch, private(100, 1, 1), "bC + (1+b)L"),
        _number_row("Figure 8", "per-layer clipping, b = 100, L = C = 1", layer, plain(100, 1, 1), "bC + 2L: as without privacy"),
        _number_row("section 4.3", "private / non-private, L/C = 0.01 ≪ b = 100", "1.01", ratio(100, 0.01, 1),
                    "printed as 1 + L/C"),
        _number_row("section 4.3", "private / non-private, L/C = b = 100", "33.3", large,
                    "printed as b/3, it is (2 + b)/3: b/3 for large b alone"),
        _number_row("section 4.3", "private / non-private, L/C = 10⁹ ≫ b = 100", "50.0", ratio(100, 1e9, 1),
                    "printed as b/2, it is (1 + b)/2: b/2 for large b alone"),
        _number_row("section 4.3", "mini-batch / per-layer clipping, b = 100, L = C", "2", ratio(100, 1, 1),
                    f"printed as double; for L = 100 C it is {large:.0f}"),
    ]  # fmt: skip
    words = (listed("pages")["memory-monir"]["beside"],)
    return _compared("memory-monir", rows, Section("Beside measured memory", words, rows=_beside(measured)))


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

EPOCHS, SAMSUM = 5, 14_732
DEVICES = (16, 64, 256, 512)
# of each of WAYS
CLAIMS = (
    "no extra communication (section 4, App. C.1)",
    "(i) 'costly since it forces devices to be idle'",
    "(ii) 'costly due to slow CPU-GPU data transfer'",
    "(iii) 'costly due to performing the extra round of backpropagation'",
    "'does not bypass the complications in the subsequent gradient rescaling step'",
)


def communication_he() -> Document:
    """Section 4 of He et al.: per-device clipping beside flat clipping in its four ways, for each number of devices."""
    a, lines = Assumptions(), []
    for devices in DEVICES:
        base = cost("per device", devices, a).seconds
        for way, claim in zip(WAYS, CLAIMS, strict=True):
            one = cost(way, devices, a)
            lines.append({
                "clipping": way, "devices": devices, "MB to a neighbour": f"{one.between / 1e6:.0f}",
                "KB of norms": f"{one.norms / 1e3:.2f}", "GB to the host and back": f"{one.host / 1e9:.1f}",
                "MB of sums to replicas": f"{one.sums / 1e6:.0f}", "waits": one.waits, "step, s": f"{one.seconds:.1f}",
                "step / per device": f"{one.seconds / base:.3f}", "He et al. say": claim,
            })  # fmt: skip
    steps = round(EPOCHS * SAMSUM / a.batch)
    return page(
        "communication-he", [Section(rows=as_rows(lines))], a=a, billions=a.parameters / 1e9, tflops=a.flops / 1e12,
        between=a.between / 1e9, to_host=a.to_host / 1e9, latency=a.latency * 1e6, epochs=EPOCHS, examples=SAMSUM, steps=steps,
        hours=steps * cost("per device", a.stages, a).seconds / 3600,
        full=2 * a.batch * a.parameters / a.stages * a.gradient / 1e12,
    )  # fmt: skip


# --- Monir et al., section 6.2 ---

# The paper gives neither B nor epochs nor C: inferred are 512, 30 and this.
MNIST_RATE, MNIST_STEPS, MNIST_C = 512 / 60000, 3516, 0.2
DELTA = 1e-5


def budgets() -> list[float]:
    """ε of each group, Table 9, case 1."""
    return [float(cell.value) for cell in paper_table("monir2023", "9") if cell.column == "Case 1"]


@cache
def _printed(kind: str) -> tuple[list[float], float]:
    """Of section 6.2: the groups' sampling rates or thresholds, and σ."""
    row, named = f"section 6.2, MNIST, {kind}", "sampling rates" if kind == "sampling" else "thresholds"
    values = printed("monir2023", "text", row, f"{named} of the groups").split(", ")
    sigma = printed("monir2023", "text", row, f"σ_{kind.replace('ing', 'e')}")
    return [float(value) for value in values], float(sigma)


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
        for group, (value, target) in enumerate(zip(values, budgets(), strict=True)):
            spent, note = individual_epsilon(kind, group, MNIST_STEPS), f"{letter} = {value}, σ = {sigma}"
            rows.append(
                _number_row(f"{kind}, group {group + 1}", "ε at the end", f"{target:.1f}", spent, note)
            )
    return _compared("individual-monir", rows, steps=MNIST_STEPS)


# --- Print beside ours ---


def _compared(name: str, rows: Rows, *more: Section, **values: Any) -> Document:
    counted = [row["agrees"] for row in rows if row["agrees"]]
    return page(
        name, [Section(rows=rows), *more], agree=counted.count("yes"), compared=len(counted), **values
    )


def _row(cell: Cell, ours: str, note: str = "") -> dict[str, str]:
    """Print beside ours; what differs in form alone is read as equal: ``≈``, ``O(…)`` with its constant spelt out."""
    value = cell.value
    simple = value.replace("≈ ", "").replace("O(BT²)", "2BT²(p+d)")
    plain = ours.partition(" + 2BT²(p+d)")[0] if value.startswith("≈") else ours
    agrees = _yes(simple == plain or value == ours) if value and ours else ""
    return _beside_print(cell.row, cell.column, value or "-", ours, agrees, note)


def _number_row(row: str, column: str, paper: str, ours: float, note: str) -> dict[str, str]:
    """Agrees where ours, rounded as in print, is what is printed; ours is shown with two digits more."""
    digits = len(paper.partition(".")[2])
    shown = f"{ours:g}" if float(ours).is_integer() else f"{ours:.{digits + 2}f}"
    return _beside_print(row, column, paper, shown, _yes(f"{ours:.{digits}f}" == paper), note)


def _beside_print(row: str, column: str, paper: str, ours: str, agrees: str, note: str) -> dict[str, str]:
    return {"row": row, "column": column, "paper": paper, "ours": ours, "agrees": agrees, "note": note}


def _yes(value: bool) -> str:
    return "yes" if value else "no"
