"""hits@1 of ConvAI2: how often the right reply is the likeliest of its candidates under the model.

The candidates of a reply are those of its file (ParlAI gives 20, the right one among them), or the right one and replies to other
utterances, drawn by its number alone. A reply's score is its mean log-likelihood per token, the end token included. The winners
of ConvAI2 trained a classifier to choose instead, which Li et al. leave out: numbers are not to be compared with theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.parallel.sharing import shared_out
from dpexp.tasks.files import Table
from dpexp.tasks.formats import TARGET
from dpexp.tasks.formats.base import CANDIDATES, SEPARATOR
from dpexp.tasks.sequences import Example, Sequences, target_tokens
from dpexp.tasks.target_loss import IGNORED, token_losses


def candidates_of(table: Table, row: int, count: int) -> list[str]:
    """The candidates of a row, the right reply first; none of the others has its text.

    Args:
        table: of a split; with a column of candidates, or without.
        row: in the table.
        count: how many, the right one included; fewer where there are no more.
    """
    right = table.columns[TARGET][row]
    if CANDIDATES in table.columns and (given := table.columns[CANDIDATES][row]):
        return [right, *(text for text in given.split(SEPARATOR) if text != right)][:count]
    order = np.random.default_rng([row, len(table)]).permutation(len(table))
    others: list[str] = []
    for number in order:
        if len(others) == count - 1:
            break
        text = table.columns[TARGET][int(number)]
        if text != right and text not in others:
            others.append(text)
    return [right, *others]


@torch.no_grad()
def hits_at_1(
    model: nn.Module,
    task: Any,
    split: str,
    rows: Sequence[int],
    count: int,
    device: torch.device,
    batch_size: int,
) -> float:
    """The share of rows whose right reply is likelier than every other candidate.

    Args:
        model: a causal language model in evaluation mode.
        task: `dpexp.tasks.generation.Generation`.
        split: dev or test.
        rows: of the split.
        count: candidates of each row.
        device: where the model is.
        batch_size: candidates per forward pass.
    """

    def hit(row: int) -> bool:
        texts = candidates_of(task.tables[split], row, count)
        scores = torch.cat([*_scores(model, task, split, row, texts, device, batch_size)])
        return bool((scores[0] > scores[1:]).all())

    found = [hit for _, hit in shared_out(list(rows), hit)]
    return sum(found) / len(found)


def _scores(
    model: nn.Module,
    task: Any,
    split: str,
    row: int,
    texts: Sequence[str],
    device: torch.device,
    batch_size: int,
) -> Iterator[Tensor]:
    """`[b]` mean log-likelihoods per token of some candidates after the row's prompt, float64, on the CPU."""
    sequences: Sequences = task.splits[split]
    # one prompt for all, with room for the longest of them
    prompt = sequences.prompt(row)
    targets = target_tokens(task.tokenizer, sequences.frame, texts)
    for start in range(0, len(texts), batch_size):
        batch = task.collate([Example(prompt, target) for target in targets[start : start + batch_size]])
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        losses = token_losses(model, batch).double()
        yield (-losses.sum(1) / (batch["targets"] != IGNORED).sum(1)).cpu()
