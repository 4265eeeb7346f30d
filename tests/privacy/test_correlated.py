"""Noise that is correlated over steps: its matrix, its arithmetic on the grid, its samples and its price."""

import math
import random
from collections import Counter, deque

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NoOpDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from scipy.linalg import toeplitz
from scipy.optimize import minimize
from scipy.signal import lfilter

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.caveats import caveats, pointless
from dpexp.privacy.correlated import (
    CorrelatedNoise,
    coefficients,
    column_norm,
    inverse,
    noise_added_up,
    noise_left,
)
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.noise import KeyedGenerator, SecureGenerator, draw_whole, room_for
from dpexp.privacy.plan import Plan, make_plan
from dpexp.privacy.sampling import CyclicSampler

SMALL = {"num_examples": 1000, "expected_batch_size": 50, "delta": 1e-5, "steps": 30}


def lower(column):
    return np.tril(toeplitz(column))


def source(step, attempt=0, kind=KeyedGenerator):
    return kind(bytes([step, attempt]) * 16)


def test_without_a_cut_the_matrix_is_the_square_root_of_the_prefix_sum():
    root = lower(coefficients(12, 12))
    assert np.abs(root @ root - np.tril(np.ones((12, 12)))).max() < 0.02  # of numbers in units of 1/256
    assert coefficients(5, 5) == (1, 0.5, 0.375, 0.3125, 0.2734375)
    assert coefficients(1, 9) == (1,)
    assert column_norm(1, 9) == 1


@pytest.mark.parametrize(("bands", "steps"), [(2, 20), (4, 400), (16, 2000)])
def test_no_other_numbers_leave_less_noise_in_the_weights(bands, steps):
    def left(column):
        impulse = np.eye(1, steps)[0]
        sums = np.cumsum(lfilter([1.0], [1.0, *column], impulse)) ** 2
        return (1 + np.square(column).sum()) * np.cumsum(sums).mean()

    half = [math.comb(2 * lag, lag) / 4**lag for lag in range(1, bands)]
    best = minimize(left, half, method="L-BFGS-B", bounds=[(0, 1)] * (bands - 1)).fun
    found = left(coefficients(bands, steps)[1:])
    assert found == pytest.approx(np.mean(noise_added_up(bands, steps) ** 2), rel=1e-9)
    assert best * (1 - 1e-9) <= found < 1.005 * best
    # of the square root, cut off; all of these are squares
    assert found < left(half) * (0.74 if steps == 2000 else 0.99)


@pytest.mark.parametrize("bands", [2, 3, 8])
def test_how_noise_adds_up_is_that_of_the_inverse_matrix(bands):
    steps = 20
    column = np.zeros(steps)
    column[:bands] = coefficients(bands, steps)
    inverted = np.linalg.inv(lower(column))
    np.testing.assert_allclose(inverse(coefficients(bands, steps), steps), inverted[:, 0], atol=1e-12)
    np.testing.assert_allclose(noise_left(bands, steps), np.linalg.norm(inverted, axis=1))
    sums = np.tril(np.ones((steps, steps))) @ inverted
    norm = np.linalg.norm(column)
    np.testing.assert_allclose(noise_added_up(bands, steps), np.linalg.norm(sums, axis=1) * norm)
    assert noise_added_up(1, steps)[-1] == pytest.approx(math.sqrt(steps))


@pytest.mark.parametrize("kind", [KeyedGenerator, SecureGenerator])
def test_an_example_moves_independent_noise_by_its_gradient_times_a_column(kind):
    """The statement that everything rests on: from releases and sums the independent noise follows, and one example of step 2
    moves that of the steps 2 to 4, by its gradient times 1, c_1, c_2 up to a unit, and no other."""
    bands, steps, size = 3, 7, 50
    noise = CorrelatedNoise(bands, steps, lambda step, attempt: source(step, attempt, kind))
    rng = torch.Generator().manual_seed(0)
    sums = [
        torch.randn(size, dtype=torch.float64, generator=rng).mul_(2.0**41).round_() for _ in range(steps)
    ]
    released = [total.clone() for total in sums]
    for step in range(steps):
        # the grid of this std is of whole numbers
        noise.add_([released[step]], [2.0**40 / (1 + 2.0**-16)], step, 0)

    def independent(sums):
        left = [after - before for after, before in zip(released, sums, strict=True)]
        found = []
        for step in range(steps):
            back = sum(
                c * left[step - lag] for lag, c in enumerate(coefficients(bands, steps)) if 0 < lag <= step
            )
            found.append(left[step] + torch.as_tensor(back).round())
        return found

    for step, drawn in enumerate(independent(sums)):
        draw_whole(sums[:1], source(step, 0, kind), expected := room_for(sums[:1]))
        assert torch.equal(drawn, expected[0])
    gradient = torch.randn(size, dtype=torch.float64, generator=rng).mul_(2.0**40).round_()
    moved = [total + gradient if step == 2 else total for step, total in enumerate(sums)]
    for step, (here, there) in enumerate(zip(independent(sums), independent(moved), strict=True)):
        factor = dict(enumerate(coefficients(bands, steps), start=2)).get(step, 0.0)
        assert float((here - there - factor * gradient).abs().max()) <= (1 if factor not in (0, 1) else 0), (
            step
        )


