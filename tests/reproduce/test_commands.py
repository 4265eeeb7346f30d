"""Commands of cells that were not run: what prints one number twice has one configuration, and it is the project's own preset."""

from __future__ import annotations

import shlex
from collections import defaultdict
from functools import cache
from itertools import combinations

import pytest

from dpexp.config import signature
from dpexp.reproduce import tables
from dpexp.reproduce.cells import Slot
from tests.reproduce.samples import run_of

ABOUT = ("task", "model", "clip", "epsilon", "metric", "subset", "formulation", "init")

STATED = ("epochs", "batch_size", "lr", "clip_norm", "rank", "quantile", "allocation")
# 20 epochs with one number of trained parameters, 10 epochs with another: one number by chance
CHANCE = {"10", "12"}


@cache
def _slots() -> list[Slot]:
    found = []
    for key, claim in tables.claims().items():
        found += [
            slot
            for slot in [claim.slot(cell, "paper") for cell in tables.printed_cells(*key)]
            if slot.command
        ]
    return found


@cache
def _configuration(command: str) -> str:
    return signature(run_of(command))


def _may_be_one_run(one: Slot, two: Slot) -> bool:
    """In two tables, and neither the digits nor the settings that both state differ."""
    tables = {one.cell.table, two.cell.table}
    if len(tables) == 1 or tables == CHANCE:
        return False
    exact = min(one.cell.decimals, two.cell.decimals) > 1
    said, other = one.cell.settings, two.cell.settings
    apart = any(name in said and name in other and said[name] != other[name] for name in STATED)
    return not apart and (not exact or one.cell.number == two.cell.number)


def test_a_number_that_two_tables_print_has_one_configuration():
    same: dict[tuple[str, ...], list[Slot]] = defaultdict(list)
    for slot in _slots():
        said = slot.cell.settings
        if " dpexp.train " in slot.command and slot.cell.number is not None:
            peft = said.get("peft") or "full"
            key = (slot.cell.paper, f"{slot.cell.number:.1f}", peft, *(said.get(name, "") for name in ABOUT))
            same[key].append(slot)
    pairs = [pair for found in same.values() for pair in combinations(found, 2) if _may_be_one_run(*pair)]
    assert len(pairs) >= 20  # He 1a, 2, 11a; 1b, 11b, 3; Li 2, 7
    apart = [
        f"{one.cell.table}, {one.cell.row}, {one.cell.column}: {one.command}\n{two.cell.table}, {two.cell.row}: {two.command}"
        for one, two in pairs
        if one.command != two.command and _configuration(one.command) != _configuration(two.command)
    ]
    assert not apart, "\n\n".join(apart)


@pytest.mark.parametrize(
    ("paper", "table", "row", "column", "words"),
    [
        ("he2023", "1a", "WRN16-4, Fixed flat", "ε = 3", ["experiment=he2023_table2_cifar10_wrn16_4_flat"]),
        ("he2023", "1a", "WRN16-4, Fixed per-layer", "ε = 3", ["clip.clip_norm=0.05", "optim.lr=40"]),
        ("he2023", "11a", "Per-layer clipping, fixed", "ε = 8", ["clip.clip_norm=0.1", "optim.lr=20"]),
        ("li2022", "2", "BLEU, ε = 3", "full", ["experiment=li2022_table7_e2e_gpt2_full"]),
        ("li2022", "3", "GPT-2, ε = 3", "F1", ["experiment=li2022_table3_personachat_full", "model=gpt2"]),
        ("li2022", "3", "HuggingFace (our implementation), non-private", "F1", ["optim.lr=6.25e-5", "optim.batch_size=32"]),
        ("li2022", "figure2", "lr = 10^-3", "B = 16", ["experiment=li2022_table7_e2e_gpt2_full", "optim.batch_size=16"]),
        ("li2022", "9", "ε = 3", "r = 10", ["repetitions=[1,10,100]"]),
    ],
)  # fmt: skip
def test_the_preset_of_the_same_run_is_found(paper: str, table: str, row: str, column: str, words: list[str]):
    (slot,) = [
        s for s in _slots()
        if (s.cell.paper, s.cell.table, s.cell.row, s.cell.column) == (paper, table, row, column)
    ]  # fmt: skip
    assert set(words) <= set(shlex.split(slot.command))
