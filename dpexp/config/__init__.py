"""From the words of a command to a checked `RunConfig`; the only place that knows Hydra.

``conf/`` holds the values, `dpexp.schemas` the types. Who wins is the order of the defaults list in ``conf/train.yaml``:
command line > experiment > scale > task.

`entry` takes a command, `resolving` makes the settings of its words, `naming` says which run they are. `composing` asks Hydra,
`checks`, `method_checks` and `unread` ask whether the settings make sense together, `mistakes` says what does not. `usage`,
`group_help` and `completion` are what a command tells of itself, and `sweeps` is a grid of jobs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpexp.schemas import RunConfig

if TYPE_CHECKING:
    from dpexp.config.entry import hydra_entry
    from dpexp.config.naming import run_folder, signature, to_dict
    from dpexp.config.resolving import compose, resolve
    from dpexp.config.usage import conf_dir

__all__ = ["RunConfig", "compose", "conf_dir", "hydra_entry", "resolve", "run_folder", "signature", "to_dict"]

_ROOMS = {
    "compose": "resolving", "resolve": "resolving", "hydra_entry": "entry", "conf_dir": "usage",
    "run_folder": "naming", "signature": "naming", "to_dict": "naming",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what is asked for: the tab key and a list of commands need not wait for Hydra."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'dpexp.config' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"dpexp.config.{_ROOMS[name]}"), name)
    return found


def __dir__() -> list[str]:
    """Name what is imported later too, for the tab key."""
    return sorted({*globals(), *__all__})