def test_the_noise_that_adds_up_in_the_weights_is_the_one_that_is_told():
    bands, steps = 4, 24
    noise, total = CorrelatedNoise(bands, steps, source), torch.zeros(20_000, dtype=torch.float64)
    for step in range(steps):
        release = torch.zeros_like(total)
        noise.add_([release], [1.0], step, 0)
        total += release
        # within five standard deviations
        assert float(release.std()) == pytest.approx(noise_left(bands, steps)[step], rel=0.025)
        expected = noise_added_up(bands, steps)[step] / column_norm(bands, steps)
        assert float(total.std()) == pytest.approx(expected, rel=0.025)
    assert expected < 0.5 * math.sqrt(steps)


def test_the_noise_of_earlier_steps_is_drawn_again_from_the_attempts_that_were_applied():
    def take(noise, steps, attempts):
        found = []
        for step in steps:
            tensors = [torch.zeros(7), torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(())]
            noise.add_(tensors, [1.0, 0.5, 0.0], step, attempts[step])
            assert tensors[2] == 0
            found.append(torch.cat([tensor.double().reshape(-1) for tensor in tensors]))
        return found

    attempts = [0, 2, 0, 1, 0, 0]
    noise = CorrelatedNoise(3, 6, source)
    whole = take(noise, range(6), attempts)
    # the last one again, as where something failed behind it
    assert torch.equal(take(noise, [5], attempts)[0], whole[5])
    # another attempt takes its place
    assert not torch.equal(take(noise, [5], [0] * 5 + [1])[0], whole[5])
    assert noise.attempts == [0, 2, 0, 1, 0, 1]
    other = CorrelatedNoise(3, 6, source)
    other.load_state_dict({"attempts": attempts[:4]})
    assert all(torch.equal(*pair) for pair in zip(take(other, [4, 5], attempts), whole[4:], strict=True))
    wrong = CorrelatedNoise(3, 6, source)
    wrong.load_state_dict({"attempts": [0, 2, 0, 0]})
    assert not torch.equal(take(wrong, [4], attempts)[0], whole[4])


def test_a_run_does_not_go_on_with_other_numbers():
    """What was taken back before was another part of the noise: from the releases of both, more than one coin would follow."""
    noise = CorrelatedNoise(4, 400, source)
    noise.load_state_dict({"attempts": [0, 0], "coefficients": list(coefficients(4, 400))})
    with pytest.raises(UserError, match=r"by \(1, 0.65625, .* would go on with \(1, 0.78125"):
        noise.load_state_dict({"attempts": [0, 0], "coefficients": list(coefficients(4, 60))})
    # as versions before these numbers wrote them: those of the square root
    with pytest.raises(UserError, match=r"by \(1, 0.5, 0.375, 0.3125\)"):
        noise.load_state_dict({"attempts": [0, 0]})
    CorrelatedNoise(4, 4, source).load_state_dict({"attempts": [0, 0]})


def test_a_draw_that_was_cut_off_leaves_nothing_behind():
    def take(noise, step):
        release = torch.zeros(5, dtype=torch.float64)
        noise.add_([release], [1.0], step, 0)
        return release

    whole, cut = CorrelatedNoise(2, 5, source), CorrelatedNoise(2, 5, source)
    expected = [take(whole, step) for step in range(5)]
    for step in range(4):
        take(cut, step)

    class Full(deque):
        def appendleft(self, found):
            super().appendleft(found)
            raise KeyboardInterrupt

    cut._earlier = Full(cut._earlier, maxlen=1)
    with pytest.raises(KeyboardInterrupt):
        take(cut, 4)
    cut._earlier = deque(cut._earlier, maxlen=1)
    assert torch.equal(take(cut, 4), expected[4])
    # what a checkpoint does not say is not guessed
    cut.load_state_dict({"attempts": [0, 0]})
    with pytest.raises(IndexError):
        take(cut, 4)


