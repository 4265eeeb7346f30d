"""What the tab key offers: commands, groups and their choices, settings.

The shells call ``dpexp completion words ...`` for every tab, so nothing heavy is imported here: choices are names of files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpexp.config.usage import COMMANDS, print_out

SHELLS = {
    "bash": """\
_dpexp() {
  local line="${COMP_LINE:0:COMP_POINT}"
  local word="${line##* }"
  mapfile -t COMPREPLY < <(dpexp completion words "$line" 2>/dev/null)
  # readline replaces only what follows the last "="
  [[ "$word" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
  [[ "${COMPREPLY[*]}" == *= ]] && compopt -o nospace
}
complete -o default -F _dpexp dpexp""",
    "zsh": """\
_dpexp() { local -a found; found=("${(@f)$(dpexp completion words "$BUFFER" 2>/dev/null)}"); compadd -S '' -a found }
compdef _dpexp dpexp""",
    "fish": """\
complete -c dpexp -f -a '(dpexp completion words (commandline -cp) 2>/dev/null)'""",
}
# commands with settings of the form KEY=VALUE
FILES = ("account", "audit", "bench", "conform", "explain", "pate", "predict", "train")


def main(arguments: Sequence[str]) -> int:
    """Print what a shell must evaluate (``dpexp completion SHELL``), or candidates (``dpexp completion words LINE``)."""
    if len(arguments) == 2 and arguments[0] == "words":
        print_out("\n".join(candidates(arguments[1])))
        return 0
    if len(arguments) == 1 and arguments[0] in SHELLS:
        print_out(SHELLS[arguments[0]])
        return 0
    print(f"error: give a shell: dpexp completion {'|'.join(SHELLS)}", file=sys.stderr)
    return 2


def candidates(line: str) -> list[str]:
    """List the whole words that the last word of a command line may become.

    Args:
        line: all up to the cursor, the name of the program first.
    """
    words = line.split(" ")
    last, given = words[-1], [word for word in words[1:-1] if word]
    if not given:
        return _starting(last, [*COMMANDS, "completion"])
    command = given[0]
    if command == "report":
        return _starting(last, _targets())
    if command not in FILES:
        return []
    from dpexp.config.usage import choices_of, conf_dir, groups_of

    groups = groups_of(command)
    name, sets, value = last.partition("=")
    if sets and name in groups:
        # a grid: task=sst2,mn
        before, comma, begun = value.rpartition(",")
        return [f"{name}={before}{comma}{choice}" for choice in _starting(begun, choices_of(name))]
    if sets:
        return []
    return _starting(last, [f"{key}=" for key in dict.fromkeys([*groups, *_settings(command, conf_dir())])])


def _starting(word: str, choices: Sequence[str]) -> list[str]:
    return [choice for choice in choices if choice.startswith(word)]


def _targets() -> list[str]:
    """List the names of ``dpexp report``, as far as files tell."""
    found = {"run", "list", "tables", "figures", "all", "report"}
    for file in Path("results").glob("*/*.md"):
        if file.parent.name in ("tables", "figures"):
            found.add(file.stem)
    return sorted(found)


def _settings(command: str, folder: Path) -> Iterator[str]:
    """Yield dotted names: from the schemas for what trains, and from the primary file for the others."""
    if command == "train":
        from dpexp.schemas import RunConfig, setting_names

        yield from setting_names(RunConfig)
    for line in (folder / f"{command}.yaml").read_text(encoding="utf-8").splitlines():
        if (match := re.match(r"([a-z_]+):", line)) and match[1] not in ("defaults", "hydra"):
            yield match[1]
