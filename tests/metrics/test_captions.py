"""METEOR, ROUGE-L and CIDEr, with Java and without."""

import pytest

from dpexp.errors import UserError
from dpexp.metrics import captions

HARD = [
    "The Mill (near Café Rouge) isn't cheap: £20-25, or £20-£25.",
    "It's a \"family-friendly\" pub. They don't serve fish & chips... do they?",
    "",
    "Find it near St. John's, e.g. by Mr. Smith's.  It's nice.It has 5/5 at 8 p.m.",
    "“Zizzi” — a coffee shop – in the city centre, 5 out of 5;",
]
needs_java = pytest.mark.skipif(
    captions.java() is None, reason="no Java on this machine: METEOR 1.5 is not tested"
)


def test_tokens_without_java(no_java):
    assert captions.tokenize(HARD[:3]) == [
        "the mill -lrb- near café rouge -rrb- is n't cheap # 20-25 or # 20 # 25",
        "it 's a family-friendly pub they do n't serve fish & chips do they",
        "",
    ]


@needs_java
def test_tokens_agree_with_stanford():
    assert [captions._stanford((line,)) for line in HARD] == [
        [" ".join(captions.treebank(line))] for line in HARD
    ]
    assert captions._stanford(tuple(HARD + [""])) == [
        " ".join(captions.treebank(line)) for line in [*HARD, ""]
    ]


def test_rouge_l_by_hand(no_java):
    # Against each reference the longest common subsequence is 3; of 4 words given, and of 6 and 3.
    score = captions.rouge_l(["a cat sat down"], [["a cat then sat very still", "a cat down"]])
    precision, recall = 3 / 4, 1.0
    assert score == pytest.approx(2.44 * precision * recall / (recall + 1.44 * precision))


def test_cider_of_equal_texts_is_ten_and_of_nothing_rare_zero(no_java):
    texts = ["one small step for man", "we choose to go there", "that giant leap was his"]
    assert captions.cider(texts, [[text] for text in texts]) == pytest.approx(10.0)
    assert captions.cider([texts[0]] * 3, [[texts[0]]] * 3) == 0.0
    assert captions.cider(["", "", ""], [[text] for text in texts]) == 0.0
    assert captions.cider(["one small step"], [["..."]]) == 0.0


def test_nltk_meteor_by_hand(no_java):
    # One chunk of 3 matches in 4 given and 3 wanted: F = P R / (0.9 P + 0.1 R), penalty 0.5 (1/3)^3.
    precision, recall = 3 / 4, 1.0
    expected = precision * recall / (0.9 * precision + 0.1 * recall) * (1 - 0.5 / 27)
    assert captions.nltk_meteor(["the cats sat down."], [["The cat sat", "a dog"]]) == pytest.approx(expected)
    assert captions.nltk_meteor(["", "."], [["a cat"], ["a dog"]]) == 0.0


def test_without_java_meteor_is_refused(no_java):
    with pytest.raises(UserError, match="install a Java runtime"):
        captions.meteor(["a"], [["a"]])


CASES = {
    "equal": ("the cat sat on the mat", ["zebras", "the cat sat on the mat"]),
    "accents": ("Café", ["Café"]),
    "other accents": ("Café b c d", ["Cafè b c d"]),
    "synonyms": ("he bought it", ["he purchased it"]),
    "two references": (
        "a cheap pub near the river",
        ["an inexpensive pub by the river", "a cheap pub near the water"],
    ),
    "first alone": ("a cheap pub near the river", ["an inexpensive pub by the river"]),
    "empty": ("", ["a cat"]),
    "odd": ("東京 ||| \u2028 naïve", ["東京 ||| naïve"]),
    "nothing in common": ("zebras", ["the cat"]),
}


@needs_java
@pytest.mark.slow
def test_meteor():
    predictions, references = zip(*CASES.values(), strict=True)
    corpus, each = captions._meteor(predictions, references)
    score = dict(zip(CASES, each, strict=True))
    assert score["equal"] == score["accents"] == pytest.approx(1.0)
    assert score["other accents"] < 1.0  # and not both read as question marks
    assert score["first alone"] < score["two references"] < 1.0
    assert score["empty"] == score["nothing in common"] == 0.0
    assert score["odd"] > 0.5
    assert 0.0 < corpus < 1.0
    # Paraphrases are METEOR 1.5's alone.
    assert score["synonyms"] > 0.8 > captions.nltk_meteor(*([case] for case in CASES["synonyms"]))


def test_a_broken_java_is_one_clear_error(tmp_path, monkeypatch):
    broken = tmp_path / "java"
    broken.write_text("#!/bin/sh\necho no such class >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(captions, "java", lambda: str(broken))
    captions._split.cache_clear()
    with pytest.raises(UserError, match="no such class"):
        captions.cider(["a b"], [["a b"]])
    with pytest.raises(UserError, match="java -version"):
        captions.meteor(["a b"], [["a b"]], pretokenized=False)