def test_each_step_draws_from_one_part_of_the_data_at_a_rate_that_is_larger():
    number, bands, rate = 1001, 4, 0.1
    sampler = CyclicSampler(number, rate, bands, b"k" * 32)
    counts, sizes = np.zeros((bands, number)), []
    for step in range(400):
        drawn = sampler.draw(step)
        assert (np.diff(drawn) > 0).all()
        counts[step % bands, drawn] += 1
        sizes.append(len(drawn))
        assert (sampler.draw(step, 1) != drawn).any() if len(sampler.draw(step, 1)) == len(drawn) else True
    # nobody is in two parts, and all are in one
    assert ((counts > 0).sum(0) == 1).all()
    assert counts.sum(0).mean() / 100 == pytest.approx(bands * rate, rel=0.03)
    assert np.mean(sizes) == pytest.approx(rate * number, rel=0.03)
    parts = (counts > 0).sum(1)
    assert parts.max() - parts.min() <= 1
    # and stay there, also in a copy, whose draws follow from a key of its own: else a window would have no charge
    copy = CyclicSampler(number, rate, bands, b"l" * 32)
    for step in range(40):
        drawn = copy.draw(step)
        assert counts[step % bands, drawn].all()
        assert not np.array_equal(drawn, sampler.draw(step))
    # whichever library deals them
    assert copy._members[0][:6].tolist() == [0, 2, 6, 10, 16, 22]


def test_b_steps_are_one_release_at_b_times_the_rate():
    plan = make_plan(**SMALL, noise_multiplier=2.0, bands=4)
    one = PoissonSampledDpEvent(0.2, GaussianDpEvent(2.0))
    assert plan.event() == SelfComposedDpEvent(one, 8)
    assert [plan.event(steps) for steps in (1, 4, 5)] == [one, one, SelfComposedDpEvent(one, 2)]
    assert [plan.step_event(step) for step in range(5)] == [one, *[NoOpDpEvent()] * 3, one]
    assert plan.rest(5) == SelfComposedDpEvent(one, 6)
    calibrated = make_plan(**SMALL, epsilon=2.0, bands=4)
    assert 0.998 * 2 < epsilon(calibrated.event(), 1e-5, "rdp") <= 2.0
    with_counts = make_plan(**SMALL, noise_multiplier=2.0, bands=4, quantile_budget=0.1)
    assert with_counts.epsilon() == pytest.approx(plan.epsilon(), rel=1e-6)
    assert Plan(**plan.to_dict()) == plan
    assert "bands" not in make_plan(**SMALL, noise_multiplier=2.0).to_dict()
    (said,) = caveats(plan)
    assert "correlated over 4 steps" in said


def test_noise_that_drowns_all_gradients_is_that_of_their_sum():
    drowns = SMALL["steps"] * SMALL["expected_batch_size"] / noise_added_up(4, SMALL["steps"])[-1]
    assert drowns > 1.3 * math.sqrt(SMALL["steps"]) * SMALL["expected_batch_size"]
    assert (
        "nothing can be learnt" in pointless(make_plan(**SMALL, noise_multiplier=1.01 * drowns, bands=4))[0]
    )
    assert pointless(make_plan(**SMALL, noise_multiplier=0.99 * drowns, bands=4)) == []


def test_the_ledger_holds_what_the_plan_says_and_another_attempt_costs_more(tmp_path):
    plan = make_plan(**SMALL, noise_multiplier=2.0, bands=4)
    ledger = Ledger(tmp_path / "ledger.jsonl", b"k" * 32)
    for step in range(7):
        ledger.begin_step(step, plan.charge(step), f"sum {step}")
        assert ledger.epsilon(1e-5) == pytest.approx(plan.epsilon(step + 1), rel=1e-9)
    before = ledger.epsilon(1e-5)
    assert ledger.begin_step(6, plan.charge(6, 0), "sum 6") == 0
    assert ledger.epsilon(1e-5) == before
    for attempt in (1, 2):
        assert ledger.begin_step(6, plan.charge(6, attempt), f"sum 6, again {attempt}") == attempt
    events = Ledger(tmp_path / "ledger.jsonl", b"k" * 32).event().events
    extra = [event.event.noise_multiplier for event in events if isinstance(event, PoissonSampledDpEvent)]
    assert extra == pytest.approx([2 / math.sqrt(2), 2 / math.sqrt(3)])


