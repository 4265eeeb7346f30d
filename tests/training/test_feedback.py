"""Noise that follows the training: the rules by hand, the filter against dp_accounting, and runs that end with it."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting.rdp import compute_epsilon

from dpexp import provenance
from dpexp.account import AccountArguments, account
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.privacy.events import decode, releases
from dpexp.privacy.plan import make_plan
from dpexp.privacy.schedules import Schedule
from dpexp.privacy.searches import ORDERS, filter_orders
from dpexp.schemas import ScheduleConfig
from dpexp.training import release
from dpexp.training.feedback import ReleasedNorm, Validation
from tests.training.tiny import cut_short, make_trainer, run_to_end, tiny_run, train, weights

VALIDATION = {
    "name": "validation",
    "decay_rate": 0.5,
    "start": 2.0,
    "threshold": 0.04,
    "window": 2,
    "every": 3,
}
RELEASED = {"name": "privacy_utility_released", "start": 2.0, "window": 3}
SMALL = {"num_examples": 60, "expected_batch_size": 20, "delta": 1e-3, "steps": 12, "epsilon": 8.0}


def divergence(q, sigma, order):
    """Of one Poisson-sampled Gaussian, by quadrature of its definition."""
    x = np.linspace(-12 * sigma, 12 * sigma + order, 40_001)
    ratio = np.logaddexp(math.log(1 - q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
    # in logarithms: of little noise the powers are beyond the largest number
    values = order * ratio - x**2 / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    peak = values.max()
    return (peak + math.log(np.trapezoid(np.exp(values - peak), x))) / (order - 1)


def release_of(schedule):
    return SimpleNamespace(plan=make_plan(**SMALL, schedule=schedule))


def test_noise_falls_where_the_average_score_does_not_rise():
    feedback = Validation(Schedule(**VALIDATION), release_of(VALIDATION), "accuracy")
    assert [feedback.validates_after(step) for step in (1, 3, 4, 6)] == [False, True, False, True]
    levels = []
    for score in (0.5, 0.5, 0.6, 0.6, 0.5):  # averages 0.5, 0.5, 0.55, 0.6, 0.55
        feedback.validated(score)
        levels.append(feedback.release.plan.level)
    assert levels == [2.0, 1.0, 1.0, 1.0, 0.5]
    first = make_plan(**SMALL)
    assert feedback.release.plan.sigma(7) == pytest.approx(0.5 * feedback.release.plan.noise_multiplier)
    # the filter has delta / 4 for each order
    assert feedback.release.plan.noise_multiplier > first.noise_multiplier


def test_the_released_norm_is_the_root_of_unbiased_estimates():
    feedback = ReleasedNorm(Schedule(**RELEASED), release_of(RELEASED), "accuracy")
    norms, variance = [4.0, 5.0, 6.0, 3.0, 2.0, 1.0, 0.2], 2.0
    for t, norm in enumerate(norms):
        feedback.stepped([torch.full((4,), math.sqrt((norm**2 + variance) / 4))], variance)
        if t >= 3:
            last = np.mean(np.square(norms[3 : t + 1][-3:]))
            assert feedback.level == pytest.approx(
                2 * min(1, max(0.1, math.sqrt(last / np.mean([16, 25, 36])))), rel=1e-5
            )
    for _ in range(3):
        feedback.stepped([torch.zeros(4)], variance)
    assert feedback.level == pytest.approx(0.2)


def run_of(schedule, steps=12):
    run = tiny_run(steps=steps, adaptive=False)
    run.privacy.noise_multiplier, run.privacy.epsilon = None, 8.0
    run.schedule = ScheduleConfig(**schedule)
    run.task.metric = "accuracy"
    return run


@pytest.mark.parametrize(
    "schedule", [VALIDATION | {"every": 1, "threshold": 1.0, "decay_rate": 0.7}, RELEASED | {"start": 1.0}]
)
def test_a_run_ends_where_no_step_fits_and_the_target_holds(schedule, tmp_path):
    """What was charged is within the target at an order of the filter, as dp_accounting counts it; one step more is at none."""
    trainer = run_to_end(tmp_path / "whole", run_of(schedule))
    plan = trainer.feedback.release.plan
    events = [
        decode(json.loads(line)["event"])
        for line in (tmp_path / "whole" / "ledger.jsonl").read_text().splitlines()
    ]
    sigmas = [event.event.noise_multiplier for event in events]
    assert sigmas[0] == pytest.approx(schedule["start"] * plan.noise_multiplier)
    orders = filter_orders(releases(plan.event()), plan.delta)

    def independent(order):
        spent = [
            divergence(event.sampling_probability, event.event.noise_multiplier, order) for event in events
        ]
        return compute_epsilon([order], [sum(spent)], plan.delta / ORDERS)[0]

    target = 8.0
    assert plan.epsilon() <= target
    assert min(independent(order) for order in orders) <= target
    if len(events) < 12:
        assert not plan.affords(trainer.ledger.event(), len(events))
        events.append(plan.step_event(len(events)))
        assert min(independent(order) for order in orders) > plan.epsilon() * 0.999
    if schedule["name"] == "validation":
        assert min(sigmas) < sigmas[0]
        assert len(events) < 12 or plan.level > 0.5
    spent = plan.guaranteed(trainer.ledger.epsilons(plan.delta))
    assert 0.99 * target < spent["rdp"] <= target
    assert spent["pld"] is spent["prv"] is spent["gdp"] is None
    again = cut_short(tmp_path / "killed", run_of(schedule), steps=2)
    train(again)
    np.testing.assert_array_equal(weights(again), weights(trainer))
    assert again.feedback.level == trainer.feedback.level


def test_the_noise_of_the_estimate_is_that_of_the_step_also_where_thresholds_move(tmp_path, monkeypatch):
    told, added, add = [], [], release.add_gaussian_

    def watched(tensors, stds, generator):
        if isinstance(stds, list):
            added.append(sum((std / 20) ** 2 * t.numel() for t, std in zip(tensors, stds, strict=True)))
        add(tensors, stds, generator)

    monkeypatch.setattr(release, "add_gaussian_", watched)
    monkeypatch.setattr(ReleasedNorm, "stepped", lambda self, gradients, variance: told.append(variance))
    run = run_of(RELEASED)
    run.clip.adaptive, run.clip.quantile_budget, run.clip.rescale = True, 0.1, False
    run_to_end(tmp_path, run)
    assert len(set(added)) == len(added) > 2
    assert told == pytest.approx(added)


def test_what_the_outputs_told_is_counted_at_the_noise_of_each_step(tmp_path):
    """All gradients are longer than the threshold: every example has told what the ledger charged for all."""
    run = run_of(VALIDATION | {"every": 2, "threshold": 1.0})
    run.clip.groups, run.clip.clip_norm = "flat", 1e-4
    run.analysis.output_specific_every, run.analysis.rounding = 3, 1.0
    trainer = run_to_end(tmp_path, run)
    levels = {
        json.loads(line)["event"]["event"]["noise_multiplier"] for line in (tmp_path / "ledger.jsonl").open()
    }
    assert len(levels) >= 2
    found = trainer.analysis.specific.epsilons(1e-3)
    assert found == pytest.approx(np.full(60, trainer.ledger.epsilon(1e-3)), rel=0.05)


NEARLY_CONSTANT = VALIDATION | {"every": 1, "threshold": 1.0, "decay_rate": 0.999, "start": 1.0}


def killed_behind_its_last_charge(folder, monkeypatch):
    """A run all of whose steps are charged, and that has no checkpoint."""
    run = run_of(NEARLY_CONSTANT)
    run.runtime.checkpoint_every = 0
    trainer = make_trainer(folder, run)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "save", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(trainer)
    assert trainer.step > 8
    return run, trainer


def test_what_is_charged_is_repeated_for_nothing_also_where_the_budget_is_spent(tmp_path, monkeypatch):
    run, killed = killed_behind_its_last_charge(tmp_path, monkeypatch)
    again = make_trainer(tmp_path, run)
    assert again.step == 0
    assert train(again).status == "finished"
    assert (again.step, again.ledger.steps_charged) == (killed.step, killed.ledger.steps_charged)
    np.testing.assert_array_equal(weights(again), weights(killed))


def test_a_spent_budget_charges_no_second_attempt(tmp_path, monkeypatch):
    run, killed = killed_behind_its_last_charge(tmp_path, monkeypatch)
    monkeypatch.setattr(provenance, "code_hash", lambda: "another")
    again = make_trainer(tmp_path, run)
    assert train(again).status == "finished"
    assert (again.step, again.ledger.steps_charged) == (0, killed.ledger.steps_charged)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule=validation", "accountant=pld"], "accountant=pld knows none: use rdp"),
        (["schedule=validation", "schedule.decay_rate=1.2"], "above 0 and below 1"),
        (["schedule=validation", "schedule.start=0.5"], r"start=0\.5 must be 1 or more"),
        (["schedule=privacy_utility_released", "optim=doppler"], "no filter as optim="),
        (["schedule=validation", "task=e2e"], "measures its texts at the end alone"),
        (
            ["schedule=validation", "task.metric=perplexity"],
            "takes more of task.metric=perplexity for better",
        ),
        (["optim.keep_best_every=5", "task.metric=loss"], "takes more of task.metric=loss for better"),
        (["schedule=privacy_utility_released", "clip=adaclip"], "as they are released"),
        (["schedule=privacy_utility_released", "peft=rgp"], "peft=rgp drops"),
    ],
)
def test_bad_settings_get_one_sentence(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        compose(["task=sst2", "scale=demo", *overrides])
    assert "\n" not in str(caught.value)


def test_a_filter_affords_what_was_planned_also_where_the_best_order_is_large():
    made = make_plan(**SMALL | {"epsilon": 1e-3, "delta": 1e-8}, schedule=VALIDATION | {"start": 1.0})
    assert filter_orders(releases(made.event()), made.delta)[0] > 5000
    assert made.affords(made.event(11), 11)
    assert not made.affords(made.event(), 11)


def test_no_epsilon_is_computed_beforehand_of_noise_that_follows():
    arguments = AccountArguments(sample_rate=0.1, steps=10, delta=1e-3, noise_multiplier=1.0)
    arguments.schedule = ScheduleConfig(**VALIDATION)
    with pytest.raises(UserError, match="follows the training"):
        account(arguments)
    with pytest.raises(UserError, match="use rdp, or a schedule that is fixed"):
        make_plan(**SMALL, schedule=VALIDATION, accountant="prv")
