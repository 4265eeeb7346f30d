"""The algebra of per-example gradients, one file per way in which a parameter can be used."""

from dpexp.clipping.contributions.base import Contribution
from dpexp.clipping.contributions.conv import Conv, Geometry
from dpexp.clipping.contributions.dense import Dense
from dpexp.clipping.contributions.formula import formula_holds
from dpexp.clipping.contributions.lookup import Lookup
from dpexp.clipping.contributions.merge import merge
from dpexp.clipping.contributions.outer import Outer
from dpexp.clipping.contributions.pulled import Pulled
from dpexp.clipping.contributions.scratch import Scratch
from dpexp.clipping.contributions.tied import Tied

__all__ = [
    "Contribution",
    "Conv",
    "Dense",
    "Geometry",
    "Lookup",
    "Outer",
    "Pulled",
    "Scratch",
    "Tied",
    "formula_holds",
    "merge",
]
