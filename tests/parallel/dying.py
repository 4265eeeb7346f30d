"""`dpexp.train` of which ranks are killed; for torchrun.

The first word says when: LIFE:RANK:INSTANT:TIME, several joined by commas. ``1:0:line:3`` kills rank 0 in its second life, behind
its third line in the ledger. The other words are settings.
"""

import os
import signal
import sys
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from dpexp import train
from dpexp.privacy.ledger import Ledger
from dpexp.training import state
from dpexp.training.release import Release

# name -> whose function, and whether the rank is killed behind it
INSTANTS: dict[str, tuple[Any, str, bool]] = {
    # no other rank has seen the line
    "line": (Ledger, "_write", True),
    # all have, and there is no noise yet
    "charge": (Release, "charge", True),
    # the sums hold noise, and the weights have not moved
    "noise": (Release, "add_noise", True),
    # of a sharded checkpoint
    "part": (FileSystemWriter, "write_data", False),
    # all of a checkpoint is written, and the pointer names the one before
    "pointer": (state, "write_json", False),
}


def arm(instant: str, time: int) -> None:
    """Have this process killed when the function of an instant is called for the n-th time."""
    owner, name, behind = INSTANTS[instant]
    function, calls = getattr(owner, name), 0

    def die() -> None:
        print(f"killed: {instant}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == time and not behind:
            die()
        result = function(*arguments, **named)
        if calls == time:
            die()
        return result

    setattr(owner, name, counted)


def main() -> None:
    # what torchrun's own process does on SIGTERM, and this one would inherit by its fork
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for kill in filter(None, sys.argv.pop(1).split(",")):
        life, rank, instant, time = kill.split(":")
        if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == (life, rank):
            arm(instant, int(time))
    train.main()


if __name__ == "__main__":
    main()
