"""Tables of the papers beside records: which record fills which cell, blocks of one scale, commands, verdicts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from dpexp.errors import UserError
from dpexp.reproduce import cells, fillings, pairs, tables
from dpexp.reproduce.cells import Claim
from dpexp.reproduce.documents import Document
from dpexp.reproduce.paper import Cell, paper_table
from dpexp.reproduce.records import Record, load
from tests.reproduce.samples import run_of, summary, write

SEEDS = (0, 1, 2)


def _build(tmp_path: Path, *summaries: dict, table: str = "1b") -> Document:
    return tables.build("he2023", table, load(write(tmp_path / "runs", *summaries)))


def _cell(**settings: str) -> Cell:
    conditions = "; ".join(f"{name}={value}" for name, value in settings.items())
    return Cell("he2023", "99", "row", "column", "90.0", "", "3", "%", conditions)


def test_a_cell_is_filled_by_the_records_of_its_settings(tmp_path: Path):
    # an upper bound is rounded upwards
    runs = [summary("flat", seed, 0.90 + seed / 100, spent=7.991) for seed in SEEDS] + [
        summary("flat", epsilon=3.0),
        summary("perlayer"),
    ]
    document = _build(tmp_path, *runs)
    (row,) = [
        r
        for r in document.rows
        if r["row"].endswith("Fixed flat") and r["column"] == "ε = 8" and r["scale"] == "small"
    ]
    assert (row["ours"], row["n"], row["difference"]) == ("91.0 ± 1.00", "3", "-0.7")
    assert (row["ε"], row["δ"], row["accountant"], row["sampling"]) == ("8.00", "4.9e-06", "rdp", "poisson")
    assert row["record"] == ", ".join(f"results/runs/record{seed}.json" for seed in SEEDS)
    assert document.status == "small 3/4"


def test_the_sweep_of_shares_fills_no_other_table(tmp_path: Path):
    runs = [
        summary("adaptive_perlayer", s, 0.8 + s / 100, epsilon=3.0, share=r)
        for s in SEEDS
        for r in (0.1, 0.4)
    ]
    rows = [row for row in _build(tmp_path, *runs, table="4").rows if row.get("n")]
    assert {(row["n"], row["ours"]) for row in rows} == {("3", "81.00 ± 1.00")}
    assert {row["record"] for row in rows} == {", ".join(f"results/runs/record{2 * s}.json" for s in SEEDS)}


def test_scales_are_never_in_one_block(tmp_path: Path):
    document = _build(tmp_path, summary(), summary(scale="paper", model="roberta_base"))
    assert [section.scale for section in document.sections] == ["small", "paper"]
    for section in document.sections:
        assert {row["scale"] for row in section.rows} == {section.scale}
        assert sum("n" in row for row in section.rows) == 1


def test_a_paper_cell_needs_the_papers_model(tmp_path: Path):
    document = _build(tmp_path, summary(scale="paper", model="bert_base"))
    assert document.status == "not run"


def test_a_demo_run_fills_nothing(tmp_path: Path):
    assert _build(tmp_path, summary(scale="demo")).status == "not run"


def test_two_configurations_are_two_lines(tmp_path: Path):
    rows = _build(tmp_path, summary(lr=1e-3), summary(lr=2e-3, seed=1)).rows
    filled = [row for row in rows if row.get("n")]
    assert [row["n"] for row in filled] == ["1", "1"]
    assert ["lr 0.001" in row["configuration"] for row in filled] == [True, False]


def test_of_several_configurations_the_best_comes_first_and_those_of_one_seed_last(tmp_path: Path):
    runs = [
        summary("flat", seed, accuracy, lr=lr)
        for lr, accuracy in ((1e-3, 0.7), (2e-3, 0.75))
        for seed in SEEDS
    ]
    rows = _build(tmp_path, *runs, summary("flat", 0, 0.9, lr=4e-3)).rows
    assert [row["ours"] for row in rows if row.get("n")] == ["75.0 ± 0.00", "70.0 ± 0.00", "90.0"]
    assert all(row["configuration"].endswith(", C = 1") for row in rows if row.get("n"))


def test_a_verdict_comes_from_seeds_and_a_test(tmp_path: Path):
    flat = [summary("flat", seed, 0.90 + seed / 1000) for seed in SEEDS]
    layer = [summary("perlayer", seed, 0.85 + seed / 1000) for seed in SEEDS]
    small, paper = _build(tmp_path / "a", *flat, *layer).sections
    assert small.paragraphs[1].startswith(
        "**supports for a part of the claim, 1 of 2 comparisons in print (1 of 1 pairs tested"
    )
    assert "= +5.00" in small.paragraphs[2]
    assert paper.paragraphs[0].startswith("**cannot tell: no two of our runs")
    turned = [summary("perlayer", s, 0.90 + s / 1000) for s in SEEDS] + [
        summary("flat", s, 0.85 + s / 1000) for s in SEEDS
    ]
    assert _build(tmp_path / "b", *turned).sections[0].paragraphs[1].startswith("**contradicts")
    assert (
        _build(tmp_path / "c", flat[0], layer[0])
        .sections[0]
        .paragraphs[1]
        .startswith("**cannot tell: fewer than two seeds")
    )


def test_runs_that_differ_in_more_than_what_is_compared_are_not_compared(tmp_path: Path):
    flat = [summary("flat", seed, 0.90 + seed / 1000, epochs=2.0) for seed in SEEDS]
    layer = [summary("perlayer", seed, 0.85 + seed / 1000, epochs=3.0) for seed in SEEDS]
    assert "no two of our runs" in _build(tmp_path, *flat, *layer).sections[0].paragraphs[1]


def test_a_learning_rate_of_its_own_is_allowed(tmp_path: Path):
    flat = [summary("flat", seed, 0.90 + seed / 1000, lr=1e-3) for seed in SEEDS]
    layer = [summary("perlayer", seed, 0.85 + seed / 1000, lr=2e-3) for seed in SEEDS]
    assert _build(tmp_path, *flat, *layer).sections[0].paragraphs[1].startswith("**supports")


def test_a_missing_cell_shows_a_command_that_composes():
    for scale in cells.SHOWN:
        for command in tables.build("he2023", "1b", []).commands(scale)[::3]:
            words = shlex.split(command)
            assert words[:3] == ["python", "-m", "dpexp.train"]
            run = run_of(command)
            assert (run.task.name, run.scale.name) == ("sst2", scale)
            assert run.privacy.epsilon in (3.0, 8.0)


def test_the_command_of_a_cell_makes_records_that_fill_it():
    """Selector and command say the same: what the command composes is what the selector looks for."""
    for cell in paper_table("he2023", "12")[3::6]:
        slot = Claim().slot(cell, "paper")
        run = run_of(slot.command)
        made = {"task": run.task.name, "model": run.model.name, "clip": run.clip.name, "privacy.epsilon": run.privacy.epsilon,
                "privacy.delta": run.privacy.delta, "optim.epochs": run.optim.epochs, "scale": run.scale.name}  # fmt: skip
        assert {key: str(made[key]) for key in slot.where} == {
            k: str(type(made[k])(v)) for k, v in slot.where.items()
        }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task": "nosuch", "clip": "flat", "metric": "accuracy"}, "not built: task=nosuch"),
        ({"task": "sst2", "clip": "nosuch", "metric": "accuracy"}, "not built: clip=nosuch"),
        ({"task": "sst2", "clip": "flat", "metric": "accuracy", "split": "train"}, "not measured"),
        ({"task": "sst2", "metric": "accuracy"}, "no run of its own"),
        ({"task": "cifar10", "metric": "accuracy", "individual": "pate"}, "not built: individual=pate"),
        ({"task": "mnist", "metric": "accuracy", "optim": "nosuch"}, "not built: optim=nosuch"),
        ({"task": "e2e", "clip": "flat", "metric": "epsilon"}, "arithmetic"),
        ({"task": "sst2", "clip": "flat", "metric": "accuracy", "quoted from X": ""}, "quoted from X"),
    ],
)
def test_a_cell_that_no_run_fills_says_why(settings: dict[str, str], reason: str):
    slot = Claim().slot(_cell(**settings), "paper")
    assert slot.reason.startswith(reason)
    assert slot.command == ""
    assert slot.fillings([]) == []


def test_stand_ins():
    cell = _cell(task="sst2", clip="flat", metric="accuracy", model="roberta_base", epochs="20", lr="0.001")
    assert set(Claim().slot(cell, "small").where) == {"task", "clip", "scale"}
    stand_ins = {"model": {"roberta_base": "*"}, "epochs": {"20": "2"}, "lr": "="}
    named = Claim(stand_ins=stand_ins).slot(cell, "small").where
    assert (named["optim.epochs"], named["optim.lr"], "model" in named) == ("2", "0.001", False)
    assert (
        "no stand-in for model=roberta_base"
        in Claim(stand_ins={"model": {"roberta_large": "*"}}).slot(cell, "small").reason
    )
    assert Claim(stand_ins={"epochs": {"20": "2"}}).slot(cell, "paper").where["optim.epochs"] == "20"


def test_a_non_private_cell_asks_for_no_epsilon():
    slot = Claim().slot(_cell(task="sst2", clip="nonprivate", metric="accuracy", delta="1e-5"), "paper")
    assert slot.where["privacy.epsilon"] is None
    assert "privacy.delta" not in slot.where
    assert "privacy=none" in slot.command


def test_every_claim_has_a_transcription_and_every_comparison_finds_its_cells():
    for (paper, table), claim in tables.claims().items():
        printed = tables.printed_cells(paper, table)
        assert printed or claim.miniature, (paper, table)
        for rule in claim.compare:
            for side in ("left", "right"):
                assert any(cell.has(rule[side]) for cell in printed), (paper, table, rule)


def test_a_search_at_fixed_epochs_has_commands_of_fixed_epochs():
    """E2E at scale=small counts steps: with them, a small batch would see fewer examples."""
    cells_ = paper_table("li2022", "figure2")
    for cell in cells_[::9]:
        slot = tables.claims()["li2022", "figure2"].slot(cell, "small")
        run = run_of(slot.command)
        assert (run.optim.steps, run.optim.epochs) == (None, 1.0)


def test_a_side_that_was_picked_among_several_says_so_beside_the_verdict(tmp_path: Path):
    flat = [summary("flat", seed, 0.90 + seed / 1000) for seed in SEEDS]
    layer = [
        summary("perlayer", seed, value + seed / 1000, lr=lr)
        for seed in SEEDS
        for lr, value in ((1e-3, 0.85), (2e-3, 0.86))
    ]
    document = _build(tmp_path / "a", *flat, *layer)
    block = document.sections[0]
    assert block.paragraphs[1].endswith("level 0.05, sides picked on these seeds)**")
    assert block.paragraphs[2] == pairs.SELECTED
    assert "lr 0.001: Fixed flat (n = 3) minus" in block.paragraphs[3]
    assert "Fixed per-layer (n = 3, best of 2) = +4.00" in block.paragraphs[3]
    assert "sides picked on these seeds" in document.paragraphs[1]
    told = [summary("flat", seed, 0.90 + seed / 1000, trials=4) for seed in SEEDS]  # its others were not kept
    assert "(n = 3, best of 4) minus" in _build(tmp_path / "b", *told, *layer).sections[0].paragraphs[3]


def test_a_search_that_is_not_finished_forbids_a_verdict_against_its_side(tmp_path: Path):
    """Flat is to beat per-layer. One seed of another learning rate did better than the side that has three."""
    high = [summary("flat", seed, 0.90 + seed / 1000) for seed in SEEDS]
    low = [summary("perlayer", seed, 0.85 + seed / 1000) for seed in SEEDS]
    better = summary("perlayer", 0, 0.95, lr=5e-3)
    words = _build(tmp_path / "a", *high, *low, better).sections[0].paragraphs
    assert words[1].startswith("**cannot tell (1 of 1 pairs tested")
    assert "the search of Fixed per-layer is not finished" in words[3]
    assert "lr 0.005, has 95.00 with n = 1: cannot tell" in words[3]
    worse = summary("perlayer", 0, 0.80, lr=5e-3)
    words = _build(tmp_path / "b", *high, *low, worse).sections[0].paragraphs
    assert words[1].startswith("**cannot tell")
    assert "its lr 0.001 is at the edge of 0.001, 0.005: cannot tell" in words[3]
    inside = _build(tmp_path / "d", *high, *low, worse, summary("perlayer", 0, 0.80, lr=2e-4))
    assert inside.sections[0].paragraphs[1].startswith("**supports")
    turned = [summary("flat", s, 0.85 + s / 1000) for s in SEEDS] + [
        summary("perlayer", s, 0.90 + s / 1000) for s in SEEDS
    ]
    rival = summary("flat", 0, 0.95, lr=5e-3)
    assert _build(tmp_path / "c", *turned, rival).sections[0].paragraphs[1].startswith("**cannot tell")
    even_better = summary("perlayer", 0, 0.95, lr=5e-3)  # of the side that is ahead anyway
    assert _build(tmp_path / "d", *turned, even_better).sections[0].paragraphs[1].startswith("**contradicts")
    neither = _build(tmp_path / "e", *high, *low, better, summary("flat", 0, 0.95, lr=5e-3)).sections[0]
    assert neither.paragraphs[1].startswith("**cannot tell: fewer than two seeds on a side, or a search")


def test_a_cell_of_random_weights_is_another_than_that_of_the_pretrained_model():
    """Table 7 of Li et al., full and retrain: their records differ in model.retrain alone, and each fills its own cell."""
    printed = {cell.row: cell for cell in paper_table("li2022", "7") if cell.column == "BLEU"}
    full, retrain = (Claim().slot(printed[f"{row}, ε = 3"], "paper") for row in ("full", "retrain"))
    assert "experiment=li2022_table7_e2e_gpt2_retrain " in retrain.command
    runs = []
    for again in (False, True):
        one = summary("flat", task="e2e", model="gpt2", scale="paper", epsilon=3.0, delta="half_over_n")
        one["details"]["config"]["model"]["retrain"] = again
        one["metrics"] = {"bleu_test": 0.2 if again else 0.6, "bleu": 0.9}
        runs.append(Record(f"{again}.json", one))
    assert [f.values for f in full.fillings(runs)] == [(pytest.approx(60.0),)]
    assert [f.values for f in retrain.fillings(runs)] == [(pytest.approx(20.0),)]


def test_a_claim_without_a_test_says_so():
    document = tables.build("li2022", "3", [])
    assert (
        document.paragraphs[1]
        == "**Our runs.** cannot tell: not run; it takes Persona-Chat's training set, which is not to be had here."
    )


def test_the_two_dev_sets_of_mnli_have_the_names_that_runs_give_them():
    row = {c.column: c for c in paper_table("li2022", "1") if c.row == "full (RoBERTa-base)"}
    run = summary("flat", task="mnli", model="roberta_base", scale="paper", epsilon=3.0, delta="half_over_n")
    one = Record("a.json", run)
    one.summary["metrics"] = {"accuracy": 0.82, "accuracy_mismatched": 0.83}
    for column, value in (("MNLI-m", 82.0), ("MNLI-mm", 83.0)):
        slot = Claim().slot(row[f"ε = 3, {column}"], "paper")
        assert [f.values for f in slot.fillings([one])] == [(pytest.approx(value),)]


@pytest.mark.parametrize(
    ("task", "metric"), [("e2e", "bleu_test"), ("samsum", "bleu_test"), ("mnist", "bleu"), ("sst2", "bleu")]
)
def test_a_cell_about_a_test_set_never_takes_the_dev_set_where_there_are_both(task: str, metric: str):
    assert cells.metric_of(_cell(task=task, metric="bleu", split="test")) == metric
    assert cells.metric_of(_cell(task=task, metric="bleu", split="validation")) == "bleu"
    assert fillings.printed_factor(metric) == 100.0


def test_the_error_of_a_finite_dev_set_stands_in_every_table(tmp_path: Path):
    runs = [summary("flat", seed, 0.80) for seed in SEEDS]
    for run in runs:
        run["data"]["rows"]["dev"] = 872
    (row,) = [row for row in _build(tmp_path, *runs).rows if row.get("n")]
    assert row["dev error"] == "± 1.35"  # sqrt(0.8 * 0.2 / 872)


def test_a_claim_of_which_a_part_is_compared_says_which(tmp_path: Path):
    """He et al., Table 10: that the allocations are close is tested, that global is best is not."""
    runs = []
    for allocation in ("global", "equal_budget"):
        for seed in SEEDS:
            run = summary("adaptive_perlayer", seed, 0.90 + seed / 1000)
            run["details"]["config"]["clip"]["allocation"] = allocation
            runs.append(run)
    said = _build(tmp_path, *runs, table="10").paragraphs[1]
    assert "supports for a part of the claim, that they are close, 1 of 4 comparisons in print (" in said


def test_a_setting_of_a_claim_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match=r"no setting same_run; did you mean same_runs"):
        Claim(same_run=["2"])
