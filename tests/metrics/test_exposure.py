"""Exposure against its closed form, and the fitted distribution against scipy's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from dpexp.errors import UserError
from dpexp.metrics.exposure import FEWEST_TO_FIT, SkewNormal, exposure, extrapolated_exposure, fit, rank


@given(st.integers(1, 200), st.data())
def test_exposure_is_the_logarithm_of_the_space_over_the_rank(others, data):
    place = data.draw(st.integers(1, others + 1))
    losses = np.random.default_rng(0).permutation([float(x) for x in range(1, others + 2) if x != place])
    assert rank(place, losses) == place
    assert exposure(place, losses) == math.log2(others + 1) - math.log2(place)


def test_the_whole_space_of_canaries():
    # Li et al., App. M: 10 words, suffixes of 5, so 10^5 texts and log2 of it, about 17 bits, for one that is first.
    space = np.arange(10**5, dtype=float)
    assert exposure(0.0, space[1:]) == pytest.approx(16.6096, abs=1e-4)
    assert exposure(float(space[-1]), space[:-1]) == 0.0


def test_equal_losses_expose_nothing():
    assert exposure(1.0, np.ones(1023)) == 0.0
    assert exposure(1.0, [math.inf] * 3) == 2.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=1), st.floats(-1e3, 1e3), st.floats(0, 10))
def test_a_lower_loss_never_exposes_less(others, loss, less):
    assert exposure(loss - less, others) >= exposure(loss, others)
    assert 0.0 <= exposure(loss, others) <= math.log2(len(others) + 1)


def test_a_canary_like_any_other_has_little_exposure_on_average():
    # -log2 of a uniform variable has mean 1 / ln 2.
    draws = np.random.default_rng(1).normal(size=(2000, 200))
    measured = np.mean([exposure(row[0], row[1:]) for row in draws])
    assert measured == pytest.approx(1 / math.log(2), abs=0.12)


@pytest.mark.parametrize("shape", [-3.0, 0.0, 4.0])
def test_fitted_distribution(shape):
    losses = stats.skewnorm.rvs(shape, loc=60, scale=5, size=4000, random_state=np.random.default_rng(2))
    fitted = fit(losses)
    assert fitted.ks_pvalue > 0.01
    true = stats.skewnorm(shape, 60, 5)
    for share in (1e-3, 0.1, 0.5, 0.9):
        assert extrapolated_exposure(true.ppf(share), fitted) == pytest.approx(
            -math.log2(share), rel=0.15, abs=0.05
        )
    # The two ways agree where there are candidates.
    for quantile in (0.01, 0.3, 0.8):
        loss = float(np.quantile(losses, quantile))
        assert extrapolated_exposure(loss, losses) == pytest.approx(exposure(loss, losses), abs=0.3)


@pytest.mark.parametrize("z", [-2.0, -3.8, -10.0, -100.0])
def test_tails_beyond_floats(z):
    normal = SkewNormal(shape=0.0, location=5.0, scale=2.0, ks_pvalue=1.0)
    assert normal.log_cdf(5 + 2 * z) == pytest.approx(float(special.log_ndtr(z)), rel=1e-9)


def test_skewed_tail_and_its_joint():
    skewed = SkewNormal(shape=2.0, location=0.0, scale=1.0, ks_pvalue=1.0)
    assert skewed.log_cdf(-1.5) == pytest.approx(float(stats.skewnorm.logcdf(-1.5, 2.0)), rel=1e-9)
    zs = np.linspace(-4, 4, 200)
    values = [skewed.log_cdf(z) for z in zs]
    assert np.all(np.diff(values) > -1e-12)
    assert extrapolated_exposure(1e9, skewed) == 0.0


def test_fit_does_not_depend_on_the_unit():
    losses = np.random.default_rng(3).gamma(9.0, size=500)
    assert extrapolated_exposure(2.0, losses) == pytest.approx(
        extrapolated_exposure(2000.0, 1000 * losses), rel=1e-6
    )


@pytest.mark.parametrize(
    ("canary", "others", "message"),
    [
        (1.0, [], "one number for each"),
        (1.0, [[1.0]], "one number for each"),
        (math.nan, [1.0], "NaN"),
        (1.0, [math.nan], "NaN"),
    ],
)
def test_bad_losses_are_refused(canary, others, message):
    with pytest.raises(UserError, match=message):
        exposure(canary, others)


def test_what_can_not_be_fitted_is_refused():
    with pytest.raises(UserError, match="too few"):
        fit(np.arange(FEWEST_TO_FIT - 1))
    with pytest.raises(UserError, match="same loss"):
        fit(np.full(100, 7.0))
    with pytest.raises(UserError, match="infinite"):
        fit([math.inf] + [1.0, 2.0] * 50)
    with pytest.raises(UserError, match="finite loss"):
        extrapolated_exposure(math.inf, np.arange(100.0))
