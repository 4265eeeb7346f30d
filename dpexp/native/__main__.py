"""``python -m dpexp.native``: build the optional C++ kernels and say what is used from now on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dpexp import native
from dpexp.errors import UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """A machine without a compiler is no error: everything works without the kernels."""
    argparse.ArgumentParser(prog="python -m dpexp.native", description=__doc__).parse_args(arguments)
    try:
        native.build()
    except (UserError, OSError) as reason:
        print(f"native kernels: {reason}")
        return
    print(f"native kernels: {native.backend()}")


if __name__ == "__main__":
    main()
