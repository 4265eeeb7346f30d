"""What clipping costs and what noise costs: accuracy against the threshold, with noise and without it, and thresholds that adapt.

It is the question of He et al. (section 3) about fixed and adaptive thresholds, on a head that is trained in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import Any

from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.drawing import draw, style
from dpexp.reproduce.fillings import Filling, columns, measured, most_seeds
from dpexp.reproduce.pairs import Choice, Pair, compared
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import mean_std

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
# in the place of a threshold that is fixed
ADAPTIVE = math.inf
_Runs = Mapping[tuple[str, str, float], Filling]


def document(records: Sequence[Record]) -> Document:
    """A block and a panel for each head."""
    found = _fillings(records)
    sections = []
    for head, named in HEADS.items():
        own = {key: filling for key, filling in found.items() if key[0] == head}
        if own:
            said = "\n".join(f"- {pair}" for pair in _pairs(head, own))
            sections.append(Section(f"a head {named}", (said,) if said else (), COLUMNS, _rows(own), "small"))
    todo = "Not run: " + ", ".join(f"`{command}`" for command in COMMANDS)
    words = (
        "How much of what privacy costs is the noise, and how much is the clipping before it? A head on frozen features of"
        f" MiniLM, SST-2, one epoch, Adam at a learning rate of {LR:g}, ε = 3 or the same steps without noise. *adaptive*: one"
        " threshold for all that follows the 75% quantile of the norms.",
        "Loss: of the dev set, the mean over seeds. A gradient that is always clipped to one length makes the head ever surer of"
        " itself: accuracy alone does not show it.",
    )
    svg = draw(lambda axes: _plot(axes, found), len(sections), (4.4, 3.6)) if sections else ""
    count = sum(len(filling.records) for filling in found.values())
    shown = tuple(sections) or (Section("", (todo,), scale="small", commands=COMMANDS),)
    title = "Thresholds: what clipping costs and what noise costs, SST-2"
    return Document(NAME, title, words, shown, COLUMNS, svg, f"small {count} runs" if count else "not run")


def _fillings(records: Sequence[Record]) -> _Runs:
    """(head, noise, C) -> the configuration of the most seeds."""
    found: dict[tuple[str, str, float], Filling] = {}
    for (noise, where), head in product(NOISE.items(), HEADS):
        wanted = {**WHERE, **where, "model.head": head, "clip": CLIPS}
        own = most_seeds(measured((r for r in records if r.matches(wanted)), "accuracy"), _threshold)
        found |= {(head, noise, threshold): filling for threshold, filling in own.items()}
    return found


def _threshold(facts: Mapping[str, Any]) -> float:
    return float(facts["clip.clip_norm"]) if facts["clip"] == "flat" else ADAPTIVE


def _rows(found: _Runs) -> Rows:
    rows: Rows = []
    for (head, noise, threshold), filling in sorted(found.items(), key=itemgetter(0)):
        losses = [value for r in filling.records if (value := r.metric("loss")) is not None]
        named = {"head": head, "noise": noise, "threshold": _named(threshold)}
        loss = f"{mean_std(losses)[0]:.3f}" if losses else ""
        rows.append(named | columns(filling, 2) | {"loss": loss})
    return rows


def _named(threshold: float) -> str:
    return "adaptive" if threshold == ADAPTIVE else f"C = {threshold:g}"


def _fixed(found: _Runs, head: str, noise: str) -> list[float]:
    return sorted(c for h, n, c in found if (h, n) == (head, noise) and c != ADAPTIVE)


def _pairs(head: str, found: _Runs) -> Iterator[Pair]:
    """The smallest threshold beside the largest and the adaptive one, under noise and without it."""
    for noise in NOISE:
        ends = list(dict.fromkeys((fixed[0], fixed[-1]))) if (fixed := _fixed(found, head, noise)) else []
        sides = [(ends[0], ends[1])] if len(ends) > 1 else []
        sides += [(ADAPTIVE, threshold) for threshold in ends if (head, noise, ADAPTIVE) in found]
        for side in sides:
            left, right = ((_named(c), Choice(found[head, noise, c])) for c in side)
            yield compared(noise, left, right, "greater")


def _plot(axes: Any, found: _Runs) -> None:
    heads = [head for head in HEADS if any(key[0] == head for key in found)]
    for axis, head in zip(axes, heads, strict=True):
        for number, noise in enumerate(NOISE):
            looks = style(number)
            if fixed := _fixed(found, head, noise):
                shown = [found[head, noise, c] for c in fixed]
                y = [float(f"{filling.mean:.2f}") for filling in shown]
                error = [float(f"{filling.std or 0:.2f}") for filling in shown]
                axis.errorbar(fixed, y, yerr=error, markersize=4, capsize=2, label=noise, **looks)
            if adaptive := found.get((head, noise, ADAPTIVE)):
                height, label = float(f"{adaptive.mean:.2f}"), f"{noise}, adaptive"
                axis.axhline(height, color=looks["color"], linestyle="--", linewidth=1, label=label)
        axis.set_xscale("log")
        axis.set_xlabel("threshold C")
        axis.set_title(f"a head {HEADS[head]}", fontsize=9)
        axis.sharey(axes[0])
    axes[0].set_ylabel("accuracy, %")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 1.0))
