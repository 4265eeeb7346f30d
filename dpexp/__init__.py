"""dpexp: differentially private deep learning, from a command line to a record that can be believed.

The rooms: ``clipping`` (per-example clipped sums for any model), ``privacy`` (all that the guarantee rests on),
``tasks`` and ``models``, ``training`` (where they meet), ``config`` (the only place that knows Hydra).

`PrivacyEngine` makes a loop of one's own private.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpexp.training.engine import PrivacyEngine

__all__ = ["PrivacyEngine", "__version__"]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import `PrivacyEngine` when it is asked for: commands that do without torch stay quick."""
    if name != "PrivacyEngine":
        raise AttributeError(f"module 'dpexp' has no attribute {name!r}")
    from dpexp.training.engine import PrivacyEngine

    return PrivacyEngine
