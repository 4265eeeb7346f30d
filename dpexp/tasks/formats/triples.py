"""DART v1.1.1 (Nan et al. 2020) and WebNLG in its layout: sets of triples, each with one or more texts.

    [["Mars_Hill_College", "IS_PART_OF", "Mars Hill"], ...]    ->    " Mars Hill College : is part of : Mars Hill | ... "

The encoding is that of Li et al., Table 12 (the bar is drawn as a dash there): subject, relation and object between colons, the
relation in small letters and words of its own. Their code (private-transformers, table2text/data_utils/language_modeling.py:318)
makes small letters of the relation and changes nothing else, which is `triples_as_coded` here:

    " Mars_Hill_College : is_part_of : Mars Hill | ... "

Every text is one example. Published as JSON; DART's test set as XML, too.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpexp.errors import UserError
from dpexp.tasks.files import Table, read_text
from dpexp.tasks.formats.base import Format, Pair, make_table

_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_|\s+")


class Triples(Format):
    """The texts of one set of triples are references for it.

    Args:
        words: whether names and relations become words, as in print; else they stay as they are, in small letters a relation.
    """

    layout = "triples"
    several = "one text is one example: a set of triples with several texts stands in several"
    unit = "item"

    def __init__(self, words: bool = True) -> None:
        self.words = words

    def read(self, paths: Sequence[Path]) -> Table:
        """JSON: a list of `{"tripleset": [[s, p, o], ...], "annotations": [{"text": ...}, ...]}`; XML: entries."""
        path = paths[0]
        text, digest = read_text(path)
        items = _xml(path, text) if text.lstrip().startswith("<") else _json(path, text)
        return make_table(str(path), self._pairs(items, str(path)), digest, self.unit)

    def _pairs(self, items: Iterator[dict[str, Any]], where: str) -> Iterator[Pair]:
        for number, item in enumerate(items, 1):
            at = f"{where}, item {number}"
            source = encode(item.get("tripleset") if isinstance(item, dict) else None, at, self.words)
            for text in _texts(item, at):
                yield number, source, text, str(number)

    def from_hub(self, row: dict[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
        """DART's columns are those of its files; WebNLG's are `modified_triple_sets` and `lex`, of which lists are made."""
        if "tripleset" in row:
            triples, texts = row["tripleset"], _column(row.get("annotations"), "text")
        else:
            sets = _column(row.get("modified_triple_sets"), "mtriple_set") or [[]]
            triples = [str(triple).split(" | ") for triple in sets[0]]
            texts = _column(row.get("lex"), "text")
        source = encode(triples, where, self.words)
        for text in _texts({"annotations": [{"text": text} for text in texts]}, where):
            yield source, text, ""


def _column(rows: Any, name: str) -> list[Any]:
    """One field of nested rows, which are a dictionary of lists or a list of dictionaries, by the version of the library."""
    if isinstance(rows, dict):
        return list(rows.get(name) or [])
    return [row.get(name) for row in rows or [] if isinstance(row, dict)]


def encode(triples: Any, where: str, words: bool = True) -> str:
    """The prompt of a set of triples; `words` as in `Triples`.

    Raises:
        UserError: it is not a list of [subject, relation, object].
    """
    fits = isinstance(triples, list) and triples
    if not fits or not all(
        isinstance(t, list) and len(t) == 3 and all(isinstance(x, str) for x in t) for t in triples
    ):
        raise UserError(f"{where}: malformed row: tripleset must be a list of [subject, relation, object]")
    parts = [
        f"{subject.replace('_', ' ')} : {_words(relation)} : {object_.replace('_', ' ')}"
        if words
        else f"{subject} : {relation.lower()} : {object_}"
        for subject, relation, object_ in triples
    ]
    return f" {' | '.join(parts)} "


def _words(relation: str) -> str:
    return " ".join(_WORD_BOUNDARY.sub(" ", relation).split()).lower()


def _texts(item: dict[str, Any], where: str) -> list[str]:
    annotations = item.get("annotations")
    if not isinstance(annotations, list) or not annotations:
        raise UserError(f"{where}: malformed row: no annotations")
    texts: list[str] = []
    for annotation in annotations:
        text = annotation.get("text") if isinstance(annotation, dict) else 0
        if not isinstance(text, str | None):
            raise UserError(f"{where}: malformed row: an annotation holds no text")
        # six of WebNLG's dev set are empty, and one of DART's test set
        texts.append((text or "").strip())
    return texts


def _json(path: Path, text: str) -> Iterator[dict[str, Any]]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: malformed JSON ({error.msg})") from error
    if not isinstance(items, list):
        raise UserError(f"{path}: a JSON list is expected, and this is a {type(items).__name__}")
    return iter(items)


def _xml(path: Path, text: str) -> Iterator[dict[str, Any]]:
    try:
        root = ET.fromstring(text.encode())
    except ET.ParseError as error:
        raise UserError(f"{path}, line {error.position[0]}: malformed XML ({error.msg})") from error
    for entry in root.iter("entry"):
        yield {
            "tripleset": [(triple.text or "").split(" | ") for triple in entry.iter("mtriple")],
            "annotations": [{"text": lex.text} for lex in entry.iter("lex")],
        }
