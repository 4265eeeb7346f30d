"""Text as one flat array of tokens, made once and cached by the hash of what it is made from."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dpexp.durable import keep_cached

log = logging.getLogger(__name__)

# texts per call of the tokenizer: large enough to be fast, small enough to bound memory
CHUNK = 8192
# of the cached files: count up when `tokenize` gives other rows
FORMAT = 1


@dataclass(frozen=True)
class TokenTable:
    """Rows of tokens behind each other: row i is `tokens[offsets[i]:offsets[i + 1]]`.

    tokens: `[total]` int32.
    offsets: `[rows + 1]` int64.
    segments: `[total]` uint8, which text of a pair a token belongs to, or None for a model that does not ask.
    truncated: how many rows were cut to the longest allowed length.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    segments: np.ndarray | None
    truncated: int

    @classmethod
    def of(
        cls, rows: Sequence[np.ndarray], segments: Sequence[np.ndarray] | None = None, truncated: int = 0
    ) -> TokenTable:
        """The table of some rows, `[T]` int32 each, and their segments, `[T]` uint8."""
        return cls(
            np.concatenate([np.empty(0, np.int32), *rows]),
            np.cumsum([0, *map(len, rows)], dtype=np.int64),
            None if segments is None else np.concatenate([np.empty(0, np.uint8), *segments]),
            truncated,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens and segments of a row."""
        place = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[place], None if self.segments is None else self.segments[place]

    @property
    def lengths(self) -> np.ndarray:
        """`[rows]` int64, tokens per row."""
        return np.diff(self.offsets)


Tokenise = Callable[[Any, Sequence[str], Sequence[str] | None, int], TokenTable]
"""(tokenizer, texts, pairs, max_length) -> tokens, see `tokenize`."""


def tokenize(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> TokenTable:
    """Tokenise texts, or pairs of texts, with the tokenizer's special tokens.

    Args:
        tokenizer: of Hugging Face.
        texts: `[rows]`.
        pairs: `[rows]` second texts, or None.
        max_length: longer rows are cut: of a pair, token by token the longer of the two.
    """
    wants_segments = "token_type_ids" in tokenizer.model_input_names
    rows: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    truncated = 0
    for start in range(0, len(texts), CHUNK):
        chosen = slice(start, start + CHUNK)
        batch = _encode(tokenizer, texts[chosen], pairs and pairs[chosen], wants_segments)
        ids = batch["input_ids"]
        too_long = [i for i, row in enumerate(ids) if len(row) > max_length]
        if too_long:
            again = _encode(
                tokenizer,
                [texts[start + i] for i in too_long],
                pairs and [pairs[start + i] for i in too_long],
                wants_segments,
                max_length,
            )
            for name in again:
                for i, row in zip(too_long, again[name], strict=True):
                    batch[name][i] = row
            truncated += len(too_long)
        # An empty text of a tokenizer without special tokens would leave the network nothing to attend to.
        rows += [np.asarray(row or [tokenizer.pad_token_id], dtype=np.int32) for row in ids]
        if wants_segments:
            segments += [np.asarray(row or [0], dtype=np.uint8) for row in batch["token_type_ids"]]
    return TokenTable.of(rows, segments if wants_segments else None, truncated)


def plain_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts without special ones, uncut; text that spells a special token stays text."""
    if not texts:
        return []
    return tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, padding=False, truncation=False,
        return_attention_mask=False, return_token_type_ids=False, verbose=False,
    )["input_ids"]  # fmt: skip


def tokenize_cached(
    cache: Path,
    content: str,
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    make: Tokenise = tokenize,
) -> TokenTable:
    """As `tokenize`, from the cache where it holds the same thing; see `keep_cached`.

    Args:
        cache: a folder.
        content: names the texts: a hash of their file together with the columns that were read, and with the rest of
            what `make` goes by.
        make: another way from texts to tokens than `tokenize`.
    """
    parts = [FORMAT, content, tokenizer_hash(tokenizer), max_length]
    path = cache / "tokens" / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}.safetensors"
    table = _load(path)
    if table is None or len(table) != len(texts):
        if len(texts) > CHUNK:
            log.info("tokenising %d texts once, and keeping them in %s", len(texts), path.parent)
        table = make(tokenizer, texts, pairs, max_length)
        keep_cached(path, _saved(table), "tokens")
    return table


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of all that decides which tokens come out."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # the settings of the last call
        state.pop("truncation"), state.pop("padding")
    else:
        state = tokenizer.get_vocab()
    parts = [type(tokenizer).__name__, tokenizer.model_input_names, str(tokenizer.init_kwargs), state]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _encode(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    segments: bool,
    max_length: int | None = None,
) -> dict[str, list[list[int]]]:
    return dict(
        tokenizer(
            list(texts),
            list(pairs) if pairs is not None else None,
            truncation=max_length is not None,
            max_length=max_length,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=segments,
            verbose=False,
        )
    )


def _load(path: Path) -> TokenTable | None:
    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            truncated = int(file.metadata()["truncated"])
    except (OSError, SafetensorError, KeyError, TypeError):
        # not there, or not readable: made anew
        return None
    return TokenTable(arrays["tokens"], arrays["offsets"], arrays.get("segments"), truncated)


def _saved(table: TokenTable) -> bytes:
    arrays = {"tokens": table.tokens, "offsets": table.offsets}
    if table.segments is not None:
        arrays["segments"] = table.segments
    return save(arrays, metadata={"truncated": str(table.truncated)})
