"""Events: what is released from one sample, and the Gaussians that it amounts to."""

import json
import math

import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)

from dpexp.errors import UserError
from dpexp.privacy.events import coarsen, composed, decode, encode, releases, step_event


def rounded(parts):
    return {(q, round(sigma, 9)): count for (q, sigma), count in parts.items()}


def test_gaussians_of_one_sample_are_one_gaussian():
    event = step_event(0.1, [1.0, 2.0, 2.0])
    assert rounded(releases(event)) == {(0.1, round((1 + 1 / 4 + 1 / 4) ** -0.5, 9)): 1}


def test_nested_compositions_are_counted_and_merged():
    inner = ComposedDpEvent([GaussianDpEvent(3.0), SelfComposedDpEvent(GaussianDpEvent(4.0), 2)])
    event = ComposedDpEvent(
        [
            SelfComposedDpEvent(PoissonSampledDpEvent(0.2, inner), 5),
            PoissonSampledDpEvent(0.2, inner),
            NoOpDpEvent(),
            SelfComposedDpEvent(GaussianDpEvent(10.0), 4),
            PoissonSampledDpEvent(1.0, GaussianDpEvent(5.0)),
        ]
    )
    assert rounded(releases(event)) == {
        (0.2, round((1 / 9 + 2 / 16) ** -0.5, 9)): 6,
        (1.0, round((4 / 100 + 1 / 25) ** -0.5, 9)): 1,
    }


@pytest.mark.parametrize(
    "event",
    [
        NoOpDpEvent(),
        composed([]),
        composed([(step_event(0.1, [1.0]), 0)]),
        step_event(0.0, [1.0]),
        step_event(0.0, [0.0]),
        step_event(0.3, [math.inf]),
        GaussianDpEvent(math.inf),
    ],
)
def test_what_releases_nothing_is_left_out(event):
    assert releases(event) == {}


def test_a_rate_that_was_rounded_above_all_is_all():
    """It was taken for nothing: such steps were free."""
    assert releases(composed([(step_event(math.nextafter(1.0, 2.0), [1.0]), 4)])) == {(1.0, 0.5): 1}


@pytest.mark.parametrize("event", [NonPrivateDpEvent(), GaussianDpEvent(0.0), step_event(0.1, [1.0, 0.0])])
def test_a_release_without_noise_stays_visible(event):
    assert [sigma for _, sigma in releases(event)] == [0.0]


@pytest.mark.parametrize(
    "event",
    [
        LaplaceDpEvent(1.0),
        PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)),
        PoissonSampledDpEvent(0.1, PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))),
    ],
)
def test_what_is_not_a_sampled_gaussian_is_not_taken_for_one(event):
    assert releases(event) is None


@pytest.mark.parametrize(("rate_step", "sigma_step"), [(1e-5, 1e-3), (0.0, 1e-3), (1e-5, 0.0)])
def test_coarsening_only_raises_rates_and_lowers_noise(rate_step, sigma_step):
    parts = {(0.01 + rate_step * i, 1.0 + sigma_step * i): i + 1 for i in range(500)}
    rough = coarsen(parts, 40)
    assert 6 <= len(rough) <= 40
    assert sum(rough.values()) == sum(parts.values())
    for threshold in range(0, 500, 7):  # at least as many releases are as bad as any given one
        q, sigma = 0.01 + rate_step * threshold, 1.0 + sigma_step * threshold
        for as_bad in (lambda a, b, q=q: a >= q, lambda a, b, sigma=sigma: b <= sigma):
            assert sum(n for key, n in rough.items() if as_bad(*key)) >= sum(
                n for key, n in parts.items() if as_bad(*key)
            )
    assert coarsen(parts, 500) is parts


def test_events_survive_json():
    event = composed([(step_event(0.1, [1.0, 2.0]), 3), (LaplaceDpEvent(2.0), 1)])
    assert decode(json.loads(json.dumps(encode(event)))) == event


@pytest.mark.parametrize(
    "record", [{"type": "os"}, {}, {"type": "GaussianDpEvent", "sigma": 1.0}, {"type": "DpEventBuilder"}]
)
def test_what_is_no_event_is_refused(record):
    with pytest.raises(UserError):
        decode(record)
