"""`dpexp.train` of which rank 1 is killed in its first life, as soon as its third step is charged; for torchrun."""

import os
import signal

from dpexp import train
from dpexp.training.release import Release

DIES_IN = 2


def main() -> None:
    charge = Release.charge

    def charge_and_die(self: Release, step: int, *rest: object) -> bool:
        done = charge(self, step, *rest)
        if step == DIES_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        Release.charge = charge_and_die
    train.main()


if __name__ == "__main__":
    main()
