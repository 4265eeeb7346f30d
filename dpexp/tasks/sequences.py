"""Pairs as tokens: a prompt, which is only read, and a target, which is learnt; both cut where they are too long, and counted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpexp.errors import UserError
from dpexp.models.tokenizer import new_token
from dpexp.tasks.files import Table
from dpexp.tasks.formats import SOURCE, TARGET
from dpexp.tasks.speakers import Speakers
from dpexp.tasks.tokens import CHUNK, Tokenise, TokenTable, plain_ids, tokenize_cached

if TYPE_CHECKING:
    from dpexp.schemas import GenerationConfig

NO_TOKENS = TokenTable.of([])


class Example(NamedTuple):
    """prompt: `[P]` int32, at least one token; target: `[L]` int32, at least one token, an end token last unless it was cut."""

    prompt: np.ndarray
    target: np.ndarray


@dataclass(frozen=True)
class Frame:
    """What stands around every source, and how much room there is.

    prefix, suffix: `[.]` int32 tokens before and after the source.
    ending: `[.]` int32 tokens behind a target, the end token last.
    longest: tokens of prompt and target together.
    longest_target: tokens of the target, its ending included.
    cut: which end of an over-long source is lost, "end" or "start".
    before_target: text in front of a target, which is tokenised with it.
    speakers: who speaks in the lines of a source, or None where it is plain text.
    """

    prefix: np.ndarray
    suffix: np.ndarray
    ending: np.ndarray
    longest: int
    longest_target: int
    cut: str = "end"
    before_target: str = " "
    speakers: Speakers | None = None

    @property
    def room(self) -> int:
        """Tokens left for source and target."""
        return self.longest - len(self.prefix) - len(self.suffix)

    def prompt(self, source: np.ndarray, target_length: int) -> np.ndarray:
        """The prompt of a source, cut so that a target of this length fits behind it."""
        room = self.room - target_length
        if len(source) > room:
            source = source[:room] if self.cut == "end" else source[len(source) - room :]
        return np.concatenate([self.prefix, source, self.suffix]).astype(np.int32)


def make_frame(tokenizer: Any, settings: GenerationConfig, max_length: int) -> Frame:
    """The frame of a task for a tokenizer.

    Raises:
        UserError: the tokenizer has no end token, or not those of the speakers; or nothing is left for the source.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(
            f"{type(tokenizer).__name__} has no end token, so a model could not learn where to stop"
        )
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else end
    prefix, suffix, before_end = (
        _affix(tokenizer, text) for text in (settings.prefix, settings.suffix, settings.before_end)
    )
    if not len(prefix) + len(suffix):
        # the first token of a target is predicted from something
        prefix = np.array([begin], np.int32)
    ending = np.append(before_end, np.int32(end)).astype(np.int32)
    frame = Frame(
        prefix, suffix, ending, max_length, settings.max_target, settings.cut, settings.before_target,
        find_speakers(tokenizer, settings),
    )  # fmt: skip
    if frame.room <= settings.max_target:
        raise UserError(
            f"task.max_length={max_length} (or what the model can read) leaves no room for a source beside "
            f"{max_length - frame.room} tokens of instruction and task.generation.max_target={settings.max_target}: "
            "raise the first or lower the last"
        )
    return frame


def find_speakers(tokenizer: Any, settings: GenerationConfig) -> Speakers | None:
    """Who speaks, by `task.generation.speakers`; None where it says nothing.

    Raises:
        UserError: a token that the tokenizer does not have, or a prompt that does not end with a speaker's.
    """
    if not settings.speakers:
        return None
    lines, names = {}, _names(tokenizer)
    for line in settings.speakers:
        words, brace, rest = line.partition("{")
        name = rest.removesuffix("}")
        if brace and (rest == name or name not in names):
            raise UserError(
                f"task.generation.speakers: {line!r} must be words and behind them nothing, or one {{NAME}} of the tokenizer's: "
                "model.new_tokens=[NAME] adds it"
            )
        lines[words] = np.array([names[name]] if brace else [], np.int32)
    known, suffix = np.concatenate(list(lines.values())), _affix(tokenizer, settings.suffix)
    if not len(suffix) or suffix[-1] not in known:
        raise UserError(
            f"task.generation.suffix={settings.suffix!r} must end with the token of the one who answers, one of those of "
            "task.generation.speakers, as in {speaker1}"
        )
    return Speakers(lines, int(suffix[-1]))


