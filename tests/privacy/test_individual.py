"""Individual budgets: each group spends its own epsilon, the batches and the average bound stay, and who is who is kept."""

import json
from functools import cache

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.calibration import calibrate
from dpexp.privacy.caveats import pointless
from dpexp.privacy.events import GroupEvents, composed, decode_groups, encode, step_event
from dpexp.privacy.individual import Budgets, draw_groups, read_groups
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.plan import Plan, make_plan
from dpexp.privacy.sampling import GroupedSampler

SHARES = (0.34, 0.43, 0.23)
MNIST = {"num_examples": 60000, "expected_batch_size": 512, "steps": 3516, "delta": 1e-5}


def plan(method, epsilons=(1.0, 2.0, 3.0), shares=SHARES, **changes):
    settings_ = {**MNIST, "steps": 200, **changes}
    groups = draw_groups(settings_["num_examples"], shares, 0)
    return make_plan(individual=(method, epsilons, groups), **settings_)


@cache
def usual(method, quantile_budget=0.0):
    return plan(method, quantile_budget=quantile_budget)


def spent(made, budget):
    return epsilon(made.event(budget=budget), made.delta, made.accountant)


def test_the_rates_that_monir_et_al_print():
    """Section 6.2: q = 0.005, 0.009, 0.013 and σ = 1.368 for ε = 1, 2, 3; batches of 512 and 30 epochs are inferred."""
    made = plan("sampling", steps=3516)
    assert [round(rate, 3) for rate in made.budgets.rates] == [0.005, 0.009, 0.013]
    assert made.noise_multiplier == pytest.approx(1.368, rel=5e-3)


def test_the_ratios_of_the_thresholds_that_monir_et_al_print():
    """Section 6.2: C_g = 0.141, 0.236, 0.299. Their common factor depends on what is averaged, which the paper does not say."""
    scales = np.asarray(plan("scaling", steps=3516).budgets.scales)
    assert scales / scales[0] == pytest.approx(np.asarray([0.141, 0.236, 0.299]) / 0.141, rel=5e-3)


@settings(deadline=None, max_examples=4)
@given(
    method=st.sampled_from(["sampling", "scaling"]),
    budget=st.sampled_from([0.0, 0.05]),
    first=st.floats(0.5, 4),
    ratio=st.floats(1, 6),
    share=st.floats(0.1, 0.9),
    schedule=st.sampled_from(["constant", {"name": "exponential", "decay_rate": 0.2}]),
)
def test_every_group_spends_its_budget_and_no_more(method, budget, first, ratio, share, schedule):
    targets = (first, first * ratio)
    made = plan(method, targets, (share, 1 - share), quantile_budget=budget, schedule=schedule)
    for group, target in enumerate(targets):
        assert 0.995 * target < spent(made, group) <= target * (1 + 1e-6)
    weights = np.asarray(made.budgets.sizes) / made.num_examples
    assert weights @ made.budgets.rates == pytest.approx(512 / 60000)
    assert weights @ made.budgets.scales == pytest.approx(1)
    assert made.epsilon() == pytest.approx(max(spent(made, 0), spent(made, 1)))


def test_a_group_that_no_rate_suits_is_said_to_be_left_out():
    """Rényi accounting of little noise leaps from 0 to above 1 as the rate grows: nothing spends ε = 1 beside 10 and 20."""
    made = plan("sampling", (1.0, 10.0, 20.0), steps=176, expected_batch_size=1024)
    assert spent(made, 0) < 0.01
    assert pointless(made) == [
        "The group with a budget of 1 is in effect left out: at the noise that the others need, the rdp accountant allows it a "
        "sampling rate of 1.3e-07. Choose budgets that are nearer to each other, more steps, or individual=scaling."
    ]
    assert pointless(plan("sampling", (1.0, 2.0, 3.0))) == []


def test_the_event_of_a_group_is_composed_inside_its_own_sampling():
    """Written with dp_accounting alone: q_g, the gradients' noise over s_g, and the counts with the same noise for all."""
    for method in ("sampling", "scaling"):
        made = usual(method, 0.1)
        for group, (rate, scale) in enumerate(zip(made.budgets.rates, made.budgets.scales, strict=True)):
            sigma_new, sigma = made.sigma_new(0), made.noise_multiplier
            step = PoissonSampledDpEvent(
                rate, ComposedDpEvent([GaussianDpEvent(sigma_new / scale), GaussianDpEvent(sigma / 0.1**0.5)])
            )
            by_hand = epsilon(SelfComposedDpEvent(step, 200), 1e-5)
            assert spent(made, group) == pytest.approx(by_hand, rel=1e-9)


def test_scaling_without_counts_gives_each_group_its_own_noise_multiplier():
    made = usual("scaling")
    for target, scale in zip((1.0, 2.0, 3.0), made.budgets.scales, strict=True):
        alone = calibrate(lambda s: composed([(step_event(512 / 60000, [s]), 200)]), target, 1e-5)
        assert made.noise_multiplier / scale == pytest.approx(alone, rel=1e-6)


def test_equal_budgets_are_one_budget():
    together = make_plan(**{**MNIST, "steps": 200}, epsilon=2.0)
    for method in ("sampling", "scaling"):
        made = plan(method, (2.0, 2.0), (0.5, 0.5))
        assert made.noise_multiplier == pytest.approx(together.noise_multiplier, rel=2e-3)
        assert made.budgets.rates == pytest.approx([512 / 60000] * 2, rel=2e-3)


