"""Suites of text metrics: on the references of E2E, and what they say of themselves."""

import csv
import lzma

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.metrics import captions, text
from dpexp.metrics.captions import cider, rouge_l
from dpexp.metrics.dialogue import corpus_f1
from dpexp.metrics.mteval import bleu, nist, tokenize
from dpexp.metrics.rouge import can_split_sentences, rouge
from dpexp.metrics.text import PERCENT, SUITES, check, missing, notes, score

TEXTS = ["The Mill is a cheap pub near the river.", "Zizzi serves English food, they say!"]
word = st.sampled_from(["the", "a", "cat", "dogs", "ran", "ünder", "5", ",", "it's", "£3.50"])
sentence = st.lists(word, min_size=1, max_size=8).map(" ".join).filter(lambda t: any(c.isalnum() for c in t))
corpus = st.lists(
    st.tuples(st.one_of(sentence, st.just("")), st.lists(sentence, min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
)


def e2e_siblings(folder, texts):
    """The first reference of each meaning in E2E's test set, and the others."""
    with lzma.open(folder / "e2e/testset_w_refs.csv.xz", "rt", encoding="utf-8", newline="") as file:
        groups = {}
        for row in csv.DictReader(file):
            groups.setdefault(row["mr"], []).append(row["ref"])
    chosen = [refs for refs in groups.values() if len(refs) > 1][:texts]
    return [refs[0] for refs in chosen], [refs[1:] for refs in chosen]


def test_perfect_predictions(no_java):
    references = [[t] for t in TEXTS]
    e2e = score("e2e", TEXTS, references)
    assert list(e2e) == ["bleu", "nist", "meteor_nltk", "rougeL", "cider"]
    assert e2e["bleu"] == pytest.approx(1.0)
    assert e2e["rougeL"] == pytest.approx(1.0)
    assert e2e["cider"] == pytest.approx(10.0)
    assert 0.99 < e2e["meteor_nltk"] < 1.0  # by its penalty for one chunk
    assert score("dialogue", TEXTS, references) == {"f1": 1.0}
    summary = score("summarization", TEXTS, references)
    assert {"rouge1", "rouge2", "rougeL"} <= set(summary)
    assert all(value == pytest.approx(1.0) for value in summary.values())
    assert {"bleu", "rouge1", "rouge2", "rougeL"} <= set(score("dart", TEXTS, references))


def test_empty_predictions_score_nothing(no_java):
    for suite in SUITES:
        scores = score(suite, ["", ""], [[t] for t in TEXTS])
        assert scores
        assert set(scores.values()) == {0.0}


def test_blank_references_are_left_out(no_java):
    assert score("e2e", TEXTS, [["", t, "  "] for t in TEXTS]) == score("e2e", TEXTS, [[t] for t in TEXTS])


def test_rouge_by_hand():
    # "cats" and "cat" have one stem ("cats" is longer than three letters); 2 of 3 words given, 2 of 4 wanted; one pair.
    scores = rouge(["The cats ran"], [["a dog barked", "the cat then slept"]])
    assert scores["rouge1"] == scores["rougeL"] == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert scores["rouge2"] == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))


def test_rouge_of_dart_averages_the_bests_of_all_subsets_that_lack_a_reference(no_java):
    prediction, texts = (
        "the cat slept on a mat",
        ["the cat slept", "a dog barked", "the cat slept on the mat"],
    )
    alone = [rouge([prediction], [[text]])["rouge1"] for text in texts]
    subsets = [max(alone[:i] + alone[i + 1 :]) for i in range(3)]  # as the loop of GEM-metrics
    assert len(set(subsets)) == 2
    dart = score("dart", [prediction], [texts])
    assert dart["rouge1"] == pytest.approx(sum(subsets) / 3)
    assert dart["rouge1"] < rouge([prediction], [texts])["rouge1"]
    assert score("dart", [prediction], [texts[:1]])["rouge1"] == pytest.approx(alone[0])


