"""Li et al., Figure 9, the whole grid of Figure 2: a heat map of learning rate and batch size for each task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpexp.reproduce import miniature, pairs
from dpexp.reproduce.documents import Document, Section, Verdict
from dpexp.reproduce.drawing import draw, heat
from dpexp.reproduce.records import Record

NAME = "figure-li-9"
TASKS = {"e2e": "bleu_test", "sst2": "accuracy"}  # Table 4 has a number of epochs for these two
# fixed: that is the claim
_EPOCHS = {
    ("e2e", "paper"): 10,
    ("sst2", "paper"): 3,
    ("e2e", "small"): 1,
    ("sst2", "small"): 2,
}
_PRESETS = {"e2e": "li2022_table7_e2e_gpt2_full", "sst2": "li2022_table1_sst2_roberta_base_full"}
_WHERE = {
    "clip": "flat",
    "peft.name": "full",
    "privacy.epsilon": 3,
    "privacy.delta": "half_over_n",
    "clip.clip_norm": 0.1,
    "optim.lr_schedule": "constant",
}


def figure_li_9(records: Sequence[Record]) -> Document:
    """A block for each scale and task, and a heat map of each that has runs."""
    sections: list[Section] = []
    counts = []
    verdicts: list[Verdict] = []
    for scale in ("paper", "small"):
        for task, metric in TASKS.items():
            section, found = miniature.build(_asked(task, metric, scale), records)
            sections.append(section)
            if section.rows:
                verdicts.append(Verdict(section.heading, pairs.verdict(found), pairs.in_short(found)))
                counts.append(f"{scale} {len(section.rows)}/64 cells on {task}")
    drawn = [section for section in sections if section.rows]
    svg, png = draw(lambda axes: _plot(axes, drawn), len(drawn), (4.6, 3.8)) if drawn else ("", b"")
    return Document(
        NAME, "Li et al., Figure 9: batch size and learning rate at fixed epochs, the whole grid", "li",
        (
            "**Claim.** As Figure 2, of whose grid this is the whole: large batches with large learning rates are best at fixed"
            " epochs.",
            f"**Our runs.** {'; '.join(map(str, verdicts)) or 'cannot tell: not run'}.",
            "The text that we have holds the caption alone, not the numbers. Drawn: learning rates 10^-3 / 2^k, k = 0 to 7, and"
            " batches of 16 to 2048, of which Figure 2 prints the corners; for E2E and SST-2, the tasks in Table 4 (ε = 3,"
            " δ = 1/2N, C = 0.1, no decay, E = 10 and 3).",
            f"Regenerate: `python -m dpexp.report {NAME}`.",
        ),
        tuple(sections), miniature.COLUMNS, svg=svg, png=png, status=", ".join(counts) or "not run",
        verdicts=tuple(verdicts),
    )  # fmt: skip


def _asked(task: str, metric: str, scale: str) -> dict[str, Any]:
    """As an entry "miniature" of ``claims.yaml``."""
    if scale == "paper":
        command = f"python -m dpexp.train sweep=li2022_fig9 experiment={_PRESETS[task]} seed=0,1,2 -m"
        words = (
            "The model is not stated for SST-2; the command has RoBERTa-base."
            if task == "sst2"
            else "GPT-2, as in Figure 2."
        )
    else:
        fixed = f"optim.steps=null optim.epochs={_EPOCHS[task, scale]}"
        command = (
            f"python -m dpexp.train sweep=li2022_fig9 task={task} clip=flat scale=small {fixed} seed=0,1,2 -m"
        )
        words = "A smaller model and fewer epochs than in Table 4; the settings of privacy are the same."
    return {
        "task": task, "metric": metric, "scale": scale, "heading": f"scale={scale}, {task}",
        "where": {**_WHERE, "optim.epochs": _EPOCHS[task, scale]},
        "row": ("lr", "optim.lr"), "column": ("B", "optim.batch_size"), "words": words, "command": command,
    }  # fmt: skip


def _plot(axes: Any, sections: Sequence[Section]) -> None:
    for axis, section in zip(axes, sections, strict=True):
        values = {(row["row"], row["column"]): float(row["ours"].split()[0]) for row in section.rows}
        rows = list(dict.fromkeys(row["row"] for row in section.rows))  # the largest learning rate on top
        columns = sorted({row["column"] for row in section.rows}, key=lambda name: float(name.split()[-1]))
        heat(axis, columns, rows, values, f"{section.heading}: {TASKS[section.heading.split()[-1]]}")
        axis.tick_params(labelsize=6)
        axis.set_xlabel("batch size")
    axes[0].set_ylabel("learning rate")
