"""The one error that a person can cause."""


class UserError(ValueError):
    """Bad input: the message says what is wrong, where, and the next step.

    Entry points print it as one line, ``error: …``, and exit with status 2; no traceback is shown.
    """

    told = False
    """Whether another process of the run prints it."""
