"""A page about one's own runs, from the files that a run writes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from dpexp.own_runs import page as page_module
from dpexp.own_runs.page import MOST_WITHIN, WITHHELD, _plot, main, size_for
from dpexp.own_runs.reading import read
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.shown import upwards
from dpexp.report import main as report
from dpexp.reproduce.drawing import draw

STEPS, DELTA, EVENT = 5, 1e-5, PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))


def _run(folder: Path, *, key: bytes = b"k" * 32, charges: int = STEPS) -> Path:
    """The folder of an interrupted run, without the training."""
    folder.mkdir(parents=True)
    ledger = Ledger(folder / "ledger.jsonl", key)
    for step in range(charges):
        ledger.begin_step(step, EVENT, f"{step}")
    (folder / "config.yaml").write_text("{optim: {batch_size: 10}, accountant: {name: pld}}")
    lines = [
        line
        for step in range(1, charges + 1)
        for line in (
            {"step": step, "lr": 0.1, "thresholds": [0.5, 0.2 * step]},
            {"step": step, "not_private": True, "loss": 1 / step, "mean_norms": [3.0, 4.0]},
        )
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    # torn by a crash
    (folder / "metrics.jsonl").write_bytes(text.encode() + b'\xff\xfe garbled\n{"step": 6, "lo')
    (folder / "summary.json").write_text(json.dumps({"privacy": {"delta": DELTA}, "task": "mnist"}))
    return folder


@pytest.fixture
def words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take nearly all the time of a page; other tests draw them of runs of every kind."""
    monkeypatch.setattr(page_module, "draw", lambda plot, **_: "")


