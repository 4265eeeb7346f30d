"""Figures that are arithmetic: accounting (Li et al. 3 left, 7; He et al. 6; Monir et al. 10, 13, 14) and complexity
(Bu et al. 7; Monir et al. 8). What they say, and their axes, are in ``pages.yaml``."""

from __future__ import annotations

from itertools import product
from typing import Any

from matplotlib.ticker import MaxNLocator

from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import composed, step_event
from dpexp.privacy.schedules import CONSTANT, Schedule, factor_counts
from dpexp.privacy.shown import upwards
from dpexp.reproduce import accounting, complexity_tables, exact
from dpexp.reproduce.documents import Document, Rows, Section, Verdict, as_rows, grouped, page
from dpexp.reproduce.drawing import draw
from dpexp.reproduce.drawing import lines as draw_lines
from dpexp.reproduce.paper import listed, paper_table, printed
from dpexp.reproduce.statistics import CONTRADICTS, SUPPORTS

E2E = 42061


def figure_li_3() -> Document:
    """Left: effective noise multiplier σ/q against q, for several numbers of steps."""
    lines = []
    legend = printed("li2022", "figure3", "left, legend", "S").split(", ")
    for steps, power in product(legend, range(-10, 1)):
        rate = 2.0**power
        effective = _sigma(E2E, rate, int(steps), 1 / (2 * E2E)) / rate
        lines.append({"S": steps, "q": f"2^{power}", "rate": f"{rate:.6g}", "σ_eff": f"{effective:.4g}"})
    rows = as_rows(lines)
    curves = [_numbers(own, "σ_eff") for own in _by(rows, "{S}").values()]
    falls = all(curve == sorted(curve, reverse=True) for curve in curves)
    return _figure("figure-li-3", rows, falls, falls="falls" if falls else "does not fall", N=E2E)


def figure_li_7() -> Document:
    """The noise that ε = 3 takes against the square-root rule."""
    (cell,), lines = paper_table("li2022", "figure7"), []
    examples, epochs, delta = (float(cell.settings[name]) for name in ("N", "epochs", "delta"))
    for power in range(-12, 1):
        rate = 2.0**power
        sigma, rule = _sigma(int(examples), rate, round(epochs / rate), delta), float(cell.value) * rate**0.5
        lines.append(
            {"q": f"2^{power}", "rate": f"{rate:.6g}", "σ": f"{sigma:.4g}", "square-root rule": f"{rule:.4g}"}
        )
    rows = as_rows(lines)
    below = [row["q"] for row in rows if float(row["square-root rule"]) < 0.9 * float(row["σ"])]
    return _figure("figure-li-7", rows, bool(below), below=", ".join(below) or "no rate")


def figure_he_6() -> Document:
    """σ_new as the share r of the budget for quantiles grows."""
    setting = next(s for s in accounting.settings_he() if s["model"] == "RoBERTa-base")
    layers, lines = accounting.num_layers(setting["model"]), []
    shares = printed("he2023", "figure6", "SST-2", "budgets r").split(", ")
    for target, share in product((3, 8), shares):
        budget = float(share.removesuffix("%")) / 100
        plan = accounting.plan_of_setting(setting, target, budget)
        sigma, new, sigma_b = plan.sigma(0), plan.sigma_new(0), plan.sigma_b(0, layers)
        lines.append({
            "ε": target, "r": budget, "σ": f"{sigma:.4g}", "σ_new": f"{new:.4g}", "σ_b": f"{sigma_b:.4g}",
            "noise added to gradients": f"{new / sigma - 1:.2%}",
        })  # fmt: skip
    rows = as_rows(lines)
    growth = max(float(r["σ_new"]) / float(r["σ"]) - 1 for r in rows if float(r["r"]) <= 0.1)
    return _figure("figure-he-6", rows, growth < 0.1, growth=growth)


def figure_bu_7() -> Document:
    """Space of the norm, layer by layer."""
    depths = complexity_tables.depth_thresholds()
    holds = all((depth == "none") == network.startswith("vit") for (network, _), depth in depths.items())
    last = "; ".join(f"{network} at {image}: {depth}" for (network, image), depth in depths.items())
    return _figure("figure-bu-7", complexity_tables.figure_7(), holds, last=last)


def figure_monir_8() -> Document:
    """Memory against the batch."""
    batches = (1, *range(10, 101, 10))
    names = ("per-layer clipping", "mini-batch clipping")
    rows = as_rows({"b": b} | dict(zip(names, exact.memory(b), strict=True)) for b in batches)
    _, layer, batch = rows[-1].values()
    holds = [batch, layer] == [cell.value for cell in paper_table("monir2023", "figure8")]
    return _figure("figure-monir-8", rows, holds, batch=batch, layer=layer)


