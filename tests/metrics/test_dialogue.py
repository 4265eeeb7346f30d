"""F1 of words and perplexity."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.metrics.dialogue import corpus_f1, f1, normalize, perplexity


def test_normalisation_is_parlais():
    assert normalize("The cat's a Dog-lover, and AN owl!") == ["cat", "s", "dog", "lover", "and", "owl"]
    assert normalize("theatre an_other") == ["theatre", "other"]
    assert normalize("") == normalize("the, a.") == []


def test_f1_by_hand():
    assert f1("the cat sat", "a cat sat down") == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert f1("no no no", "no") == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1))  # repeats count
    assert f1("", "hello") == f1("hello", "") == f1("", "") == 0.0


def test_corpus_f1_is_the_mean_of_the_best():
    assert corpus_f1(["i like cats", "hi"], [["i like dogs", "i like cats"], ["bye"]]) == 0.5


@given(st.text(), st.text())
def test_f1_is_symmetric_and_a_share(left, right):
    assert f1(left, right) == pytest.approx(f1(right, left))
    assert 0.0 <= f1(left, right) <= 1.0
    assert f1(left, left) == (1.0 if normalize(left) else 0.0)


def test_perplexity_weighs_tokens_alike():
    assert perplexity([3 * math.log(10), 0.0], [3, 0]) == pytest.approx(10.0)
    assert perplexity([2 * math.log(2), 6 * math.log(8)], [2, 6]) == pytest.approx(2 ** (20 / 8))
    assert perplexity([1e6], [1]) == math.inf
    assert math.isnan(perplexity([math.nan], [1]))


@pytest.mark.parametrize(("nll", "tokens"), [([], []), ([0.0], [0]), ([1.0, 2.0], [1])])
def test_perplexity_of_nothing_is_refused(nll, tokens):
    with pytest.raises(UserError, match="perplexity"):
        perplexity(nll, tokens)
