"""Noise over time: the formulas, what is refused, and that the budget is that of the steps one by one."""

import itertools
import json
import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.privacy import schedules
from dpexp.privacy.accountants import ACCOUNTANTS, epsilon
from dpexp.privacy.caveats import caveats
from dpexp.privacy.events import coarsen, releases
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.plan import Plan, make_plan
from dpexp.privacy.schedules import ADAPTIVE, CONSTANT, SCHEDULES, Schedule, factor_counts

SMALL = {"num_examples": 1000, "expected_batch_size": 50, "delta": 1e-5}  # an epoch is 20 steps
DECAYS = {
    "time": {"name": "time", "decay_rate": 0.5},
    "exponential": {"name": "exponential", "decay_rate": 0.1},
    "step": {"name": "step", "decay_rate": 0.6, "period": 2},
    "polynomial": {"name": "polynomial", "decay_rate": 3, "period": 5, "end_ratio": 0.2},
    "convergence_rate": {"name": "convergence_rate", "condition": 50},
    "influence": {"name": "influence", "influences": [1.0, 2.0, 16.0]},
    "given": {"name": "given", "factors": [4.0, 8.0, 2.0]},
    "privacy_utility": {"name": "privacy_utility", "condition": 50},
    "privacy_utility_convex": {"name": "privacy_utility_convex", "decay_rate": 0.5},
}
FORMULAS = {  # Monir et al., section 3.1.1, with σ_0 = 10, written out again
    "time": lambda t: 10 / (1 + 0.5 * t),
    "exponential": lambda t: 10 * math.e ** (-0.1 * t),
    "step": lambda t: 10 * 0.6 ** (t // 2),
    "polynomial": lambda t: (10 - 2) * (1 - t / 5) ** 3 + 2 if t < 5 else 2,
    # section 3.1.3; an epoch is 20 steps, the run has 6.5 of them
    "convergence_rate": lambda t: 10 * 0.98 ** (20 * t / 4),
    "influence": lambda t: 10 / (1, 2, 16)[int(t / 6.5 * 3)] ** 0.25,
    "given": lambda t: (10, 20, 5)[int(t / 6.5 * 3)],
    "privacy_utility": lambda t: 10 * 0.99 ** (20 * t / 2),
    "privacy_utility_convex": lambda t: 10 / math.sqrt(1 + 0.5 * t),
}


def plan(schedule, **changes):
    return make_plan(**{**SMALL, "steps": 130, "noise_multiplier": 10.0, "schedule": schedule, **changes})


@pytest.mark.parametrize("name", DECAYS)
def test_the_noise_of_every_step_is_the_formula_at_the_epochs_so_far(name):
    made = plan(DECAYS[name])
    assert [made.sigma(step) for step in range(130)] == pytest.approx(
        [FORMULAS[name](step // 20) for step in range(130)], rel=1e-12
    )
    assert made.sigma(0) == made.sigma(19) == pytest.approx(10)
    assert made.sigma(129) < made.sigma(0)


def test_every_decay_has_a_formula_here():
    assert set(SCHEDULES) - set(ADAPTIVE) == {"constant", *DECAYS} == {"constant", *FORMULAS}


@pytest.mark.parametrize("size", [1, 3, 7, 49, 50, 93, 999, 1000])
def test_an_epoch_begins_after_n_over_b_steps_whatever_the_rounding(size):
    """49·(1/49) is below 1 in floating point."""
    schedule = Schedule("time", decay_rate=1.0)
    for epoch in (1, 2, 10, 100):
        assert schedule.epochs(epoch * size, 1 / size) == epoch
        assert schedule.epochs(epoch * size - 1, 1 / size) == epoch - 1


def test_noise_may_change_within_an_epoch():
    often = Schedule("exponential", decay_rate=0.1, updates_per_epoch=4)
    assert [often.epochs(step, 0.05) for step in (0, 4, 5, 10, 19, 20)] == [0, 0, 0.25, 0.5, 0.75, 1]
    assert len(factor_counts(often, 40, 40, 0.05)) == 8


def test_a_polynomial_without_a_period_takes_the_length_of_the_run():
    values = {"name": "polynomial", "decay_rate": 1, "end_ratio": 0.5}
    made = plan(values, steps=100)  # five epochs
    assert [made.sigma(20 * epoch) for epoch in range(5)] == pytest.approx([10, 9, 8, 7, 6])
    assert made.epsilon() == plan({**values, "period": 5}, steps=100).epsilon()


rates, periods = st.floats(1e-3, 2), st.floats(0.5, 50)
any_decay = st.one_of(
    st.builds(Schedule, st.just("time"), rates),
    st.builds(Schedule, st.just("exponential"), st.floats(1e-3, 0.3)),
    st.builds(Schedule, st.just("step"), st.floats(0.8, 0.99), periods.filter(lambda p: p > 1)),
    st.builds(Schedule, st.just("polynomial"), rates, st.none() | periods, st.floats(0.01, 1)),
    st.builds(Schedule, st.just("convergence_rate"), condition=st.floats(100, 1e5)),
    st.builds(Schedule, st.just("privacy_utility"), condition=st.floats(100, 1e5)),
    st.builds(Schedule, st.just("privacy_utility_convex"), rates),
    st.builds(Schedule, st.just("influence"), influences=st.lists(st.floats(0.01, 10), min_size=1, max_size=9).map(sorted)),
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(schedule=any_decay, updates=st.integers(1, 5), epochs=st.integers(1, 40), size=st.integers(1, 30))
def test_every_decay_is_positive_begins_at_one_and_never_rises(schedule, updates, epochs, size):
    schedule = Schedule(**{**schedule.__dict__, "updates_per_epoch": updates})
    steps = epochs * size
    factors = [schedule.factor(step, steps, 1 / size) for step in range(steps)]
    assert factors[0] == pytest.approx(1, rel=1e-12)
    assert all(0 < later <= before for before, later in itertools.pairwise(factors))
    counts = factor_counts(schedule, steps, steps, 1 / size)
    assert sum(count for _, count in counts) == steps
    assert len(counts) <= epochs * updates
    assert Schedule.of(json.loads(json.dumps(schedule.plain()))) == schedule


@pytest.mark.parametrize("name", DECAYS)
def test_the_budget_is_that_of_the_steps_one_by_one(name):
    made = plan(DECAYS[name], noise_multiplier=3.0, quantile_budget=0.1)
    for done in (0, 1, 20, 75, 130):
        by_hand = ComposedDpEvent([made.step_event(step) for step in range(done)])
        for accountant in ("rdp", "gdp"):
            assert made.epsilon(done, accountant) == pytest.approx(
                epsilon(by_hand, made.delta, accountant), rel=1e-12
            )


def test_less_noise_later_costs_more_than_constant_noise_and_less_than_the_least_of_it():
    decayed = plan(DECAYS["time"], noise_multiplier=4.0, steps=60)
    bounds = [plan("constant", noise_multiplier=s, steps=60) for s in (4.0, decayed.sigma(59))]
    for accountant in ("rdp", "gdp", "pld"):
        low, high = (bound.epsilon(accountant=accountant) for bound in bounds)
        assert low < decayed.epsilon(accountant=accountant) < high


def test_the_accountants_agree_about_decaying_noise():
    """The central limit below, RDP above, and the two numerical ones close to each other between them."""
    found = plan(DECAYS["exponential"], noise_multiplier=2.0, steps=60).epsilons()
    assert set(found) == set(ACCOUNTANTS)
    assert found["gdp"] < found["pld"] <= found["prv"] * 1.001 < found["rdp"]
    assert found["prv"] == pytest.approx(found["pld"], rel=0.02)


@pytest.mark.parametrize("name", DECAYS)
def test_calibration_keeps_the_target(name):
    target = 2.0
    made = plan(DECAYS[name], noise_multiplier=None, epsilon=target)
    assert 0.998 * target < made.epsilon() <= target
    by_hand = ComposedDpEvent([made.step_event(step) for step in range(made.steps)])
    assert epsilon(by_hand, made.delta) <= target
    assert made.sigma(0) > plan("constant", noise_multiplier=None, epsilon=target).sigma(0) > made.sigma(129)


def test_calibration_under_pld_keeps_the_target():
    made = plan(DECAYS["step"], noise_multiplier=None, epsilon=2.0, accountant="pld", steps=60)
    assert 0.998 * 2 < made.epsilon() <= 2.0 < made.epsilon(accountant="rdp")


@settings(deadline=None, max_examples=60)
@given(
    sigmas=st.lists(st.floats(0.3, 50), min_size=20, max_size=60, unique=True),
    limit=st.integers(1, 15),
    data=st.data(),
)
def test_joined_noise_is_never_more_than_there_was(sigmas, limit, data):
    """Sorted by noise, every release is charged with at most its own; the count stays."""
    parts = {(0.01, sigma): data.draw(st.integers(1, 5)) for sigma in sigmas}
    joined = coarsen(parts, limit)
    assert len(joined) <= limit
    each, charged = (sorted(s for (_, s), n in some.items() for _ in range(n)) for some in (parts, joined))
    assert len(each) == len(charged)
    assert all(less <= own for less, own in zip(charged, each, strict=True))


def test_joining_many_kinds_costs_little():
    """Less than 1% of ε with half as many kinds as there are."""
    made = make_plan(
        num_examples=60000, expected_batch_size=512, steps=11700, delta=1e-5, noise_multiplier=10.0,
        schedule={"name": "time", "decay_rate": 0.05},
    )  # fmt: skip
    parts = releases(made.event())
    assert len(parts) == 100
    exact, joined = (ACCOUNTANTS["gdp"](some, 1e-5) for some in (parts, coarsen(parts, 50)))
    assert exact < joined < 1.01 * exact


def test_a_constant_plan_is_the_plan_of_before():
    """Fingerprint and values as they were before there were other schedules."""
    made = make_plan(
        num_examples=42061, expected_batch_size=1024, steps=410, delta=1e-5, noise_multiplier=1.07
    )
    assert made.to_dict() == {
        "num_examples": 42061, "sample_rate": 1024 / 42061, "steps": 410, "noise_multiplier": 1.07,
        "quantile_budget": 0.0, "delta": 1e-5, "accountant": "rdp", "sampling": "poisson", "target_epsilon": None,
        "schedule": "constant",
    }  # fmt: skip
    assert {made.sigma(step) for step in range(410)} == {1.07}
    assert made == make_plan(
        num_examples=42061, expected_batch_size=1024, steps=410, delta=1e-5, noise_multiplier=1.07,
        schedule={"name": "constant", "decay_rate": None, "period": None, "end_ratio": None, "updates_per_epoch": 1},
    )  # fmt: skip
    assert caveats(made) == []


@pytest.mark.parametrize("name", DECAYS)
def test_a_decaying_plan_survives_its_plain_form_and_says_where_it_ends(name):
    made = plan(DECAYS[name])
    again = Plan(**json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert again.fingerprint() == made.fingerprint() != plan("constant").fingerprint()
    assert f"schedule={name} takes it to {made.sigma(129):.4g} in the last one" in caveats(made)[0]


def test_a_ledger_charges_each_step_with_its_own_noise_and_twice_what_was_repeated(tmp_path):
    """Killed after step 49 with a checkpoint at step 30: replayed steps are free, changed ones are charged again."""
    made = plan(DECAYS["step"], noise_multiplier=2.0)
    ledger = Ledger(tmp_path / "ledger.jsonl", b"k" * 32)
    for step in range(50):
        ledger.begin_step(step, made.step_event(step), f"first {step}")
    resumed = Ledger(tmp_path / "ledger.jsonl", b"k" * 32)
    for step in range(30, 130):
        who = "first" if step < 40 else "second"
        attempt = resumed.begin_step(step, made.step_event(step), f"{who} {step}")
        assert attempt == (1 if 40 <= step < 50 else 0)
    again = [made.step_event(step) for step in (*range(130), *range(40, 50))]
    assert resumed.steps_charged == 140
    assert resumed.epsilon(1e-5) == pytest.approx(epsilon(ComposedDpEvent(again), 1e-5), rel=1e-12)
    assert resumed.epsilon(1e-5) > made.epsilon()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "convergence_rate"}, "not given: schedule.condition, which schedule=convergence_rate needs"),
        ({"name": "privacy_utility", "condition": 1.0}, "condition=1.0 must be above 1"),
        ({"name": "influence"}, "not given: schedule.influences"),
        ({"name": "influence", "influences": []}, "not given: schedule.influences"),
        ({"name": "influence", "influences": [1.0, 0.0]}, "must be numbers above 0"),
        ({"name": "given"}, "not given: schedule.factors, which schedule=given needs"),
        ({"name": "given", "factors": [1.0, math.inf]}, "must be numbers above 0"),
        ({"name": "time", "decay_rate": 1.0, "factors": [1.0]}, "schedule=time has no factors"),
        ({"name": "linear"}, r"schedule=linear.*choices: constant, time"),
        ({"name": "time"}, r"not given: schedule.decay_rate, which schedule=time needs"),
        ({"name": "time", "decay_rate": 0}, "decay_rate=0 must be above 0"),
        ({"name": "exponential", "decay_rate": math.inf}, "decay_rate=inf must be above 0"),
        ({"name": "exponential", "decay_rate": math.nan}, "decay_rate=nan must be above 0"),
        ({"name": "step", "decay_rate": 1.0, "period": 2}, "above 0 and below 1"),
        ({"name": "step", "decay_rate": 0.5}, "not given: schedule.period"),
        ({"name": "step", "decay_rate": 0.5, "period": 0}, "period=0 must be a number of epochs above 0"),
        ({"name": "polynomial", "decay_rate": 1}, "not given: schedule.end_ratio"),
        ({"name": "polynomial", "decay_rate": 1, "end_ratio": 0.0}, "end_ratio=0.0 must be above 0 and at most 1"),
        ({"name": "polynomial", "decay_rate": 1, "end_ratio": 1.5}, "end_ratio=1.5 must be above 0 and at most 1"),
        ({"name": "constant", "decay_rate": 0.1}, "schedule=constant has no decay_rate"),
        ({"name": "time", "decay_rate": 1.0, "updates_per_epoch": 0}, "updates_per_epoch=0 must be 1 or more"),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        Schedule(**values)


def test_a_decay_to_no_noise_is_refused():
    with pytest.raises(UserError, match=r"leaves less than a millionth of the noise at step 20 of 130"):
        plan({"name": "exponential", "decay_rate": 20})


def test_the_pure_functions_can_be_used_alone():
    assert schedules.constant(7) == 1
    assert schedules.time(4, 0.25) == 0.5
    assert schedules.step(9.99, 0.5, 5) == 0.5
    assert schedules.step(10, 0.5, 5) == 0.25
    assert schedules.polynomial(3, 1, 3, 0.2) == schedules.polynomial(300, 1, 3, 0.2) == pytest.approx(0.2)
    assert Schedule.of("constant") == Schedule.of(CONSTANT) == CONSTANT


def test_the_steps_of_constant_noise_are_not_counted_one_by_one():
    assert factor_counts(CONSTANT, 10**15, 10**15, 0.01) == ((1.0, 10**15),)
    assert factor_counts(CONSTANT, 0, 10, 0.01) == ()


CONDITION, STEPS = 30.0, 80
QUADRATIC = np.geomspace(1 / CONDITION, 1.0, 12)  # curvatures: M = 1, mu = 1/kappa; d = 12


def excess_risk(sigmas):
    """EER of gradient descent with step 1/M on ½ Σ h_i θ_i² from θ = 1, exactly: bias and variance of each coordinate."""
    mean, variance = np.ones(12), np.zeros(12)
    for sigma in sigmas:
        mean, variance = (1 - QUADRATIC) * mean, (1 - QUADRATIC) ** 2 * variance + sigma**2
    return 0.5 * float(QUADRATIC @ (mean**2 + variance))


def risk_bound(sigmas):
    """ERUB: a step multiplies the excess by at most 1 - 1/κ and adds d·σ²/(2M) (docs/methods/convergence_rate.md)."""
    excess = 0.5 * QUADRATIC.sum()
    for sigma in sigmas:
        excess = (1 - 1 / CONDITION) * excess + 12 * sigma**2 / 2
    return excess


def scaled(factors, budget=1e4):
    """The noise of this shape that costs Σ 1/σ² = budget."""
    return np.asarray(factors) * math.sqrt(np.sum(np.asarray(factors) ** -2.0) / budget)


def test_the_convergence_rate_schedule_makes_the_bound_least_and_the_bound_holds():
    schedule = Schedule("convergence_rate", condition=CONDITION, updates_per_epoch=STEPS)
    best = scaled([schedule.factor(step, STEPS, 1 / STEPS) for step in range(STEPS)])
    rng = np.random.default_rng(0)
    others = [scaled(np.ones(STEPS)), scaled(best[::-1])]
    others += [scaled(best * np.exp(0.1 * rng.standard_normal(STEPS))) for _ in range(50)]
    for sigmas in [best, *others]:
        assert excess_risk(sigmas) <= risk_bound(sigmas)
        assert risk_bound(best) <= risk_bound(sigmas)
    # Of these the gradients of the bound along the budget's surface vanish at the best: equal q_t·σ_t⁴
    influence = (1 - 1 / CONDITION) ** np.arange(STEPS - 1, -1, -1)
    assert influence * best**4 == pytest.approx(influence[0] * best[0] ** 4)


def test_measured_influences_beat_the_bound_where_they_are_known():
    """q_s = ∂EER/∂σ_s² of the quadratic itself, in place of that of its bound."""
    powers = np.arange(STEPS - 1, -1, -1)[:, None]
    influences = 0.5 * (QUADRATIC * (1 - QUADRATIC) ** (2 * powers)).sum(1)
    schedule = Schedule("influence", influences=tuple(influences), updates_per_epoch=STEPS)
    sigmas = scaled([schedule.factor(step, STEPS, 1 / STEPS) for step in range(STEPS)])
    bound = Schedule("convergence_rate", condition=CONDITION, updates_per_epoch=STEPS)
    by_bound = scaled([bound.factor(step, STEPS, 1 / STEPS) for step in range(STEPS)])
    assert excess_risk(sigmas) < excess_risk(by_bound) < excess_risk(scaled(np.ones(STEPS)))


def test_noise_at_the_gradients_norm_is_the_best_ratio_and_its_bound_holds():
    """σ = ‖∇F‖/√d and η = 1/(2M) minimise (1/σ) / E[decrease], and the excess then shrinks by 1 - 1/(2κ)."""
    norm, dimension = 3.0, 12

    def ratio(sigma, step_size):
        decrease = step_size * norm**2 - 0.5 * step_size**2 * (norm**2 + dimension * sigma**2)
        return 1 / sigma / decrease if decrease > 0 else math.inf

    best = ratio(norm / math.sqrt(dimension), 0.5)
    grid = [
        (norm / math.sqrt(dimension) * a, 0.5 * b)
        for a in np.geomspace(0.2, 5, 41)
        for b in np.geomspace(0.2, 3, 41)
    ]
    assert all(best <= ratio(*point) + 1e-12 for point in grid)

    mean, variance = np.ones(12), np.zeros(12)
    first = excess = 0.5 * QUADRATIC.sum()
    for step in range(STEPS):
        assert excess <= first * (1 - 1 / (2 * CONDITION)) ** step * (1 + 1e-12)
        squared = float(QUADRATIC**2 @ (mean**2 + variance))  # E‖∇F‖²
        mean, variance = (1 - QUADRATIC / 2) * mean, (1 - QUADRATIC / 2) ** 2 * variance + squared / 12 / 4
        excess = 0.5 * float(QUADRATIC @ (mean**2 + variance))


def test_both_theories_give_the_same_decay_of_a_badly_conditioned_loss():
    """(1 - 1/κ)^(1/4) and (1 - 1/(2κ))^(1/2) are both e^(-1/(4κ)) up to 1/κ²."""
    hong, fay = (
        Schedule(name, condition=1e4).factor(2000, 10**4, 1e-3)
        for name in ("convergence_rate", "privacy_utility")
    )
    assert hong == pytest.approx(fay, rel=1e-4) == pytest.approx(math.exp(-2000 / 4e4), rel=1e-4)
