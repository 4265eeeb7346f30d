"""The engines: different ways to compute the same clipped sum.

They share the same taps and the same algebra and differ in three choices (Bu et al., Tables 2 and 5):

- ``norm``: how per-example norms are found: by the ghost norm, by instantiating per-example gradients, by the papers'
  layerwise rule ``2T² < pd``, or by whichever method measured fastest for the shapes at hand;
- ``keep``: whether instantiated per-example gradients are kept for the weighted sum or computed again (``always_keep``: whatever
  they weigh; otherwise only where they are no heavier than the activations that would be held instead);
- ``second_pass``: whether the clipped sum comes from a second back-propagation (ghost clipping, Li et al., section 4), or
  from the activations and output gradients kept since the first one (book-keeping).
"""

from __future__ import annotations

from dataclasses import dataclass

from dpexp.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Engine:
    """One row of Bu et al., Table 2; see the module's docstring for the fields."""

    name: str
    norm: str = "measured"
    keep: bool = True
    second_pass: bool = False
    always_keep: bool = False


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("auto"),
        Engine("onepass"),
        Engine("bk", norm="ghost", keep=False),
        Engine("bk_mixghost", norm="rule", keep=False),
        Engine("bk_mixopt", norm="rule", always_keep=True),
        Engine("ghost", norm="ghost", keep=False, second_pass=True),
        Engine("mixghost", norm="rule", keep=False, second_pass=True),
        Engine("fastgrad", norm="instantiate", keep=False, second_pass=True),
        Engine("fastgrad_improved", norm="instantiate", keep=False),
        Engine("opacus_improved", norm="instantiate", always_keep=True),
        Engine("loop"),
        Engine("opacus"),
    )
}


def engine_named(name: str) -> Engine:
    """Look an engine up; a wrong name gets the list and the closest match."""
    if name not in ENGINES:
        raise UserError(f"engine={name!r} is not known{did_you_mean(str(name), list(ENGINES))}")
    return ENGINES[name]
