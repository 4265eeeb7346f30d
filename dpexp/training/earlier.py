"""What a model has learnt from private data before a run: the run's own ε says nothing of that."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

CARD = "PRIVACY.md"


class _Run(NamedTuple):
    folder: Path
    # of the parameter when the run let go of it: whoever puts other weights in its place changes it
    version: int


_runs: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember(parameters: Iterable[Tensor], folder: Path) -> None:
    """Keep in mind what has trained these parameters, for as long as they live in this process.

    Args:
        parameters: as a run leaves them.
        folder: of the run.
    """
    for parameter in parameters:
        _runs[parameter] = _Run(folder.resolve(), parameter._version)


def learnt_before(model: nn.Module, source: str, folder: Path | None) -> str | None:
    """Say what another run has taught a model, in words that go with what could not be proven; None where nothing is known.

    Only a run in this process is known, and weights that lie beside a PRIVACY.md. Which rows both have seen nobody can tell from
    their hashes: data to which rows were added have another one.

    Args:
        model: with the weights that a run begins with.
        source: where the weights were read from, if that is a folder.
        folder: of a run that goes on, which adds up its own steps; None: it begins, also where a folder was deleted.
    """
    goes_on = None if folder is None else folder.resolve()
    for parameter in model.parameters():
        run = _runs.get(parameter)
        if run is not None and run.version == parameter._version and run.folder != goes_on:
            return (
                f"that this epsilon is all that the weights tell of the data: the run in {run.folder} has trained them before. "
                "Of every row that is in both data sets, epsilon and delta of both runs add up. For a run of its own, begin "
                "with the weights before that one; to train for longer, plan all steps in one run"
            )
    if source and (Path(source) / CARD).is_file():
        return (
            f"that this epsilon is all that the weights tell of the data: {source} holds a {CARD}, so that they have learnt from "
            "private data before. Of somebody who is in both data sets they tell what both epsilons and deltas allow together"
        )
    return None
