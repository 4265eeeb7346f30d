"""dpexp: differentially private deep learning, from a command line to a record that can be believed.

The rooms: ``clipping`` (per-example clipped sums for any model), ``privacy`` (all that the guarantee rests on),
``tasks`` and ``models``, ``training`` (where they meet), ``config`` (the only place that knows Hydra).

`PrivacyEngine` makes a loop of one's own private.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpexp.training.own_loop.engine import PrivacyEngine

__all__ = ["PrivacyEngine", "__version__"]

__version__ = "0.2.0"

# Read when torch is loaded. OpenMP's threads wait for their next work in a loop before they sleep, GNU's for some 20 ms: on a
# machine with other work they take the cores from those that they wait for. This is about half a millisecond, long enough for
# the gaps between the operations of a step.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"


def __getattr__(name: str) -> Any:
    """Import `PrivacyEngine` when it is asked for: commands that do without torch stay quick."""
    if name != "PrivacyEngine":
        raise AttributeError(f"module 'dpexp' has no attribute {name!r}")
    from dpexp.training.own_loop.engine import PrivacyEngine

    return PrivacyEngine


def __dir__() -> list[str]:
    """Name `PrivacyEngine` too, for the tab key."""
    return sorted({*globals(), *__all__})
