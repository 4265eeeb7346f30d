"""The league: its commands, which records belong to them, and what is concluded from these."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from dpexp.config import compose
from dpexp.privacy.events import encode
from dpexp.privacy.schedules import Schedule
from dpexp.privacy.tuning import tuned_epsilons
from dpexp.reproduce import league
from dpexp.reproduce.league import Entry
from dpexp.reproduce.paper import listed
from dpexp.reproduce.records import Record, load
from tests.reproduce.samples import summary, write

TASK = "sst2"
BEST = {1.0e-3: 0.70, 4.0e-3: 0.80, 1.6e-2: 0.75, 6.4e-2: 0.60, 2.56e-1: 0.50}


def _run(entry: Entry, rate: float, seed: int, accuracy: float) -> dict:
    run = summary(seed=seed, accuracy=accuracy, task=entry.task, epsilon=entry.epsilon, lr=rate)
    words = shlex.split(entry.command(rate, [seed], 1))
    # as a queue says where, and a reader might: the order is nobody's business
    run["command"] = shlex.join([*words[:3], "runtime=cpu", *reversed(words[3:]), "runtime.threads=1"])
    return run


def _season(lift: dict[str, float], best: dict[float, float] = BEST) -> Iterator[dict]:
    """Every method of a task: the rates by the tuning seeds, and the other seeds, a little apart, at the best of them."""
    for entry in league.entries(TASK):
        more = lift.get(entry.method, 0.0)
        scores = dict(zip(entry.rates, best.values(), strict=True))
        for rate, accuracy in scores.items():
            for number, seed in enumerate(entry.tuning):
                # the first one alone would pick another rate
                yield _run(
                    entry,
                    rate,
                    seed,
                    accuracy + more + (0.3 if (number, rate) == (0, entry.rates[-1]) else 0),
                )
        rate = max(scores, key=lambda rate: scores[rate])
        for seed in entry.seeds:
            yield _run(entry, rate, seed, scores[rate] + more + 1e-3 * seed)


def _records(folder: Path, runs: Iterator[dict]) -> list[Record]:
    return load(write(folder, *runs))


def _first(method: str) -> Entry:
    return next(entry for entry in league.entries(TASK) if entry.method == method)


def test_every_method_is_a_run_that_can_be_composed() -> None:
    tasks = list(listed("league")["tasks"])
    assert len(listed("league")["methods"]) >= 15
    for number, method in enumerate(listed("league")["methods"]):
        task = tasks[number % len(tasks)]
        entry = next(entry for entry in league.entries(task) if entry.method == method)
        run = compose([*entry.words, "privacy=eps1", "optim.lr=0.004", "seed=1", "trials=3"])
        assert f"task={run.task.name}" in entry.words
        assert (run.privacy.epsilon, run.trials, run.optim.lr_schedule) == (1, 3, "constant")


@pytest.mark.parametrize("task", listed("league")["tasks"])
def test_the_noise_of_every_decay_falls_to_a_third(task: str) -> None:
    for method in ("time", "exponential", "polynomial", "convergence_rate"):
        entry = next(entry for entry in league.entries(task) if entry.method == method)
        run = compose([*entry.words, "privacy=eps8", "optim.lr=0.004"])
        rate = run.optim.batch_size / run.task.num_examples["small"]
        steps = round(run.optim.epochs / rate)
        factor = Schedule.of(asdict(run.schedule)).factor(steps, steps, rate)
        assert factor == pytest.approx(1 / 3, abs=0.03), method


def test_every_claim_is_about_methods_that_there_are() -> None:
    methods = listed("league")["methods"]
    for claim in listed("league")["claims"]:
        assert {claim["left"], claim["right"]} <= methods.keys()


def test_first_the_rates_then_the_seeds_at_the_best_one(tmp_path: Path) -> None:
    first = league.commands(TASK, [])
    rows = list(league.entries(TASK))
    entry = _first("disk")
    trials = len(BEST) * len(entry.tuning)
    assert len(entry.tuning) == 3
    assert len(first) == len(set(first)) == trials * len(rows)
    assert all(
        int(command.rpartition("seed=")[2]) in entry.tuning and "trials=1" in command for command in first
    )
    runs = [_run(entry, rate, seed, accuracy) for rate, accuracy in BEST.items() for seed in entry.tuning]
    then = league.commands(TASK, _records(tmp_path / "rates", iter(runs)))
    # they have run
    assert len(set(first) - set(then)) == trials
    (more,) = set(then) - set(first)
    assert "optim=disk" in more
    assert more.endswith("privacy=eps1 optim.lr=0.004 trials=16 seed=1,2,3,4,5,6,7,8 -m")
    another = [*runs, *(_run(entry, 0.05, seed, 0.9) for seed in entry.tuning), _run(entry, 0.06, 0, 0.99)]
    (once_more,) = set(league.commands(TASK, _records(tmp_path / "another", iter(another)))) - set(first)
    # the last rate has been tried with one seed only: it costs a trial, and is no candidate
    assert once_more.endswith("privacy=eps1 optim.lr=0.05 trials=20 seed=1,2,3,4,5,6,7,8 -m")


def test_a_record_belongs_to_the_row_whose_command_it_was(tmp_path: Path) -> None:
    flat, doppler = _first("flat"), _first("doppler")
    records = _records(tmp_path, iter([_run(doppler, 4e-3, 1, 0.8)]))
    assert doppler.runs(records).keys() == {(4e-3, 1)}
    assert flat.runs(records) == {}


def test_rows_are_ranked_and_tested_against_the_first(tmp_path: Path) -> None:
    page = league.document(_records(tmp_path, _season({"doppler": 0.05, "perlayer": -0.05})))
    ranks, claims, *blocks = page.sections
    block = next(block for block in blocks if block.rows)
    own = {(row["method"], row["ε"]): row for row in block.rows}
    assert own["doppler", "1"]["rank"] == "1"
    assert own["doppler", "1"]["ours"] == "85.45 ± 0.24"
    assert own["doppler", "1"]["minus flat"] == "+5.00"
    assert own["doppler", "1"]["beside flat"] == "better"
    assert own["perlayer", "8"]["beside flat"] == "worse"
    assert own["disk", "8"]["beside flat"] == "not told apart"
    assert float(own["disk", "8"]["p (Holm)"]) == 1.0
    assert own["flat", "8"]["beside flat"] == ""
    assert ranks.rows[0] == {
        "method": "doppler", "mean rank": "1.0", "best": "2 of 2", "better than flat": "2 of 2", "worse than flat": "0 of 2",
    }  # fmt: skip
    said = {verdict.where: verdict.word for verdict in page.verdicts}
    assert said["He et al. 2023, Table 1: fixed per-layer clipping is worse than flat clipping"] == "supports"
    assert (
        said["Zhang et al. 2025: a simplified Kalman filter of the noisy gradients (DiSK) helps"]
        == "cannot tell"
    )
    assert (
        "fixed per-layer clipping is worse than flat clipping. **supports for a part" in claims.paragraphs[1]
    )


def test_a_best_rate_at_the_edge_is_a_search_that_is_not_finished(tmp_path: Path) -> None:
    edge = {1.0e-3: 0.70, 4.0e-3: 0.72, 1.6e-2: 0.75, 6.4e-2: 0.80, 2.56e-1: 0.85}
    page = league.document(_records(tmp_path, _season({"perlayer": -0.05}, edge)))
    said = {verdict.where: verdict.word for verdict in page.verdicts}
    assert (
        said["He et al. 2023, Table 1: fixed per-layer clipping is worse than flat clipping"] == "cannot tell"
    )


def test_a_row_without_all_of_its_seeds_is_not_shown(tmp_path: Path) -> None:
    runs = [run for run in _season({}) if not (run["seed"] == 3 and "optim=disk" in run["command"])]
    page = league.document(_records(tmp_path, iter(runs)))
    assert not any(section.heading == "Ranks" for section in page.sections)
    assert "disk" not in {row["method"] for row in page.rows}
    assert league.document([]).status == "not run"


def test_a_row_is_priced_with_all_that_was_tried_for_it(tmp_path: Path) -> None:
    event = SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)), 20)
    runs = list(_season({}))
    for run in runs:
        # the first trials of a search know of themselves alone
        run["privacy"] |= {"events": [encode(event)], "delta": 1e-5, "trials": 1}
    page = league.document(_records(tmp_path, iter(runs)))
    (row,) = (row for row in page.rows if row["method"] == "disk" and row["ε"] == "8")
    rdp = tuned_epsilons(event, 1e-5, 3 * len(BEST) + 1)["rdp"]
    assert row["ε with tuning"] == f"{rdp:.2f}"


def test_a_rate_at_which_a_run_diverged_is_not_the_best(tmp_path: Path) -> None:
    entry = _first("flat")
    diverged = {"metrics": {"accuracy": None}}
    runs = (
        _run(entry, rate, seed, 0.5) | (diverged if (number, seed) == (0, entry.tuning[0]) else {})
        for number, rate in enumerate(entry.rates)
        for seed in entry.tuning
    )
    best, tried = league._best_rate(entry, entry.runs(_records(tmp_path, runs)))
    assert best == entry.rates[1]
    assert tried == dict.fromkeys(entry.rates, len(entry.tuning))


def test_of_rates_with_as_many_right_answers_the_smallest_is_taken(tmp_path: Path) -> None:
    entry = _first("flat")
    # of 872 examples; floating point adds them up to two means
    right = {entry.rates[2]: (703, 698, 699), entry.rates[3]: (696, 693, 711)}
    runs = (
        _run(entry, rate, seed, count / 872)
        for rate in entry.rates
        for seed, count in zip(entry.tuning, right.get(rate, (600, 600, 600)), strict=True)
    )
    assert league._best_rate(entry, entry.runs(_records(tmp_path, runs)))[0] == entry.rates[2]
