"""The staircase covers the curve, numbers have their probabilities far into the tails, and the cipher is the published one."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from scipy import stats

from dpexp.privacy import exact
from dpexp.privacy.cipher import chacha
from dpexp.privacy.discrete import Piece, integers
from dpexp.privacy.staircase import TAIL, decide, propose, staircase

CPU = torch.device("cpu")
KEY = bytes(range(32))
STAIRS = staircase()


def density(magnitude):
    """exp(-n²/2^81), to 40 digits."""
    with localcontext() as context:
        context.prec = 40
        return (-(Decimal(int(magnitude)) ** 2) / (1 << 81)).exp()


def height(value):
    return Decimal(value) / STAIRS.total


def test_every_layer_is_wide_enough_and_accepts_at_once_only_below_the_curve():
    widths, heights = STAIRS.widths, STAIRS.heights
    assert len(widths) == len(heights) == 257
    assert heights[0] == 0
    assert heights[-1] >= STAIRS.total
    assert widths[0] == (TAIL << 17) - 1
    assert min(widths[:-1]) > 2
    for i, packed in enumerate(STAIRS.packed):
        width, sure = packed & (2**21 - 1), packed >> 21 << 21
        assert width == widths[i]
        # All first words that propose a width are equally many: this is what makes the layers' probabilities equal.
        assert heights[i + 1] - heights[i] == 2**32 // width
        if i:
            assert density(width << 23) <= height(heights[i])
        if sure:
            # The largest magnitude that such words give, and one more for a negative number.
            largest = (((sure - 1) * width >> 32) << 23) + 2**23
            assert density(largest) >= height(heights[i + 1])
    assert sum(packed >> 21 << 21 for packed in STAIRS.packed) / 2**40 > 0.981


@pytest.mark.parametrize("place", [0.001, 0.3, 1.0, 2.5, 4.3, 5.8, 9.0, 15.9])
def test_the_layers_add_up_to_the_curve(place):
    number = int(place * 2**40)
    parts = [
        min(Decimal(top - low), max(Decimal(0), density(number) * STAIRS.total - low))
        for width, low, top in zip(STAIRS.widths, STAIRS.heights, STAIRS.heights[1:])
        if number < width << 23
    ]
    assert abs(sum(parts) / (density(number) * STAIRS.total) - 1) < Decimal("1e-25")


def words(count, seed, low=0, high=2**32):
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high, count))


def bits(count, seed):
    return torch.from_numpy(
        np.random.default_rng(seed).integers(-(2**31), 2**31, (4, count)).astype(np.int32)
    )


@pytest.mark.parametrize(("low", "high", "part"), [(5.8, 6.4, 3), (8.0, 8.2, 23)])
def test_the_tail_has_the_shape_of_the_gaussian(low, high, part):
    """Proposals of the lowest layer between two borders: those that are accepted are what the sampler has there."""
    proposals = 2_000_000
    first = words(proposals, 1, int(low / TAIL * 2**32), int(high / TAIL * 2**32))
    second = words(proposals, 2) & ~255
    heights = bits(proposals, 3)
    # The height is taken from the lowest 2^-part of the layer, else hardly any would be accepted.
    heights[0] &= (1 << (32 - part)) - 1
    numbers, accepted = decide(first, second, heights)
    values = numbers[accepted].abs().numpy() / 2**40
    assert len(values) > 200
    lower, upper = stats.norm.sf(low), stats.norm.sf(high)
    assert stats.kstest(values, lambda x: (lower - stats.norm.sf(x)) / (lower - upper)).pvalue > 1e-3
    mass = (lower - upper) * (2 * np.pi) ** 0.5
    expected = proposals * mass / (high - low) * STAIRS.total / (STAIRS.heights[1] * 2.0**-part)
    assert abs(len(values) - expected) < 5 * expected**0.5


def test_every_whole_number_is_proposed_once():
    """The highest bit of the second word makes n of a magnitude m, or -1 - n: no zero that counts twice."""
    layer = torch.tensor([255, 255 | 1 << 31, 255 | 5 << 8, 255 | 5 << 8 | 1 << 31])
    # The first word must not fall into the incomplete round that is drawn again.
    first = torch.full((4,), 2**32 // STAIRS.widths[255] // 2)
    numbers, accepted = decide(first, layer, torch.zeros(4, 4, dtype=torch.int32))
    assert numbers.tolist() == [0, -1, 5, -6]
    assert accepted.all()
    assert not propose(first, layer)[1].any()
    assert not decide(torch.zeros(4, dtype=torch.int64), layer, torch.zeros(4, 4, dtype=torch.int32))[1].any()


def test_what_is_sure_is_accepted_whatever_its_height_and_the_rest_by_chance():
    first, second = words(1 << 18, 1), words(1 << 18, 2)
    numbers, sure = propose(first, second)
    top = torch.full((4, 1 << 18), -1, dtype=torch.int32)
    found, accepted = decide(first, second, top)
    assert torch.equal(found, numbers)
    assert accepted[sure].all()
    assert not accepted[~sure].all()
    assert abs(sure.double().mean() - 0.9818) < 0.001


def test_numbers_are_gaussian_over_all_scales():
    drawn = integers(KEY, [Piece(0, 0, 1 << 20)], CPU)[0].numpy()
    assert stats.kstest(drawn / 2**40, "norm").pvalue > 1e-3
    bins = stats.norm.ppf(np.linspace(0, 1, 1025))
    assert stats.chisquare(np.histogram(drawn / 2**40, bins)[0]).pvalue > 1e-3
    # The low bits are uniform: nothing is hidden at the scale of the grid.
    for shift in (0, 8, 16, 24, 30):
        low = (drawn.astype(np.int64) >> shift) & 255
        assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > 1e-4


def test_numbers_depend_on_key_stream_and_place_alone():
    whole = integers(KEY, [Piece(3, 0, 1000)], CPU)[0]
    pieces = integers(KEY, [Piece(3, 256, 300), Piece(4, 0, 300), Piece(3, 0, 5)], CPU)
    assert torch.equal(pieces[0], whole[256:556])
    assert torch.equal(pieces[2], whole[:5])
    assert not torch.equal(pieces[1], whole[:300])
    assert not torch.equal(integers(b"k" * 32, [Piece(3, 0, 1000)], CPU)[0], whole)


def test_the_cipher_is_the_published_one():
    """RFC 8439, section 2.3.2: key 00 01 … 1f, nonce 00 00 00 09 00 00 00 4a 00 00 00 00, counter 1."""
    block = chacha(KEY, torch.tensor([0x0900000000000001]), 0x4A000000, 0, 20)
    assert block.t().contiguous().numpy().tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_with_eight_rounds_too():
    """The first of the test vectors of Strombergson's draft: everything is zero."""
    block = chacha(bytes(32), torch.zeros(1, dtype=torch.int64), 0, 0, 8)
    assert block.t().contiguous().numpy().tobytes().hex() == (
        "3e00ef2f895f40d67f5bb8e81f09a5a12c840ec3ce9a7f3b181be188ef711a1e"
        "984ce172b9216f419f445367456d5619314a42a3da86b001387bfdb80e0cfe42"
    )


