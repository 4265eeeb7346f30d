"""Votes of teachers: Algorithms 1 and 2 as derived, what one example moves, and the events that are charged for it."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from rich.console import Console
from scipy.optimize import brentq
from scipy.stats import norm

import dpexp.pate
import dpexp.training.pate.questions
from dpexp.auditing.gaussian import pair_lower_bound, two_world_lower_bound
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.pate import PateConfig, check, pate, release, teachers_of
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.noise import KeyedGenerator, SecureGenerator
from dpexp.privacy.pate import plan_votes, upsampling, weights
from dpexp.privacy.sampling import PoissonSampler
from dpexp.reproduce.records import provenance_problems
from dpexp.training.pate.teachers import neighbour_votes, share_out

KEY = b"k" * 32


def test_upsampling_is_the_least_whole_ratio():
    """Algorithm 1: scale by 10^p, divide by the greatest common divisor."""
    assert upsampling([1.0, 2.0, 3.0], 0) == [1, 2, 3]
    assert upsampling([0.5, 0.75], 2) == [2, 3]
    assert upsampling([1.0, 10.0, 20.0], 2) == [1, 10, 20]
    with pytest.raises(UserError, match="nothing at 0 decimals"):
        upsampling([0.1, 1.0], 0)


def test_weights_are_proportional_to_budgets_and_keep_the_sum_of_votes():
    """Algorithm 2 as derived. As the review prints it, two groups of equal budgets get weights in the ratio of their sizes."""
    found = weights([1.0, 2.0, 3.0], [34, 43, 23])
    assert found[1] / found[0] == pytest.approx(2)
    assert found[2] / found[0] == pytest.approx(3)
    assert np.dot(found, [34, 43, 23]) == pytest.approx(100)
    assert weights([2.0, 2.0], [90, 10]) == pytest.approx([1.0, 1.0])


def gaussian_epsilon_by_hand(mu, delta):
    """The smallest ε with Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) = δ (Balle & Wang 2018)."""
    return brentq(
        lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 1e-6, 200
    )


@pytest.mark.parametrize("method", ["uniform", "upsampling", "weighting"])
def test_every_group_spends_at_most_its_budget(method):
    budgets = [1.0, 2.0, 3.0] if method != "uniform" else [2.0]
    plan = plan_votes(method, budgets, teachers=[34, 43, 23], queries=200, delta=1e-5, accountant="pld")
    for group, (target, spent) in enumerate(zip(budgets, plan.spent(), strict=True)):
        # √2·m_j/σ for each of 200 answers, in closed form
        mu = math.sqrt(2 * 200) * plan.moves[group] / plan.sigma
        assert spent == pytest.approx(gaussian_epsilon_by_hand(mu, 1e-5), rel=1e-4)
        assert spent <= target
        if method != "upsampling":
            assert spent > 0.99 * target
    assert max(s / t for s, t in zip(plan.spent(), budgets, strict=True)) > 0.99


def test_private_neighbours_are_charged_inside_the_sampling():
    plan = plan_votes("knn", [1.5], teachers=[1], queries=50, delta=1e-5, rate=0.1)
    one = PoissonSampledDpEvent(0.1, GaussianDpEvent(plan.sigma / math.sqrt(2)))
    assert plan.spent()[0] == pytest.approx(epsilon(SelfComposedDpEvent(one, 50), 1e-5), rel=1e-9)
    assert 1.48 < plan.spent()[0] <= 1.5


@pytest.mark.parametrize(("copies", "apart"), [([1, 2, 3], False), ([1, 1, 1], True)])
def test_an_example_reaches_as_many_teachers_as_it_is_charged_for(copies, apart):
    groups = np.repeat([0, 1, 2], [34, 43, 23])
    shares = share_out(groups, copies, [4, 5, 3], 7, apart=apart)
    assert len(shares) == 12
    seen = np.zeros(100, int)
    for share in shares:
        assert len(set(share.tolist())) == len(share)
        seen[share] += 1
    assert seen.tolist() == np.asarray(copies)[groups].tolist()
    if apart:
        assert [set(groups[share].tolist()) for share in shares] == [{0}] * 4 + [{1}] * 5 + [{2}] * 3
    assert teachers_of(12, np.array([34, 43, 23]), apart=True) == [4, 5, 3]


def test_one_example_moves_the_votes_of_neighbours_by_at_most_root_two():
    """Leave one out, every example, against votes that are counted naively."""
    rng = np.random.default_rng(0)
    points, labels = torch.from_numpy(rng.normal(size=(30, 3))), rng.integers(0, 3, 30)
    queries = torch.from_numpy(rng.normal(size=(8, 3)))

    def votes(members):
        return neighbour_votes(points, labels, queries, 3, 5, lambda number: members)

    everyone = votes(np.arange(30))
    for q in range(8):
        nearest = ((points - queries[q]) ** 2).sum(1).argsort()[:5]
        assert everyone[q].tolist() == np.bincount(labels[nearest], minlength=3).tolist()
    moved = [np.linalg.norm(everyone - votes(np.delete(np.arange(30), i)), axis=1).max() for i in range(30)]
    assert max(moved) == pytest.approx(math.sqrt(2))
    assert votes(np.arange(3)).sum(1).tolist() == [3.0] * 8


def test_answers_are_charged_before_their_noise_and_groups_each_with_their_own(tmp_path):
    plan = plan_votes("weighting", [1.0, 3.0], teachers=[5, 5], queries=6, delta=1e-5)
    ledger, groups = Ledger(tmp_path / "ledger.jsonl", KEY), np.repeat([0, 1], 50)
    counts = np.zeros((6, 3))
    counts[np.arange(6), [0, 1, 2, 0, 1, 2]] = 1e9
    assert release(counts, plan, ledger, KEY, {}, groups).argmax(1).tolist() == [0, 1, 2, 0, 1, 2]
    assert [found["rdp"] for found in ledger.epsilons_by_budget(1e-5)] == pytest.approx(plan.spent())
    # rounding is the same for all, also where an example moves the votes by next to nothing
    with pytest.raises(UserError, match="their rounding would cost more than is accounted for"):
        release(counts, replace(plan, moves=(1e-9, plan.moves[1])), ledger, KEY, {}, groups)
    # the same votes again are the same release; others would be charged anew, beyond the budget
    release(counts, plan, ledger, KEY, {}, groups)
    with pytest.raises(UserError, match="is charged for other votes"):
        release(counts + 1, plan, ledger, KEY, {}, groups)
    assert ledger.steps_charged == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["pate.method=weighting"], "one budget|give individual.epsilons"),
        (["individual.epsilons=[1,2]", "privacy.epsilon=null"], "take upsampling or weighting"),
        (["pate.method=votes"], "pate.method=votes is not a choice"),
        (["task=sst2"], "has neither: take task=mnist"),
        (["pate.teachers=0"], r"pate\.teachers=0 must be 1 or more"),
        (["runtime.dry_run=true"], r"runtime\.dry_run=True is not read by pate"),
        (["privacy.noise_multiplier=3"], r"privacy\.noise_multiplier=3\.0 is not read by pate"),
        (["privacy.sampling=fixed"], r"privacy\.sampling=fixed is not read"),
        (["privacy.bands=4"], r"privacy\.bands=4 is not read"),
        (["individual.budgets=file.txt"], r"individual\.budgets=file\.txt is not read"),
        (["privacy.release=strikt"], r"privacy\.release=strikt is not a choice"),
        (["privacy.delta=3"], "neither a number in"),
        (["pate.lr=nan"], r"pate\.lr=nan is not a finite number"),
        (
            ["pate.method=weighting", "privacy.epsilon=null", "individual.epsilons=[1,-2]"],
            r"individual\.epsilons=\[1\.0, -2\.0\] must be positive",
        ),
        (["task=images", "data.train=folder", "scale=own"], "declared and not read from it"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(UserError, match=message):
        check(compose(changes, "pate", PateConfig))


def test_a_group_without_teachers_and_copies_beyond_the_teachers_are_refused():
    with pytest.raises(UserError, match="no teacher of its own"):
        plan_votes("weighting", [1.0, 2.0], teachers=[3, 0], queries=5, delta=1e-5)
    with pytest.raises(UserError, match="puts an example into 20 teachers, and there are 10"):
        plan_votes("upsampling", [1.0, 20.0], teachers=[10], queries=5, delta=1e-5, precision=0)


def test_teachers_without_an_example_are_refused_before_anything_is_charged(tmp_path):
    asked = [
        "scale=demo",
        "data.num_examples=20",
        "pate.teachers=30",
        "runtime=cpu",
        f"data.cache={tmp_path}",
    ]
    with pytest.raises(UserError, match=r"10 of 30 teachers .*: lower pate\.teachers"):
        pate(compose(asked, "pate", PateConfig), tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_the_release_the_noise_and_the_key_are_as_asked_for(tmp_path):
    asked = [
        "scale=demo", "pate.method=knn", "pate.queries=4", "pate.student_epochs=1", "privacy.release=strict",
        "privacy.secure=true", "runtime=cpu", f"data.cache={tmp_path}", f"runtime.runs_dir={tmp_path}",
    ]  # fmt: skip
    summary = pate(compose(asked, "pate", PateConfig), tmp_path / "run", Console(quiet=True))
    assert summary["data"]["sha256"]["train"] is None
    assert summary["wall_s"] is None
    assert json.loads((tmp_path / "run" / "ledger.jsonl").read_text())["time"] is None
    assert any("by whole numbers alone" in note for note in summary["privacy"]["notes"])


def test_a_record_says_where_its_epsilon_is_no_guarantee_or_next_to_none(tmp_path):
    """By the central limit theorem neighbours have an epsilon of 1.0 where it is 2.5."""
    asked = [
        "scale=demo", "pate.method=knn", "pate.queries=4", "pate.student_epochs=1", "privacy.delta=0.1", "privacy.epsilon=30",
        "accountant=gdp", "accountant.allow_clt=true", "runtime=cpu", f"data.cache={tmp_path}",
    ]  # fmt: skip
    notes = pate(compose(asked, "pate", PateConfig), tmp_path / "run", Console(quiet=True))["privacy"][
        "notes"
    ]
    for words in ("it is not a guarantee", "not below 1/N", "bounds next to nothing"):
        assert any(words in note for note in notes)


@pytest.mark.parametrize("method", ["uniform", "knn"])
def test_a_run_that_was_cut_off_behind_its_charge_gives_the_same_answers_and_pays_once(
    tmp_path, monkeypatch, method
):
    asked = compose(
        [
            "scale=demo", f"pate.method={method}", "pate.teachers=3", "pate.queries=4", "pate.teacher_epochs=1",
            "pate.student_epochs=1", "runtime=cpu", f"data.cache={tmp_path}",
        ],
        "pate",
        PateConfig,
    )  # fmt: skip
    answers, learned = [], dpexp.training.pate.questions.learn

    def watched(network, task, examples, labels=None, **settings):
        if labels is not None:
            answers.append(labels.tolist())
            if len(answers) == 1:
                raise KeyboardInterrupt
        return learned(network, task, examples, labels=labels, **settings)

    monkeypatch.setattr("dpexp.training.pate.questions.learn", watched)
    with pytest.raises(KeyboardInterrupt):
        pate(asked, tmp_path / "run", Console(quiet=True))
    summary = pate(asked, tmp_path / "run", Console(quiet=True))
    assert answers[0] == answers[1]
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) == 1
    assert summary["privacy"]["epsilon"]["rdp"] <= 2.0
    git = summary["git"] | {"commit": "of the record", "dirty": False}
    data = summary["data"] | {"sha256": {"train": "of the files"}}
    assert provenance_problems(summary | {"git": git, "data": data}) == []


@pytest.mark.parametrize("noise", [1.0, 0.7])
def test_noisy_votes_tell_no_more_than_their_event_and_less_noise_is_found_out(monkeypatch, noise):
    """Whose vote for one class turns to another is guessed from all noisy counts, with the heaviest teacher's weight."""
    plan = plan_votes("weighting", [2.0, 6.0], teachers=[3, 2], queries=4, delta=1e-5, accountant="pld")
    rng, there, scores = np.random.default_rng(2), [], []
    add = dpexp.pate.add_gaussian_

    def watched(sums, std, generator):
        add(sums, noise * std, generator=generator)
        scores.append(float((sums[0][:, 0] - sums[0][:, 1]).sum()))

    monkeypatch.setattr("dpexp.pate.add_gaussian_", watched)
    ledger = SimpleNamespace(fingerprints=lambda step: [""], begin_step=lambda *charge: 0)
    monkeypatch.setattr("dpexp.pate.fingerprint", lambda *facts: "")
    for trial in range(2000):
        there.append(rng.random() < 0.5)
        counts = np.tile([10.0, 10.0], (4, 1))
        counts[:, 0 if there[-1] else 1] += plan.moves[1]
        release(counts, plan, ledger, trial.to_bytes(32, "little"), {}, np.zeros(10, np.int64))
    lower = pair_lower_bound(scores, np.array(there), 1e-5, 1 - 1e-5)
    claimed = plan.spent()[1]
    assert claimed == pytest.approx(6.0, rel=0.01)
    assert 0.6 * claimed < lower
    assert (lower > claimed) == (noise < 1)


