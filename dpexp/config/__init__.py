"""From the words of a command to a checked `RunConfig`; the only place that knows Hydra.

``conf/`` holds the values, `dpexp.schemas` the types. Who wins is the order of the defaults list in ``conf/train.yaml``:
command line > experiment > scale > task.

`entry` takes a command, `resolving` makes the settings of its words, `naming` says which run they are. `composing` asks Hydra,
and `presets` computes what follows from other settings. `checks`, with `data_checks`, `method_checks` and `unread`, asks whether
they make sense together; `mistakes` says what is wrong with words that Hydra refuses. `usage`, `group_help` and `completion` are
what a command tells of itself, and `sweeps` is a grid of jobs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpexp.config.entry import hydra_entry
    from dpexp.config.naming import run_folder, signature, to_dict
    from dpexp.config.resolving import compose, resolve
    from dpexp.config.usage import conf_dir
    from dpexp.schemas import RunConfig

__all__ = ["RunConfig", "compose", "conf_dir", "hydra_entry", "resolve", "run_folder", "signature", "to_dict"]

_ROOMS = {
    "RunConfig": "dpexp.schemas", "conf_dir": "dpexp.config.usage", "hydra_entry": "dpexp.config.entry",
    **dict.fromkeys(("compose", "resolve"), "dpexp.config.resolving"),
    **dict.fromkeys(("run_folder", "signature", "to_dict"), "dpexp.config.naming"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what is asked for: the tab key and a list of commands need not wait for Hydra."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'dpexp.config' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_ROOMS[name]), name)
    return found


def __dir__() -> list[str]:
    """Name what is imported later too, for the tab key."""
    return sorted({*globals(), *__all__})
