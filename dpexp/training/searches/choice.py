"""Which search a configuration names."""

from dpexp.training.searches.base import StepSearch
from dpexp.training.searches.hyfreedp import HyFreeDP
from dpexp.training.searches.noisybtls import NoisyBTLS
from dpexp.training.searches.noisymax import NoisyMax

SEARCHES: dict[str, type[StepSearch]] = {"noisymax": NoisyMax, "noisybtls": NoisyBTLS, "hyfreedp": HyFreeDP}
