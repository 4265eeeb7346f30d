"""Who else hears of the metrics: Weights & Biases (offline unless asked otherwise), TensorBoard, or nobody.

A tracker is handed what `record.Metrics` decided may be told: what is released, and with ``tracker.not_private=true`` the
rest too, under names that begin with ``not_private/``.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpexp.errors import UserError
from dpexp.record import withheld

if TYPE_CHECKING:
    from dpexp.schemas import RunConfig


def tells_all(run: "RunConfig") -> bool:
    """Whether the tracker hears what no noise covers: on request, and of runs without privacy."""
    return run.tracker.not_private or not run.clip.private


def what_is_told(run: "RunConfig") -> str | None:
    """One sentence for a private run with a tracker, else None."""
    if run.tracker.name == "none" or not run.clip.private:
        return None
    if run.tracker.not_private:
        return (
            f"tracker={run.tracker.name} is told losses and gradient norms too (tracker.not_private=true): no noise covers "
            "them, so keep its pages to yourself"
        )
    clock = (
        " It notes when it was told, and so how long steps took"
        if run.tracker.name == "wandb" and withheld(run)
        else ""
    )
    return (
        f"tracker={run.tracker.name} is told what is released alone; tracker.not_private=true adds losses and gradient "
        f"norms, which no noise covers.{clock}"
    )


@contextmanager
def tracking(
    run: "RunConfig", settings: dict[str, Any], folder: Path
) -> Iterator["WandbTracker | TensorBoardTracker | None"]:
    """The configured tracker while it is needed, None for none. Its files go into the run's folder.

    It is told numbers, nested dicts of numbers, or lists of numbers.

    Raises:
        UserError: its package is not installed.
    """
    tracker: WandbTracker | TensorBoardTracker | None = None
    try:
        if run.tracker.name == "wandb":
            tracker = WandbTracker(run, settings, folder)
        elif run.tracker.name == "tensorboard":
            tracker = TensorBoardTracker(run, settings, folder)
    except ImportError as error:
        raise UserError(
            f"tracker={run.tracker.name} needs a package that is not installed ({error.name}): "
            f"pip install {run.tracker.name}, or choose tracker=none"
        ) from error
    try:
        yield tracker
    finally:
        if tracker is not None:
            tracker.close()


class WandbTracker:
    """Weights & Biases; a resumed run goes on under its name."""

    def __init__(self, run: "RunConfig", settings: dict[str, Any], folder: Path):
        import wandb

        name = "-".join(folder.parts[-3:])
        self.run = wandb.init(
            project=run.tracker.project,
            mode="online" if run.tracker.mode == "online" else "offline",
            name=name,
            id=name.replace("/", "-"),
            resume="allow",
            config=settings,
            dir=str(folder),
            settings=None if tells_all(run) else wandb.Settings(console="off", x_disable_stats=True),
        )

    def log(self, values: dict[str, Any], step: int) -> None:
        self.run.log(flatten(values), step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoardTracker:
    """TensorBoard event files in the run's folder."""

    def __init__(self, run: "RunConfig", settings: dict[str, Any], folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        # of every line with a strict release, which tells nobody how long steps took
        self.time = time.time() if withheld(run) else None

    def log(self, values: dict[str, Any], step: int) -> None:
        for name, value in flatten(values).items():
            self.writer.add_scalar(name, value, step, walltime=self.time)

    def close(self) -> None:
        self.writer.close()


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested dicts and lists as one level of numbers, names joined by a slash; what is no number is left out."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[f"{prefix}{name}"] = float(value)
    return flat
