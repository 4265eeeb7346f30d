"""Which search a configuration names."""

from torch import nn

from dpexp.schemas import SearchConfig
from dpexp.training.release import Release
from dpexp.training.searches.base import Losses, StepSearch
from dpexp.training.searches.hyfreedp import HyFreeDP
from dpexp.training.searches.noisybtls import NoisyBTLS
from dpexp.training.searches.noisymax import NoisyMax


def build_search(
    settings: SearchConfig,
    release: Release,
    model: nn.Module,
    losses: Losses,
    *,
    expected_batch: float,
    largest: float,
) -> StepSearch:
    """The search of a configuration, for a plan that pays for it."""
    kinds: dict[str, type[StepSearch]] = {"noisymax": NoisyMax, "noisybtls": NoisyBTLS, "hyfreedp": HyFreeDP}
    kind = kinds[settings.name]
    made = kind(settings, release, model, losses, expected_batch=expected_batch, largest=largest)
    made.prepare()
    return made
