"""What noisy votes of teachers tell about an example: PATE with one budget or several, and private nearest neighbours.

GNMax (Papernot et al. 2018, Proposition 8): the answer to a query is the class with the most votes after N(0, σ²) was added
to the count of each. One example reaches the counts through its teacher alone, and can move that teacher's vote from one
class to another: √2 in L2. So a query is a Gaussian mechanism with noise multiplier σ/√2, and Q queries to the same teachers
are Q of them.

SeqPATE (Tian et al. 2022): in the place of a vote stands a distribution over candidates for the next word. Two of them are √2
apart at most, as two votes are, so that all of this holds for their sums too.

Groups of examples with budgets of their own (Boenisch et al. 2022; Monir et al., section 5): an example of group j moves the
counts by √2·m_j.

==========  ===========================================================================================================
uniform     one teacher each: m_j = 1 for all, and σ is that of the strictest budget
upsampling  an example of group j is in the data of u_j different teachers: m_j = u_j (their Algorithm 1)
weighting   teachers of group j see examples of group j alone, and their votes weigh w_j: m_j = w_j (their Algorithm 2)
==========  ===========================================================================================================

The weights. For small ε a group spends ε_j ∝ m_j/σ, so w_j must be proportional to ε_j, and Σ_j n_j w_j = k keeps the sum of all
votes: w_j = k·ε_j/Σ_i n_i ε_i. Algorithm 2 as the review prints it multiplies ε_j by the share n_j/k of the teachers first
and divides by the sum of these: then w_j is proportional to n_j ε_j, groups of equal budgets get unequal weights, and the
weights add up to Σ n_j w_j ≠ k. Beyond small ε the right measure is what each group could afford alone: with σ_j its own
noise, w_j ∝ 1/σ_j spends every budget exactly.

Private kNN (Zhu et al. 2020): no teachers. For each query a Poisson sample of the private data is drawn anew, and the k
neighbours of the query in it vote. One example more drives at most one neighbour out and votes in its place: √2 again,
inside the sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from dp_accounting import DpEvent, GaussianDpEvent

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.calibration import calibrate
from dpexp.privacy.events import GroupEvents, composed, step_event

METHODS = ("uniform", "upsampling", "weighting", "knn")
VOTE_MOVE = math.sqrt(2)


def upsampling(epsilons: Sequence[float], precision: int = 2) -> list[int]:
    """Compute how many teachers see an example of each group: the least whole numbers in the ratio of the budgets.

    Args:
        epsilons: of the groups, which are rounded to ``precision`` decimals (Algorithm 1 scales them by 10^p).

    Raises:
        UserError: a budget that rounds to nothing.
    """
    scaled = [round(Fraction(value).limit_denominator(10**12) * 10**precision) for value in epsilons]
    if min(scaled) < 1:
        raise UserError(
            f"individual.epsilons={list(epsilons)}: a budget is nothing at {precision} decimals: raise pate.precision"
        )
    divisor = math.gcd(*scaled)
    return [value // divisor for value in scaled]


def weights(strengths: Sequence[float], teachers: Sequence[int]) -> list[float]:
    """Compute the weight of each group's teachers: proportional to ``strengths``, and with the sum of the number of teachers.

    Args:
        strengths: ε_j (the corrected Algorithm 2), or 1/σ_j of what each group affords alone.
        teachers: n_j.
    """
    total = sum(n * s for n, s in zip(teachers, strengths, strict=True))
    return [s * sum(teachers) / total for s in strengths]


@dataclass(frozen=True)
class VotePlan:
    """What the answers to all queries release.

    ``sigma``: of the noise on each count; ``moves``: m_j of each group; ``rate``: of the sample that votes on a query, 1 for
    teachers.
    """

    method: str
    epsilons: tuple[float, ...]
    sigma: float
    moves: tuple[float, ...]
    queries: int
    rate: float
    delta: float
    accountant: str

    def event(self, group: int = 0) -> DpEvent:
        """Everything that is released about an example of a group."""
        return _votes(self.sigma / self.moves[group], self.queries, self.rate)

    def charge(self, membership: str) -> DpEvent | GroupEvents:
        """What the ledger writes; ``membership`` says who is in which group, where there are several."""
        if len(self.moves) == 1:
            return self.event()
        return GroupEvents(tuple(self.event(group) for group in range(len(self.moves))), membership)

    def spent(self) -> list[float]:
        """ε of each group under the plan's accountant."""
        return [epsilon(self.event(group), self.delta, self.accountant) for group in range(len(self.moves))]


def plan_votes(
    method: str,
    epsilons: Sequence[float],
    *,
    teachers: Sequence[int],
    queries: int,
    delta: float,
    accountant: str = "rdp",
    precision: int = 2,
    rate: float = 1.0,
) -> VotePlan:
    """Calibrate the noise of all votes so that each group of examples spends at most its ε.

    Args:
        method: one of `METHODS`.
        epsilons: of the groups; one where all have the same. Methods without groups keep the smallest.
        teachers: n_j of each group, for weighting; their sum counts otherwise.
        queries: Q, answered one after the other.
        delta, accountant: of every group.
        precision: see `upsampling`.
        rate: of the Poisson sample of each query (knn).

    Raises:
        UserError: an unknown method, more copies than teachers, or a group without teachers.
    """
    if method not in METHODS:
        raise UserError(f"pate.method={method} is not a choice; choices: {', '.join(METHODS)}")
    if queries < 1:
        raise UserError(f"pate.queries={queries}: at least one is needed")
    if not 0 < rate <= 1:
        raise UserError(f"pate.rate={rate} must be above 0 and at most 1")
    if method == "weighting" and min(teachers) < 1:
        raise UserError(
            f"a group of examples has no teacher of its own ({list(teachers)}): raise pate.teachers, or pate.method=upsampling"
        )
    if method != "knn":
        rate = 1.0

    def alone(target: float) -> float:
        return calibrate(lambda sigma: _votes(sigma, queries, rate), target, delta, accountant)

    needed = [alone(target) for target in epsilons]
    if method == "weighting":
        moves = weights([1 / sigma for sigma in needed], teachers)
    elif method == "upsampling":
        moves = [float(copies) for copies in upsampling(epsilons, precision)]
        if max(moves) > sum(teachers):
            raise UserError(
                f"upsampling puts an example into {max(moves):g} teachers, and there are {sum(teachers)}: raise pate.teachers, "
                "or lower pate.precision"
            )
    else:
        moves = [1.0] * len(needed)
    sigma = max(own * move for own, move in zip(needed, moves, strict=True))
    return VotePlan(
        method, tuple(epsilons), sigma, tuple(moves), queries, rate, delta, accountant
    )  # fmt: skip


def _votes(sigma: float, queries: int, rate: float) -> DpEvent:
    """Q queries whose counts one example moves by √2, under N(0, σ²) on each."""
    one: DpEvent = GaussianDpEvent(sigma / VOTE_MOVE)
    if rate < 1:
        one = step_event(rate, [sigma / VOTE_MOVE])
    return composed([(one, queries)])
