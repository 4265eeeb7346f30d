"""Figures that are arithmetic: accounting (Li et al. 3 left, 7; He et al. 6; Monir et al. 10, 13, 14) and complexity
(Bu et al. 7; Monir et al. 8)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import composed, step_event
from dpexp.privacy.schedules import CONSTANT, Schedule, factor_counts
from dpexp.reproduce import complexity_tables, exact, noise
from dpexp.reproduce.documents import REGENERATE, Document, Rows, Section, Verdict, as_rows, grouped
from dpexp.reproduce.drawing import draw
from dpexp.reproduce.drawing import lines as draw_lines
from dpexp.reproduce.paper import paper_table
from dpexp.reproduce.statistics import CONTRADICTS, SUPPORTS

E2E = 42061
# the legend of Figure 3, left
STEPS = (16, 64, 256, 1024, 4096)
# Figure 6 of He et al.
BUDGETS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.8)
# Figure 10 of Monir et al. prints no decay rates; these are what a public implementation of Yu et al. (2019), whose settings it
# says it takes, has as defaults.
_DECAYS = (
    Schedule("time", decay_rate=0.05),
    Schedule("polynomial", decay_rate=3, period=100, end_ratio=0.2),
    Schedule("exponential", decay_rate=0.01),
)


def figure_li_3() -> Document:
    """Left: effective noise multiplier σ/q against q, for several numbers of steps."""
    lines = []
    for steps, power in product(STEPS, range(-10, 1)):
        rate = 2.0**power
        sigma = noise.plan_of(E2E, rate * E2E, steps, 1 / (2 * E2E), 3.0).noise_multiplier
        lines.append((steps, f"2^{power}", f"{rate:.6g}", f"{sigma / rate:.4g}"))
    rows = as_rows(("S", "q", "rate", "σ_eff"), lines)
    curves = [_numbers(own, "σ_eff") for own in _by(rows, "{S}").values()]
    falls = all(curve == sorted(curve, reverse=True) for curve in curves)
    return _figure("figure-li-3", "Li et al., Figure 3 (left): effective noise multiplier", rows, (
        "At a fixed number of updates S the effective noise multiplier falls as the batch grows.",
        f"{_says(falls)}: σ/q {'falls' if falls else 'does not fall'} with q for every S",
        f"ε = 3 under RDP; N = {E2E} (E2E) and δ = 1/(2N) are assumed, the caption gives neither. The right panel"
        " (signal-to-noise ratio against the final loss) needs training runs.",
    ), Axis("rate", "sampling rate q", 10), Axis("σ_eff", "effective noise multiplier σ/q", 10), lines="S = {S}")  # fmt: skip


def figure_li_7() -> Document:
    """The noise that ε = 3 takes against the square-root rule."""
    lines = []
    for power in range(-12, 1):
        rate = 2.0**power
        sigma = noise.plan_of(50000, rate * 50000, round(50 / rate), 1e-5, 3.0).noise_multiplier
        lines.append((f"2^{power}", f"{rate:.6g}", f"{sigma:.4g}", f"{10.34 * rate**0.5:.4g}"))
    rows = as_rows(("q", "rate", "σ", "square-root rule"), lines)
    ys = {"actual (RDP)": "σ", "10.34 √q": "square-root rule"}
    below = [row["q"] for row in rows if float(row["square-root rule"]) < 0.9 * float(row["σ"])]
    return _figure("figure-li-7", "Li et al., Figure 7: the square-root rule for σ", rows, (
        "σ ≈ c√q underestimates the noise for small sampling rates.",
        f"{_says(bool(below))}: by more than 10% at q = {', '.join(below) or 'no rate'}",
        "ε = 3, δ = 1e-5, N = 50,000, E = 50 as in print; σ under RDP, c = 10.34 as printed.",
    ), Axis("rate", "sampling rate q = B/N", 2), Axis(ys, "noise multiplier σ", 2))  # fmt: skip


def figure_he_6() -> Document:
    """σ_new as the share r of the budget for quantiles grows."""
    setting, layers, lines = noise.FINE_TUNING[0], noise.num_layers("RoBERTa-base"), []
    for target, budget in product((3, 8), BUDGETS):
        plan = setting.plan(target, budget)
        sigma, new = plan.sigma(0), plan.sigma_new(0)
        added = f"{new / sigma - 1:.2%}"
        lines.append(
            (target, f"{budget:g}", f"{sigma:.4g}", f"{new:.4g}", f"{plan.sigma_b(0, layers):.4g}", added)
        )
    rows = as_rows(("ε", "r", "σ", "σ_new", "σ_b", "noise added to gradients"), lines)
    growth = max(float(r["σ_new"]) / float(r["σ"]) - 1 for r in rows if float(r["r"]) <= 0.1)
    return _figure("figure-he-6", "He et al., Figure 6: the price of quantiles, σ_new(r)", rows, (
        "From r = 0.01% up, the share of the budget that pays for quantiles hardly matters.",
        f"{_says(growth < 0.1)} for a part of the claim, as far as arithmetic goes and up to r = 10%: the gradient's noise grows"
        f" by at most {growth:.1%}. Accuracies need the sweep"
        " `python -m dpexp.train sweep=he2023_fig6 task=sst2 clip=adaptive_perlayer scale=small -m`",
        "SST-2, RoBERTa-base (K = 102), B = 1024, E = 20; B is one of {512, 1024, 2048} in the paper.",
    ), Axis("r", "share r of the budget for quantiles", 10), Axis("σ_new", "gradients' noise multiplier σ_new"),
        lines="ε = {ε}")  # fmt: skip


def figure_bu_7() -> Document:
    """Space of the norm, layer by layer."""
    rows, depths = complexity_tables.figure_7(), complexity_tables.thresholds()
    holds = all((d["last layer that instantiates"] == "none") == d["network"].startswith("vit") for d in depths)  # fmt: skip
    said = "; ".join(f"{d['network']} at {d['image']}: {d['last layer that instantiates']}" for d in depths)
    ys = {"ghost norm, 2T²": "ghost", "instantiation, pd": "instantiation"}
    return _figure("figure-bu-7", "Bu et al., Figure 7: space of the per-example norm, layer by layer", rows, (
        "Convolutional networks prefer instantiation at the first layers and the ghost norm below a depth;"
        " transformers prefer the ghost norm everywhere.",
        f"{_says(holds)}. Last layer that instantiates: {said}. The text says 9 at 224 (ResNet18) and 17 at 512; by the"
        " paper's own rule it is 13 (T = 256 and 2T² = 131,072 in conv5_x)",
    ), Axis("layer", "layer"), Axis(ys, "floats, one example", 10), panels="{network}, {image} x {image}")  # fmt: skip


def figure_monir_8() -> Document:
    """Memory against the batch."""
    names = ("per-layer clipping", "mini-batch clipping")
    rows = as_rows(("b", *names), [(b, b + 2, 2 * b + 1) for b in (1, *range(10, 101, 10))])
    layer, batch = (rows[-1][name] for name in names)
    holds = [batch, layer] == [cell.value for cell in paper_table("monir2023", "figure8")]
    return _figure("figure-monir-8", "Monir et al., Figure 8: memory against the batch", rows, (
        "Mini-batch clipping needs twice the memory of per-layer clipping: 201 against 102 at b = 100.",
        f"{_says(holds)}: {batch} against {layer}, bC + (1+b)L and bC + 2L with"
        " L = C = 1 (the factor is two only there; table memory-monir)",
    ), Axis("b", "batch b"), Axis({name: name for name in names}, "memory, units of L = C = 1"))  # fmt: skip


def figure_monir_10() -> Document:
    """ε over the epochs of a run: constant noise and the three decays of the picture."""
    rate, epochs, per_epoch, lines = 512 / 60000, 100, 117, []
    for schedule, epoch in product((CONSTANT, *_DECAYS), (1, *range(10, epochs + 1, 10))):
        sigma = 8.0 if schedule == CONSTANT else 10.0
        counts = factor_counts(schedule, epoch * per_epoch, epochs * per_epoch, rate)
        event = composed((step_event(rate, [sigma * scale]), count) for scale, count in counts)
        lines.append((schedule.name, f"{sigma:g}", epoch, f"{epsilon(event, 1e-5, 'rdp'):.4g}"))
    rows = as_rows(("schedule", "σ_0", "epoch", "ε"), lines)
    spent = {name: _numbers(own, "ε") for name, own in _by(rows, "{schedule}").items()}
    decays = [spent[schedule.name] for schedule in _DECAYS]
    holds = all(own[0] < spent["constant"][0] for own in decays) and spent["time"] == [*map(max, *decays)]
    return _figure("figure-monir-10", "Monir et al., Figure 10: how the budget is spent over time", rows, (
        "Decaying noise spends little at the beginning; time-based decay spends fastest of all.",
        "cannot tell: the paper prints no decay rates, and with those chosen here the claim"
        f" {'holds' if holds else 'does not hold'}. Drawn: σ_0 = 10 and σ = 8"
        " as printed; k = 0.05 (time), 0.01 (exponential), 3 with period 100 and σ_end = 2 (polynomial) are defaults of a"
        " public implementation of Yu et al. (2019)",
        "MNIST, N = 60,000; B = 512 and δ = 1e-5 are assumed (section 6.2 needs them; figure-monir-13).",
    ), Axis("epoch", "epoch"), Axis("ε", "ε (RDP, δ = 1e-5)"), lines="{schedule}")  # fmt: skip


def _groups(kind: str, number: str) -> Document:
    shares = range(exact.MNIST_STEPS // 12, exact.MNIST_STEPS + 1, exact.MNIST_STEPS // 12)
    rows = as_rows(("group", "step", "ε"), [
        (group + 1, step, f"{exact.individual_epsilon(kind, group, step):.4g}") for group in range(3) for step in shares
    ])  # fmt: skip
    last = [float(row["ε"]) for row in rows if row["step"] == str(exact.MNIST_STEPS)]
    spent = all(abs(value - target) < 0.05 for value, target in zip(last, exact.TARGETS, strict=True))
    title = f"Monir et al., Figure {number}: budgets of the groups over time ({kind})"
    return _figure(f"figure-monir-{number}", title, rows, (
        "Every group spends its own budget, and all have spent it at the end of training.",
        "cannot tell: B and T were fitted to the rates, thresholds and noise that the section prints, which in turn"
        f" come from these budgets. With them the groups {'have' if spent else 'have not'} spent their own:"
        f" {', '.join(f'{value:.2f}' for value in last)} at the last step for 1, 2, 3",
        "MNIST, case 1, RDP, δ = 1e-5; B, T and C are inferred (table individual-monir).",
    ), Axis("step", "step"), Axis("ε", "ε of the group"), lines="group {group}")  # fmt: skip


figure_monir_13 = partial(_groups, "sampling", "13")
figure_monir_14 = partial(_groups, "scaling", "14")


def _says(holds: bool) -> str:
    return SUPPORTS if holds else CONTRADICTS


def _numbers(rows: Rows, column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def _by(rows: Rows, form: str) -> dict[str, Rows]:
    """The rows with each text that they make of a form like "{network}, {image}"."""
    return grouped(rows, lambda row: form.format(**row))


class Axis(NamedTuple):
    """A column, or several of which each has a line with a label; the name of the axis; its base where it is logarithmic."""

    column: str | Mapping[str, str]
    name: str
    base: int = 0


def _figure(
    name: str, title: str, rows: Rows, words: tuple[str, ...], x: Axis, y: Axis, *, lines: str = "", panels: str = ""
) -> Document:  # fmt: skip
    """A figure of all rows.

    Args:
        words: the claim; what ours say about it, which begins with a verdict and has no last point; and notes.
        x, y: its axes.
        lines, panels: each text that the rows make of these forms has a line, or a panel, of its own.
    """

    def plot(axes: Any) -> None:
        for axis, (panel, own) in zip(axes, pictures.items(), strict=True):
            parts = _by(own, lines) if isinstance(y.column, str) else dict.fromkeys(y.column, own)
            columns = {} if isinstance(y.column, str) else y.column
            draw_lines(axis, [
                (label, _numbers(part, str(x.column)), _numbers(part, columns.get(label, str(y.column))))
                for label, part in parts.items()
            ])  # fmt: skip
            if x.base:
                axis.set_xscale("log", base=x.base)
            if y.base:
                axis.set_yscale("log", base=y.base)
            axis.set_xlabel(x.name)
            axis.set_title(panel, fontsize=9)
        axes[0].set_ylabel(y.name)

    pictures = _by(rows, panels)
    svg = draw(plot, len(pictures), (3.6, 3.2) if panels else (5.0, 3.6))
    claim, said, *notes = words
    # in short: what follows the verdict, one sentence
    verdict = Verdict("", said, said.partition(": ")[2].partition(". ")[0])
    section = Section("", (), tuple(rows[0]), rows, verdicts=(verdict,))
    foot = f"Data: `results/figures/{{name}}.csv`. {REGENERATE}"
    return Document(name, title, tuple(notes), (section,), svg=svg, foot=foot, claim=claim)
