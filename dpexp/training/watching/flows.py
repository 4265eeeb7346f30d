"""What flows through a tape: what earlier batches have left behind, numbers of the whole batch, rows that stand twice.

Where it may not arrive it is refused, without anything being done again.
"""

from __future__ import annotations

from collections.abc import Collection

from dpexp.errors import UserError
from dpexp.training.watching.lines import ADDING, SHAPES, name_of
from dpexp.training.watching.memory import Remains
from dpexp.training.watching.messages import COUNTED, EARLIER, REPEATED
from dpexp.training.watching.tape import Tape


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
