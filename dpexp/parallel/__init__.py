"""Several processes that train together: who they are, what they tell each other, and which of them writes."""

from dpexp.parallel.environment import current, joined, started_by_torchrun, told_by_submitit
from dpexp.parallel.ranks import ALONE, Ranks

__all__ = ["ALONE", "Ranks", "current", "joined", "started_by_torchrun", "told_by_submitit"]
