"""The embedded data: always the same, named as what it is, learnable but not by rote."""

import math
from collections import Counter
from typing import Any

import pytest

from dpexp.errors import UserError
from dpexp.tasks.demo import DEMO_ROWS, demo_tables

CASES = [(2, None), (3, None), (2, "second"), (3, "second")]


@pytest.mark.parametrize(("classes", "pair"), CASES)
def test_rows_are_distinct_and_known_to_the_tokenizer(classes: int, pair: str | None, tokenizer: Any) -> None:
    labels = [f"class {i}" for i in range(classes)]
    tables = demo_tables(labels, "text", pair, "label")
    rows = []
    for split, table in tables.items():
        assert len(table) == DEMO_ROWS[split]
        counts = Counter(table.columns["label"])
        assert set(counts) == set(labels)
        assert min(counts.values()) > len(table) / (2 * classes)
        assert "synthetic" in table.at(0)
        rows += list(zip(table.columns["text"], table.columns.get("second", table.columns["text"])))
    assert len(set(rows)) == len(rows)
    words = tokenizer([text for row in rows for text in row])["input_ids"]
    assert tokenizer.unk_token_id not in {token for ids in words for token in ids}
    assert sum(map(len, words)) == sum(len(text.split()) + 2 for row in rows for text in row)  # no word in pieces


def test_the_same_everywhere() -> None:
    digests = [table.sha256[:16] for table in demo_tables([], "sentence", None, "label").values()]
    assert digests == ["DIGEST_TRAIN", "DIGEST_DEV"]


def test_counting_words_learns_most_of_it_and_not_all() -> None:
    tables = demo_tables(["0", "1"], "text", None, "label")
    counts: dict[str, Counter[str]] = {"0": Counter(), "1": Counter()}
    for text, label in zip(*(tables["train"].columns[name] for name in ("text", "label"))):
        counts[label].update(text.split())
    evidence = {w: math.log((counts["1"][w] + 1) / (counts["0"][w] + 1)) for w in counts["0"] | counts["1"]}
    dev = list(zip(*(tables["dev"].columns[name] for name in ("text", "label"))))
    right = sum((sum(evidence.get(w, 0.0) for w in text.split()) > 0) == (label == "1") for text, label in dev)
    assert 0.75 < right / len(dev) < 0.95


def test_only_two_or_three_classes() -> None:
    with pytest.raises(UserError, match="two or three classes"):
        demo_tables(list("abcd"), "text", None, "label")
