"""The algebra of per-example gradients, one file per way in which a parameter can be used."""

from dpexp.clipping.gradients.base import PerExampleGradient
from dpexp.clipping.gradients.conv import Conv, Geometry
from dpexp.clipping.gradients.dense import Dense, Joined
from dpexp.clipping.gradients.grouped import Grouped
from dpexp.clipping.gradients.lookup import Lookup
from dpexp.clipping.gradients.memory import Scratch
from dpexp.clipping.gradients.merge import Tied, instantiated, merge
from dpexp.clipping.gradients.outer import Outer
from dpexp.clipping.gradients.pulled import Pulled

__all__ = [
    "Conv",
    "Dense",
    "Geometry",
    "Grouped",
    "Joined",
    "Lookup",
    "Outer",
    "PerExampleGradient",
    "Pulled",
    "Scratch",
    "Tied",
    "instantiated",
    "merge",
]
