"""Grids in miniature, data that stand in for the papers', and cells where a paper gives the noise instead of ε."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from dpexp.audit import AuditConfig
from dpexp.config import RunConfig, compose
from dpexp.reproduce import catalogue, tables
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.cells import Claim
from dpexp.reproduce.documents import Document
from dpexp.reproduce.paper import paper_table
from dpexp.reproduce.records import Record, agrees, load
from tests.reproduce.samples import run_of, summary, write

SEEDS = (0, 1, 2)
PROGRAMS = {"train": RunConfig, "audit": AuditConfig}
MNIST = {"task": "mnist", "model": "cnn_papernot", "epsilon": 3.0}


def _grid(sign: float = 1.0, seeds: tuple[int, ...] = SEEDS) -> list[dict]:
    """The best learning rate is inside the grid."""
    return [
        summary(
            "flat", seed, 0.7 + sign * 0.02 * math.log2(size / 128) + gain + 1e-3 * seed,
            lr=lr, batch_size=size, delta="half_over_n", **MNIST,
        )
        for lr, gain in ((1e-3, 0.0), (4e-3, 0.04), (1.6e-2, 0.03)) for size in (128, 512, 2048) for seed in seeds
    ]  # fmt: skip


def _figure(results: Path, *runs: dict) -> Document:
    write(results / "runs", *runs)
    return Context(results).document("figure-li-2")


def _table(table: str, folder: Path, *runs: dict, paper: str = "he2023") -> Document:
    return tables.build(paper, table, load(write(folder, *runs)))


def test_a_grid_in_miniature_is_a_block_and_a_picture_of_its_own(tmp_path: Path):
    document = _figure(tmp_path, *_grid())
    block = document.sections[0]
    assert block.heading == "scale=small, in miniature on mnist"
    assert len(block.rows) == 9
    assert (block.rows[0]["row"], block.rows[0]["column"]) == ("lr = 0.016", "B = 128")
    assert (block.rows[0]["ours"], block.rows[0]["n"]) == ("73.10 ± 0.10", "3")
    assert "paper" not in block.columns
    assert "difference" not in block.columns
    assert "ours, scale=small, in miniature on mnist" in document.svg
    assert "62.94" in document.svg  # the paper's beside it
    assert document.status == "small 9 cells in miniature on mnist"
    assert all("n" not in row for section in document.sections[1:] for row in section.rows)


@pytest.mark.parametrize(
    ("sign", "seeds", "word"), [(1, SEEDS, "supports"), (-1, SEEDS, "contradicts"), (1, (0,), "cannot tell")]
)
def test_its_verdict_comes_from_seeds(sign: float, seeds: tuple[int, ...], word: str, tmp_path: Path):
    document = _figure(tmp_path, *_grid(sign, seeds))
    assert document.sections[0].paragraphs[1].startswith(f"**{word}")
    assert f"in miniature on mnist: {word}" in document.paragraphs[1]


@pytest.mark.parametrize(("slope", "word"), [(-1, "supports"), (1, "contradicts")])
def test_small_thresholds_are_to_be_best(slope: float, word: str, tmp_path: Path):
    """Li et al., Figure 4: each column at its best learning rate, the smallest beside the largest."""
    runs = []
    for number, threshold in enumerate((0.05, 0.5, 8.0)):
        for lr, less in ((2.5e-3, 0.1), (1e-2, 0.0), (4e-2, 0.1)):
            for seed in SEEDS:
                accuracy = 0.7 + slope * 0.02 * number - less + 1e-3 * seed
                run = summary(
                    "flat",
                    seed,
                    accuracy,
                    lr=lr,
                    clip_norm=threshold,
                    epsilon=3.0,
                    epochs=1.0,
                    batch_size=1024,
                )
                run["details"]["config"]["model"] |= {"head": "linear", "frozen_features": True}
                runs.append(run)
    document = tables.build("li2022", "figure4", load(write(tmp_path, *runs)))
    block = document.sections[0]
    part = "for a part of the claim, that the largest is worse than the smallest"
    assert f"in miniature on sst2: {word} {part} (1 of 1 pairs" in document.paragraphs[1]
    assert "lr = 0.01, C = 0.05 (n = 3, best of 3) minus lr = 0.01, C = 8" in block.paragraphs[3]
    (command, *_) = tables.build("li2022", "figure4", []).commands("small")
    run = run_of(command)
    assert (run.model.frozen_features, run.model.head, run.privacy.epsilon) == (True, "linear", 3.0)
    assert (run.optim.name, run.optim.batch_size, run.optim.epochs) == ("adam", 1024, 1)


def test_a_grid_that_was_not_run_names_its_sweep_and_run_1_runs_it(tmp_path: Path):
    document = _figure(tmp_path)
    (command, *_) = document.commands("small")
    assert f"`{command}`" in document.sections[0].paragraphs[1]
    run = run_of(command)
    where = tables.claims()["li2022", "figure2"].miniature[0]["where"]
    made = {
        name: getattr(getattr(run, name.split(".")[0]), name.split(".")[1]) for name in where if "." in name
    }
    made["clip"] = run.clip.name
    assert made == where
    assert (run.task.name, run.scale.name) == ("mnist", "small")


def test_the_same_grid_gives_the_same_bytes(tmp_path: Path):
    first, second = (_figure(tmp_path / folder, *_grid()) for folder in ("a", "b"))
    assert (first.svg, first.as_csv(), first.as_markdown()) == (
        second.svg,
        second.as_csv(),
        second.as_markdown(),
    )


def _methods(task: str, **settings: object) -> list[dict]:
    accuracy = {"flat": 0.60, "adaptive_perlayer": 0.602, "perlayer": 0.55}
    said = {"task": task, "epsilon": 3.0, "optimizer": "sgd", **settings}
    return [
        summary(clip, seed, value + 1e-3 * seed, **said) for clip, value in accuracy.items() for seed in SEEDS
    ]


def test_other_data_are_never_cifar_10(tmp_path: Path):
    jpeg = _methods("cifar10_jpeg", model="cnn_cifar", title="CIFAR-10 (JPEG q75)")
    document = _table("2", tmp_path, *jpeg, *_methods("mnist", model="cnn_papernot"))
    own, stand_in, mnist, paper = document.sections
    assert (own.rows, own.columns) == ([], ())
    assert "task=cifar10 " in own.paragraphs[0]
    assert stand_in.heading == "scale=small, on cifar10_jpeg instead"
    assert any("Another data set, CIFAR-10 (JPEG q75)" in words for words in stand_in.paragraphs)
    assert (
        "**supports for a part of the claim, 1 of 4 comparisons in print (1 of 1 pairs tested, Welch's t over seeds, level"
        " 0.05)**"
    ) in stand_in.paragraphs
    filled = [row for row in stand_in.rows if "n" in row]
    assert [(row["ours"], row["difference"]) for row in filled] == [("60.1 ± 0.10", ""), ("60.3 ± 0.10", "")]
    assert "task=cifar10_jpeg" in next(
        row["ours"] for row in stand_in.rows if row["ours"].startswith("not run")
    )
    assert (mnist.heading, len(mnist.rows)) == ("scale=small, on mnist instead", 2)
    assert all("n" not in row for row in paper.rows)
    assert document.status == "small 2/8 on cifar10_jpeg, small 2/8 on mnist"


def test_cifar_10_itself_has_its_own_block_and_a_difference(tmp_path: Path):
    document = _table("2", tmp_path, *_methods("cifar10", model="cnn_cifar"))
    assert document.status == "small 2/8"
    row = next(row for row in document.sections[0].rows if "n" in row)
    assert (row["ours"], row["difference"]) == ("60.1 ± 0.10", "-3.0")


def test_a_search_with_another_optimiser_is_no_cell_of_the_table(tmp_path: Path):
    assert _table("2", tmp_path, *_grid()).status == "not run"


def test_run_1_fills_the_first_stand_in():
    document = tables.build("he2023", "1a", [])
    assert document.commands("small")
    assert all("task=cifar10_jpeg" in command for command in document.commands("small"))
    assert all("task=cifar10_jpeg" not in command for command in document.commands("paper"))


def test_where_a_paper_gives_the_noise_the_epsilon_that_came_out_selects(tmp_path: Path):
    said = {
        "task": "mnist",
        "model": "cnn_papernot",
        "scale": "paper",
        "epsilon": None,
        "epochs": None,
        "steps": 677,
    }
    runs = [summary("flat", seed, 0.9, sigma=2.0, spent=1.004, **said) for seed in SEEDS]
    runs += [summary("flat", seed, 0.92, sigma=2.0, spent=0.998, schedule="time", **said) for seed in SEEDS]
    other = summary("adaptive_flat", 0, 0.85, sigma=2.0, spent=1.0, **said)  # printed at 0.83
    rows = _table("figure11", tmp_path, *runs, other, paper="monir2023").rows
    assert {row["row"]: row["ours"] for row in rows if row.get("n")} == {
        "standard DP-SGD": "90.00 ± 0.00",
        "noise magnitude time decay": "92.00 ± 0.00",
    }


@pytest.mark.parametrize("key", tables.claims(), ids="_".join)
def test_what_a_command_composes_is_what_its_cell_selects(key: tuple[str, str]):
    """At paper scale, for one cell of each row: the preset or the settings make the run that the table looks for."""
    rows = {}
    for cell in tables.printed_cells(*key):
        slot = tables.claims()[key].slot(cell, "paper")
        if slot.command:
            rows.setdefault(cell.row, slot)
    for slot in list(rows.values())[:4]:
        words = shlex.split(slot.command)
        program = words[2].removeprefix("dpexp.")
        first_of_each = [word if "=[" in word else word.split(",")[0] for word in words[3:] if word != "-m"]
        run = compose(first_of_each, program, PROGRAMS[program])
        facts = {
            "method": getattr(run, "method", None),
            "task": run.task.name,
            "model": run.model.name,
            "clip": run.clip.name,
            "scale": run.scale.name,
        }
        for name, wanted in slot.where.items():
            if name in ("spent", "epochs"):
                continue  # they come out
            group, _, field = name.partition(".")
            made = facts[name] if name in facts else getattr(getattr(run, group), field)
            assert agrees(made, wanted), (slot.command, name, made, wanted)


def test_shares_are_printed_times_100():
    (cell,) = [c for c in paper_table("li2022", "2") if c.row == "BLEU, ε = 3" and c.column == "full"]
    slot = Claim(stand_ins={"model": {"gpt2": "*"}}).slot(cell, "small")
    run = summary("flat", task="e2e", model="smollm2", epsilon=3.0, delta="half_over_n")
    run["metrics"] = {"bleu": 0.7, "bleu_test": 0.61}
    (filling,) = slot.fillings([Record("x.json", run)])
    assert filling.values == pytest.approx((61.0,))


def test_the_efficiency_page_is_a_target():
    assert "efficiency" in catalogue.resolve(["tables"])


def test_a_schedule_is_compared_with_constant_noise_at_the_same_epsilon(tmp_path: Path):
    said = {
        "task": "mnist",
        "model": "cnn_papernot",
        "scale": "paper",
        "epsilon": None,
        "epochs": None,
        "sigma": 2.0,
    }
    runs = [summary("flat", s, 0.9 + s / 1000, spent=1.0, steps=677, **said) for s in SEEDS]
    runs += [
        summary("flat", s, 0.92 + s / 1000, spent=1.0, steps=441, schedule="time", **said) for s in SEEDS
    ]
    paper = _table("figure11", tmp_path, *runs, paper="monir2023").sections[-1]
    assert paper.paragraphs[0].startswith("**cannot tell: the paper does not state network")
    assert (
        "at what was chosen here: supports for a part of the claim, 1 of 2 comparisons in print (1 of 1 pairs tested"
        in paper.paragraphs[0]
    )
    assert "= +2.00" in paper.paragraphs[1]


def test_a_gain_in_points_is_no_run():
    (cell,) = [c for c in paper_table("monir2023", "figure12") if c.unit == "points"]
    assert Claim().slot(cell, "small").reason.startswith("no run of its own")
