"""What clipping costs and what noise costs: accuracy against the threshold, with noise and without it, and thresholds that adapt.

It is the question of He et al. (section 3) about fixed and adaptive thresholds, on a head that is trained in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpexp.reproduce import cells
from dpexp.reproduce.cells import Filling
from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.drawing import COLOURS, MARKERS, draw
from dpexp.reproduce.pairs import Choice, Pair, compared, line
from dpexp.reproduce.records import Record, by_configuration
from dpexp.reproduce.statistics import compare, mean_std

NAME = "figure-thresholds"
LR = 0.01
HEADS = {"linear": "with a bias", "unbiased": "without a bias"}
NOISE: dict[str, dict[str, Any]] = {
    "ε = 3": {"privacy.epsilon": 3},
    "no noise": {"privacy.epsilon": None, "privacy.noise_multiplier": 0},
}
WHERE = {
    "task": "sst2", "scale": "small", "model": "minilm", "model.frozen_features": True, "optim.name": "adam",
    "optim.batch_size": 1024, "optim.epochs": 1, "optim.lr": LR,
}  # fmt: skip
CLIPS = ("flat", "adaptive_flat")
_COMMON = (
    "task=sst2 scale=small peft=head model.trainable=all model.pooling=mean model.head=linear,unbiased model.frozen_features=true"
    f" model.dropout=0 optim.batch_size=1024 optim.epochs=1 optim.lr={LR:g} seed=0,1,2 -m"
)
COMMANDS = tuple(
    f"python -m dpexp.train {clip} {privacy} {_COMMON}"
    for clip in ("clip=flat clip.clip_norm=0.05,0.2,0.5,2,8", "clip=adaptive_flat")
    for privacy in ("privacy=eps3", "privacy=noise privacy.noise_multiplier=0")
)
COLUMNS = (
    "head", "noise", "threshold", "ours", "n", "dev error", "loss", "configuration", "ε", "δ", "accountant", "hardware", "record",
)  # fmt: skip
_Runs = Mapping[tuple[str, str, float | None], Filling]


def document(records: Sequence[Record]) -> Document:
    """A block and a panel for each head."""
    found = _fillings(records)
    sections = []
    for head, named in HEADS.items():
        own = {key: filling for key, filling in found.items() if key[0] == head}
        if own:
            said = "\n".join(f"- {line(pair)}" for pair in _pairs(head, own))
            sections.append(Section(f"a head {named}", (said,) if said else (), COLUMNS, _rows(own), "small"))
    todo = "Not run: " + ", ".join(f"`{command}`" for command in COMMANDS)
    words = (
        "How much of what privacy costs is the noise, and how much is the clipping before it? A head on frozen features of"
        f" MiniLM, SST-2, one epoch, Adam at a learning rate of {LR:g}, ε = 3 or the same steps without noise. *adaptive*: one"
        " threshold for all that follows the 75% quantile of the norms.",
        "Loss: of the dev set, the mean over seeds. A gradient that is always clipped to one length makes the head ever surer of"
        " itself: accuracy alone does not show it.",
        f"Regenerate: `python -m dpexp.report {NAME}`.",
    )
    svg, png = draw(lambda axes: _plot(axes, found), len(sections), (4.4, 3.6)) if sections else ("", b"")
    count = sum(len(filling.records) for filling in found.values())
    return Document(
        NAME, "Thresholds: what clipping costs and what noise costs, SST-2", "", words,
        tuple(sections) or (Section("", (todo,), scale="small"),), COLUMNS, svg=svg, png=png,
        status=f"small {count} runs" if count else "not run",
    )  # fmt: skip


def _fillings(records: Sequence[Record]) -> _Runs:
    """(head, noise, C or None where it adapts) -> the configuration of the most seeds."""
    found: dict[tuple[str, str, float | None], Filling] = {}
    for noise, where in NOISE.items():
        for head in HEADS:
            wanted = {**WHERE, **where, "model.head": head, "clip": CLIPS}
            for group in by_configuration(record for record in records if record.matches(wanted)):
                measured = [(r, value) for r in group if (value := r.metric("accuracy")) is not None]
                facts = group[0].facts
                threshold = float(facts["clip.clip_norm"]) if facts["clip"] == "flat" else None
                key = head, noise, threshold
                filling = Filling(
                    tuple(r for r, _ in measured), tuple(100 * value for _, value in measured), "accuracy"
                )
                if measured and (key not in found or len(measured) > len(found[key].values)):
                    found[key] = filling
    return found


def _rows(found: _Runs) -> Rows:
    rows: Rows = []
    for (head, noise, threshold), filling in sorted(found.items(), key=_order):
        losses = [value for r in filling.records if (value := r.metric("loss")) is not None]
        rows.append(
            {"head": head, "noise": noise, "threshold": _named(threshold)}
            | cells.columns(filling, 2)
            | {"loss": f"{mean_std(losses)[0]:.3f}" if losses else ""}
        )
    return rows


def _order(item: tuple[tuple[str, str, float | None], Filling]) -> tuple[str, str, float]:
    (head, noise, threshold), _ = item
    return head, noise, float("inf") if threshold is None else threshold


def _named(threshold: float | None) -> str:
    return "adaptive" if threshold is None else f"C = {threshold:g}"


def _pairs(head: str, found: _Runs) -> list[Pair]:
    """The smallest threshold beside the largest and the adaptive one, under noise and without it."""
    pairs = []
    for noise in NOISE:
        fixed = sorted(c for h, n, c in found if n == noise and c is not None)
        sides: list[tuple[float | None, float | None]] = [(fixed[0], fixed[-1])] if len(fixed) > 1 else []
        if fixed and (head, noise, None) in found:
            sides += [(None, threshold) for threshold in dict.fromkeys((fixed[0], fixed[-1]))]
        for left, right in sides:
            chosen = Choice(found[head, noise, left]), Choice(found[head, noise, right])
            result = compare(chosen[0].filling.values, chosen[1].filling.values, "greater")
            pairs.append(compared(noise, (_named(left), _named(right)), chosen, "greater", 0.0, result))
    return pairs


def _plot(axes: Any, found: _Runs) -> None:
    heads = [head for head in HEADS if any(key[0] == head for key in found)]
    for axis, head in zip(axes, heads, strict=True):
        for number, noise in enumerate(NOISE):
            colour = COLOURS[number]
            fixed = sorted(
                (c, filling) for (h, n, c), filling in found.items() if (h, n) == (head, noise) and c is not None
            )  # fmt: skip
            values = [
                [float(f"{part or 0:.2f}") for part in mean_std(filling.values)] for _, filling in fixed
            ]
            if fixed:
                axis.errorbar(
                    [c for c, _ in fixed], [mean for mean, _ in values], yerr=[std for _, std in values], color=colour,
                    marker=MARKERS[number], markersize=4, capsize=2, label=noise,
                )  # fmt: skip
            if adaptive := found.get((head, noise, None)):
                height = float(f"{mean_std(adaptive.values)[0]:.2f}")
                axis.axhline(height, color=colour, linestyle="--", linewidth=1, label=f"{noise}, adaptive")
        axis.set_xscale("log")
        axis.set_xlabel("threshold C")
        axis.set_title(f"a head {HEADS[head]}", fontsize=9)
    axes[0].set_ylabel("accuracy, %")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
