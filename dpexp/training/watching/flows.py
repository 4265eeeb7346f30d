"""What flows through a tape: what earlier batches have left behind, numbers of the whole batch, rows that stand twice.

Where it may not arrive it is refused, without anything being done again.
"""

from __future__ import annotations

from collections.abc import Collection

from dpexp.errors import UserError
from dpexp.training.watching.lines import ADDING, SHAPES, name_of
from dpexp.training.watching.memory import Remains
from dpexp.training.watching.tape import Tape

EARLIER = (
    "{what} on what an earlier batch has left behind (a running mean, a memory bank, a replay buffer): that holds other "
    "examples, without noise; or on rows of the data set that the loop has read beside its batch (negatives, a mean over all). "
    "This voids any guarantee. Leave it out, or make it of public data; what belongs to an example stands in the data set"
)
COUNTED = (
    "{what} on a number that the loop has made of its batch or of the one before (.item(), float(), a mean that the model gives "
    "back or keeps, what ranks add up or gather, a gradient of all losses together), and so on all of its examples, whether a "
    "gradient shows it or not. This voids any guarantee. Leave it out, or use a public one"
)
REPEATED = (
    "the loop takes rows of its batch so that some stand twice (a bootstrap, classes made equally frequent, a row in place "
    "of another): their examples have two losses each, and move the clipped sum by twice the threshold. Leave it out: in a "
    "Poisson sample every example stands once"
)


def refuse_others(tape: Tape, number: int, what: str) -> None:
    """Refuse what was computed with numbers of the whole batch, or from what an earlier one has left behind."""
    earlier, counted, memory = set(tape.old), set[int](), tape.memory
    remains = Remains(memory)
    for line in tape.lines:
        # what is written over is not in what stands there then
        over = line.targets if line.filled else frozenset()
        skipped = name_of(line.func) in SHAPES or remains.misses(line.read)
        used = [n for n in line.uses[skipped:] if n not in over]
        if not earlier.isdisjoint(used) or remains.among(used):
            earlier.update(set(line.written) - memory.parts.keys())
            remains.add(line.written)
        else:
            remains.remove(line.filled)
        if line.counted or counted.intersection(memory.of(line.uses)):
            counted.update(memory.of(line.written))
    if number in earlier or remains.among([number]):
        raise UserError(EARLIER.format(what=what))
    if number in counted:
        raise UserError(COUNTED.format(what=what))


def refuse_repeated(tape: Tape, reached: Collection[int | None]) -> None:
    """Refuse a batch of as many rows, of which some are taken twice: their examples would have two shares of the sum.

    What belongs to examples, several to one and none to another, may by chance be as many: it is added up by whose it is.

    Args:
        tape: of the batch.
        reached: numbers of what enters the model, and of the losses; None of what is not on the tape.
    """
    taken = set[int]()
    for line in tape.lines:
        adds = name_of(line.func).rstrip("_") in ADDING
        if line.repeats or (taken.intersection(tape.memory.of(line.uses)) and not adds):
            taken.update(tape.memory.of(line.written))
    if taken and (None in reached or taken.intersection(reached)):
        raise UserError(REPEATED)
