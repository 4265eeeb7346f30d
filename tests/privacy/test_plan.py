"""The plan: the budget split of Proposition 3.1, composition inside the sampling, and what is refused."""

import math
from dataclasses import replace

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.privacy.accountants import ACCOUNTANTS, epsilon
from dpexp.privacy.caveats import caveats, earliest_end, noise_that_follows, pointless
from dpexp.privacy.events import composed
from dpexp.privacy.plan import Plan, make_plan, resolve_delta

E2E = {"num_examples": 42061, "expected_batch_size": 1024, "steps": 410, "delta": "half_over_n"}


def plan(**changes):
    return make_plan(**{**E2E, "noise_multiplier": 1.07, **changes})


@settings(deadline=None)
@given(r=st.floats(1e-6, 0.999), sigma=st.floats(0.1, 50), groups=st.integers(1, 10**5))
def test_the_split_is_proposition_3_1_for_any_number_of_groups(r, sigma, groups):
    """σ_new = (σ^-2 - K/(2σ_b)²)^(-1/2), and the share of the counts is r = Kσ²/(4σ_b²) (Remark 3.1)."""
    split = plan(noise_multiplier=sigma, quantile_budget=r)
    sigma_b = split.sigma_b(0, groups)
    assert groups * sigma**2 / (4 * sigma_b**2) == pytest.approx(r)
    assert split.sigma_new(0) == pytest.approx((sigma**-2 - groups / (2 * sigma_b) ** 2) ** -0.5, rel=1e-6)


def test_the_event_holds_the_noise_that_training_uses():
    """K counts of sensitivity 1/2 with noise σ_b each are one Gaussian of multiplier σ_b / (√K/2)."""
    split = plan(quantile_budget=0.1)
    event = split.step_event(7)
    assert isinstance(event, PoissonSampledDpEvent)
    assert event.sampling_probability == split.sample_rate == 1024 / 42061
    gradient, counts = event.event.events
    assert gradient.noise_multiplier == split.sigma_new(7)
    for groups in (1, 12, 199):
        assert counts.noise_multiplier == pytest.approx(split.sigma_b(7, groups) / (math.sqrt(groups) / 2))


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("r", [1e-4, 0.01, 0.1, 0.5])
def test_an_adaptive_run_costs_exactly_what_the_plain_run_costs(accountant, r):
    assert plan(quantile_budget=r).epsilon(accountant=accountant) == plan().epsilon(accountant=accountant)


def test_sampling_each_release_by_itself_undercounts():
    """At r = 0.1, ε = 3.0 would print as about 2.8."""
    split = make_plan(**E2E, epsilon=3.0, quantile_budget=0.1)
    gradient, counts = split.step_event(0).event.events
    apart = ComposedDpEvent(
        [PoissonSampledDpEvent(split.sample_rate, release) for release in (gradient, counts)]
    )
    wrong = epsilon(SelfComposedDpEvent(apart, split.steps), split.delta)
    assert split.epsilon() == pytest.approx(3.0, abs=1e-3)
    assert wrong == pytest.approx(2.8, abs=0.05)


def test_calibrating_the_adaptive_run_gives_the_noise_of_the_plain_run():
    assert make_plan(**E2E, epsilon=3.0, quantile_budget=0.1).noise_multiplier == pytest.approx(
        make_plan(**E2E, epsilon=3.0).noise_multiplier, rel=1e-9
    )


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_calibrated_plan_keeps_its_target(accountant):
    made = make_plan(**E2E, epsilon=8.0, accountant=accountant, allow_clt=True)
    assert 0.998 * 8 < made.epsilon() <= 8.0
    assert made.target_epsilon == 8.0


def test_epsilon_grows_with_the_steps_that_were_taken():
    made = plan()
    assert made.epsilon(0) == 0
    assert 0 < made.epsilon(1) < made.epsilon(200) < made.epsilon(410) == made.epsilon()
    assert set(made.epsilons()) == set(ACCOUNTANTS)
    with pytest.raises(UserError, match="410 steps, not 411"):
        made.epsilon(411)


def test_no_noise_is_an_infinite_epsilon():
    assert plan(noise_multiplier=0.0).epsilon() == math.inf


def test_full_batches_are_not_sampled():
    made = plan(expected_batch_size=42061, steps=1, noise_multiplier=5.0)
    assert made.sample_rate == 1.0
    assert made.epsilon(accountant="pld") == epsilon(GaussianDpEvent(5.0), made.delta, "pld")


def test_a_schedule_reaches_training_and_accounting_alike():
    """Halved every second epoch; `test_schedules` has the rest."""
    schedule = {"name": "step", "decay_rate": 0.5, "period": 2}
    small = {"num_examples": 1000, "expected_batch_size": 20, "steps": 200, "schedule": schedule}
    made = plan(**small, noise_multiplier=2.0)
    assert [made.sigma(99), made.sigma(100)] == [2.0, 1.0]
    by_hand = ComposedDpEvent([made.step_event(step) for step in range(200)])
    assert made.epsilon() == pytest.approx(epsilon(by_hand, made.delta), rel=1e-12)
    calibrated = plan(**small, noise_multiplier=None, epsilon=1.0)
    assert calibrated.epsilon() <= 1.0
    assert calibrated.epsilon() == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(UserError, match=r"schedule=linear.*constant"):
        plan(schedule="linear")