def test_counts_that_alone_would_overspend_are_refused():
    with pytest.raises(UserError, match="counts of adaptive thresholds alone would spend more"):
        plan("scaling", (0.1, 20.0), (0.1, 0.9), quantile_budget=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 1.0}, "give neither epsilon nor noise_multiplier"),
        ({"sampling": "shuffle"}, "need Poisson batches"),
        ({"epsilons": (1.0, -2.0, 3.0)}, "must be positive numbers"),
    ],
)
def test_what_makes_no_plan(changes, message):
    with pytest.raises(UserError, match=message):
        plan("sampling", **changes)
    with pytest.raises(UserError, match="name=both is not a choice"):
        plan("both")


def test_a_plan_comes_back_from_json():
    made = usual("scaling")
    again = Plan(**json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert isinstance(again.budgets, Budgets)
    assert "budgets" not in make_plan(**MNIST, noise_multiplier=1.0).to_dict()


def test_groups_are_drawn_with_the_given_shares():
    groups = draw_groups(1000, SHARES, 3)
    assert np.bincount(groups).tolist() == [340, 430, 230]
    assert np.array_equal(groups, draw_groups(1000, SHARES, 3))
    assert not np.array_equal(groups, draw_groups(1000, SHARES, 4))
    assert not np.array_equal(groups, np.sort(groups))
    with pytest.raises(UserError, match="add up to 1"):
        draw_groups(1000, (0.5, 0.6), 0)
    with pytest.raises(UserError, match="leaves a group of 2 examples empty"):
        draw_groups(2, (0.1, 0.9), 0)


def test_groups_from_a_file(tmp_path):
    file = tmp_path / "groups.txt"
    file.write_text("1\n3\n2\n1\n")
    assert read_groups(file, 4, 3).tolist() == [0, 2, 1, 0]
    # as some editors save it
    file.write_text("1\n3\n2\n1\n", encoding="utf-8-sig")
    assert read_groups(file, 4, 3).tolist() == [0, 2, 1, 0]
    with pytest.raises(UserError, match="has 4 lines for 5 training examples"):
        read_groups(file, 5, 3)
    with pytest.raises(UserError, match="line 2: '3' is not a group from 1 to 2"):
        read_groups(file, 4, 2)
    with pytest.raises(UserError, match="nobody is in group 4"):
        read_groups(file, 4, 4)
    with pytest.raises(UserError, match="cannot be read"):
        read_groups(tmp_path / "missing.txt", 4, 3)


def test_every_group_is_sampled_at_its_rate_and_independently():
    groups = draw_groups(200, (0.5, 0.5), 0)
    sampler = GroupedSampler(groups, (0.1, 0.4), b"k" * 32)
    drawn = np.zeros((4000, 200), dtype=bool)
    for step in range(len(drawn)):
        indices = sampler.draw(step)
        assert np.array_equal(indices, np.unique(indices))
        drawn[step, indices] = True
    for group, rate in enumerate((0.1, 0.4)):
        share = drawn[:, groups == group].mean(0)
        assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 4000) ** 0.5)
    sizes = [drawn[:, groups == group].sum(1) for group in (0, 1)]
    assert abs(np.corrcoef(*sizes)[0, 1]) < 5 / 4000**0.5
    for group, rate in enumerate((0.1, 0.4)):  # binomial, as of independent draws
        assert sizes[group].var() == pytest.approx(100 * rate * (1 - rate), rel=0.15)
    assert np.array_equal(sampler.draw(7, 1), GroupedSampler(groups, (0.1, 0.4), b"k" * 32).draw(7, 1))
    assert not np.array_equal(sampler.draw(7, 1), sampler.draw(7, 0))


def test_the_ledger_charges_every_group(tmp_path):
    made = usual("sampling")
    ledger = Ledger(tmp_path / "ledger.jsonl", b"k" * 32)
    for step in range(3):
        assert ledger.begin_step(step, made.charge(step), f"f{step}") == 0
    assert ledger.begin_step(1, made.charge(1), "f1") == 0  # a replay
    again = Ledger(tmp_path / "ledger.jsonl", b"k" * 32)
    assert (again.steps_charged, again.num_budgets) == (3, 3)
    by_group = [group["rdp"] for group in again.epsilons_by_budget(1e-5)]
    assert by_group == pytest.approx([epsilon(made.event(3, group), 1e-5) for group in range(3)])
    assert by_group[0] < by_group[1] < by_group[2] == again.epsilon(1e-5) == again.epsilons(1e-5)["rdp"]


def test_examples_may_not_change_their_group_on_the_way(tmp_path):
    made = usual("sampling")
    ledger = Ledger(tmp_path / "ledger.jsonl", b"k" * 32)
    ledger.begin_step(0, made.charge(0), "f")
    moved = GroupEvents(made.charge(1).events, "another membership")
    for other in (moved, made.step_event(1)):
        with pytest.raises(UserError, match="examples have changed their budget groups"):
            ledger.begin_step(1, other, "g")
    assert ledger.steps_charged == 1


def test_events_of_groups_come_back_from_json():
    charge = usual("scaling", 0.1).charge(0)
    assert decode_groups(json.loads(json.dumps(encode(charge)))) == charge
    assert decode_groups(encode(charge.events[0])) is None