@settings(max_examples=40, deadline=None)
@given(corpus)
def test_more_references_never_hurt_a_metric_of_the_best(pairs):
    java, captions.java = captions.java, lambda: None
    try:
        predictions, several = [p for p, _ in pairs], [refs for _, refs in pairs]
        for one in ([refs[:1] for refs in several], [refs[-1:] for refs in several]):
            assert rouge_l(predictions, several) >= rouge_l(predictions, one) - 1e-12
            assert corpus_f1(predictions, several) >= corpus_f1(predictions, one) - 1e-12
            more, fewer = rouge(predictions, several), rouge(predictions, one)
            assert all(more[name] >= fewer[name] - 1e-12 for name in fewer)
    finally:
        captions.java = java


@settings(max_examples=40, deadline=None)
@given(corpus)
def test_scores_are_in_their_ranges_and_ignore_the_order_of_the_texts(pairs):
    java, captions.java = captions.java, lambda: None
    try:
        for measure, most in ((bleu, 1.0), (rouge_l, 1.0), (corpus_f1, 1.0), (cider, 10.0), (nist, 1e3)):
            value = measure([p for p, _ in pairs], [refs for _, refs in pairs])
            assert 0.0 <= value <= most + 1e-9
            backwards = measure([p for p, _ in pairs[::-1]], [refs[::-1] for _, refs in pairs[::-1]])
            assert backwards == pytest.approx(value)
    finally:
        captions.java = java


def test_real_references_against_their_siblings(real_data, no_java):
    from nltk.translate.bleu_score import corpus_bleu

    predictions, references = e2e_siblings(real_data, 120)
    scores = score("e2e", predictions, references)
    expected = corpus_bleu(
        [[tokenize(t) for t in refs] for refs in references], [tokenize(p) for p in predictions]
    )
    assert scores["bleu"] == pytest.approx(expected, abs=1e-9)
    # Texts of other meanings are worse by every measure.
    wrong = score("e2e", predictions[1:] + predictions[:1], references)
    assert all(wrong[name] < 0.9 * scores[name] for name in scores)


def each_against_its_siblings(folder, meanings):
    """Every reference of E2E's test set, of so many meanings, and its siblings: those of the same meaning without it."""
    with lzma.open(folder / "e2e/testset_w_refs.csv.xz", "rt", encoding="utf-8", newline="") as file:
        groups = {}
        for row in csv.DictReader(file):
            groups.setdefault(row["mr"], []).append(row["ref"])
    chosen = [refs for refs in groups.values() if len(refs) > 1][:meanings]
    pairs = [(ref, refs[:i] + refs[i + 1 :]) for refs in chosen for i, ref in enumerate(refs)]
    return [ref for ref, _ in pairs], [others for _, others in pairs]


def test_each_real_reference_against_its_siblings(real_data, no_java):
    from nltk.translate.bleu_score import corpus_bleu

    predictions, references = each_against_its_siblings(real_data, 16)
    assert len(predictions) > 100
    words, wanted = [tokenize(p) for p in predictions], [[tokenize(t) for t in refs] for refs in references]
    assert bleu(predictions, references) == pytest.approx(corpus_bleu(wanted, words), abs=1e-9)
    scores = score("e2e", predictions, references)
    one_more = score(
        "e2e", predictions, [[p, *refs] for p, refs in zip(predictions, references, strict=True)]
    )
    assert one_more["bleu"] == pytest.approx(1.0)
    assert one_more["rougeL"] == pytest.approx(1.0)
    assert all(scores[name] < 0.95 * one_more[name] for name in scores), "each was among its own references"
    other = score("e2e", predictions[40:] + predictions[:40], references)
    assert all(other[name] < scores[name] for name in scores), (
        "texts of other meanings are worse by every measure"
    )


@pytest.mark.slow
def test_bleu_and_nist_of_all_real_references_against_their_siblings(real_data):
    predictions, references = each_against_its_siblings(real_data, None)
    assert len(predictions) == 4693 - 14, "14 of the 630 meanings have a single reference"
    assert 0.5 < bleu(predictions, references) < 0.75
    assert 7.0 < nist(predictions, references) < 10.0


