"""Random numbers that all examples of a physical batch share: a coin that skips a layer, noise on a weight, dropout of positions.

A mask of its own for each example follows from secret numbers, and one example more makes the others' masks no other ones in law.
What a physical batch shares is another matter. With one example more those behind it move on, at each border one of them into the
next physical batch, where the coin fell otherwise: the sum moves by up to 2C for each of them, and not by C alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpexp.clipping.independence.arguments import Inputs
from dpexp.clipping.independence.chance import OTHERS, Chance
from dpexp.clipping.independence.replay import Replay
from dpexp.clipping.independence.runs import Runs

Unequal = Callable[[Tensor, Tensor], bool]

# a coin that falls so in one batch of a thousand, too
LEVELS = (0.001, 0.999, 0.25, 0.75)
# of the generators of Python and numpy, whose first numbers are near 0 with one and near 1 with the other
SEEDS = tuple(chance.seed for chance in OTHERS[:2])


def shared_draws(replay: Replay, runs: Runs, batch: Inputs, resized: Inputs, unequal: Unequal) -> str:
    """Say in words what the examples of a batch share of chance, where it changes what they get; "" if nothing does.

    Shared is what as many numbers are drawn for in a batch of another size.

    Args:
        replay: of the forward; its chance is that of a first look, and is left so.
        runs: that run it.
        batch, resized: what entered it, and the same of more or fewer examples.
        unequal: whether two outputs differ by more than rounding.
    """
    before = replay.chance
    (once, *_), _ = runs.of([batch])
    draws, stood = replay.draws, replay.stood
    runs.of([resized])
    others = replay.draws
    # as many numbers from the generators of Python and numpy
    by_others = stood == replay.stood and replay.drawn_by_others

    def changes(chance: Chance) -> bool:
        replay.chance = chance
        try:
            (now, *_), _ = runs.of([batch])
        finally:
            replay.chance = before
        return now.keys() != once.keys() or any(
            leaf.shape != once[n].shape or unequal(leaf[None], once[n][None]) for n, leaf in now.items()
        )

    alike = [draw.name for draw in draws] == [draw.name for draw in others]
    shared = [n for n, draw in enumerate(draws) if alike and 0 < draw.size == others[n].size]
    if masks := [draws[n] for n in shared if draws[n].mask]:
        return f"one mask of dropout, of {masks[0].size} numbers"
    coins = [n for n in shared if not draws[n].mask]
    if coins and any(changes(Chance(moved=frozenset(coins), other=level)) for level in LEVELS):
        drawn = draws[coins[0]]
        return f"what {drawn.name} draws, {drawn.size} number{'s' * (drawn.size > 1)}"
    # other seeds move single numbers of torch's, too, and an example may draw its own
    own = any(draw.size == 1 for n, draw in enumerate(draws) if n not in shared)
    if by_others and not own and any(changes(Chance(seed=seed)) for seed in SEEDS):
        return "what it draws from the generators of Python or numpy"
    return ""
