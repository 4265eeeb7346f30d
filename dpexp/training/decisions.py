"""What was decided on a machine by trying: kept with a run, so that it repeats its sums, and with the machine, for other runs."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpexp.durable import cache_folder, make_folder, read_json, write_json
from dpexp.parallel import ALONE, Ranks
from dpexp.provenance import device_name
from dpexp.training.state import disk_errors


@dataclass
class Decisions:
    """What was decided on this machine by trying: the physical batch size and the engine's measured choices.

    Kept in the run's folder from before the first release, so that a resumed run repeats the same sums instead of
    measuring again. Decisions of another device are ignored.
    """

    path: Path
    device: str
    values: dict[str, Any] = field(default_factory=dict)
    # rank 0 reads and writes for all
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self.values = self.ranks.once(self._read)

    def _read(self) -> dict[str, Any]:
        # Damaged or edited: measure again, which costs time and at most a second charge, never the guarantee.
        stored = read_json(self.path)
        known = stored.pop("check", None) == _checksum(stored) and stored.get("device") == self.device
        return stored if known else {}

    def get(self, name: str) -> Any:
        """The decision called `name`, or None."""
        return self.values.get(name)

    def keep(self, name: str, value: Any) -> None:
        """Write a decision down, durably; nothing happens where it stands there already."""
        if self.values.get(name) != value:
            self.values = {"device": self.device} | self.values | {name: value}
            if self.ranks.writes:
                with disk_errors(self.path.parent):
                    write_json(self.path, self.values | {"check": _checksum(self.values)})

    def of_rank(self, name: str) -> Any:
        """A decision that each rank makes for itself: this rank's, or rank 0's where there were fewer before."""
        return self.get(_own(name, self.ranks.rank)) or self.get(name)

    def keep_of_ranks(self, name: str, value: Any) -> None:
        """Write down what each rank has decided; all call it."""
        mine = self.get(_own(name, self.ranks.rank))
        for rank, theirs in enumerate(self.ranks.gather(None if value == mine else value)):
            if theirs is not None:
                self.keep(_own(name, rank), theirs)


def _own(name: str, rank: int) -> str:
    return f"{name} of rank {rank}" if rank else name


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def machine_name(device: torch.device) -> str:
    """What a measured choice of an engine depends on beyond the shapes."""
    return f"{device_name(device)}, torch {torch.__version__}"


def machine_file() -> Path:
    """Where this machine's measured choices are shared by its runs, so that the same run twice gives the same numbers."""
    folder = cache_folder()
    make_folder(folder, "DPEXP_CACHE")
    return folder / "choices.json"