@pytest.mark.parametrize("noise", [1.0, 0.3])
def test_neighbours_tell_no_more_than_their_event_and_less_noise_is_found_out(noise):
    """Is the nearest point, which alone has the other label, among the data? All others are known, and who is drawn is not."""
    rate, queries = 0.9, 2
    plan = plan_votes("knn", [3.0], teachers=[1], queries=queries, delta=1e-3, rate=rate, accountant="pld")
    points, labels = torch.arange(31.0)[:, None], np.r_[1, np.zeros(30, int)]
    rng, there, scores = np.random.default_rng(4), [], []
    for trial in range(2000):
        there.append(rng.random() < 0.5)
        sampler = PoissonSampler(31, rate, trial.to_bytes(32, "little"))

        def drawn(number, sampler=sampler, first=0 if there[-1] else 1):
            found = sampler.draw(number)
            return found[found >= first]

        counts = neighbour_votes(points, labels, torch.zeros(queries, 1), 2, 5, drawn)
        noisy = counts + rng.normal(0, noise * plan.sigma, counts.shape)
        moved = (noisy[:, 1] - noisy[:, 0] + 5) / 2
        # of moved by 1 with probability `rate`, at a variance of σ²/2
        scores.append(np.log1p(rate * np.expm1((2 * moved - 1) / plan.sigma**2)).sum())
    lower = two_world_lower_bound(scores, np.array(there), 0.3, 1e-3, 1 - 1e-4)
    assert 0.15 * plan.spent()[0] < lower
    assert (lower > plan.spent()[0]) == (noise < 1)


