"""Calibration: keeps the target, wastes next to nothing, and says so where it cannot."""

import math

import pytest
from dp_accounting import get_sigma_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.calibration import calibrate
from dpexp.privacy.events import composed, step_event


def sampled(q, steps):
    return lambda sigma: composed([(step_event(q, [sigma]), steps)])


def check(make_event, target, delta, accountant):
    """The σ that is returned keeps the target, and one that is 0.02% smaller does not."""
    sigma = calibrate(make_event, target, delta, accountant)
    assert epsilon(make_event(sigma), delta, accountant) <= target
    assert epsilon(make_event(sigma * (1 - 2e-4)), delta, accountant) > target


@settings(max_examples=12, deadline=None)
@given(
    q=st.floats(1e-4, 1.0),
    steps=st.integers(1, 20000),
    target=st.floats(0.05, 30),
    delta=st.sampled_from([1e-8, 1e-5, 1e-3]),
)
def test_renyi_never_overspends(q, steps, target, delta):
    check(sampled(q, steps), target, delta, "rdp")


@settings(max_examples=25, deadline=None)
@given(q=st.floats(1e-4, 1.0), steps=st.integers(1, 10**6), target=st.floats(0.01, 100))
def test_the_central_limit_theorem_never_overspends(q, steps, target):
    check(sampled(q, steps), target, 1e-5, "gdp")


@pytest.mark.parametrize(("q", "steps", "target"), [(0.0243, 410, 3.0), (0.2, 50, 0.5), (1.0, 7, 2.0)])
def test_privacy_loss_distributions_never_overspend(q, steps, target):
    check(sampled(q, steps), target, 1e-5, "pld")


def test_prv_never_overspends():
    check(sampled(0.05, 20), 4.0, 1e-5, "prv")


def test_tighter_accountants_need_less_noise():
    found = {name: calibrate(sampled(0.0243, 410), 3.0, 1e-5, name) for name in ("rdp", "pld", "gdp")}
    assert found["gdp"] < found["pld"] < found["rdp"]


def test_without_sampling_the_noise_is_the_analytic_gaussian():
    sigma = calibrate(sampled(1.0, 1), 1.0, 1e-5, "pld")
    assert sigma == pytest.approx(get_sigma_gaussian(1.0, 1e-5), rel=1.1e-4)


def test_heterogeneous_events_are_calibrated_as_one():
    def make_event(sigma):
        return composed([(step_event(0.02, [sigma]), 100), (step_event(0.05, [2 * sigma]), 50)])

    check(make_event, 2.0, 1e-5, "rdp")


def test_tiny_and_huge_targets():
    assert calibrate(sampled(0.01, 100), 1e-3, 1e-5) > 100
    sigma = calibrate(sampled(0.01, 100), 1e6, 1e-5)
    assert 0 < sigma < 0.05
    assert epsilon(sampled(0.01, 100)(sigma), 1e-5) <= 1e6


@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_a_target_that_no_grid_holds_is_refused_and_not_met_with_far_too_much_noise(accountant):
    with pytest.raises(UserError, match=f"beyond what accountant={accountant} can tell"):
        calibrate(sampled(0.01, 1000), 5000.0, 1e-5, accountant)
    # without sampling nothing needs a grid
    assert epsilon(sampled(1.0, 10)(calibrate(sampled(1.0, 10), 5000.0, 1e-5, accountant)), 1e-5) > 4900


def test_a_run_without_releases_needs_no_noise():
    assert calibrate(sampled(0.0, 100), 1.0, 1e-5) == 0.0
    assert calibrate(sampled(0.1, 0), 1.0, 1e-5) == 0.0


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_a_target_must_be_a_positive_number(target):
    with pytest.raises(UserError, match="positive number"):
        calibrate(sampled(0.1, 10), target, 1e-5)


def test_an_unreachable_target_says_what_to_change():
    with pytest.raises(UserError, match="raise epsilon or delta, or take fewer steps or a smaller batch"):
        calibrate(sampled(0.1, 10), 1.0, 0.0)


def test_the_edge_of_what_an_accountant_can_tell_is_no_answer():
    """PRV finds no finite ε below twice the noise that PLD needs."""

    def apart(sigma):
        return composed([(step_event(5.2e-5, [4.88 * sigma]), 94), (step_event(0.123, [0.539 * sigma]), 101)])

    assert calibrate(apart, 31, 1.5e-5, "pld") < 1
    with pytest.raises(UserError, match="take accountant=pld"):
        calibrate(apart, 31, 1.5e-5, "prv")
