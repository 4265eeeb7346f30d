"""Who speaks: tokens in the place of words that begin the lines of a source, and the type of every token.

As in TransferTransfo (Wolf et al. 2019), which Li et al. built on for Persona-Chat. With `task.generation.speakers` of

    ["your persona: ", "partner: {speaker2}", "you: {speaker1}"]

the source of `dpexp.tasks.formats.personachat` becomes, behind the prefix {bos} and in front of the suffix {speaker1},

    <bos> i like to ski. <speaker2> hello , how are you ? <speaker1>

and a type is a token too: that of who speaks. Models look it up in the embedding of the tokens, and add both. Lines are tokenised
each by itself, so that none of them can spell a token of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpexp.errors import UserError
from dpexp.tasks.files import Table
from dpexp.tasks.tokens import CHUNK, TokenTable, plain_ids


@dataclass(frozen=True)
class Speakers:
    """What `task.generation.speakers` says, in a tokenizer's tokens.

    lines: the words that a line begins with -> `[.]` int32, the tokens in their place.
    own: the token of the one who answers, at the end of the prompt.
    """

    lines: Mapping[str, np.ndarray]
    own: int

    @property
    def tokens(self) -> np.ndarray:
        """`[.]` int32, those that say who speaks."""
        return np.unique(np.concatenate([*self.lines.values(), [self.own]])).astype(np.int32)

    def types(self, tokens: np.ndarray) -> np.ndarray:
        """`[..., T]`, like the tokens: the last speaker's token up to each; before the first, who answers."""
        speaks = np.isin(tokens, self.tokens)
        last = np.maximum.accumulate(np.where(speaks, np.arange(tokens.shape[-1]), -1), axis=-1)
        return np.where(last < 0, self.own, np.take_along_axis(tokens, last.clip(0), -1)).astype(tokens.dtype)

    def tokenize(self, tokenizer: Any, texts: Sequence[str], table: Table) -> TokenTable:
        """Sources as tokens.

        Args:
            tokenizer: of Hugging Face.
            texts: `[rows]`, the sources of a table, in order.
            table: says in a message where a row stands.

        Raises:
            UserError: a line does not say who speaks.
        """
        rows: list[np.ndarray] = []
        for start in range(0, len(texts), CHUNK):
            split = [
                self._split(text, table, start + i) for i, text in enumerate(texts[start : start + CHUNK])
            ]
            said = iter(plain_ids(tokenizer, [rest for lines in split for _, rest in lines]))
            for lines in split:
                parts = [part for mark, _ in lines for part in (mark, next(said))]
                rows.append(np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32))
        return TokenTable.of(rows)

    def _split(self, text: str, table: Table, row: int) -> list[tuple[np.ndarray, str]]:
        """Of each line the token, and what is said."""
        found = []
        for line in text.split("\n"):
            words = next((words for words in self.lines if line.startswith(words)), None)
            if words is None:
                raise UserError(
                    f"{table.at(row)}: a line of the source begins with none of task.generation.speakers, "
                    f"{', '.join(map(repr, self.lines))}: every line must say who speaks"
                )
            found.append((self.lines[words], line.removeprefix(words)))
        return found
