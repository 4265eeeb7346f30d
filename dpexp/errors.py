"""The one error that a person can cause, the end of its message, and what a command says that a person stops."""

import logging
from collections.abc import Iterable
from difflib import get_close_matches

log = logging.getLogger(__name__)

# exit status after Ctrl-C
INTERRUPTED = 130


class UserError(ValueError):
    """Bad input: the message says what is wrong, where, and the next step.

    Entry points print it as one line, ``error: …``, and exit with status 2; no traceback is shown.
    """

    told = False
    """Whether another process of the run prints it."""


class LateError(UserError):
    """A model used a layer in a way that it had not shown; now it is known, and the same step can be run again."""


class UntoldError(ValueError):
    """Something of the loop or the model cannot be looked at: the message says why, and holds nothing of a batch."""


def without_data(error: Exception) -> str:
    """Say why something could not be looked at, in a note that goes with the model: an error may quote private values."""
    if isinstance(error, UntoldError):
        return str(error)
    log.debug("not looked at: %s: %s", type(error).__name__, error)
    return f"{type(error).__name__}; the log has its words at the level DEBUG"


def first_line(error: object) -> str:
    """What a library says, without what it says besides; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def either(names: Iterable[str]) -> str:
    """Write names as a choice among them: a, b or c."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(word: str, names: list[str] | tuple[str, ...]) -> str:
    """The end of an error message: the nearest of the names, and all of them while they are few enough to read."""
    near = get_close_matches(word, names, n=2, cutoff=0.6)
    hint = f"; did you mean {either(near)}?" if near else ""
    listed = f" (choices: {', '.join(names)})" if names and (len(names) <= 14 or not near) else ""
    return hint + listed
