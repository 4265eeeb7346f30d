"""The sampler is exactly Poisson and remembers nothing; the key is secret and lasts."""

import math

import numpy as np
import pytest
from scipy.stats import binom, chi2, kstest, norm

from dpexp.errors import UserError
from dpexp.privacy import sampling
from dpexp.privacy.sampling import PoissonSampler, stream

KEY = b"k" * 32


def membership(num_examples, rate, steps):
    drawn = np.zeros((steps, num_examples), dtype=bool)
    sampler = PoissonSampler(num_examples, rate, KEY)
    for step in range(steps):
        drawn[step, sampler.draw(step)] = True
    return drawn


def test_batch_sizes_are_binomial():
    sizes = membership(500, 0.03, 4000).sum(axis=1)
    lowest, highest = 8, 23
    observed = np.bincount(np.clip(sizes, lowest, highest), minlength=highest + 1)[lowest:]
    probability = binom.pmf(np.arange(lowest, highest + 1), 500, 0.03)
    probability[0], probability[-1] = binom.cdf(lowest, 500, 0.03), binom.sf(highest - 1, 500, 0.03)
    statistic = ((observed - 4000 * probability) ** 2 / (4000 * probability)).sum()
    assert chi2.sf(statistic, highest - lowest) > 1e-3


def test_every_example_is_in_equally_often_and_independently():
    rate, steps, num_examples = 0.2, 4000, 60
    drawn = membership(num_examples, rate, steps)
    deviations = (drawn.mean(axis=0) - rate) / math.sqrt(rate * (1 - rate) / steps)
    assert kstest(deviations, norm.cdf).pvalue > 1e-3
    # Between examples within a step, and between steps of one example: correlations are noise of size 1/sqrt(n).
    between = np.corrcoef(drawn.T)[np.triu_indices(num_examples, 1)] * math.sqrt(steps)
    assert kstest(between, norm.cdf).pvalue > 1e-3
    over_time = [
        np.corrcoef(drawn[:-1, i], drawn[1:, i])[0, 1] * math.sqrt(steps) for i in range(num_examples)
    ]
    assert kstest(over_time, norm.cdf).pvalue > 1e-3


def test_no_number_of_examples_is_drawn_first_which_numpy_would_only_approximate(monkeypatch):
    class Gaps:
        """A generator of these gaps alone: it has no binomial."""

        given = iter([[3, 1, 5], [2, 2**62, 2**62]])

        def geometric(self, rate, size):
            assert rate == 0.2
            return np.array(next(self.given))

    monkeypatch.setattr(sampling, "generator_from", lambda digest: Gaps())
    assert PoissonSampler(20, 0.2, KEY).draw(0).tolist() == [2, 3, 8, 10]


def test_a_draw_is_sorted_distinct_and_in_range():
    for rate in (0.001, 0.5, 0.99):
        drawn = PoissonSampler(1000, rate, KEY).draw(3)
        assert drawn.dtype == np.int64
        assert (np.diff(drawn) > 0).all()
        assert drawn.size == 0 or (drawn[0] >= 0 and drawn[-1] < 1000)


def test_a_draw_depends_on_key_step_and_attempt_alone():
    one, other = PoissonSampler(10**6, 1e-3, KEY), PoissonSampler(10**6, 1e-3, KEY)
    forward = [one.draw(step) for step in range(5)]
    backward = [other.draw(step) for step in reversed(range(5))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forward, backward))
    assert not np.array_equal(forward[0], forward[1])
    assert not np.array_equal(forward[0], one.draw(0, attempt=1))
    assert not np.array_equal(forward[0], PoissonSampler(10**6, 1e-3, b"o" * 32).draw(0))


def test_the_ends_of_the_rate():
    assert PoissonSampler(7, 1.0, KEY).draw(0).tolist() == list(range(7))
    assert PoissonSampler(7, 0.0, KEY).draw(0).tolist() == []
    assert any(PoissonSampler(7, 0.01, KEY).draw(step).size == 0 for step in range(20))


@pytest.mark.parametrize(("num_examples", "rate"), [(0, 0.1), (10, -0.1), (10, 1.1), (10, math.nan)])
def test_a_sampler_needs_examples_and_a_rate(num_examples, rate):
    with pytest.raises(UserError, match=r"at rate .*optim\.batch_size"):
        PoissonSampler(num_examples, rate, KEY)


def test_streams_differ_by_name_step_attempt_and_key():
    calls = [
        ("noise", 0, 0),
        ("noise", 1, 0),
        ("noise", 0, 1),
        ("counts", 0, 0),
        ("noise", 10, 0),
        ("noise1", 0, 0),
    ]
    seeds = {stream(key, *call) for call in calls for key in (KEY, b"\0" * 32)}
    assert len(seeds) == 2 * len(calls)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream(KEY, "noise", 5, 2) == stream(KEY, "noise", 5, 2)
