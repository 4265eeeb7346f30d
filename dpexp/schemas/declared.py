"""What a configuration declares of the data, which is public and fixes the guarantee."""

from __future__ import annotations

from dpexp.schemas import RunConfig


def declared_num_examples(run: RunConfig) -> int | None:
    """Read N as the configuration declares it; None where only the data can tell (a person's own file)."""
    if run.data.num_examples is not None or run.data.train is not None:
        return run.data.num_examples
    return run.task.num_examples.get(run.scale.name)


def declared_users(run: RunConfig) -> int | None:
    """Read the number of users that the configuration declares; None where only the data can tell."""
    rows = declared_num_examples(run)
    if run.unit.size > 0:
        return None if rows is None else -(-rows // run.unit.size)
    return run.unit.num_users


def declared_units(run: RunConfig) -> int | None:
    """Read N of the guarantee as the configuration declares it: of examples, or of users (``unit=user``)."""
    return declared_num_examples(run) if run.unit.name == "example" else declared_users(run)
