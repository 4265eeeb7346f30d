"""From a budget for every example to a few groups: partitioning for personalised differential privacy.

Li, Xiong, Ji & Jiang (2017), as reviewed by Monir et al., section 5: examples with different budgets are put into bins, and
each bin is computed with the smallest budget in it, so that nobody's is exceeded. The bins are chosen

- ``privacy_aware``: so that the least of the budgets is wasted, the least Σ_i (ε_i - ε_bin);
- ``utility``: so that the answer is the best. Here that is the signal against the noise of a step: with scaled thresholds
(or rates)
  an example of a bin counts in proportion to 1/σ(ε_bin), σ(ε) being the noise multiplier that ε would need by itself.

Both maximise Σ_i v(ε_bin) with v(ε) = ε or 1/σ(ε), which is increasing, so that bins are intervals of the sorted budgets,
and dynamic programming over the distinct budgets finds the best of all partitions. For small ε the two agree, because σ is
proportional to 1/ε. Budgets are public here, as groups are (`dpexp.privacy.individual`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpexp.errors import UserError

METHODS = ("privacy_aware", "utility")


def partition(
    budgets: NDArray[np.float64], bins: int, value: Callable[[float], float] | None = None
) -> tuple[list[float], NDArray[np.int64]]:
    """Put examples into bins.

    Args:
        budgets: ``[N]``, ε of each example.
        bins: at most so many.
        value: v(ε), increasing; None is ε itself.

    Returns:
        ε of each bin, rising, and ``[N]`` the bin of each example.

    Raises:
        UserError: no bins, or budgets that are no positive numbers.
    """
    if bins < 1:
        raise UserError(f"individual.bins={bins}: at least one is needed")
    if not len(budgets) or not (np.isfinite(budgets) & (budgets > 0)).all():
        raise UserError("individual.budgets must be positive numbers, one for each training example")
    distinct, where, counts = np.unique(budgets, return_inverse=True, return_counts=True)
    worth = np.asarray(
        [distinct[i] if value is None else value(float(distinct[i])) for i in range(len(distinct))]
    )
    number = np.concatenate([[0], np.cumsum(counts)])
    bins, size = min(bins, len(distinct)), len(distinct)
    # best[b][j]: of the first j budgets in b bins; a bin [i, j) counts number·worth of its first
    best = np.full((bins + 1, size + 1), -np.inf)
    best[0, 0], start = 0.0, np.zeros((bins + 1, size + 1), np.int64)
    for b in range(1, bins + 1):
        for j in range(1, size + 1):
            found = best[b - 1, :j] + (number[j] - number[:j]) * worth[:j]
            start[b, j] = int(found.argmax())
            best[b, j] = found[start[b, j]]
    edges, end = [], size
    for b in range(bins, 0, -1):
        end = int(start[b, end])
        edges.append(end)
    edges.reverse()
    groups = np.searchsorted(edges, where, side="right") - 1
    return [float(distinct[i]) for i in edges], groups.astype(np.int64)


def read_budgets(file: str | Path, num_examples: int) -> NDArray[np.float64]:
    """Read ``[N]`` budgets from a text file that has one number in the line of each training example.

    Raises `UserError` with the line for what is no positive number, and for a file of another length.
    """
    found = np.empty(num_examples)
    for line, word in enumerate(read_lines("individual.budgets", file, num_examples, "a budget"), start=1):
        try:
            found[line - 1] = float(word)
        except ValueError:
            found[line - 1] = np.nan
        if not (np.isfinite(found[line - 1]) and found[line - 1] > 0):
            raise UserError(f"{file}, line {line}: {word!r} is not a positive number")
    return found


def read_lines(setting: str, file: str | Path, num_examples: int, each: str) -> list[str]:
    """Read a text file that has a word in the line of each training example.

    Args:
        setting: that names the file, for messages.
        file: to read.
        num_examples: how many there are.
        each: what a line holds, in words.

    Raises:
        UserError: it cannot be read, or has another length.
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{setting}={file} cannot be read: {error}") from None
    if len(lines) != num_examples:
        raise UserError(
            f"{file} has {len(lines)} lines for {num_examples} training examples: it needs {each} for each, in the order of the "
            "data"
        )
    return lines


def sampling_mechanism(epsilons: Sequence[float], threshold: float) -> list[float]:
    """Compute the probabilities with which examples are kept before a mechanism that spends ``threshold`` sees them.

    Jorgensen, Yu & Cormode (2015), Definition 3.2: π(ε) = (e^ε - 1)/(e^t - 1) for ε < t, else 1. Whoever is kept with
    probability π for an (t, δ)-DP mechanism is protected with ln(1 + π(e^t - 1)) = min(ε, t), at πδ.

    Raises:
        UserError: a threshold or a budget that is no positive number.
    """
    if not all(0 < value < np.inf for value in (*epsilons, threshold)):
        raise UserError(f"budgets {list(epsilons)} and threshold {threshold} must be positive numbers")
    # e^(ε-t)·(1 - e^-ε)/(1 - e^-t): without overflow
    return [
        1.0 if e >= threshold else float(np.exp(e - threshold) * np.expm1(-e) / np.expm1(-threshold))
        for e in epsilons
    ]


def exponential_mechanism(
    values: NDArray[np.float64], epsilons: NDArray[np.float64], candidates: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute the law of a personalised median: the exponential-like mechanism of Jorgensen et al. (2015), section 4.

    A candidate's score is the least Σ ε_i over sets of examples whose values would have to be others for it to be a median,
    negative; Pr[r] ∝ e^(score/2). If the value of example i is replaced, a set that did before and i do after: every score moves
    by at most ε_i, and the law by a factor of e^(ε_i).

    Args:
        values: ``[N]``; neighbours replace one of them, N is public.
        epsilons: ``[N]`` budgets.
        candidates: ``[R]`` public answers.

    Returns:
        ``[R]`` probabilities.
    """
    scores = np.zeros(len(candidates))
    for number, candidate in enumerate(candidates):
        for side in (values < candidate, values > candidate):
            too_many = int(side.sum()) - len(values) // 2
            if too_many > 0:
                scores[number] = -np.sort(epsilons[side])[:too_many].sum()
    weights = np.exp((scores - scores.max()) / 2)
    return np.asarray(weights / weights.sum())
