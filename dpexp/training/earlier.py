"""What a model has learnt from private data before a run: the run's own ε says nothing of that."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dpexp.privacy.ledger import Ledger
from dpexp.training.watching.guards import few_numbers

CARD = "PRIVACY.md"
# ways of PEFT to begin that read rows of data
BY_DATA = ("eva", "corda", "lora_ga")

# a digest of weights -> folder of the run that left them
_runs: dict[bytes, Path] = {}
# what tells a data set from others -> folders of the runs that have taken steps on it
_learners: dict[str, set[Path]] = {}


def taught(data: str, folder: Path) -> None:
    """Note that a run has taken a step on a data set (see `dpexp.training.identity.data_identity`)."""
    _learners.setdefault(data, set()).add(folder.resolve())


def also_tried(data: str, folder: Path, trials: int) -> str | None:
    """Say how many other runs of this process have learnt from the same data, unless as many trials are declared; else None."""
    others = len(_learners.get(data, set()) - {folder.resolve()})
    if others < trials:
        return None
    return (
        f"other runs of this process on the same data: {others}. The epsilon of this card is that of one: where this run was "
        f"chosen from them, PrivacyEngine(..., trials={others + 1}) writes a card with the epsilon of the choice (run the script "
        "again: nothing is trained)"
    )


def digests_of(weights: Iterable[Tensor]) -> set[bytes]:
    """Return a digest of a few numbers of each weight: copies have the same."""
    rows = (row.cpu().contiguous() for row in map(few_numbers, weights) if row is not None)
    return {hashlib.blake2b(row.view(torch.uint8).numpy().tobytes()).digest() for row in rows}


def remembering(weights: Sequence[Tensor], ledger: Ledger, folder: Path) -> Callable[[], None]:
    """Return what a run calls at its end: which run has left these weights is then known for as long as this process lives.

    Args:
        weights: as the run finds them; what it does not change says nothing of it.
        ledger: of the run: without a step it teaches nothing.
        folder: of the run.
    """
    before = digests_of(weights)

    def remember() -> None:
        if ledger.steps_charged:
            _runs.update(dict.fromkeys(digests_of(weights) - before, folder.resolve()))

    return remember


def learnt_before(model: nn.Module, source: str, folder: Path | None) -> str | None:
    """Say what another run has taught a model, in words that go with what could not be proven; None where nothing is known.

    Only a run in this process is known, whatever model its weights are in now, weights that lie beside a PRIVACY.md, and adapters
    of PEFT that begin where rows of data have put them. Which rows both have seen nobody can tell from their hashes: data to
    which rows were added have another one.

    Args:
        model: with the weights that a run begins with.
        source: where the weights were read from, if that is a folder.
        folder: of a run that goes on, which adds up its own steps; None: it begins, also where a folder was deleted.
    """
    goes_on = None if folder is None else folder.resolve()
    for digest in digests_of(model.parameters()):
        run = _runs.get(digest)
        if run not in (None, goes_on):
            return (
                f"that this epsilon is all that the weights tell of the data: the run in {run} has trained them before. "
                "Of every row that is in both data sets, epsilon and delta of both runs add up. For a run of its own, begin "
                "with the weights before that one; to train for longer, plan all steps in one run"
            )
    if source and (Path(source) / CARD).is_file():
        return (
            f"that this epsilon is all that the weights tell of the data: {source} holds a {CARD}, so that they have learnt from "
            "private data before. Of somebody who is in both data sets they tell what both epsilons and deltas allow together"
        )
    tables = (getattr(part, "peft_config", None) for part in model.modules())
    configs = [config for table in tables if isinstance(table, Mapping) for config in table.values()]
    if ways := [way for way in BY_DATA if way in [getattr(c, "init_lora_weights", None) for c in configs]]:
        return (
            f"that this epsilon is all that the weights tell of the data: init_lora_weights={ways[0]} has made adapters of rows "
            "of data, which are published with the model. Take public rows for it, or a way to begin that reads none"
        )
    return None
