"""PATE's teachers and student: who learns from what, and how votes are counted (Papernot et al. 2018; `dpexp.privacy.pate`)."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.models.trainable import train_mode
from dpexp.privacy.sampling import generator_from

if TYPE_CHECKING:
    from dpexp.tasks.base import Task

Batch = dict[str, Tensor]


@dataclass
class VotesConfig:
    """How votes are made and spent; the values stand in ``conf/pate.yaml``."""

    method: str = "uniform"
    teachers: int = 250
    queries: int = 100
    precision: int = 0
    neighbours: int = 50
    rate: float = 0.1
    teacher_epochs: int = 20
    student_epochs: int = 40
    lr: float = 1e-3
    batch_size: int = 32
    texts: int = 50
    candidates: int = 100


def shuffled(number: int, seed: int, name: str) -> np.ndarray:
    """``[number]``, a public random order."""
    return generator_from(hashlib.sha256(f"{name} {seed}".encode()).digest()).permutation(number)


def share_out(
    groups: np.ndarray, copies: Sequence[int], teachers: Sequence[int], seed: int, *, apart: bool
) -> list[np.ndarray]:
    """Deal the examples out to the teachers; everything that decides it is public.

    Args:
        groups: ``[N]``, of each example.
        copies: u_j, how many different teachers see an example of group j.
        teachers: n_j of each group, where the groups are kept ``apart``; else their sum counts.
        seed: public.

    Returns:
        for each teacher the numbers of its examples. Those of one example differ, because it is dealt to neighbours.
    """
    order = shuffled(len(groups), seed, "teachers")
    if apart:
        return [
            share
            for group, number in enumerate(teachers)
            for share in _dealt(order[groups[order] == group], number)
        ]
    dealt = np.repeat(order, np.asarray(copies)[groups[order]])
    return _dealt(dealt, sum(teachers))


def _dealt(examples: np.ndarray, number: int) -> list[np.ndarray]:
    return [examples[first::number] for first in range(number)]


def learn(
    network: nn.Module,
    task: "Task",
    examples: Sequence[int] | np.ndarray,
    *,
    labels: np.ndarray | None = None,
    split: str = "train",
    epochs: int,
    lr: float,
    batch_size: int,
    seed: int,
    device: torch.device,
) -> nn.Module:
    """Train a network without privacy by Adam: a teacher on private examples, the student on labelled public ones.

    Args:
        network: in place, and returned in evaluation mode.
        task: its losses and data.
        examples: numbers in ``split``.
        labels: ``[len(examples)]`` in the place of the examples' own.
        epochs, lr, batch_size: of Adam.
        seed: of the order.
        device: where to compute.
    """
    train_mode(network.to(device))
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    rows, members = getattr(task, split), np.asarray(examples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for epoch in range(epochs):
            order = shuffled(len(members), seed, f"epoch {epoch}")
            for start in range(0, len(order), batch_size):
                where = order[start : start + batch_size]
                batch = task.collate([rows[int(i)] for i in members[where]])
                if labels is not None:
                    batch["labels"] = torch.from_numpy(labels[where])
                optimizer.zero_grad()
                task.losses(network, {k: v.to(device) for k, v in batch.items()}).mean().backward()
                optimizer.step()
    return network.eval()


@torch.no_grad()
def predictions(
    network: nn.Module, inputs: Tensor, device: torch.device, batch_size: int = 1000
) -> np.ndarray:
    """``[Q]`` classes of images."""
    found = [network(part.to(device)).argmax(1).cpu() for part in inputs.split(batch_size)]
    return torch.cat(found).numpy()


def summed_answers(
    make: Callable[[int], nn.Module],
    fit: Callable[[nn.Module, np.ndarray, int], nn.Module],
    shares: Sequence[np.ndarray],
    weights: Sequence[float],
    answers: Callable[[nn.Module], np.ndarray],
    done: Callable[[int], object] = lambda number: None,
) -> np.ndarray:
    """Train the teachers, one at a time, and add up what they say.

    Args:
        make: a fresh network from a seed.
        fit: trains it on a teacher's examples, with a seed.
        shares: the examples of each teacher.
        weights: of each teacher's answers.
        answers: of a network, ``[Q, C]``.
        done: called with the number of teachers so far.

    Returns:
        ``[Q, C]``, float64.
    """
    total: np.ndarray | float = 0.0
    for number, (share, weight) in enumerate(zip(shares, weights, strict=True)):
        total = total + weight * answers(fit(make(number), share, number))
        done(number + 1)
    assert isinstance(total, np.ndarray)
    return total


@torch.no_grad()
def neighbour_votes(
    private: Tensor,
    labels: np.ndarray,
    queries: Tensor,
    classes: int,
    k: int,
    sample: Callable[[int], np.ndarray],
) -> np.ndarray:
    """Let the k nearest private examples of a fresh sample vote on each query (Zhu et al. 2020).

    Fewer than k vote where fewer were drawn. Distances are Euclidean, between inputs as they are; of rows that are equally far
    the earlier ones vote. Whatever else is drawn, their order is then the same, so that one example displaces one neighbour.

    Args:
        private: ``[N, d]``.
        labels: ``[N]``.
        queries: ``[Q, d]``.
        k: neighbours.
        sample: number of the query -> the Poisson sample that votes on it.

    Returns:
        ``[Q, classes]`` counts, float64.
    """
    if k < 1:
        raise UserError(f"pate.neighbours={k}: at least one is needed")
    counts = np.zeros((len(queries), classes))
    for number, query in enumerate(queries):
        drawn = sample(number)
        if not len(drawn):
            continue
        distances = (private[torch.from_numpy(drawn)] - query).square().sum(1)
        # topk chooses among ties by what else there is
        nearest = distances.sort(stable=True).indices[:k].numpy()
        np.add.at(counts[number], labels[drawn[nearest]], 1.0)
    return counts
