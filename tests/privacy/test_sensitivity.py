"""Noise per group and centred counts: the algebra, and the distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.privacy.sensitivity import (
    ALLOCATIONS,
    centred_counts,
    centred_norms,
    noise_scales,
    noise_stds,
    noisy_fractions,
    noisy_means,
    sensitivity,
)

groups = st.lists(st.tuples(st.floats(1e-4, 1e3), st.integers(1, 10**6)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(groups=groups, sigma=st.floats(0.01, 100), allocation=st.sampled_from(ALLOCATIONS))
def test_the_budgets_of_the_groups_add_up_to_sigma_new(groups, sigma, allocation):
    thresholds = torch.tensor([c for c, _ in groups], dtype=torch.float64)
    stds = noise_stds(thresholds, [d for _, d in groups], sigma, allocation)
    # Σ C_k²/std_k²: group k alone is a Gaussian mechanism of std_k/C_k
    spent = (thresholds / stds).square().sum()
    assert spent.item() == pytest.approx(sigma**-2, rel=1e-9)


@pytest.mark.parametrize(
    ("allocation", "expected"),
    [
        # C = (3, 4), d = (1, 4): S = 5; S = √2, γ = C; γ = (3, 2), S = √5
        ("global", [2 * 5.0, 2 * 5.0]),
        ("equal_budget", [2 * 2**0.5 * 3, 2 * 2**0.5 * 4]),
        ("weighted", [2 * 5**0.5 * 3, 2 * 5**0.5 * 2]),
    ],
)
def test_noise_of_every_group_is_sigma_new_times_s_times_gamma(allocation, expected):
    stds = noise_stds(torch.tensor([3.0, 4.0]), [1, 4], 2.0, allocation)
    assert stds.tolist() == pytest.approx(expected)


def test_the_sensitivity_is_reached_and_never_exceeded():
    """Gradients as long as the thresholds allow, in random directions: the scaled vector is S long, for every allocation."""
    thresholds, sizes = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64), [3, 7, 20]
    for allocation in ALLOCATIONS:
        scales = noise_scales(thresholds, sizes, allocation)
        parts = [
            torch.nn.functional.normalize(torch.randn(size, dtype=torch.float64), dim=0) * threshold / scale
            for size, threshold, scale in zip(sizes, thresholds, scales, strict=True)
        ]
        assert torch.cat(parts).norm().item() == pytest.approx(float(sensitivity(thresholds, scales)))


def test_total_noise_power_is_that_of_the_paper():
    """He et al., section 3.3 and Appendix E: V_G = ΣC²·Σd, V_E = K·Σ d·C²; the weighted power is V_G again."""
    thresholds, sizes = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64), [100, 7, 2000]
    d = torch.tensor(sizes, dtype=torch.float64)
    power = {a: float((noise_stds(thresholds, sizes, 1.0, a).square() * d).sum()) for a in ALLOCATIONS}
    v_g = float(thresholds.square().sum() * d.sum())
    assert power["global"] == pytest.approx(v_g)
    assert power["weighted"] == pytest.approx(v_g)
    assert power["equal_budget"] == pytest.approx(float(3 * (d * thresholds.square()).sum()))


def test_the_equal_budget_noise_of_a_group_does_not_depend_on_the_other_thresholds():
    one = noise_stds(torch.tensor([1.0, 2.0]), [5, 5], 1.0, "equal_budget")
    other = noise_stds(torch.tensor([1.0, 900.0]), [5, 5], 1.0, "equal_budget")
    assert one[0] == other[0]


@pytest.mark.parametrize("bad", [[0.0, 1.0], [-1.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_thresholds_that_bound_nothing_are_refused(bad):
    with pytest.raises(UserError, match="positive and finite"):
        noise_scales(torch.tensor(bad), [1, 1], "global")


def test_an_unknown_allocation_is_refused_with_the_choices():
    with pytest.raises(UserError, match="equal_budget"):
        noise_scales(torch.ones(1), [1], "equal")


def test_counts_are_centred_and_a_nan_counts_as_above():
    norms = torch.tensor([[0.5, 1.0, 1.5, float("nan")], [9.0, 9.0, float("inf"), 9.0]])
    assert centred_counts(norms, torch.tensor([1.0, 2.0])).tolist() == [2 - 2.0, 0 - 2.0]
    assert centred_counts(torch.zeros(2, 0), torch.ones(2)).tolist() == [0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**31))
def test_one_example_moves_every_centred_count_by_exactly_a_half(num_groups, num_examples, seed):
    generator = torch.Generator().manual_seed(seed)
    norms = torch.rand(num_groups, num_examples, generator=generator)
    estimates = torch.rand(num_groups, generator=generator)
    moved = centred_counts(norms, estimates) - centred_counts(norms[:, 1:], estimates)
    assert moved.abs().tolist() == [0.5] * num_groups


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**31))
def test_one_example_moves_a_centred_sum_of_norms_by_at_most_half_its_bound(num_groups, num_examples, seed):
    generator = torch.Generator().manual_seed(seed)
    norms = 3 * torch.rand(num_groups, num_examples, generator=generator)
    norms[0, 0] = float("nan")
    bounds = torch.rand(num_groups, generator=generator) + 0.1
    moved = (centred_norms(norms, bounds) - centred_norms(norms[:, 1:], bounds)).abs()
    assert (moved <= bounds.double() / 2 * (1 + 1e-9)).all()
    assert moved[0] == pytest.approx(float(bounds[0]) / 2)
    by_hand = [
        sum(min(x, float(d)) for x in row) for row, d in zip(norms[:, 1:].tolist(), bounds, strict=True)
    ]
    means = (
        noisy_means(centred_norms(norms[:, 1:], bounds), bounds, num_examples - 1)
        if num_examples > 1
        else None
    )
    if means is not None:
        assert (means * (num_examples - 1)).tolist() == pytest.approx(by_hand, rel=1e-6)
    assert centred_norms(torch.zeros(num_groups, 0), bounds).tolist() == [0.0] * num_groups


def test_counts_do_not_depend_on_how_the_batch_is_cut():
    norms, estimates = torch.rand(3, 17), torch.full((3,), 0.4)
    pieces = sum(centred_counts(piece, estimates) for piece in norms.split(5, dim=1))
    assert torch.equal(pieces, centred_counts(norms, estimates))


def test_the_estimate_of_the_fraction_is_unbiased_for_poisson_batches():
    """E[(Σ(b-1/2))/B + 1/2] = share below, although the drawn batch is never B: 30,000 draws from 1,000 examples."""
    rng = np.random.default_rng(0)
    share, num_examples, rate = 0.7, 1000, 0.05
    drawn = rng.binomial(num_examples, rate, 30_000)
    below = rng.binomial(drawn, share)
    counts = torch.tensor(below - drawn / 2)
    estimate = noisy_fractions(counts, num_examples * rate).mean().item()
    # One estimate has a standard deviation of about 0.1 here, so the mean of 30,000 has 0.0006.
    assert estimate == pytest.approx(share, abs=0.003)
