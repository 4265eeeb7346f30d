"""The papers' tables of hyper-parameters beside the presets that follow them: printed, in the preset, and whether they agree."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from dpexp.config import compose
from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.paper import Cell, paper_table

NAME = "hyperparameters"
COLUMNS = ("setting", "of", "printed", "preset", "agrees", "command")
# (table, a setting of the cell) -> what composes the run; a table is left out where nothing here follows it.
PRESETS: dict[tuple[str, str, str], dict[str, str]] = {
    ("he2023", "7", "clip"): {
        "adaptive_perlayer": "experiment=he2023_table2_cifar10_wrn16_4_adaptive_perlayer",
        "perlayer": "experiment=he2023_table1a_cifar10_wrn16_4_perlayer",
        "flat": "experiment=he2023_table2_cifar10_wrn16_4_flat",
    },
    ("he2023", "8", "column"): {
        "RoBERTa-base, Adaptive": "experiment=he2023_table3_sst2_roberta_base_adaptive_perlayer",
        "RoBERTa-base, Fixed": "experiment=he2023_table1b_sst2_roberta_base_perlayer",
        "RoBERTa-large, Adaptive": "experiment=he2023_table3_sst2_roberta_large_adaptive_perlayer",
    },
    ("he2023", "9", "task"): {
        "e2e": "experiment=he2023_table5_e2e_gpt2_adaptive_perlayer",
        "dart": "experiment=he2023_table5_dart_gpt2_adaptive_perlayer",
    },
    ("li2022", "5", "peft"): {
        "full": "experiment=li2022_table7_e2e_gpt2_full",
        "prefix": "experiment=li2022_table7_e2e_gpt2_prefix",
        "top2": "experiment=li2022_table7_e2e_gpt2_top2",
    },
    ("li2022", "6", "peft"): {
        "lora": "experiment=li2022_table7_e2e_gpt2_lora",
        "rgp": "experiment=li2022_table7_e2e_gpt2_rgp",
    },
}  # fmt: skip
# The words of a row, up to the first symbol -> a setting.
SETTINGS = {
    "optimizer": "optim.name", "adam (β": "optim.betas", "adam ϵ": "optim.eps", "adam (ϵ)": "optim.eps",
    "weight decay": "optim.weight_decay", "momentum": "optim.momentum", "warm-up": "optim.warmup_ratio",
    "learning rate schedule": "optim.lr_schedule", "learning rate decay": "optim.lr_schedule", "lr decay": "optim.lr_schedule",
    "peak learning rate": "optim.lr", "learning rate": "optim.lr", "batch size": "optim.batch_size", "max epochs": "optim.epochs",
    "epochs": "optim.epochs", "attention dropout": "model.attention_dropout", "dropout": "model.dropout",
    "allocation": "clip.allocation", "init threshold": "clip.init_threshold", "clipping norm": "clip.clip_norm",
    "private quantile": "clip.quantile_budget", "quantile learning": "clip.quantile_lr", "rank": "peft.rank",
    "target quantile": "clip.target_quantile",
}  # fmt: skip
WORDS = {"linear decay": "linear", "yes": "linear", "no": "constant", "decoupled": "adamw"}


def document() -> Document:
    """One block for each table."""
    sections = []
    for paper, table, key in PRESETS:
        found = [_row(cell, PRESETS[paper, table, key], key) for cell in paper_table(paper, table)]
        rows: Rows = [row for row in found if row is not None]
        sections.append(
            Section(f"{'He' if paper == 'he2023' else 'Li'} et al., Table {table}", (), COLUMNS, rows)
        )
    rows = [row for section in sections for row in section.rows]
    yes, told = (sum(row["agrees"] in words for row in rows) for words in (("yes",), ("yes", "no")))
    return Document(
        NAME, "Hyper-parameters: printed, and in the presets", "",
        (
            f"**{yes} of {told} cells that say something about a preset agree.** A set of values in print is the search of the"
            " paper: a preset agrees where its value is in it. Which one was chosen is printed in bold, and lost in our copy.",
            f"Regenerate: `python -m dpexp.report {NAME}`.",
        ),
        tuple(sections), COLUMNS,
    )  # fmt: skip


def _row(cell: Cell, presets: dict[str, str], key: str) -> dict[str, str] | None:
    setting = next((path for word, path in SETTINGS.items() if cell.row.lower().startswith(word)), None)
    if setting is None or not cell.value:
        return None
    row = {"setting": cell.row, "of": cell.column, "printed": cell.value}
    command = presets.get(cell.column if key == "column" else cell.settings.get(key, ""))
    if command is None:
        return row | {"agrees": "no preset"}
    value = _value(command, setting)
    accepted = values(cell.value)
    agrees = "not comparable" if accepted is None else "yes" if _among(value, accepted) else "no"
    return row | {"preset": _said(value), "agrees": agrees, "command": f"`{command}`"}


@cache
def _run(command: str) -> Any:
    return compose([command])


def _value(command: str, setting: str) -> Any:
    value = _run(command)
    for part in setting.split("."):
        value = getattr(value, part)
    return value


def values(printed: str) -> list[Any] | None:
    """What a printed value admits: numbers, pairs, or words; None where it refers to something else.

    `{1, 2, 4} x 10^-4` is three numbers, `1%` is 0.01, `(0.9, 0.98)` is one pair.
    """
    text = printed.strip().lower().removeprefix("equivalent ")
    if match := re.fullmatch(r"\{(.*)\}(?: x (\d+)\^(-?\d+))?", text):
        factor = float(match[2]) ** int(match[3]) if match[2] else 1.0
        parts = [values(part) for part in match[1].split(", ")]
        if any(part is None for part in parts):
            return None
        flat = [value for part in parts for value in part or []]
        return [value * factor if isinstance(value, float) else value for value in flat]
    if match := re.fullmatch(r"\((.*)\)", text):
        return [[float(part) for part in match[1].split(", ")]]
    try:
        return [float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)]
    except ValueError:
        pass
    words = WORDS.get(text, text)
    return [words] if re.fullmatch(r"[a-z0-9_]+", words) else None


def _among(value: Any, accepted: list[Any]) -> bool:
    if isinstance(value, int | float):
        return any(
            isinstance(one, float) and abs(one - value) <= 1e-9 * max(1.0, abs(value)) for one in accepted
        )
    return value in accepted


def _said(value: Any) -> str:
    return (
        ", ".join(map(_said, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