@pytest.mark.slow
@pytest.mark.skipif(
    captions.java() is None, reason="no Java on this machine: the official tokens are not tested"
)
def test_the_whole_test_set_with_java_and_without(real_data, monkeypatch):
    predictions, references = e2e_siblings(real_data, 616)
    captions._split.cache_clear()
    official = score("e2e", predictions, references)
    assert list(official) == ["bleu", "nist", "meteor", "rougeL", "cider"]
    # One person's text against the others': about as good as the systems of the E2E challenge.
    assert len(predictions) == 616
    assert 0.55 < official["bleu"] < 0.70
    assert 8.0 < official["nist"] < 9.5
    assert 0.42 < official["meteor"] < 0.50
    assert 0.60 < official["rougeL"] < 0.72
    assert 1.5 < official["cider"] < 2.5
    monkeypatch.setattr(captions, "java", lambda: None)
    captions._split.cache_clear()
    assert official["rougeL"] == pytest.approx(rouge_l(predictions, references), abs=5e-4)
    assert official["cider"] == pytest.approx(cider(predictions, references), abs=2e-3)
    # another scale altogether
    assert captions.nltk_meteor(predictions, references) > official["meteor"] + 0.2
    captions._split.cache_clear()


def test_what_is_missing_says_why(monkeypatch, no_java):
    monkeypatch.setattr(text.learned, "locate", lambda *_: None)
    assert set(missing("e2e")) == {"meteor"}
    assert "Java" in missing("e2e")["meteor"]
    assert set(missing("dart")) == {"meteor", "bertscore", "bleurt"}
    assert "distilbert-base-uncased" in missing("dart")["bertscore"]
    assert "bertscore" not in score("dart", TEXTS, [[t] for t in TEXTS])
    assert any("not comparable" in note for note in notes("e2e"))
    assert any("Treebank" in note for note in notes("e2e"))
    assert not any("Treebank" in note for note in notes("dart"))
    assert notes("dialogue") == []


def test_with_java_nothing_needs_a_note(monkeypatch):
    monkeypatch.setattr(captions, "java", lambda: "/usr/bin/java")
    assert missing("e2e") == {}
    assert notes("e2e") == []


def test_rouge_lsum_needs_a_sentence_splitter(monkeypatch):
    monkeypatch.setattr(text.rouge, "can_split_sentences", lambda: False)
    assert "punkt" in missing("summarization")["rougeLsum"]
    assert list(score("summarization", ["a b"], [["a b"]])) == ["rouge1", "rouge2", "rougeL"]
    assert isinstance(can_split_sentences(), bool)


def test_percent_names_metrics_of_the_suites():
    assert {name for parts in SUITES.values() for part in parts for name in part.names} >= PERCENT


@pytest.mark.parametrize(
    ("suite", "predictions", "references", "message"),
    [
        ("e2d", ["a"], [["a"]], "no suite of text metrics named e2d: choose one of e2e, dart"),
        ("e2e", ["a", "b"], [["a"]], "2 predictions for 1 groups"),
        ("e2e", [], [], "no prediction to score"),
        ("e2e", ["a"], ["a"], "must be a list of texts"),
        ("e2e", ["a", "b"], [["a"], []], "prediction 1 has no reference"),
        ("e2e", ["a"], [["  "]], "prediction 0 has no reference"),
        ("e2e", [None], [["a"]], "prediction 0 is NoneType"),
        ("e2e", ["a"], [["a", None]], "must be a list of texts"),
    ],
)
def test_bad_input_is_one_clear_error(suite, predictions, references, message):
    with pytest.raises(UserError, match=message):
        score(suite, predictions, references)


def test_check_fails_before_anything_is_generated(monkeypatch):
    check("e2e")
    with pytest.raises(UserError, match="no suite"):
        check("none")
    with pytest.raises(UserError, match="bertscor uses a model"):
        check("dart", {"bertscor": "x"})
    with pytest.raises(UserError, match="no model in"):
        check("dart", {"bleurt": "/no/such/folder"})
    monkeypatch.setattr(text.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need evaluate, .* pip install 'dpexp\[nlg\]'"):
        check("dialogue")
