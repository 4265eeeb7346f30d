"""Figures from curves of runs: what is drawn, from which records, and the verdict of their seeds."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from dpexp.config import conf_dir
from dpexp.reproduce import curves
from dpexp.reproduce.documents import Document
from dpexp.reproduce.paper import selected, targets
from dpexp.reproduce.records import by_configuration, load
from tests.reproduce import samples
from tests.reproduce.samples import summary, write

SEEDS = (0, 1, 2)
CIFAR = {"task": "cifar10_jpeg", "model": "cnn_cifar", "epsilon": 3.0, "title": "CIFAR-10 (JPEG q75)"}


def _build(name: str, tmp_path: Path, *summaries: dict) -> Document:
    return curves.build(name, load(write(tmp_path / "runs", *summaries)))


def _three_ways(
    adaptive: float, flat: float = 0.6, perlayer: float = 0.55, spread: float = 1e-3
) -> list[dict]:
    accuracies = {"adaptive_perlayer": adaptive, "flat": flat, "perlayer": perlayer}
    return [
        summary(clip, seed, value + spread * seed, curves=samples.curves(value + spread * seed), **CIFAR)
        for clip, value in accuracies.items()
        for seed in SEEDS
    ]


def _norms(task: str, growths: tuple[float, ...], **settings: object) -> list[dict]:
    return [
        summary("adaptive_perlayer", seed, task=task, curves=samples.curves(0.6, 8, growth), **settings)
        for seed, growth in enumerate(growths)
    ]


def _says(document: Document) -> str:
    return document.paragraphs[1]


@pytest.mark.parametrize(
    ("adaptive", "word"), [(0.602, "supports"), (0.57, "contradicts"), (0.591, "cannot tell")]
)
def test_figure_3_is_drawn_and_judged_by_its_last_points(adaptive: float, word: str, tmp_path: Path):
    document = _build("figure-he-3", tmp_path, *_three_ways(adaptive))
    assert f"cifar10_jpeg instead: {word}" in _says(document)
    assert document.status == "small 9 runs on cifar10_jpeg"
    assert document.svg.count("(n = 3)") == 3
    assert "cnn_cifar flat" in document.svg
    assert len(document.rows) == 9 * 4


def test_figure_3_of_one_seed_cannot_tell(tmp_path: Path):
    document = _build("figure-he-3", tmp_path, *(s for s in _three_ways(0.602) if s["seed"] == 0))
    assert "cannot tell: fewer than two seeds" in _says(document)
    assert "(n =" not in document.svg


def test_figure_3_compares_within_a_network_alone(tmp_path: Path):
    """A better network that was trained with one of the methods says nothing about the others."""
    better = [summary("flat", seed, 0.9 + 1e-3 * seed, **CIFAR | {"model": "scattering"}) for seed in SEEDS]
    document = _build("figure-he-3", tmp_path, *_three_ways(0.602), *better)
    assert "cifar10_jpeg instead: supports" in _says(document)


def test_two_data_sets_are_two_blocks(tmp_path: Path):
    other = summary("flat", task="cifar10", model="cnn_cifar", curves=samples.curves(0.6))
    document = _build("figure-he-3", tmp_path, *_three_ways(0.6), other)
    headings = [section.heading for section in document.sections]
    assert headings == ["scale=paper", "scale=small, cifar10", "scale=small, cifar10_jpeg instead"]
    for section in document.sections[1:]:
        assert {row["run"].split()[0] for row in section.rows} == {section.heading.split()[1]}


@pytest.mark.parametrize(
    ("growths", "word"),
    [((4.0, 4.2, 3.9), "supports"), ((0.2, 0.22, 0.19), "contradicts"), ((4.0,), "cannot tell")],
)
def test_figure_2_says_whether_norms_grow_near_the_input(
    growths: tuple[float, ...], word: str, tmp_path: Path
):
    document = _build("figure-he-2", tmp_path, *_norms("cifar10_jpeg", growths, model="cnn_cifar"))
    assert f"small, cifar10_jpeg instead: {word}" in _says(document)
    assert "outside every guarantee" in document.paragraphs[2]
    (block,) = [section for section in document.sections if section.rows]
    assert {row["record"] for row in block.rows} == {"results/runs/record0.json"}  # one seed is shown
    assert len(block.rows) == 4 * 8
    assert (block.rows[-8]["50%"], block.rows[-8]["group"]) == (f"{growths[0]:.4g}", "layer0")
    assert "layer0" in document.svg


def test_figure_4_says_whether_layers_move_apart(tmp_path: Path):
    apart = _build("figure-he-4", tmp_path / "a", *_norms("sst2", (4.0, 4.2, 3.9)))
    assert "small, sst2: supports" in _says(apart)
    assert "(factors 3.85 and 1.37): layer0 (n = 3) minus layer7" in apart.sections[-1].paragraphs[1]


# 0: seeds that all agree leave no test
@pytest.mark.parametrize(
    ("apart", "word"), [(0.01, "contradicts"), (0.08, "cannot tell"), (0.0, "cannot tell")]
)
def test_figure_4_says_whether_layers_move_together(apart: float, word: str, tmp_path: Path):
    """Every layer by the same factor, another one for each seed, give or take."""
    together = _norms("sst2", (1.0, 1.0, 1.0))
    for seed, one in enumerate(together):
        for layer, values in enumerate(one["curves"]["norms"]["points"][-1]["values"]):
            values[:] = [value * (2 + seed) * (1 + apart * ((layer + seed) % 3 - 1)) for value in values]
    document = _build("figure-he-4", tmp_path, *together)
    assert f"small, sst2: {word}" in _says(document)
    assert "within a factor of 1.1" in document.sections[-1].paragraphs[1]


def test_a_layer_without_gradient_is_left_out(tmp_path: Path):
    runs = _norms("sst2", (4.0, 4.2))
    for one in runs:
        for point in one["curves"]["norms"]["points"]:
            point["values"][0] = [0.0, 0.0, 0.0, 0.0]
    document = _build("figure-he-4", tmp_path, *runs)
    assert "supports" in _says(document)
    assert document.svg


def test_runs_that_kept_no_curve_draw_nothing(tmp_path: Path):
    for name in ("figure-he-2", "figure-he-3"):
        document = _build(name, tmp_path, summary("adaptive_perlayer", **CIFAR))
        assert (document.svg, document.status) == ("", "not run")
        assert "runtime.eval_every=49" in document.sections[1].paragraphs[0]


def test_lines_of_other_settings_are_told_apart(tmp_path: Path):
    runs = [
        summary("adaptive_perlayer", lr=lr, quantile=quantile)
        for lr in (1e-3, 2e-3)
        for quantile in (0.5, 0.9)
    ]
    document = _build("figure-he-5", tmp_path, *runs)
    assert {row["run"].rpartition(", ")[2] for row in document.rows} == {"lr 0.001", "lr 0.002"}
    assert {row["x"] for row in document.rows} == {"0.5", "0.9"}


@pytest.mark.parametrize("name", ["figure-he-2", "figure-he-3", "figure-he-4"])
def test_the_same_records_give_the_same_bytes(name: str, tmp_path: Path):
    runs = [
        *_three_ways(0.6),
        *_norms("sst2", (4.0, 4.2)),
        *_norms("cifar10_jpeg", (4.0, 4.2), model="cnn_small"),
    ]
    first, second = (_build(name, tmp_path / folder, *runs) for folder in ("a", "b"))
    assert first.svg
    assert (first.svg, first.as_markdown(), first.as_csv()) == (
        second.svg,
        second.as_markdown(),
        second.as_csv(),
    )


def _commands() -> list[tuple[str, str, str]]:
    return [
        (name, scale, command)
        for name, target in targets("curves").items()
        for scale, commands in target.commands.items()
        for command in commands
    ]


@pytest.mark.parametrize(("name", "scale", "command"), _commands())
def test_a_command_makes_records_that_its_figure_selects_and_draws(name: str, scale: str, command: str):
    """The first and the last job of it; curves need looks on the way, and a sweep needs two values."""
    target = targets("curves")[name]
    x = set()
    for side in (0, -1):
        run, made = samples.run_of(command, side), samples.made_by(command, side)
        assert made.facts["scale"] == scale
        assert made.matches(target.select), made.facts
        if target.kind == "sweep":
            x.add(made.facts[target.x])
        else:
            assert run.runtime.eval_every > 0
        if target.metric == "bleu":
            assert run.task.generation.when == "always"
    sweep = next((w.partition("=")[2] for w in shlex.split(command) if w.startswith("sweep=")), "")
    if target.kind == "sweep" and sweep:
        params = yaml.safe_load((conf_dir() / "sweep" / f"{sweep}.yaml").read_text())["hydra"]["sweeper"][
            "params"
        ]
        varied = next(key for key in (target.x, *target.along) if key in params)
        assert len(str(params[varied]).split(",")) > 1
    elif target.kind == "sweep":
        assert len(x) == 2


@pytest.mark.parametrize(("gain", "word"), [(0.05, "supports"), (-0.05, "contradicts")])
def test_figure_5_says_whether_a_high_quantile_is_best_on_text(gain: float, word: str, tmp_path: Path):
    runs = [
        summary("adaptive_perlayer", seed, 0.8 + gain * quantile + 1e-3 * seed, quantile=quantile)
        for quantile in (0.2, 0.6, 0.9)
        for seed in SEEDS
    ]
    document = _build("figure-he-5", tmp_path, *runs)
    assert f"sst2: {word} for a part of the claim, the one about sst2" in _says(document)
    assert "quantile 0.9 (n = 3, best of 3) minus quantile 0.2" in document.sections[-1].paragraphs[2]


@pytest.mark.parametrize(("gain", "word"), [(0.004, "supports"), (0.1, "contradicts")])
def test_figure_5_says_whether_quantiles_are_alike_on_images(gain: float, word: str, tmp_path: Path):
    """Those outside 0.3 to 0.9 are not in the claim."""
    runs = [
        summary("adaptive_perlayer", s, value + 1e-3 * s, quantile=quantile, **CIFAR)
        for quantile, value in ((0.1, 0.2), (0.3, 0.6), (0.6, 0.6 + gain), (0.9, 0.601))
        for s in SEEDS
    ]
    document = _build("figure-he-5", tmp_path, *runs)
    assert f"cifar10_jpeg instead: {word} for a part" in _says(document)


@pytest.mark.parametrize(("gain", "word"), [(0.004, "supports"), (0.1, "contradicts")])
def test_figure_6_says_whether_shares_are_alike_and_leaves_figure_5_alone(
    gain: float, word: str, tmp_path: Path
):
    """Beyond a fifth of the budget nothing is claimed."""
    runs = [
        summary("adaptive_perlayer", s, value + 1e-3 * s, share=share)
        for share, value in ((0.001, 0.8), (0.1, 0.8 + gain), (0.2, 0.801), (0.8, 0.5))
        for s in SEEDS
    ]
    document = _build("figure-he-6b", tmp_path, *runs)
    assert f"sst2: {word} for a part of the claim, accuracies up to r = 20%" in _says(document)
    assert len({row["run"] for row in document.rows}) == 1
    assert len(document.rows) == 12
    quantiles = [summary("adaptive_perlayer", s, 0.8, quantile=q) for q in (0.3, 0.9) for s in SEEDS]
    document = _build("figure-he-5", tmp_path / "both", *runs, *quantiles)
    assert {row["record"] for row in document.rows if row["x"] == "0.5"} <= {
        row["record"] for row in document.rows if row["run"].endswith("r 0.1")
    }


def test_figure_5_has_a_verdict_for_each_task(tmp_path: Path):
    runs = [
        summary("adaptive_perlayer", s, value + 1e-3 * s, quantile=quantile, **settings)
        for settings in (CIFAR, {"task": "sst2"})
        for quantile, value in ((0.3, 0.6), (0.6, 0.601), (0.9, 0.6))
        for s in SEEDS
    ]
    said = _says(_build("figure-he-5", tmp_path, *runs))
    assert "cifar10_jpeg instead: supports for a part of the claim, the one about cifar10_jpeg" in said
    assert "sst2: cannot tell" in said


@pytest.mark.parametrize(("large", "word"), [(0.9, "supports"), (0.7, "contradicts"), (0.8, "cannot tell")])
def test_figure_6_of_li_compares_models_of_two_sizes(large: float, word: str, tmp_path: Path):
    runs = [
        summary("flat", seed, value + 1e-3 * seed, model=model)
        for model, value in (("minilm", 0.8), ("mpnet", large), ("roberta_tiny", 0.99))
        for seed in SEEDS
    ]
    document = _build("figure-li-6", tmp_path, *runs)
    assert f"sst2: {word}" in _says(document)
    assert "mpnet (109M) (n = 3) minus minilm (23M) (n = 3)" in document.sections[-1].paragraphs[-1]


def test_figure_6_of_li_does_not_compare_other_settings(tmp_path: Path):
    runs = [
        summary("flat", seed, model=model, batch_size=batch)
        for model, batch in (("minilm", 64), ("mpnet", 2048))
        for seed in SEEDS
    ]
    assert _build("figure-li-6", tmp_path, *runs).verdicts == ()


@pytest.mark.parametrize(("even", "word"), [(0.95, "supports"), (0.85, "contradicts")])
def test_figure_15_of_monir_compares_splits_of_the_budget(even: float, word: str, tmp_path: Path):
    """What the paper leaves open decides: the seeds speak for our choice alone."""
    runs = []
    for budgets, value in (([1.0, 2.0, 3.0], even), ([1.0, 10.0, 20.0], 0.9), ([1.0, 2.0, 20.0], 0.9)):
        for seed in SEEDS:
            value_of_seed = value + 1e-3 * seed
            one = summary("flat", seed, value_of_seed, task="mnist", curves=samples.curves(value_of_seed))
            one["details"]["config"]["individual"] = {"name": "scaling", "epsilons": budgets}
            runs.append(one)
    said = _says(_build("figure-monir-15", tmp_path, *runs))
    assert f"at what was chosen here: {word} (2 of 2 pairs tested" in said
    assert "cannot tell" in said


def test_a_value_for_each_task_is_no_sweep(tmp_path: Path):
    """Two tasks at two quantiles are two points, not a line."""
    runs = [summary("adaptive_perlayer", quantile=0.75), summary("adaptive_perlayer", quantile=0.6, **CIFAR)]
    document = _build("figure-he-5", tmp_path, *runs)
    assert (document.status, document.svg) == ("not run", "")


def test_label_words_are_a_setting_of_their_own(tmp_path: Path):
    runs = []
    for word, accuracy in (("great", 0.9), ("awesome", 0.88)):
        for seed in SEEDS:
            one = summary("flat", seed, accuracy, task="sst2_infilling", model="roberta_tiny")
            one["details"]["config"]["task"]["label_words"] = {"0": "terrible", "1": word}
            runs.append(one)
    document = _build("figure-li-8", tmp_path, *runs)
    assert {row["x"] for row in document.rows} == {"terrible/great", "terrible/awesome"}
    assert len(by_configuration(load(tmp_path / "runs"))) == 2


def test_against_time_engines_are_lines_of_their_own(tmp_path: Path):
    runs = []
    for engine in ("opacus", "ghost"):
        one = summary("flat", task="e2e", model="gpt2", curves=samples.curves(0.6))
        for point in one["curves"]["dev"]:
            point["dev"]["loss"] = 1 - point["dev"]["accuracy"]
        runs.append(one | {"engine": engine})
    rows = _build("figure-he-7", tmp_path, *runs).rows
    assert {row["run"].rpartition(", ")[2] for row in rows} == {"engine opacus", "engine ghost"}


@pytest.mark.parametrize(("gain", "word"), [(0.01, "supports"), (-0.01, "contradicts"), (0.0, "cannot tell")])
def test_quality_follows_the_first_signal(gain: float, word: str, tmp_path: Path):
    runs = [
        summary(
            seed=seed, accuracy=0.8 + gain * size + 1e-3 * (seed - 1), batch_size=64 << size, epochs=None, steps=100,
            curves={"signal_to_noise": {"mean": 0.05 * 2**size, "updates": 30, "not_private": True}},
        )
        for size in range(4)
        for seed in SEEDS
    ]  # fmt: skip
    document = _build("figure-li-3b", tmp_path, *runs)
    assert f"sst2 instead: {word}" in _says(document)
    assert document.status == "small 12 runs on sst2"
    # one line, along which the batch changes
    assert len({row["run"] for row in document.rows}) == 1
    if gain:
        assert f"= {100 * gain:+.2f}" in _says(document) + "".join(
            p for s in document.sections for p in s.paragraphs
        )


def test_runs_of_another_length_do_not_show_the_signal(tmp_path: Path):
    kept = {"signal_to_noise": {"mean": 0.05, "updates": 30, "not_private": True}}
    assert not _build("figure-li-3b", tmp_path, *(summary(seed=s, curves=kept) for s in SEEDS)).rows


def test_figure_6_of_li_has_the_tasks_of_its_panels():
    target = targets("curves")["figure-li-6"]
    assert target.select["task"] == ["mnli", "sst2", "qqp", "qnli", "dart"]
    asked = {samples.run_of(command).task.name for command in target.commands["paper"]}
    assert asked == set(target.select["task"])


def test_the_batches_of_figure_3_of_li_are_the_rates_of_its_legend():
    (legend,) = selected("li2022", "figure3", "q")
    rates = [2.0 ** int(power.removeprefix("2^")) for power in legend.value.split(", ")]
    sweep = yaml.safe_load((conf_dir() / "sweep" / "li2022_fig3.yaml").read_text())
    sizes = str(sweep["hydra"]["sweeper"]["params"]["optim.batch_size"]).split(",")
    assert [float(size) for size in sizes] == pytest.approx([42061 * rate for rate in rates], abs=0.01)
