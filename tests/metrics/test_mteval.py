"""BLEU and NIST against worked examples, nltk and a naive twin."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.metrics.mteval import bleu, length_penalty, ngrams, nist, tokenize

words = st.sampled_from(["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "near", "river"])
sentence = st.lists(words, min_size=5, max_size=12).map(" ".join)
corpus = st.lists(st.tuples(sentence, st.lists(sentence, min_size=1, max_size=3)), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The Mill, near Café Rouge.", ["the", "mill", ",", "near", "café", "rouge", "."]),
        ("It costs 20.50 (or 1,000)!", ["it", "costs", "20.50", "(", "or", "1,000", ")", "!"]),
        ("family-friendly £20-25", ["family-friendly", "£20", "-", "25"]),
        ("5 out of 5.", ["5", "out", "of", "5", "."]),
        ("Fish &amp; chips\nhere", ["fish", "&", "chips", "here"]),
        ("", []),
    ],
)
def test_tokens_are_those_of_the_script(text, tokens):
    assert tokenize(text) == tokens


def test_bleu_clips_counts_and_smooths_by_halves():
    # Papineni et al., 2002, example 2: 2 of 7 unigrams. The longer orders have no match: 1/2 of 6, 1/4 of 5, 1/8 of 4.
    references = [["the cat is on the mat", "there is a cat on the mat"]]
    expected = (2 / 7 * 1 / 12 * 1 / 20 * 1 / 32) ** 0.25
    assert bleu(["the the the the the the the"], references) == pytest.approx(expected)


def test_bleu_compares_with_the_closest_length():
    text = "a b c d e f"
    assert bleu([text], [[text + " g h", text]]) == pytest.approx(1.0)
    assert bleu([text], [[text + " g h"]]) == pytest.approx(math.exp(1 - 8 / 6))


def test_case_is_ignored_and_order_is_not():
    assert bleu(["THE CAT SAT ON THE MAT"], [["the cat sat on the mat"]]) == pytest.approx(1.0)
    assert bleu(["mat the on sat cat the"], [["the cat sat on the mat"]]) < 0.5


def test_nist_by_hand():
    # Words: a twice, b, c of 4; information of a: log2(4/2), of b: log2(4/1), of "a b" after a: log2(2/1).
    assert nist(["a b"], [["a b", "a c"]]) == pytest.approx((1 + 2) / 2 + 1)
    # One word against references of two: the penalty at half the length.
    assert nist(["a"], [["a b", "a c"]]) == pytest.approx(1.0 * length_penalty(1, 2))


def test_bleu_and_nist_are_those_of_the_official_script():
    official = json.loads((Path(__file__).parent / "official_mteval.json").read_text(encoding="utf-8"))
    for name, system in official["systems"].items():
        assert nist(system["outputs"], official["references"]) == pytest.approx(system["nist"], abs=6e-5), (
            name
        )
        assert bleu(system["outputs"], official["references"]) == pytest.approx(system["bleu"], abs=6e-5), (
            name
        )


def test_nist_length_penalty():
    assert length_penalty(2, 3) == pytest.approx(0.5)
    assert length_penalty(3, 3) == length_penalty(9, 3) == length_penalty(0, 0) == 1.0
    assert length_penalty(0, 3) == 0.0


def test_empty_predictions_score_nothing():
    references = [["a b c d e"], ["f g h i j"]]
    assert bleu(["", ""], references) == 0.0
    assert nist(["", ""], references) == 0.0
    assert 0.0 < nist(["a b c d e", ""], references) < nist(["a b c d e", "f g h i j"], references)


@settings(max_examples=50, deadline=None)
@given(corpus)
def test_bleu_equals_nltk_where_every_order_matches(pairs):
    from nltk.translate.bleu_score import corpus_bleu

    predictions = [prediction for prediction, _ in pairs] + ["the cat sat on the mat"]
    references = [texts for _, texts in pairs] + [["the cat sat on the mat"]]
    expected = corpus_bleu(
        [[tokenize(t) for t in texts] for texts in references], [tokenize(p) for p in predictions]
    )
    assert bleu(predictions, references) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(corpus)
def test_nist_equals_nltk_where_there_is_one_reference(pairs):
    from nltk.translate.nist_score import corpus_nist

    predictions, references = [p for p, _ in pairs], [texts[:1] for _, texts in pairs]
    expected = corpus_nist(
        [[tokenize(t) for t in texts] for texts in references], [tokenize(p) for p in predictions]
    )
    assert nist(predictions, references) == pytest.approx(expected, abs=1e-9)


def naive_nist(predictions, references):
    """Straight from the definition, counting one n-gram at a time."""

    def count(gram, text):
        return sum(text[i : i + len(gram)] == gram for i in range(len(text) - len(gram) + 1))

    pool = [text.split() for texts in references for text in texts]
    total = 0.0
    for n in range(1, 6):
        gain = grams = 0
        for prediction, texts in zip(predictions, references, strict=True):
            given = prediction.split()
            grams += max(0, len(given) - n + 1)
            for gram in {tuple(given[i : i + n]) for i in range(len(given) - n + 1)}:
                hits = min(count(list(gram), given), max(count(list(gram), text.split()) for text in texts))
                if hits:
                    own = sum(count(list(gram), text) for text in pool)
                    before = (
                        sum(count(list(gram[:-1]), text) for text in pool) if n > 1 else sum(map(len, pool))
                    )
                    gain += hits * math.log2(before / own)
        total += gain / grams if grams else 0.0
    wanted = sum(map(len, pool)) / (len(pool) / len(references))
    ratio = min(1.0, sum(len(p.split()) for p in predictions) / wanted)
    return total * math.exp(math.log(0.5) / math.log(1.5) ** 2 * math.log(ratio) ** 2)


@settings(max_examples=50, deadline=None)
@given(corpus)
def test_nist_equals_a_naive_twin_with_several_references(pairs):
    predictions, references = [p for p, _ in pairs], [texts for _, texts in pairs]
    assert nist(predictions, references) == pytest.approx(naive_nist(predictions, references), abs=1e-9)


@given(st.lists(words, max_size=8), st.integers(1, 5))
def test_number_of_ngrams(text, order):
    found = Counter(map(len, ngrams(text, order)))
    assert all(found[n] == max(0, len(text) - n + 1) for n in range(1, order + 1))