def random_words(seed):
    rng = np.random.default_rng(seed)
    return lambda count: rng.integers(0, 1 << 64, count, dtype=np.uint64)


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_the_exact_sampler_gives_every_number_its_probability(bits):
    drawn = exact.discrete_gaussian(1_000_000, bits, random_words(bits))
    numbers = np.arange(-6 << bits, (6 << bits) + 1)
    weights = np.exp(-(numbers.astype(float) ** 2) / 2 ** (2 * bits + 1))
    expected = weights / weights.sum() * len(drawn)
    often = expected > 10
    found = np.array([(drawn == number).sum() for number in numbers])
    scaled = expected[often] * found[often].sum() / expected[often].sum()
    assert stats.chisquare(found[often], scaled).pvalue > 1e-3
    assert abs(drawn).max() <= 7 << bits


def test_both_samplers_agree():
    slow = exact.discrete_gaussian(200_000, 40, random_words(0))
    assert slow.dtype == np.int64
    assert len(exact.discrete_gaussian(0, 40, random_words(0))) == 0
    assert stats.kstest(slow / 2**40, "norm").pvalue > 1e-3
    assert stats.ks_2samp(slow, integers(KEY, [Piece(1, 0, 200_000)], CPU)[0].numpy()).pvalue > 1e-3
    for shift in (0, 20, 30):
        assert stats.chisquare(np.bincount((slow >> shift) & 255, minlength=256)).pvalue > 1e-4


def test_words_of_an_incomplete_round_are_drawn_again():
    given = iter([np.array([2**64 - 1, 5], np.uint64), np.array([7], np.uint64)])
    assert exact._below(lambda count: next(given), 2, 3).tolist() == [1, 2]
