"""What a command tells of itself: its help, its groups and their choices, and where the files of choices are."""

from __future__ import annotations

import inspect
import io
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

# of `dpexp COMMAND`
COMMANDS = {
    "train": "train, evaluate, write a record; -m for grids",
    "predict": "apply the model of a finished run to new rows: a CSV file",
    "account": "ε under every accountant; or the noise, or the number of steps, for an ε",
    "report": "report run FOLDER: a page about a run of yours; else the papers' tables and figures beside ours",
    "explain": "how each layer of a model is clipped, and what every implementation costs",
    "bench": "speed and memory of engines relative to training without privacy",
    "audit": "attack a run of your settings: a lower bound on its ε",
    "pate": "PATE: teachers vote with noise, a student learns; training without DP-SGD",
    "conform": "test which libraries clip which models exactly",
    "demo": "a first private run in a minute, on embedded data",
    "native": "build the optional C++ kernels",
}

# what the choices of a group are about
GROUPS = {
    "task": "what is learnt, from which data",
    "model": "the network",
    "optim": "optimiser, learning rate, batch, length of the run",
    "accountant": "how ε is computed",
    "schedule": "how the noise changes during the run",
    "peft": "which parameters train",
    "privacy": "the target ε; any other one is privacy.epsilon=NUMBER",
    "individual": "groups of examples with an ε of their own",
    "unit": "whom ε protects: a row, or a user with all rows",
    "clip": "how each example's gradient is bounded: the method",
    "engine": "how the clipped sum is computed: time and memory, never the result",
    "runtime": "device and processes",
    "tracker": "where metrics are sent",
    "scale": "paper, small and demo: how large task and model are; own: settings for your own data",
    "search": "step sizes found within the budget",
    "experiment": "settings of the papers' tables",
    "recipe": "on top of an experiment: the authors' code, where it differs from their text",
    "sweep": "grids of the papers",
    "bench": "measurements of the papers",
}
# the default of a group whose choice a task brings
AT_SCALE = "the task's at its scale: conf/task_at_scale"
# choices of a group in the help
MOST_LISTED = 40
# Hydra's own options
TAKE_A_WORD = frozenset(
    ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p")
)
# Hydra's own, in full; it takes a beginning of one too
OPTIONS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--shell-completion",
    "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip


def conf_dir() -> Path:
    """Find the folder of configuration files."""
    return shipped("conf")


def shipped(name: str) -> Path:
    """Find a file or folder that travels with the code: inside the installed wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / name if (package / name).exists() else package.parent / name


def options_last(words: list[str]) -> list[str]:
    """Put what sets a value first among the words of a command: the parser takes those from one place alone."""
    settings = [
        not word.startswith("-") and before not in TAKE_A_WORD and ("=" in word or word.startswith("~"))
        for before, word in zip(["", *words], words, strict=False)
    ]
    pairs = list(zip(words, settings, strict=True))
    return [word for word, sets in pairs if sets] + [word for word, sets in pairs if not sets]


def dashed(words: list[str]) -> str | None:
    """Find the first word that looks like an option and is none, without its dashes and its value; None: there is none."""
    names = [
        word.partition("=")[0] for word in words if word.startswith("--") or (word[:1] == "-" and "=" in word)
    ]
    unknown = [
        name
        for name in names
        if name not in TAKE_A_WORD and not any(option.startswith(name) for option in OPTIONS)
    ]
    return unknown[0].lstrip("-").replace("-", "_") if unknown else None


def print_what_can_be() -> None:
    """Let a terminal, a pipe or a file whose encoding lacks a character (ε in most old ones) have a mark in its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_out(text: str) -> None:
    """Print to standard output, whose reader may have left (``| head``)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # what Python flushes when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def help_text(config_name: str, purpose: str) -> str:
    """Write the ``--help`` of a command whose function says its `purpose`."""
    lines = [
        f"python -m dpexp.{config_name} [GROUP=CHOICE ...] [KEY=VALUE ...]",
        "",
        # what Python code asks of it and gets is left out
        re.split(r"\n+(?:Args|Returns|Raises):\n", inspect.cleandoc(purpose))[0],
        "",
    ]
    header, groups = _header(config_name), groups_of(config_name)
    if header:
        lines += [*header, ""]
    if groups:
        lines.append("Groups [and their defaults]:")
    for group, choice in groups.items():
        default = {"???": "required", None: "none"}.get(choice, choice)
        lines += [f"  {group} [{default}]: {GROUPS[group]}", f"      {_summary(group)}"]
    lines += ["", "Settings besides (??? = required):"] if groups else ["Settings (??? = required):"]
    lines += [f"  {line}" for line in _own_settings(config_name)]
    lines += ["", "  --cfg job    show every setting and its value"]
    if "accountant" in groups:
        lines.append("  --help GROUP    every setting of a group, such as --help accountant")
    if "experiment" in groups:
        lines += [
            "  -m           run a grid: KEY=VALUE,VALUE",
            "  --config-dir FOLDER    add your own presets: FOLDER/experiment/NAME.yaml",
        ]
    return "\n".join(lines)


def _header(config_name: str) -> list[str]:
    """Read the comment that a primary configuration begins with: examples, and the settings used most."""
    lines = (conf_dir() / f"{config_name}.yaml").read_text(encoding="utf-8").splitlines()
    return [
        line.removeprefix("#").removeprefix(" ")
        for line in itertools.takewhile(lambda x: x.startswith("# "), lines)
    ]


def _summary(group: str) -> str:
    """List the choices of a group; where there are very many, families and how many there are of each."""
    names = choices_of(group)
    if len(names) <= MOST_LISTED:
        return ", ".join(names)
    families = Counter(name.partition("_")[0] for name in names)
    alone = {name.partition("_")[0]: name for name in names}
    some = ", ".join(
        f"{family}_... ({count})" if count > 1 else alone[family] for family, count in families.items()
    )
    return f"{len(names)} files in conf/{group}: {some}; for example {names[0]}"


def _own_settings(config_name: str) -> Iterator[str]:
    """Yield the lines of a primary configuration that set values, with their comments."""
    shown = False
    for line in (conf_dir() / f"{config_name}.yaml").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith((" ", "#")):
            shown = not line.startswith(("defaults:", "hydra:"))
        if shown and line and not line.startswith("#"):
            yield line


def groups_of(config_name: str) -> dict[str, str | None]:
    """Find the groups that a command may choose of, each with its default ("???" where one must be chosen)."""
    file = conf_dir() / f"{config_name}.yaml"
    # each composition asks; somebody may edit the file between two of them
    return dict(_groups_in(file, file.stat().st_mtime_ns))


@lru_cache(maxsize=64)
def _groups_in(file: Path, written: int) -> dict[str, str | None]:
    defaults = cast("list[Any]", OmegaConf.to_container(OmegaConf.load(file).defaults))
    groups = {
        group.removeprefix("optional "): choice
        for entry in defaults
        if isinstance(entry, dict)
        for group, choice in entry.items()
        if group != "task_at_scale" and not group.startswith(("hydra", "override "))
    }
    if "task" not in groups:
        return groups
    return {"task": groups["task"], "model": AT_SCALE, "optim": AT_SCALE} | groups


def choices_of(group: str) -> list[str]:
    """List the choices of a group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
