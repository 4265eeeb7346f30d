"""Batches of tokens with more padding, and with less: the content of an example must not feel it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.independence.arguments import Inputs, changed, leaves, positional_names
from dpexp.clipping.independence.replay import Replay
from dpexp.errors import UntoldError

FIXED = (
    "Leave padding out (a mean over the tokens or the values that are an example's own, a mask, packed sequences), or pad every "
    "batch to one length and say so: task.pad_to in a configuration, fixed_length=True of PrivacyEngine or attach in code (every "
    "step then costs as much as the longest allowed example)"
)

BROKEN = (
    "The model makes NaN or infinity of padding: where all that a position may attend to is masked by -inf, as in a window that "
    "lies in padding, its softmax is NaN, and spreads to the tokens in the next layer. Mask with torch.finfo(dtype).min. Else: "
)

# names under which models take what says where padding is
MASKS = (
    "attention_mask",
    "input_mask",
    "src_key_padding_mask",
    "key_padding_mask",
    "padding_mask",
    "pad_mask",
    "mask",
)
# of labels, what torch's losses and all of transformers leave out
IGNORED = -100
# what training calls the numbers of a batch's rows
ROW_NUMBERS = "dpexp_numbers"
# integers that are no token ids
NO_IDS = ("position", "type", "segment", "label", "mask")

Made = Callable[[], Inputs]
Unequal = Callable[[Tensor, Tensor], bool]
Comparison = Callable[..., bool | None]
# of a batch and one with more padding, and how their outputs are compared
Pairs = Iterator[tuple[Made, Made, Comparison]]


@dataclass
class Padding:
    """How the inputs of one forward say which tokens are padding.

    Attributes:
        content: ``[rows, T]`` bool, which positions are no padding.
        tokens: the id of padding.
        masked: the value of padding in the mask.
        left: whether padding stands in front.
        short: a row that ends in padding, where lengths say so; the others are padded with what it ends in.
        named: the last position that a whole number beside the tokens may name: where an answer ends, where a mask stands.
        told: whether the inputs or the model say what padding is; else rows of ids end as padded ones do.
    """

    inputs: Inputs
    names: list[str]
    rows: int
    content: Tensor
    tokens: int | None = None
    masked: float = 0.0
    left: bool = False
    short: int | None = None
    named: int = -1
    told: bool = True

    @staticmethod
    def of(replay: Replay, rows: int, token: int | float | None) -> Padding | None:
        """None where the inputs do not say what padding is; ``token``: its id, or the float that stands in the padding of other
        sequences, where that is known from elsewhere.
        """
        names = positional_names(replay.model)
        found_as = partial(Padding, replay.inputs, names, rows)
        entered: dict[str, Tensor] = {}
        for name, part in leaves(replay.inputs, names=names):
            if isinstance(part, Tensor) and part.dim() and part.shape[0] == rows:
                entered.setdefault(name, part)
        tables = {name: part for name, part in entered.items() if part.dim() == 2}
        ids = [part for name, part in tables.items() if _is_ids(name, part)]
        value, token = (token, None) if isinstance(token, float) else (None, token)
        token = _padding_token(replay.model) if token is None else token
        mask = next((tables[name] for name in MASKS if name in tables), None)
        if mask is not None:
            left = _ends(mask, 0) is None
            kept = _ends(mask, -1 if left else 0)
            if kept is None or not bool(((mask == 0) | (mask == 1)).all()):
                return None
            if token is None and bool((mask != kept).any()):
                beside = next((part for part in ids if part.shape == mask.shape), None)
                token = None if beside is None else int(beside[mask != kept][0])
            named = _last_named(entered, mask.shape[1])
            return found_as(mask == kept, token, 1 - kept, left, named=named)
        # without a mask, where the batch has rows that end in padding and a row that does not
        by_ids = None
        if len(ids) == 1 and ids[0].shape[1] > 1:
            told = token is not None
            token = _last_twice(ids[0]) if token is None else token
            ends = ids[0][:, -1] == token
            if bool(ends.any()) and not bool(ends.all()):
                named, content = _last_named(entered, ids[0].shape[1]), ids[0] != token
                by_ids = found_as(content, token, named=named, told=told)
        if by_ids is not None and by_ids.told:
            return by_ids
        by_lengths = Padding._by_lengths(found_as, entered)
        if by_lengths is None and value is not None:
            return Padding._by_value(found_as, entered, value)
        return by_lengths or by_ids

    @staticmethod
    def _by_lengths(found_as: Callable[..., Padding], entered: dict[str, Tensor]) -> Padding | None:
        """Of sequences of any numbers, ``[rows, T, …]``, beside a vector of their lengths."""
        vectors = (p for n, p in entered.items() if p.dim() == 1 and "len" in n.lower())
        lengths = next((p for p in vectors if not p.is_floating_point()), None)
        if lengths is None or not int(lengths.min()) < (full := int(lengths.max())):
            return None
        content = torch.arange(full, device=lengths.device) < lengths[:, None]
        times = (part.mT if _times_last(part, full) else part for part in entered.values())
        behind = [
            part[~content.to(part.device)] for part in times if part.dim() > 1 and part.shape[1] == full
        ]
        if not behind or not all(bool((values == values[0]).all()) for values in behind):
            return None
        return found_as(content, short=int(lengths.argmin()))

    @staticmethod
    def _by_value(
        found_as: Callable[..., Padding], entered: dict[str, Tensor], value: float
    ) -> Padding | None:
        """Of sequences of any numbers, ``[rows, T, …]``, some of which end in, or begin with, what they are padded with."""
        numbers = [part for part in entered.values() if part.dim() > 1 and part.is_floating_point()]
        # series with their times last
        numbers += [part.mT for part in numbers if part.dim() == 3]
        # a table of features beside a series has fewer dimensions
        for part, left in product(sorted(numbers, key=Tensor.dim, reverse=True), (False, True)):
            there = (part != value).flatten(1).unflatten(1, (part.shape[1], -1)).any(2)
            full = there[:, 0 if left else -1]
            if bool(full.any()) and not bool(full.all()):
                # what stands between two numbers is no padding
                content = (there if left else there.flip(1)).cumsum(1) > 0
                content = content if left else content.flip(1)
                return found_as(content, left=left, short=int(full.int().argmin()))
        return None

    def pairs(self, unequal: Unequal, others: tuple[int, int] = (sys.maxsize, 0)) -> Pairs:
        """Pairs of a shorter and a longer batch with the same content, and how their outputs are compared.

        Args:
            unequal: see `Comparison`.
            others: columns of the shortest and the longest batch that were looked at before: some models go another way from a
                length on (rotary embeddings with a second set of frequencies for long texts, sparse attention).
        """
        full, (shortest, longest) = self.content.shape[1], others
        lengths = [(full, full), (full, 1)]
        if longest > 2 * full:
            lengths.append((full, longest - full))
        for length in {full // 2, min(shortest, full // 2)}:
            # torch reads behind the end without a word where an index is expanded
            if self.short is None and length and self.named < length:
                lengths.append((length, full - length))
        for length, more in lengths:
            whole, long = length == full, partial(self.resized, length, more)
            short: Made = (lambda: self.inputs) if whole else partial(self.resized, length, 0)
            yield short, long, self.comparison(length, more, unequal)

    def resized(self, length: int, more: int) -> Inputs:
        """The first ``length`` columns of the batch and ``more`` of padding; the last ones, where padding stands in front."""
        full = self.content.shape[1]
        padded = self.short
        if padded is None and not bool(self.content.all()):
            padded = int(self.content.sum(1).argmin())

        def change(name: str, part: Any) -> Any:
            if not isinstance(part, Tensor) or part.dim() < 2 or name.startswith("decoder_"):
                return part
            if part.shape[0] == self.rows and _times_last(part, full):
                if padded is None:
                    raise UntoldError(f"no row shows what {name} is padded with")
                return change(name, part.mT).mT
            if full in part.shape[2:] and part.shape[0] == self.rows:
                raise UntoldError(f"{name} has the length of the batch in several dimensions")
            if part.shape[:2] != (self.rows, full):
                return part
            part = part[:, full - length :] if self.left else part[:, :length]
            padding = part[:, :1] if self.left else part[:, -1:]
            if padded is not None and (self.short is not None or part.dim() > 2):
                padding = padding[padded].expand_as(padding)
            if name in MASKS:
                padding = torch.full_like(padding, self.masked)
            elif "label" in name and part.dtype == torch.int64:
                padding = torch.full_like(padding, IGNORED)
            elif _is_ids(name, part) and self.tokens is not None:
                padding = torch.full_like(padding, self.tokens)
            padding = padding.repeat_interleave(more, 1)
            return torch.cat([padding, part] if self.left else [part, padding], 1)

        return changed(self.inputs, change, names=self.names)

    def comparison(self, length: int, more: int, unequal: Unequal) -> Comparison:
        """Compares what has a position for each token at positions of content, and what has none as a whole."""
        content = self.content[:, -length:] if self.left else self.content[:, :length]

        def differs(short: Tensor, long: Tensor, leaf: int | None = None) -> bool | None:
            if not short.dim() or short.shape[0] != self.rows or long.dim() != short.dim():
                return None
            if short.dim() > 1 and short.shape[1] == length and long.shape[1] == length + more:
                if short.shape[2:] != long.shape[2:]:
                    return None
                long = long[:, more:] if self.left else long[:, :length]
                keep = content.to(short.device).reshape(self.rows, length, *[1] * (short.dim() - 2))
                return unequal(torch.where(keep, short, 0.0), torch.where(keep, long, 0.0))
            return unequal(short, long) if short.shape == long.shape else None

        return differs


def _times_last(part: Tensor, full: int) -> bool:
    """Whether these are series ``[rows, features, T]`` in a batch whose sequences have this length."""
    return part.dim() == 3 and part.is_floating_point() and part.shape[1] != full == part.shape[2]


def _is_ids(name: str, part: Tensor) -> bool:
    return not (part.is_floating_point() or part.dtype == torch.bool or any(word in name for word in NO_IDS))


def _last_named(entered: dict[str, Tensor], length: int) -> int:
    """The largest whole number beside the tokens that may be a position in them; -1 without one."""
    beside = [
        part[part < length].flatten()
        for name, part in entered.items()
        if not part.is_floating_point()
        and part.dtype != torch.bool
        and part.shape[1:2] != (length,)
        and "label" not in name
        and name != ROW_NUMBERS
    ]
    return max((int(part.max()) for part in beside if part.numel()), default=-1)


def _last_twice(ids: Tensor) -> int:
    """The id in which most rows end that end in one twice; -1 where none does."""
    twice = ids[:, -1][ids[:, -1] == ids[:, -2]]
    return int(twice.mode().values) if len(twice) else -1


def _ends(mask: Tensor, column: int) -> float | None:
    """The value that all rows of a mask have in a column, if they have one."""
    values = mask[:, column].unique()
    return float(values[0]) if len(values) == 1 else None


def _padding_token(model: nn.Module) -> int | None:
    """What the model's configuration, or its first table with a padding row, says."""
    for module in model.modules():
        token = getattr(getattr(module, "config", None), "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    tables = (m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding))
    return next((index for index in tables if index is not None), None)