def figure_monir_10() -> Document:
    """ε over the epochs of a run: constant noise and the three decays of the picture."""
    rate, epochs, per_epoch, lines = exact.MNIST_RATE, 100, 117, []
    initial, fixed = (float(cell.value) for cell in paper_table("monir2023", "figure10"))
    rates = listed("pages")["figure-monir-10"]["decays"]
    every = (CONSTANT, *(Schedule(name, **own) for name, own in rates.items()))
    for schedule, epoch in product(every, (1, *range(10, epochs + 1, 10))):
        sigma = fixed if schedule == CONSTANT else initial
        counts = factor_counts(schedule, epoch * per_epoch, epochs * per_epoch, rate)
        event = composed((step_event(rate, [sigma * scale]), count) for scale, count in counts)
        spent = upwards(epsilon(event, 1e-5, "rdp"), ".4g")
        lines.append({"schedule": schedule.name, "σ_0": f"{sigma:g}", "epoch": epoch, "ε": spent})
    rows = as_rows(lines)
    curves = {name: _numbers(own, "ε") for name, own in _by(rows, "{schedule}").items()}
    decays = [curves[name] for name in rates]
    holds = all(own[0] < curves["constant"][0] for own in decays) and curves["time"] == [*map(max, *decays)]
    return _figure("figure-monir-10", rows, then="holds" if holds else "does not hold", decays=rates)


def individual_budgets(kind: str, number: str) -> Document:
    """Figures 13 and 14 of Monir et al.: ε of the groups over the steps."""
    every = exact.MNIST_STEPS // 12
    steps = range(every, exact.MNIST_STEPS + 1, every)
    rows = as_rows(
        {"group": group + 1, "step": step, "ε": upwards(exact.individual_epsilon(kind, group, step), ".4g")}
        for group, step in product(range(3), steps)
    )
    last = [float(row["ε"]) for row in rows if row["step"] == str(exact.MNIST_STEPS)]
    spent = all(abs(ours - float(value)) < 0.05 for ours, value in zip(last, exact.budgets(), strict=True))
    return _figure(
        f"figure-monir-{number}", rows, kind=kind, number=number, have="have" if spent else "have not",
        last=", ".join(f"{value:.2f}" for value in last),
    )  # fmt: skip


def _sigma(examples: int, rate: float, steps: int, delta: float) -> float:
    """Of ε = 3 under RDP."""
    return accounting.plan_of(
        num_examples=examples, expected_batch_size=rate * examples, steps=steps, delta=delta, epsilon=3.0
    ).noise_multiplier


def _numbers(rows: Rows, column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def _by(rows: Rows, form: str) -> dict[str, Rows]:
    """The rows with each text that they make of a form like "{network}, {image}"."""
    return grouped(rows, lambda row: form.format(**row))


def _figure(name: str, rows: Rows, holds: bool = True, **values: Any) -> Document:
    """A figure of all rows, drawn as ``pages.yaml`` says, where ``word`` is the verdict on a claim that holds or not."""
    words = listed("pages")["arithmetic"] | listed("pages")[name]
    (x, x_name, *x_base), (y, y_name, *y_base) = words["x"], words["y"]
    columns, panels = y if isinstance(y, dict) else {}, _by(rows, words.get("panels", ""))

    def plot(axes: Any) -> None:
        for axis, (title, own) in zip(axes, panels.items(), strict=True):
            lines = {label: (own, column) for column, label in columns.items()} or {
                label: (part, y) for label, part in _by(own, words.get("lines", "")).items()
            }
            series = [(label, _numbers(part, x), _numbers(part, column)) for label, (part, column) in lines.items()]  # fmt: skip
            draw_lines(axis, series)
            for base, scale in ((x_base, axis.set_xscale), (y_base, axis.set_yscale)):
                if base:
                    scale("log", base=base[0])
            if not x_base:
                axis.xaxis.set_major_locator(MaxNLocator("auto", integer=max(_numbers(own, x)) > 1))
            axis.set_xlabel(x_name)
            axis.set_title(title, fontsize=9)
        axes[0].set_ylabel(y_name)

    said = words["said"].format(word=SUPPORTS if holds else CONTRADICTS, **values)
    # in short: what follows the verdict, one sentence
    verdict = Verdict("", said, said.partition(": ")[2].partition(". ")[0])
    svg = draw(plot, len(panels), (3.6, 3.2) if len(panels) > 1 else (5.0, 3.6))
    return page(name, [Section(rows=rows, verdicts=(verdict,))], svg=svg, words=words, **values)