def test_the_exact_noise_is_drawn_where_it_is_asked_for(tmp_path, monkeypatch):
    kinds = []
    monkeypatch.setattr(
        "dpexp.pate.add_gaussian_", lambda tensors, std, generator: kinds.append(type(generator))
    )
    plan = plan_votes("uniform", [1.0], teachers=[5], queries=6, delta=1e-5)
    for secure in (False, True):
        ledger = Ledger(tmp_path / f"{secure}.jsonl", KEY)
        release(np.zeros((6, 3)), plan, ledger, KEY, {}, np.zeros(10, np.int64), secure=secure)
    assert kinds == [KeyedGenerator, SecureGenerator]


def test_noise_whose_grid_is_too_coarse_for_so_many_answers_is_refused(tmp_path):
    plan = replace(plan_votes("uniform", [1.0], teachers=[5], queries=6, delta=1e-5), sigma=1e7)
    ledger = Ledger(tmp_path / "ledger.jsonl", KEY)
    with pytest.raises(UserError, match="for 18 numbers"):
        release(np.zeros((6, 3)), plan, ledger, KEY, {}, np.zeros(10, np.int64))
    assert not ledger.steps_charged


def test_among_neighbours_that_are_equally_far_one_example_displaces_one() -> None:
    """Points on a grid, as images of few grey values are: of `topk` a missing one moved the counts by up to 7."""
    generator = np.random.default_rng(0)
    for size, k in ((20, 3), (100, 20), (400, 57)):
        points = torch.from_numpy(generator.integers(0, 3, (size, 3))).float()
        labels = generator.integers(0, 4, size)

        def counts(members: np.ndarray, points=points, labels=labels, k=k) -> np.ndarray:
            return neighbour_votes(points, labels, torch.zeros(1, 3), 4, k, lambda _: members)

        whole = counts(np.arange(size))
        moved = [np.linalg.norm(whole - counts(np.delete(np.arange(size), gone))) for gone in range(size)]
        assert max(moved) <= np.sqrt(2) + 1e-12
