"""`dpexp.train` of which rank 1 is killed in its first life, as soon as its third step is charged; for torchrun.

Noise is a function of the step alone, as in the run that it is compared with: real noise follows every bit of the sums.
"""

import os
import signal

from dpexp import train
from dpexp.training import release
from dpexp.training.release import Release
from tests.pipeline.test_training import numbered_noise

DIES_IN = 2


def main() -> None:
    charge = Release.charge

    def charge_and_die(self: Release, step: int, *rest: object) -> bool:
        done = charge(self, step, *rest)
        if step == DIES_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    release.add_gaussian_ = numbered_noise()
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        Release.charge = charge_and_die
    train.main()


if __name__ == "__main__":
    main()
