"""The embedded data: always the same, named as what it is, learnable but not by rote."""

import math
from collections import Counter
from typing import Any

import pytest

from dpexp.errors import UserError
from dpexp.tasks.demo import demo_tables

CASES = [(2, None), (3, None), (2, "second"), (3, "second")]


@pytest.mark.parametrize(("classes", "pair"), CASES)
def test_splits_are_apart_balanced_and_known_to_the_tokenizer(
    classes: int, pair: str | None, tokenizer: Any
) -> None:
    labels = [f"class {i}" for i in range(classes)]
    tables = demo_tables(labels, "text", pair, "label", 1234)
    rows = {}
    for split, table in tables.items():
        assert len(table) == {"train": 1234, "dev": 400}[split]
        counts = Counter(table.columns["label"])
        assert set(counts) == set(labels)
        assert min(counts.values()) > len(table) / (2 * classes)
        assert "synthetic" in table.at(0)
        rows[split] = list(zip(table.columns["text"], table.columns.get("second", table.columns["text"])))
    assert not set(rows["train"]) & set(rows["dev"])
    texts = [text for row in rows["train"] + rows["dev"] for text in row]
    tokens = tokenizer(texts)["input_ids"]
    assert tokenizer.unk_token_id not in {token for ids in tokens for token in ids}
    assert [len(ids) for ids in tokens] == [len(text.split()) + 2 for text in texts]  # no word is in pieces


def test_the_same_everywhere_and_for_every_n() -> None:
    default, larger = (
        demo_tables([], "sentence", None, "label"),
        demo_tables([], "sentence", None, "label", 2500),
    )
    assert default["dev"] == larger["dev"]
    assert len(default["train"]) == 2000
    assert larger["train"].columns["sentence"][:2000] == default["train"].columns["sentence"]
    assert [table.sha256[:16] for table in default.values()] == ["54b4968b0a182ba5", "a4152b710b2e006b"]


def test_counting_words_learns_most_of_it_and_not_all() -> None:
    tables = demo_tables(["0", "1"], "text", None, "label")
    counts: dict[str, Counter[str]] = {"0": Counter(), "1": Counter()}
    for text, label in zip(*(tables["train"].columns[name] for name in ("text", "label"))):
        counts[label].update(text.split())
    evidence = {w: math.log((counts["1"][w] + 1) / (counts["0"][w] + 1)) for w in counts["0"] | counts["1"]}
    dev = list(zip(*(tables["dev"].columns[name] for name in ("text", "label"))))
    right = sum(
        (sum(evidence.get(w, 0.0) for w in text.split()) > 0) == (label == "1") for text, label in dev
    )
    assert 0.75 < right / len(dev) < 0.95


def test_only_two_or_three_classes() -> None:
    with pytest.raises(UserError, match="two or three classes"):
        demo_tables(list("abcd"), "text", None, "label")


@pytest.mark.parametrize("rows", [0, 100_001])
def test_no_more_rows_than_the_grammar_is_good_for(rows: int) -> None:
    with pytest.raises(UserError, match=f"from 1 to 100000 rows, and {rows} are declared"):
        demo_tables([], "text", None, "label", rows)
