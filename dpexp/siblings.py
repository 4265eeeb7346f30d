"""The runs beside a run: an unfinished one that a change of the runtime left behind, and others on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpexp.durable import flattened, read_json, read_yaml
from dpexp.privacy.shown import upwards

if TYPE_CHECKING:
    from dpexp.privacy.plan import Plan
    from dpexp.schemas import RunConfig

# settings that change no result in exact arithmetic
RUNTIME = ("engine.", "runtime.", "tracker.")


def unfinished(settings: dict[str, Any], folder: Path) -> tuple[Path, dict[str, Any], int] | None:
    """The run with the most charges that differs from this one in its runtime alone and is not finished.

    Args:
        settings: of this run, as `dpexp.config.to_dict` gives them.
        folder: of this run, ``.../<signature>/seed<k>``; its neighbours are looked at.

    Returns:
        Its folder, its settings that differ, and the lines of its ledger; None where there is no such run.
    """
    ours = dict(flattened(settings))
    found = []
    for ledger in folder.parent.parent.glob(f"*/{folder.name}/ledger.jsonl"):
        other = ledger.parent
        if other == folder or read_json(other / "summary.json").get("status") == "finished":
            continue
        try:
            charges = ledger.read_bytes().count(b"\n")
        except OSError:
            continue
        theirs = dict(flattened(read_yaml(other / "config.yaml")))
        different = {key: value for key, value in theirs.items() if ours.get(key) != value}
        if charges and different and all(key.startswith(RUNTIME) for key in different):
            found.append((other, different, charges))
    return max(found, key=lambda run: run[2], default=None)


def sentence(run: RunConfig, settings: dict[str, Any], folder: Path, plan: Plan | None) -> str | None:
    """What to say before the first step of a private run, or None."""
    if plan is None or (known := unfinished(settings, folder)) is None:
        return None
    other, different, charges = known
    accountant = "pld" if plan.projections else "rdp"
    # of a course that a filter ends, only the whole budget is known
    spent = plan.epsilon(None if plan.moves else min(charges, plan.steps), accountant)
    given = " ".join(
        f"{key.removesuffix('.name')}={'null' if value is None else value}"
        for key, value in sorted(different.items())
    )
    return (
        f"note: {other} is an unfinished run of the same settings but for its runtime, with {charges} charges (ε = "
        f"{upwards(spent)} by {accountant}) on the same data, which no epsilon of this run counts. To go on with it "
        f"instead: {given}"
    )


def also_tried(summary: dict[str, Any], folder: Path) -> str | None:
    """Say how many other private runs on the same file stand beside a run that has not declared as many trials; else None.

    Of a person's own data alone: those of a published data set were most likely made to compare methods.

    Args:
        summary: the record of a private run.
        folder: of this run, as in `unfinished`.
    """
    privacy, train = summary["privacy"], _file_of(summary["details"].get("config", {}))
    if train is None or privacy["delta"] is None or privacy.get("trials_law") is not None:
        return None
    count = 0
    for ledger in folder.parent.parent.glob("*/*/ledger.jsonl"):
        if ledger.parent != folder and ledger.stat().st_size:
            details = read_json(ledger.parent / "summary.json").get("details") or {}
            count += _file_of(details.get("config") or read_yaml(ledger.parent / "config.yaml")) == train
    if count < int(privacy.get("trials") or 1):
        return None
    return (
        f"note: other runs in {folder.parent.parent} that have learnt from {train}: {count}. Epsilon is that of this one alone: "
        f"if it is chosen from them, type its command again with trials={count + 1}; nothing is trained, and PRIVACY.md then "
        "holds the epsilon of the choice"
    )


def _file_of(settings: dict[str, Any]) -> str | None:
    """The training file of a person's own, as the settings of a run name it."""
    data = settings.get("data") or {}
    return data.get("train")
