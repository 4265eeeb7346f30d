"""Text infilling: a classification asked as a missing word (Li et al. 2022, section 3.2, Appendix N).

The texts stand in a template that has one masked position, and every class has a word: "<S1> It was [MASK] ." with great
and terrible. A masked language model, whose head is pretrained too, says how well each word fits there.

The loss is the cross-entropy over the words of the K classes alone, not over the whole vocabulary: section 3.2 compares the
probabilities of the label words, and Appendix E calls it filling in the word "among K candidates". The logits of all
other words get no gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.tasks.classification import Example, TextClassification
from dpexp.tasks.demo import DEMO_WORDS
from dpexp.tasks.sources import is_demo
from dpexp.tasks.tokens import CHUNK, TokenTable, plain_ids

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

FIRST, SECOND, MASK = "<S1>", "<S2>", "[MASK]"
_MARKS = re.compile(r"(<S[12](?::\w*)*>|\[MASK\])")
EDITS: dict[str, Callable[[str], str]] = {
    "": str.strip,
    "raw": str,
    "cut": lambda text: text[:-1],
    "lower": lambda text: text[:1].lower() + text[1:],
}
"""What becomes of a text in its place, <S1:NAME>: blanks around it go ("", the usual), or it stays as the file has it (raw),
loses its last character (cut), or its first letter becomes small (lower). The last three are those of the code of Gao et al. 2021
(LM-BFF), which Li et al. used; there, blanks around a text stay."""


class Piece(NamedTuple):
    """One piece of a template: a mark (`FIRST`, `SECOND`, `MASK`) or words between them.

    spaced: does white space precede it?
    edit: a key of `EDITS`, of a text.
    most: tokens of a text that are kept, where not all are; the others are lost before the row is cut to its length.
    """

    text: str
    spaced: bool
    edit: str = ""
    most: int | None = None


def parse_template(template: str, pairs: bool) -> list[Piece]:
    """The pieces of a template, in order.

    White space is where the template has it, and nothing else: "<S1> ? [MASK] , <S2>" keeps a space before the question mark.

    Args:
        template: words around <S1> (the text), [MASK] (written so for every model) and, for pairs, <S2>. A text can be
            changed first, <S1:cut>; see `EDITS`. <S1:200> and <S1:cut:200> keep 200 tokens of it at most.
        pairs: whether the task has a second text.

    Raises:
        UserError: a mark is missing, there twice, or not wanted, or a change of a text is unknown.
    """
    wanted = (FIRST, SECOND, MASK) if pairs else (FIRST, MASK)
    marks = [_mark(part, False) for part in _MARKS.findall(template)]
    if unknown := [mark.edit for mark in marks if mark.edit not in EDITS]:
        raise UserError(
            f"task.template={template!r}: a text can't be changed by {unknown[0]!r}; choose one of "
            f"{', '.join(filter(None, EDITS))}, or a number of tokens above 0"
        )
    found = [mark.text for mark in marks]
    if sorted(found) != sorted(wanted):
        raise UserError(
            f"task.template={template!r} must hold {', '.join(wanted[:-1])} and {wanted[-1]} once each, and holds "
            f"{', '.join(found) or 'none of them'}"
        )
    pieces: list[Piece] = []
    spaced = False
    for part in _MARKS.split(template):
        if part.strip():
            spaced = spaced or part[0].isspace()
            pieces.append(_mark(part, spaced) if _MARKS.fullmatch(part) else Piece(part.strip(), spaced))
            spaced = False
        spaced = spaced or part[-1:].isspace()
    return pieces


def _mark(part: str, spaced: bool) -> Piece:
    """A mark, and what becomes of its text: of "<S1:cut:200>" it is "<S1>"."""
    if part == MASK:
        return Piece(part, spaced)
    text, *asked = part.strip("<>").split(":")
    most = int(asked.pop()) if asked and asked[-1].isdecimal() and int(asked[-1]) else None
    return Piece(f"<{text}>", spaced, ":".join(asked), most)


def label_word_tokens(
    tokenizer: Any, words: dict[str, str], labels: Sequence[str], spaced: bool
) -> list[int]:
    """The token of each class's word.

    Args:
        tokenizer: of the model.
        words: label -> word.
        labels: the classes, in order.
        spaced: whether the word stands behind a space, which is a part of the token in RoBERTa's vocabulary.

    Raises:
        UserError: a class without a word or the reverse, a word that is not one token of this tokenizer, or two classes
            with one token.
    """
    if set(words) != set(labels):
        raise UserError(
            f"task.label_words has words for {', '.join(words) or 'no class'}, and the classes are {', '.join(labels)}: "
            "every class needs one word"
        )
    tokens: dict[int, str] = {}
    for label in labels:
        word = (" " if spaced else "") + words[label].strip()
        (ids,) = plain_ids(tokenizer, [word])
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            pieces = ", ".join(tokenizer.convert_ids_to_tokens(ids)) or "nothing"
            raise UserError(
                f"task.label_words.{label}={words[label]} is not a single token of this model's tokenizer ({pieces}), and "
                "one mask stands for one token: choose another word"
            )
        if ids[0] in tokens:
            raise UserError(
                f"task.label_words: {words[label]} stands for {tokens[ids[0]]} and for {label}, so that the two can't be "
                "told apart"
            )
        tokens[ids[0]] = label
    return list(tokens)


def tokenize_template(
    pieces: Sequence[Piece],
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
) -> TokenTable:
    """Put texts into a template and tokenise the whole, with the tokenizer's special tokens around it.

    A row that is too long loses words at the end of its text (of a pair: of the longer one first), never the template or
    the mask. What looks like a special token in a text ("[MASK]") is read as the letters it is made of, so
    that every row has exactly one mask.

    Args:
        pieces: see `parse_template`.
        tokenizer: of Hugging Face, with a mask token.
        texts: `[rows]`.
        pairs: `[rows]` second texts, or None.
        max_length: tokens per row at most, all told.

    Returns:
        One row per text; its segments, where the model asks for them, are all 0, because the template makes the pair one text.

    Raises:
        UserError: the template alone fills `max_length`.
    """
    mask = tokenizer.mask_token_id
    before, after = _special_tokens(tokenizer)
    fixed = {
        piece: [mask] if piece.text == MASK else _encode(tokenizer, [piece])[0]
        for piece in pieces
        if piece.text not in (FIRST, SECOND)
    }
    room = max_length - sum(len(fixed.get(piece, ())) for piece in pieces) - len(before) - len(after)
    if room < (1 if pairs is None else 2):
        raise UserError(
            f"task.template takes {max_length - room} of the {max_length} tokens that task.max_length allows (special ones "
            "included), and leaves no room for the text: raise task.max_length or shorten the template"
        )
    rows: list[np.ndarray] = []
    truncated = 0
    for start in range(0, len(texts), CHUNK):
        filled = {}
        for piece in pieces:
            if piece not in fixed:
                chosen = (pairs or ()) if piece.text == SECOND else texts
                change = EDITS[piece.edit]
                inserted = [Piece(change(text), piece.spaced) for text in chosen[start : start + CHUNK]]
                filled[piece] = _encode(tokenizer, inserted)
        for ids in zip(*filled.values(), strict=True):
            own = [len(text[: piece.most]) for piece, text in zip(filled, ids, strict=True)]
            lengths = _shortened(own, room)
            truncated += sum(lengths) < sum(map(len, ids))
            kept = {piece: text[:n] for piece, text, n in zip(filled, ids, lengths, strict=True)}
            parts = [before, *(fixed[piece] if piece in fixed else kept[piece] for piece in pieces), after]
            rows.append(np.fromiter(itertools.chain.from_iterable(parts), np.int32))
    segments = [np.zeros(len(row), np.uint8) for row in rows]
    table = TokenTable.of(
        rows, segments if "token_type_ids" in tokenizer.model_input_names else None, truncated
    )
    if np.count_nonzero(table.tokens == mask) != len(rows):
        raise UserError(
            f"{type(tokenizer).__name__} makes a mask token out of ordinary text, so that a row has several: take another "
            "model.tokenizer"
        )
    return table


def read_prompt(
    task: TaskConfig, data: DataConfig, scale: str, tokenizer: Any
) -> tuple[list[Piece], list[str], list[int]]:
    """The pieces of a task's template, its classes, and the token of each class's word.

    Raises:
        UserError: a template or words that do not fit, or a tokenizer without a mask token.
    """
    if not task.template:
        raise UserError(
            f"task={task.name}: text infilling needs task.template, such as 'task.template=\"<S1> It was [MASK] .\"'"
        )
    given = task.label_words
    if not (given or task.labels) and is_demo(data, scale):
        given = DEMO_WORDS
    if not given:
        raise UserError(
            f"task={task.name}: text infilling needs a word for every class, such as "
            "task.label_words={ham: fine, spam: junk}"
        )
    if tokenizer.mask_token_id is None:
        raise UserError(
            f"task={task.name}: text infilling needs a masked language model, and the tokenizer of this one has no "
            "mask token: take a model of the BERT, RoBERTa or DistilBERT family"
        )
    pieces = parse_template(task.template, pairs=bool(data.text_pair or task.text_pair))
    labels = [str(label) for label in task.labels or given]
    behind_space = next(piece.spaced for piece in pieces if piece.text == MASK)
    words = {str(label): word for label, word in given.items()}
    return pieces, labels, label_word_tokens(tokenizer, words, labels, behind_space)


class TextInfilling(TextClassification):
    """A task whose configuration says `kind: text_infilling`: classification with `template` and `label_words`.

    Without declared `task.labels` the classes are those that have a label word.
    """

    head: ClassVar[str] = "masked_lm"

    def __init__(self, task: TaskConfig, data: DataConfig, scale: str, tokenizer: Any) -> None:
        """Check template and words, then read the data as `TextClassification` does.

        Raises:
            UserError: also for a template or words that do not fit, or a tokenizer without a mask token.
        """
        self.pieces, labels, words = read_prompt(task, data, scale, tokenizer)
        self.words = torch.tensor(words)
        self.mask_token = int(tokenizer.mask_token_id)
        make = functools.partial(tokenize_template, self.pieces)
        task = dataclasses.replace(task, labels=labels)
        super().__init__(task, data, scale, tokenizer, make, str(self.pieces))

    def collate(self, examples: list[Example]) -> dict[str, Tensor]:
        """As `TextClassification.collate`, with `mask_positions` int64 `[B]`: where each row's mask stands."""
        batch = super().collate(examples)
        return {**batch, "mask_positions": (batch["input_ids"] == self.mask_token).int().argmax(1)}

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The logits of the label words at the mask, `[B, K]`."""
        inputs = {name: t for name, t in batch.items() if name not in ("labels", "mask_positions")}
        at_mask = batch["mask_positions"][:, None, None]
        with _passing_on(model, at_mask, batch["input_ids"].shape[1]):
            logits = model(**inputs).logits
        # a model without a base model to tell its head from
        if logits.shape[1] != 1:
            logits = logits.take_along_dim(at_mask, 1)
        return logits[:, 0, self.words.to(logits.device)]


@contextmanager
def _passing_on(model: nn.Module, positions: Tensor, length: int) -> Iterator[None]:
    """Let the base model hand one position per example to the head: `[B, 1, V]` logits instead of `[B, T, V]`.

    The head works position by position, so that nothing else changes; to a clipping engine it is a shorter sequence.

    Args:
        model: with the head.
        positions: `[B, 1, 1]`.
        length: tokens of the batch; prompt tuning puts vectors of its own before them, and all positions move on by as many.
    """

    def choose(module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden.take_along_dim(positions + (hidden.shape[1] - length), 1)
        return output

    base = _base_model(model)
    handle = base.register_forward_hook(choose) if base is not None else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _base_model(model: nn.Module) -> nn.Module | None:
    """The network below the head, also where the model is wrapped."""
    for module in model.modules():
        base = module._modules.get(str(getattr(module, "base_model_prefix", "")))
        if base is not None:
            return base
    return None


def _encode(tokenizer: Any, texts: Sequence[Piece]) -> list[list[int]]:
    """Tokens of words that stand behind a space or not, without special ones."""
    ids = plain_ids(tokenizer, [(" " if text.spaced else "") + text.text for text in texts])
    return [row if text.text else [] for row, text in zip(ids, texts, strict=True)]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    around = tokenizer(tokenizer.mask_token, return_attention_mask=False)["input_ids"]
    middle = around.index(tokenizer.mask_token_id)
    return around[:middle], around[middle + 1 :]


def _shortened(lengths: list[int], room: int) -> list[int]:
    """As many tokens of each text as fit, taken from the longer one first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    fair = room // 2
    if first <= fair:
        return [first, room - first]
    if second <= fair:
        return [room - second, second]
    return [room - fair, fair]
