"""``dpexp COMMAND ...``: every command by one name; ``dpexp train ...`` is ``python -m dpexp.train ...``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

import dpexp
from dpexp.config import completion
from dpexp.config.usage import COMMANDS, print_out, print_what_can_be
from dpexp.errors import INTERRUPTED, did_you_mean

_VERSION = ("-V", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command as ``python -m`` would. Returns the exit status."""
    print_what_can_be()
    words = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help", "help"):
        print_out(_usage())
    elif name in _VERSION or (name in COMMANDS and rest and rest[0] in _VERSION):
        print_out(f"dpexp {dpexp.__version__}")
    elif name == "completion":
        return completion.main(rest)
    elif name in COMMANDS:
        sys.argv[1:] = rest
        try:
            runpy.run_module(f"dpexp.{name}", run_name="__main__", alter_sys=True)
        except KeyboardInterrupt:
            # while libraries are loaded, which takes seconds; later the command says it itself
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
    else:
        print(
            f"error: {name} is no command{did_you_mean(name, [*COMMANDS, 'completion'])}",
            file=sys.stderr,
        )
        return 2
    return 0


def _usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name.ljust(width)}{purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            f"dpexp {dpexp.__version__}: differentially private deep learning",
            "",
            "dpexp COMMAND [SETTINGS ...]     dpexp COMMAND --help",
            "",
            *lines,
            "",
            'eval "$(dpexp completion bash)" completes commands, settings and choices with the tab key (also: zsh, fish)',
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