def _names(tokenizer: Any) -> dict[str, int]:
    """What stands in braces in a prompt's prefix or suffix: bos, and `NAME` of every further special token `<NAME>`."""
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    further = [token[1:-1] for token in tokenizer.extra_special_tokens if re.fullmatch(r"<\w+>", token)]
    return {name: tokenizer.convert_tokens_to_ids(new_token(name)) for name in further} | {"bos": begin}


def _affix(tokenizer: Any, text: str) -> np.ndarray:
    names, pieces = _names(tokenizer), list[int]()
    parts = re.split(r"\{(" + "|".join(names) + r")\}", text)
    for plain, name in zip_longest(parts[::2], parts[1::2]):
        pieces += plain_ids(tokenizer, [plain])[0] if plain else []
        pieces += [names[name]] if name else []
    return np.asarray(pieces, np.int32)


def target_tokens(tokenizer: Any, frame: Frame, texts: Sequence[str]) -> list[np.ndarray]:
    """Texts as targets: `[L]` int32 each, their ending last unless it was cut."""
    return [
        _ended(np.asarray(row, np.int32), frame)
        for row in plain_ids(tokenizer, [f"{frame.before_target}{text}" for text in texts])
    ]


def _ended(target: np.ndarray, frame: Frame) -> np.ndarray:
    return np.concatenate([target, frame.ending])[: frame.longest_target].astype(np.int32)


class Sequences(Sequence[Example]):
    """A tokenised split.

    Args:
        frame: around every source.
        sources, targets: tokens without any special one; rows belong together.
    """

    def __init__(self, frame: Frame, sources: TokenTable, targets: TokenTable) -> None:
        self.frame, self.sources, self.targets = frame, sources, targets
        self.target_lengths = np.minimum(targets.lengths + len(frame.ending), frame.longest_target)
        self.lengths = (
            len(frame.prefix)
            + len(frame.suffix)
            + np.minimum(sources.lengths, frame.room - self.target_lengths)
            + self.target_lengths
        )

    def __len__(self) -> int:
        return len(self.target_lengths)

    def __getitem__(self, i: Any) -> Any:
        ended = _ended(self.targets.row(i)[0], self.frame)
        return Example(self.frame.prompt(self.sources.row(i)[0], len(ended)), ended)

    def longer_than(self, most: int) -> np.ndarray:
        """`[rows]` bool: which rows have more tokens than `most`, before anything is cut."""
        around = len(self.frame.prefix) + len(self.frame.suffix) + len(self.frame.ending)
        return np.asarray(around + self.sources.lengths + self.targets.lengths > most)

    def prompt(self, i: int) -> np.ndarray:
        """`[P]` int32: what a model is given to go on from, cut so that the longest target fits behind it."""
        return self.frame.prompt(self.sources.row(i)[0], self.frame.longest_target)

    def prompt_is_cut(self, i: int) -> bool:
        """Whether `prompt(i)` lost a part of its source."""
        return bool(self.sources.lengths[i] > self.frame.room - self.frame.longest_target)

    def cut(self) -> tuple[np.ndarray, np.ndarray]:
        """Which rows lost a part of their source, and of their target; `[rows]` bool each."""
        sources = self.sources.lengths > self.frame.room - self.target_lengths
        return sources, self.targets.lengths + len(self.frame.ending) > self.frame.longest_target


def tokenize_pairs(cache: Path, table: Table, tokenizer: Any, frame: Frame) -> Sequences:
    """The pairs of a table, tokenised once and cached; see `tokenize_cached`."""
    columns = {}
    for name in (SOURCE, TARGET):
        # A target follows the prompt as a word follows another: in byte-level vocabularies the blank belongs to the word.
        before = frame.before_target if name == TARGET else ""
        texts = [f"{before}{text}" for text in table.columns[name]]
        content = f"{table.sha256} {name} {len(texts)} {_content(texts)}"
        make: Tokenise = _tokenize_plain
        if name == SOURCE and (speakers := frame.speakers) is not None:
            content += f" {[(words, tokens.tolist()) for words, tokens in speakers.lines.items()]}"

            def make(tokenizer: Any, texts: Sequence[str], *_: Any) -> TokenTable:
                return speakers.tokenize(tokenizer, texts, table)

        columns[name] = tokenize_cached(cache, content, tokenizer, texts, None, 1 << 30, make=make)
    return Sequences(frame, columns[SOURCE], columns[TARGET])


def _content(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _tokenize_plain(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> TokenTable:
    """See `plain_ids`."""
    rows: list[np.ndarray] = []
    for start in range(0, len(texts), CHUNK):
        rows += [np.asarray(row, np.int32) for row in plain_ids(tokenizer, texts[start : start + CHUNK])]
    return TokenTable.of(rows)