def test_the_fingerprint_names_every_field():
    made = plan()
    assert made.fingerprint() == Plan(**made.to_dict()).fingerprint()
    changes = {
        "steps": 411,
        "noise_multiplier": 1.08,
        "quantile_budget": 0.01,
        "delta": 1e-5,
        "sampling": "shuffle",
    }
    others = [plan(**{name: value}).fingerprint() for name, value in changes.items()]
    assert len({made.fingerprint(), *others}) == 1 + len(changes)


def test_what_is_not_a_guarantee_says_so():
    assert caveats(plan()) == []
    assert "not a guarantee" in caveats(plan(sampling="shuffle"))[0]
    assert "central limit" in caveats(plan(accountant="gdp", allow_clt=True))[0]
    assert "1/N" in caveats(plan(delta=1e-3))[0]
    huge = plan(noise_multiplier=None, epsilon=1e6)
    assert pointless(huge) == caveats(huge)
    assert "epsilon = 1e+06 bounds next to nothing" in caveats(huge)[0]


@pytest.mark.parametrize("follows", [
    {"name": "validation", "decay_rate": 0.8, "start": 1.5, "threshold": 0.01, "window": 3, "every": 20},
    {"name": "validation", "decay_rate": 0.99, "start": 1.5, "threshold": 0.01, "window": 3, "every": 20},
    {"name": "privacy_utility_released", "start": 1.5, "window": 7},
])  # fmt: skip
def test_where_noise_that_follows_the_training_may_end_a_run_is_said_at_its_start(follows):
    """As the run itself asks, step by step."""
    made = plan(noise_multiplier=None, epsilon=3.0, schedule=follows)
    taken = []
    while len(taken) < made.steps:
        moved = replace(made, level=made.schedule.lowest_level(len(taken)))
        if not moved.affords(composed([(event, 1) for event in taken]), len(taken)):
            break
        taken.append(moved.step_event(len(taken)))
    assert earliest_end(made) == len(taken)
    assert f"after {len(taken)} of 410 steps at the earliest" in noise_that_follows(made)[0]
    assert noise_that_follows(plan()) == []


def test_noise_that_drowns_whatever_all_examples_say_is_told():
    (said,) = pointless(plan(noise_multiplier=None, epsilon=1e-7))
    assert said in caveats(plan(noise_multiplier=None, epsilon=1e-7))
    assert "nothing can be learnt" in said
    # 410 batches of 1024 that all say the same move the weights by 410·1024·C, their noise by √410·σ·C
    drowns = 1024 * math.sqrt(410)
    assert pointless(plan(noise_multiplier=1.01 * drowns)) != []
    assert pointless(plan(noise_multiplier=0.99 * drowns)) == []
    decays = {"name": "time", "decay_rate": 0.1}
    assert pointless(plan(noise_multiplier=1.01 * drowns, schedule=decays)) == []


def test_a_schedule_that_ends_within_its_first_epoch_is_told():
    """Noise and batches move between epochs: in a shorter run what was asked for would do nothing, and nothing would say so."""
    decays = {"name": "time", "decay_rate": 0.1}
    (said,) = pointless(plan(steps=20, schedule=decays))
    assert said.startswith("schedule=time changes nothing")
    (said,) = pointless(plan(steps=20, batches=decays))
    assert said.startswith("optim.batch_growth changes nothing")
    assert pointless(plan(steps=20, schedule=decays | {"updates_per_epoch": 4})) == []
    assert pointless(plan(steps=50, schedule=decays)) == pointless(plan(steps=20)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 0}, "0 examples"),
        ({"expected_batch_size": 0}, "batch_size=0"),
        ({"expected_batch_size": 42062}, "at most N = 42061"),
        ({"expected_batch_size": math.nan}, "batch_size=nan"),
        ({"steps": 0}, "steps=0"),
        ({"quantile_budget": 1.0}, "0 <= r < 1"),
        ({"quantile_budget": math.nan}, "0 <= r < 1"),
        ({"accountant": "moments"}, "rdp, gdp, prv, pld"),
        ({"accountant": "gdp"}, "allow_clt=true"),
        ({"sampling": "round_robin"}, "poisson, fixed, shuffle"),
        ({"epsilon": 3.0}, "exactly one of epsilon and noise_multiplier"),
        ({"noise_multiplier": None}, "exactly one of epsilon and noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"delta": 1.5}, "delta=1.5"),
        ({"delta": 0}, "delta=0"),
        ({"delta": "one_over_n"}, "half_over_n"),
        ({"noise_multiplier": None, "epsilon": -3.0}, "positive number"),
    ],
)
def test_bad_input_is_one_clear_error(changes, message):
    with pytest.raises(UserError, match=message):
        plan(**changes)


def test_fixed_thresholds_release_no_counts():
    with pytest.raises(UserError, match="quantile_budget"):
        plan().sigma_b(0, 3)


def test_rules_for_delta():
    assert resolve_delta("half_over_n", 42061) == 1 / (2 * 42061)
    assert resolve_delta("n_pow_-1.1", 67349) == 67349**-1.1
    assert resolve_delta("1e-5", 10) == resolve_delta(1e-5, 10) == 1e-5