def test_what_is_charged_covers_every_history_of_crashes():
    """Releases form a tree: each takes back noise of those before it. The coins of an example in the steps of its part move those
    up to b - 1 steps behind them, and no release is moved by two of them; the largest coin is within the largest charge, the
    second within the second, and so on."""
    chance = random.Random(0)
    for _ in range(300):
        bands, steps = chance.choice([2, 3, 5]), chance.randint(5, 9)
        sizes = {"num_examples": 100, "expected_batch_size": 4, "delta": 1e-5, "steps": steps}
        plan = make_plan(**sizes, noise_multiplier=1.0, bands=bands)
        # step, attempt and predecessor
        tree, attempts, here = [], Counter(), None
        while len(tree) < 30 and (here is None or tree[here][0] < steps - 1):
            step = 0 if here is None else tree[here][0] + 1
            tree.append((step, attempts[step], here))
            attempts[step] += 1
            here = len(tree) - 1 if chance.random() < 0.7 else chance.choice([None, *range(len(tree))])
        events = [plan.charge(step, attempt) for step, attempt, _ in tree]
        charges = sorted(e.event.noise_multiplier**-2 for e in events if isinstance(e, PoissonSampledDpEvent))
        for part in range(bands):
            moved = Counter()
            for number in range(len(tree)):
                found, before = [], number
                for factor in coefficients(bands, steps):
                    if before is not None:
                        found += [(before, factor)] if tree[before][0] % bands == part else []
                        before = tree[before][2]
                assert len(found) <= 1
                moved.update({coin: (factor / column_norm(bands, steps)) ** 2 for coin, factor in found})
            pairs = zip(sorted(moved.values(), reverse=True), reversed(charges), strict=False)
            assert len(moved) <= len(charges)
            assert all(coin <= charge * (1 + 1e-9) for coin, charge in pairs)


@pytest.mark.parametrize(
    ("bands", "changes", "said"),
    [
        (0, {}, "nor a whole number"),
        (65, {}, "nor a whole number"),
        (31, {}, "at most 20"),
        (21, {}, "at most 20"),
        (2, {"sampling": "fixed"}, "needs Poisson batches"),
        (2, {"schedule": {"name": "time", "decay_rate": 0.5}}, "constant noise"),
        (2, {"batches": {"name": "step", "decay_rate": 0.5, "period": 1}}, "drop sampling"),
    ],
)
def test_what_cannot_be_correlated_is_refused(bands, changes, said):
    with pytest.raises(UserError, match=said):
        make_plan(**SMALL, noise_multiplier=2.0, bands=bands, **changes)


def test_auto_takes_the_bands_with_the_least_noise_in_the_weights():
    best = make_plan(**SMALL, epsilon=8.0, bands="auto")
    plans = {bands: make_plan(**SMALL, epsilon=8.0, bands=bands) for bands in (1, 2, 4, 8, 16)}
    assert best == min(plans.values(), key=Plan.noise_in_weights)
    assert best.bands > 1
    assert best.noise_in_weights() < 0.75 * plans[1].noise_in_weights()
    # every example in every other step: larger parts would hold fewer than a batch
    assert make_plan(**(SMALL | {"expected_batch_size": 500}), epsilon=0.5, bands="auto").bands == 1
    with pytest.raises(UserError, match="give a number of bands"):
        make_plan(**SMALL, noise_multiplier=1.0, bands="auto")
    with pytest.raises(UserError, match="constant noise"):
        make_plan(**SMALL, epsilon=1.0, bands="auto", schedule={"name": "time", "decay_rate": 0.5})
    for wrong in ("Auto", 2.5, True, None, "2.0x"):
        with pytest.raises(UserError, match="neither auto nor a whole number"):
            make_plan(**SMALL, epsilon=1.0, bands=wrong)


def test_independent_noise_takes_no_number_for_each_step(monkeypatch):
    monkeypatch.setattr("dpexp.privacy.plan.noise_added_up", None)
    monkeypatch.setattr("dpexp.privacy.caveats.noise_added_up", None)
    plan = make_plan(**(SMALL | {"steps": 10**9}), epsilon=8.0)
    assert plan.bands == 1
    assert not caveats(plan)
