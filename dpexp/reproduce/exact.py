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
from dpexp.reproduce.documents import Document, Rows, Section, as_rows, block, page
from dpexp.reproduce.paper import Cell, listed, paper_table, printed

_BESIDE = (
    "network", "b", "L, MiB", "non-private, MiB", "formula, MiB", "mini-batch clipping, MiB", "measured / formula",
    "per-layer clipping, MiB", "measured / non-private", "record",
)  # fmt: skip

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
    counted = [row["agrees"] for row in rows]
    beside = Section(
        "Beside measured memory", (listed("pages")["memory-monir"]["beside"],), _BESIDE, _beside(measured)
    )
    return page("memory-monir", [block(rows), beside], agree=counted.count("yes"), compared=len(counted))


def _beside(measured: Sequence[Measurement]) -> Rows:
    """A row for each network of a benchmark with both ways to clip: (b - 1)·L more than without privacy, and nothing more."""
    lines = []
    for one in measured:
        found = {
            (row["workload"], row["method"]): row for row in one.content["rows"] if row["status"] == "ok"
        }
        for (workload, method), row in found.items():
            plain, layers = found.get((workload, "nonprivate")), found.get((workload, "auto/layer"))
            if method != "opacus:flat" or plain is None or layers is None:
                continue
            size, b = row["trainable"] * 4 / 2**20, row["batch_size"]
            formula = plain["peak_mib"] + (b - 1) * size
            lines.append((
                workload, f"{b:g}", f"{size:.0f}", *(f"{x:.0f}" for x in (plain["peak_mib"], formula, row["peak_mib"])),
                f"{row['peak_mib'] / formula:.2f}", f"{layers['peak_mib']:.0f}",
                f"{layers['peak_mib'] / plain['peak_mib']:.2f}", one.path,
            ))  # fmt: skip
    return as_rows(_BESIDE, lines)


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
_CLIPPING = (
    "clipping", "devices", "MB to a neighbour", "KB of norms", "GB to the host and back", "MB of sums to replicas", "waits",
    "step, s", "step / per device", "He et al. say",
)  # fmt: skip


def communication_he() -> Document:
    """Section 4 of He et al.: per-device clipping beside flat clipping in its four ways, for each number of devices."""
    a, lines = Assumptions(), []
    for devices in DEVICES:
        base = cost("per device", devices, a).seconds
        for way, claim in zip(WAYS, CLAIMS, strict=True):
            one = cost(way, devices, a)
            lines.append((
                way, devices, f"{one.between / 1e6:.0f}", f"{one.norms / 1e3:.2f}", f"{one.host / 1e9:.1f}",
                f"{one.sums / 1e6:.0f}", one.waits, f"{one.seconds:.1f}", f"{one.seconds / base:.3f}", claim,
            ))  # fmt: skip
    steps = round(EPOCHS * SAMSUM / a.batch)
    return page(
        "communication-he", [block(as_rows(_CLIPPING, lines))], a=a, billions=a.parameters / 1e9, tflops=a.flops / 1e12,
        between=a.between / 1e9, to_host=a.to_host / 1e9, latency=a.latency * 1e6, epochs=EPOCHS, examples=SAMSUM, steps=steps,
        hours=steps * cost("per device", a.stages, a).seconds / 3600,
        full=2 * a.batch * a.parameters / a.stages * a.gradient / 1e12,
    )  # fmt: skip


# --- Monir et al., section 6.2 ---

MNIST = {"N": 60000, "B": 512, "epochs": 30, "delta": 1e-5, "C": 0.2}
TARGETS = (1.0, 2.0, 3.0)
# 30 epochs of 60000 / 512 batches: inferred, the paper gives neither B nor epochs
MNIST_STEPS = 3516


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
        rate, sigma = MNIST["B"] / MNIST["N"], sigma * MNIST["C"] / values[group]
    return epsilon(composed([(step_event(rate, [sigma]), steps)]), MNIST["delta"], "rdp")


def individual_monir() -> Document:
    """Section 6.2, Table 9 case 1: what the printed rates and thresholds spend."""
    rows = []
    for kind, letter in (("sampling", "q"), ("scaling", "C")):
        values, sigma = _printed(kind)
        for group, (value, target) in enumerate(zip(values, TARGETS, strict=True)):
            spent, note = individual_epsilon(kind, group, MNIST_STEPS), f"{letter} = {value}, σ = {sigma}"
            rows.append(
                _number_row(f"{kind}, group {group + 1}", "ε at the end", f"{target:.1f}", spent, note)
            )
    return _compared("individual-monir", rows, steps=MNIST_STEPS)


# --- Print beside ours ---

_COMPARED = ("row", "column", "paper", "ours", "agrees", "note")


def _compared(name: str, rows: Rows, **values: Any) -> Document:
    counted = [row["agrees"] for row in rows if row["agrees"]]
    return page(name, [block(rows)], agree=counted.count("yes"), compared=len(counted), **values)


def _row(cell: Cell, ours: str, note: str = "") -> dict[str, str]:
    """Print beside ours; what differs in form alone is read as equal: ``≈``, ``O(…)`` with its constant spelt out."""
    value = cell.value
    simple = value.replace("≈ ", "").replace("O(BT²)", "2BT²(p+d)")
    plain = ours.partition(" + 2BT²(p+d)")[0] if value.startswith("≈") else ours
    agrees = _yes(simple == plain or value == ours) if value and ours else ""
    return dict(zip(_COMPARED, (cell.row, cell.column, value or "-", ours, agrees, note), strict=True))


def _number_row(row: str, column: str, paper: str, ours: float, note: str) -> dict[str, str]:
    """Agrees where ours, rounded as in print, is what is printed; ours is shown with two digits more."""
    digits = len(paper.partition(".")[2])
    agrees = _yes(f"{ours:.{digits}f}" == paper)
    shown = f"{ours:g}" if float(ours).is_integer() else f"{ours:.{digits + 2}f}"
    return dict(zip(_COMPARED, (row, column, paper, shown, agrees, note), strict=True))


def _yes(value: bool) -> str:
    return "yes" if value else "no"