def test_epsilon_is_that_of_the_ledger(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a")
    steps, found = read(folder).epsilons
    assert steps == [1, 2, 3, 4, 5]
    expected = Ledger(folder / "ledger.jsonl", b"k" * 32).epsilons(DELTA)
    assert {name: values[-1] for name, values in found.items()} == pytest.approx(expected)
    assert all(values == sorted(values) for values in found.values())


@pytest.mark.parametrize("count", [2, 30])
def test_the_names_of_many_runs_do_not_cover_their_lines(count: int) -> None:
    series = [
        (f"mnist/0123456789/seed{number} dev accuracy", [1.0, 2.0], [0.5, 0.6]) for number in range(count)
    ]
    kept: list[Any] = []

    def plot(axes: Any) -> None:
        _plot(series, False, axes)
        kept.append(axes[0])

    with warnings.catch_warnings():
        # where the names leave no room for axes
        warnings.simplefilter("error")
        draw(plot, size=size_for(count))
    (axis,) = kept
    if count > MOST_WITHIN:
        (names,) = axis.figure.legends
        assert names.get_window_extent().x0 >= axis.get_window_extent().x1
        assert names.get_window_extent().y0 >= 0
    else:
        assert axis.get_legend() is not None


def test_a_run_is_a_page_with_its_pictures(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a")
    assert report(["run", str(folder)]) == 0
    page = (folder / "report" / "index.html").read_text()
    for name in ("epsilon", "thresholds", "loss", "norms"):
        assert f'src="{name}.svg"' in page
        assert (folder / "report" / f"{name}.svg").read_text().startswith("<?xml")
        assert (folder / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("not private: computed") == 4  # heading and description of two pictures
    assert "unfinished" in page
    assert page.count("gdp") == page.count("ε by gdp (not a guarantee)") == 1


def test_what_a_failed_run_never_measured_is_left_out(tmp_path: Path) -> None:
    failed = _run(tmp_path / "a", charges=0)
    told = {"status": "failed", "performance": dict.fromkeys(("examples_per_s", "step_s", "device"))}
    (failed / "summary.json").write_text(json.dumps(told))
    main([str(failed)])
    page = (failed / "report" / "index.html").read_text()
    assert "<td>failed</td>" in page
    assert "None" not in page


def test_what_is_not_private_can_be_left_out(tmp_path: Path) -> None:
    """Nor how long steps took, which follows from how many rows were drawn."""
    folder = _run(tmp_path / "a")
    # charges of this test come at once
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    for number, line in enumerate(line for line in lines if "event" in line):
        line["time"] = number**2
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    performance = {"examples_per_s": 4321.0, "step_s": 0.1, "peak_memory_mib": 5.0, "device": "cpu"}
    (folder / "summary.json").write_text(json.dumps({"performance": performance}))
    main([str(folder)])
    page = (folder / "report" / "index.html").read_text()
    assert 'src="throughput.svg"' in page
    assert "4321" in page
    main([str(folder), "--released"])
    page = (folder / "report" / "index.html").read_text()
    assert "not private" not in page
    assert "throughput" not in page
    assert "4321" not in page
    assert "<td>cpu</td>" in page
    assert not [name for name in WITHHELD for _ in (folder / "report").glob(f"{name}.*")]


def test_runs_stand_beside_each_other(tmp_path: Path) -> None:
    folders = [_run(tmp_path / name / "seed0", charges=n) for name, n in (("a", 5), ("b", 3), ("c", 2))]
    assert main([*map(str, folders), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "<td>5</td><td>3</td><td>2</td>" in page
    assert read(folders[0]).accountant == "pld"


def test_what_epsilon_rests_on_stands_beside_it(tmp_path: Path) -> None:
    folders = [_run(tmp_path / name / "seed0") for name in ("a", "b")]
    for folder, notes in zip(
        folders, (["said of both"], ["said of both", "no guarantee: shuffled"]), strict=True
    ):
        record = {"privacy": {"delta": DELTA, "notes": notes}, "task": "mnist"}
        (folder / "summary.json").write_text(json.dumps(record))
    main([*map(str, folders), "--released", "--out", str(tmp_path / "page")])
    page = (tmp_path / "page" / "index.html").read_text()
    assert page.count("<li>said of both</li>") == 1
    assert f"<li>no guarantee: shuffled ({read(folders[1]).name})</li>" in page


def test_a_trainer_s_folder_is_found_beside_its_output(tmp_path: Path) -> None:
    _run(tmp_path / "out.privacy")
    (tmp_path / "out").mkdir()
    assert len(read(tmp_path / "out").events) == STEPS


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(["run", str(tmp_path)]) == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_of_a_run_that_a_filter_ended_the_budget_is_shown_and_nothing_else(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a")
    spent = {"rdp": 7.75, "gdp": None, "prv": None, "pld": None}
    privacy = {"delta": DELTA, "epsilon": spent, "filtered": True}
    (folder / "summary.json").write_text(json.dumps({"privacy": privacy, "task": "mnist"}))
    main([str(folder)])
    page = (folder / "report" / "index.html").read_text()
    assert "<tr><th>ε by rdp</th><td>7.7500</td></tr>" in page
    assert "ε by pld" not in page
    assert not list((folder / "report").glob("epsilon.*"))


def test_by_shuffled_batches_no_accountant_gives_a_guarantee(tmp_path: Path) -> None:
    """Not by a record, nor by the settings of a run that has none yet."""
    folders = [_run(tmp_path / name / "seed0") for name in ("a", "b", "c")]
    record = {"privacy": {"delta": DELTA, "sampling": "shuffle"}, "task": "mnist"}
    for folder in folders:
        (folder / "summary.json").write_text(json.dumps(record))
    (folders[1] / "summary.json").write_text(json.dumps({"privacy": {"delta": DELTA}}))
    (folders[1] / "config.yaml").write_text("{privacy: {sampling: shuffle}, accountant: {name: pld}}")
    main([*map(str, folders), "--out", str(tmp_path / "page")])
    page = (tmp_path / "page" / "index.html").read_text()
    assert page.count("<th>ε by ") == page.count(" (not a guarantee)</th>") == 4
    assert 'src="epsilon.svg"' in page


@pytest.mark.usefixtures("words_alone")
def test_the_choice_among_trials_is_in_the_table_where_there_was_one(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a")
    tuned = {"rdp": 5.4321, "gdp": None, "prv": None, "pld": None}
    privacy = {"delta": DELTA, "accountant": "pld", "epsilon_with_tuning": tuned}
    (folder / "summary.json").write_text(json.dumps({"privacy": privacy}))
    main([str(folder)])
    assert "<th>ε with tuning</th><td>5.4321 by rdp</td>" in (folder / "report" / "index.html").read_text()


@pytest.mark.usefixtures("words_alone")
def test_what_runs_cost_together_is_told_by_their_ledgers(tmp_path: Path) -> None:
    """Each with what it has charged, one that was killed too; no run pays twice, however often it is named."""
    longer, killed = _run(tmp_path / "a", charges=5), _run(tmp_path / "b", charges=3)
    (killed / "summary.json").unlink()
    main([str(longer), str(killed), str(killed), "--out", str(tmp_path / "page")])
    page = (tmp_path / "page" / "index.html").read_text()
    alone = Ledger(_run(tmp_path / "c", charges=8) / "ledger.jsonl", b"k" * 32)
    assert (
        f"ε of all 2 runs together, the unfinished and failed ones included, is {upwards(alone.epsilon(DELTA))}"
        in page
    )
    bare = _run(tmp_path / "d", charges=0)
    (bare / "summary.json").write_text(json.dumps({"privacy": {"released": ["model without any guarantee"]}}))
    main([str(longer), str(bare), "--out", str(tmp_path / "page")])
    assert (
        "together, the unfinished and failed ones included, has no value"
        in (tmp_path / "page" / "index.html").read_text()
    )
    moved = _run(tmp_path / "e")
    (moved / "summary.json").write_text(
        json.dumps({"privacy": {"delta": DELTA, "filtered": True, "epsilon": {"rdp": 2.0}}})
    )
    main([str(longer), str(moved), "--out", str(tmp_path / "page")])
    assert (
        "together, the unfinished and failed ones included, is not told here: of"
        in (tmp_path / "page" / "index.html").read_text()
    )


@pytest.mark.usefixtures("words_alone")
@pytest.mark.parametrize(
    "settings",
    [
        "search: {name: noisymax, mechanism: laplace}",
        "schedule: {name: validation}",
        "unit: {name: user, size: 3}",
    ],
)
def test_what_runs_cost_together_is_not_told_where_the_ledgers_do_not_know(
    tmp_path: Path, settings: str
) -> None:
    """An unfinished run has no record that says so: a filter that did not end it guarantees nothing of its course. And who is
    protected as a user is not protected as an example, nor the other way round."""
    plain, other = _run(tmp_path / "a"), _run(tmp_path / "b")
    (other / "summary.json").unlink()
    (other / "config.yaml").write_text(settings)
    main([str(plain), str(other), "--out", str(tmp_path / "page")])
    assert "failed ones included, is not told here" in (tmp_path / "page" / "index.html").read_text()


@pytest.mark.usefixtures("words_alone")
def test_a_run_whose_ledger_is_not_there_is_not_left_out_of_what_runs_cost_together(tmp_path: Path) -> None:
    """Its record may lie in a folder of its own: the others alone would cost too little. Nor is one that has not ended, and
    learns without privacy."""
    plain, alone, bare = (_run(tmp_path / name) for name in "abc")
    (alone / "ledger.jsonl").unlink()
    (alone / "summary.json").write_text(json.dumps({"privacy": {"delta": DELTA, "steps": STEPS}}))
    for name in ("ledger.jsonl", "summary.json"):
        (bare / name).unlink()
    (bare / "config.yaml").write_text("{clip: {name: nonprivate, private: false}}")
    for other, told in ((alone, "is not told here: "), (bare, "has no value: ")):
        main([str(plain), str(other), "--out", str(tmp_path / "page")])
        assert f"failed ones included, {told}" in (tmp_path / "page" / "index.html").read_text()
