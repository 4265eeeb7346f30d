"""What a person gives to `dpexp.PrivacyEngine`, checked before anything is made of it."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from dpexp.clipping.refusals import refuse_lazy
from dpexp.clipping.rules import CLIPPING
from dpexp.errors import UserError, did_you_mean, either
from dpexp.privacy.plan_checks import steps_of
from dpexp.privacy.schedules import Schedule
from dpexp.privacy.sensitivity import ALLOCATIONS
from dpexp.tasks.origins import MADE, origins

WHOLE = ("steps", "rows_per_example", "checkpoint_every", "trials", "noise_seed", "physical_batch_size")
"""Counts; the others may have a fraction."""
FROM_ZERO = ("checkpoint_every", "noise_multiplier", "noise_seed")
"""May be 0; the others must be above."""
OPTIONAL = ("steps", "epochs", "epsilon", "noise_multiplier", "target_quantile", "noise_seed")
"""May be None."""
LARGEST = {"clip_norm": 1e18, "loss_scale": 1e18}
"""Of what is computed with in 32 bits."""
SMALLEST = {"loss_scale": 1.0}
"""Of what multiplies gradients before their norms are taken: squares of small ones are nothing in 32 bits."""
AGAIN = "a Subset or a selection with repeated numbers, a part that is put in again"
COPIES = (
    "privacy would protect each copy by itself. Give every example once, with a weight in its loss where it is to count more; or "
    "say whose each copy is: users="
)


OVERLAPPING = (
    "rows of a tensor of shape {shape} in the data set share memory (windows that overlap, as unfold makes them): a value stands "
    "in several examples, and privacy would protect each of these by itself. Cut a series into windows that do not overlap, or "
    "say whose each window is: users="
)

ELSEWHERE = {
    "max_grad_norm": "clip_norm",
    "target_epsilon": "epsilon",
    "target_delta": "delta",
    "sigma": "noise_multiplier",
    "clipping": "groups",
    "module": "model",
    "data_loader": "dataset",
    "sample_size": "dataset",
    "num_training_epochs": "epochs",
    "clipping_fn": "rule",
    "secure_mode": "secure",
    "max_physical_batch_size": "physical_batch_size",
}
"""What other libraries call an argument."""
OF_A_LOADER = (
    "sampler",
    "batch_sampler",
    "shuffle",
    "drop_last",
    "num_workers",
    "poisson_sampling",
)
"""What a loader is given, and has no counterpart."""
OF_BATCHES = ("collate_fn", "physical_batch_size", "max_physical_batch_size")
"""What `engine.batches` takes, and `PrivacyEngine` does not."""
P = ParamSpec("P")
T = TypeVar("T")

# what PrivacyEngine takes where nothing is given
QUANTILE_BUDGET, QUANTILE_LR = 0.1, 0.3


def named(function: Callable[P, T]) -> Callable[P, T]:
    """Make a method that is called with arguments of other names, or without some, say so in one sentence."""
    parameters = inspect.signature(function)
    called, given, more = f"engine.{function.__name__}", "...", ""
    of_the_loop: tuple[str, ...] = ()
    if function.__name__ == "__init__":
        called, given = "PrivacyEngine", "model, optimizer, dataset, folder=..., batch_size=..., ..."
        more = ". The data set, and what is private, are given here and not to make_private (docs/from_opacus.md)"
        of_the_loop = OF_BATCHES

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        known = list(parameters.parameters)[1:]
        for name in kwargs:
            if name in of_the_loop:
                raise UserError(
                    f"{name}= is no argument of {called}: the loop takes it, engine.batches({ELSEWHERE.get(name, name)}=...)"
                )
            if name in ELSEWHERE:
                raise UserError(f"{name}= is called {ELSEWHERE[name]}= here (docs/from_opacus.md)")
            if name in OF_A_LOADER:
                raise UserError(
                    f"{name}= is no argument of {called}: the engine reads the examples and draws Poisson samples itself, as the "
                    "guarantee asks. Rare examples may have larger weights in the loss, by public counts"
                )
            if name not in known:
                raise UserError(f"{name}= is no argument of {called}{did_you_mean(name, known)}")
        try:
            parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise UserError(f"{called}({given}): {error}{more}") from None
        return function(*args, **kwargs)

    return checked


def checked_flags(**arguments: Any) -> Iterator[bool]:
    """Yield flags as Python's own, whatever library they come from, and refuse what is neither True nor False: any text counts as
    true, also "no".

    Raises:
        UserError: the first of them.
    """
    for name, value in arguments.items():
        if type(value).__name__ not in ("bool", "bool_"):
            raise UserError(f"{name}={value!r} is neither True nor False: give one of them, without quotes")
        yield bool(value)


def check_numbers(**arguments: Any) -> None:
    """Refuse what is not a number of the right kind.

    Raises:
        UserError: text or another type, NaN or infinity, a fraction of a count, or a number that is too small or too large.
    """
    for name, value in arguments.items():
        if value is None and name in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UserError(f"{name}={value!r} is not a number: give one, without quotes")
        if not math.isfinite(value):
            raise UserError(f"{name}={value} is not a finite number")
        if name in WHOLE and not (isinstance(value, Integral) or float(value).is_integer()):
            raise UserError(f"{name}={value} is not a whole number")
        if value < 0 or (value == 0 and name not in FROM_ZERO):
            raise UserError(f"{name}={value} must be {'0 or larger' if name in FROM_ZERO else 'above 0'}")
        if float(value) < SMALLEST.get(name, -math.inf):
            raise UserError(
                f"{name}={value:g} must be at least {SMALLEST[name]:g}: it meets numbers of 32 bits"
            )
        if float(value) > LARGEST.get(name, math.inf):
            raise UserError(
                f"{name}={value:g} must be at most {LARGEST[name]:g}: it meets numbers of 32 bits"
            )


class Numbers(SimpleNamespace):
    """The numbers that `dpexp.PrivacyEngine` is given, checked, as Python's own, whatever library they come from.

    Raises:
        UserError: see `check_numbers`; or two that do not go together.
    """

    def __init__(self, **given: Any):
        check_numbers(**given)
        for name, value in given.items():
            setattr(self, name, value if value is None else int(value) if name in WHOLE else float(value))
        if self.target_quantile is not None and self.target_quantile >= 1:
            raise UserError(
                f"target_quantile={self.target_quantile} is a share of the norms: give a number below 1"
            )
        if self.target_quantile is None:
            for name, neutral in (("quantile_budget", QUANTILE_BUDGET), ("quantile_lr", QUANTILE_LR)):
                if getattr(self, name) != neutral:
                    raise UserError(
                        f"{name}={getattr(self, name)} does nothing while thresholds are fixed: give target_quantile too, or "
                        "leave it out"
                    )
        if (self.epochs is None) == (self.steps is None):
            raise UserError("give exactly one of epochs and steps")

    def steps_of(self, num_units: int) -> int:
        """T: as given, or the epochs in steps of the expected batch.

        Raises:
            UserError: the epochs are less than half a step.
        """
        epochs = self.epochs or 0
        if steps := self.steps or steps_of(epochs, num_units, self.batch_size):
            return int(steps)
        raise UserError(
            f"epochs={epochs:g} is less than one step of batch_size={self.batch_size:g} in {num_units}: give "
            f"{self.batch_size / num_units:.3g} epochs or more, or steps=1"
        )


def checked_folder(folder: Any) -> Path:
    """Return the folder of a run as a path, which stays the same one where the process goes to another folder.

    Raises:
        UserError: it is none, or a file has its name.
    """
    if not isinstance(folder, str | Path) or not str(folder) or "\0" in str(folder):
        raise UserError(
            f'folder={folder!r} is not the name of a folder: give one, such as folder="runs/mine"'
        )
    try:
        path = Path(folder).expanduser().absolute()
        is_file = path.exists() and not path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        # a name that is too long, a home that is nobody's
        raise UserError(f"folder={folder!r} is no name of a folder ({error}): give another one") from None
    if is_file:
        raise UserError(f"folder={folder} is a file: give the run a folder of its own")
    return path


def check_dataset(dataset: Any, users: Sequence[Hashable] | None) -> None:
    """Refuse what has no examples by number, and what has an example under several, unless ``users`` says whose each is.

    Warns of rows that may be copies on purpose, and of windows that overlap.

    Raises:
        UserError: a loader, a table, several splits or a stream; an example stands there more than once.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UserError(
            "the data set is a DataLoader, and the engine draws batches itself: give loader.dataset here, and loader.collate_fn "
            "to engine.batches(...)"
        )
    # a data set that polars has made of a table is one of torch
    table = type(dataset).__module__.partition(".")[0] in ("polars", "pyarrow")
    if hasattr(dataset, "iloc") or (table and not isinstance(dataset, Dataset)):
        raise UserError(
            f"a {kind} gives columns and not examples: make a TensorDataset or a list of rows of it"
        )
    if isinstance(dataset, Mapping):
        raise UserError(
            f"a {kind} has names and not examples by number: give one of its splits, or a TensorDataset of its columns"
        )
    if isinstance(dataset, tuple) and all(isinstance(part, torch.Tensor | np.ndarray) for part in dataset):
        raise UserError(
            "a tuple of tensors or arrays is no data set: torch.utils.data.TensorDataset(*tensors) makes one of tensors"
        )
    numbered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not numbered or isinstance(dataset, IterableDataset):
        raise UserError(
            f"a {kind} has no length or no examples by number, and Poisson sampling needs both: give a map-style data set"
        )
    if users is not None:
        return
    most = _copies(origins(dataset, {})) if _made_of_others(dataset) else 1
    if most > 1:
        raise UserError(f"an example stands in the data set up to {most} times ({AGAIN}), and {COPIES}")
    for tensor in getattr(dataset, "tensors", (dataset,)):
        if isinstance(tensor, torch.Tensor) and _rows_overlap(tensor):
            warnings.warn(OVERLAPPING.format(shape=list(tensor.shape)), stacklevel=4)
    # a list may be a stand-in for data, in which nobody is anybody
    rows = [id(row) for row in dataset if isinstance(row, MADE)] if isinstance(dataset, list) else []
    if len(set(rows)) < len(rows):
        warnings.warn(f"a row stands in the data set up to {_copies(rows)} times, and {COPIES}", stacklevel=4)


def _made_of_others(dataset: Any) -> bool:
    return isinstance(dataset, Subset | ConcatDataset) or hasattr(dataset, "_indices")


def _rows_overlap(tensor: torch.Tensor) -> bool:
    """Whether adjacent rows lie in the same memory; those of a transposed tensor are interleaved."""
    if tensor.layout != torch.strided or tensor.dim() < 2 or tensor.is_nested or not tensor.numel():
        return False
    (rows, step), *others = zip(tensor.shape, tensor.stride(), strict=True)
    within = sum((size - 1) * stride for size, stride in others if stride <= step * (rows - 1))
    return rows > 1 and 0 < step <= within


def _copies(numbers: Any) -> int:
    """How often the most frequent number is there."""
    return int(np.unique(numbers, return_counts=True)[1].max(initial=1))


def check_optimizer(model: Any, optimizer: Any) -> None:
    """Refuse a model or an optimizer that is none, as where arguments are in another order.

    Raises:
        UserError: says what is in its place.
    """
    for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise UserError(
                f"{name}: this is of type {type(value).__name__} and no torch {kind.__name__}; "
                "PrivacyEngine(model, optimizer, dataset, folder=...) is the order"
            )
        wrappers = (type(part) for part in [value, *(value.modules() if value is model else ())])
        for wrapper in wrappers:
            if wrapper.__module__.startswith(("opacus.grad_sample", "opacus.optimizers")):
                raise UserError(
                    f"{name}: this is wrapped in Opacus' {wrapper.__name__}, whose work the engine does itself: give the plain "
                    "module and the plain optimizer, as they were before Opacus had them (docs/from_opacus.md)"
                )
    refuse_lazy(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.device.type == "meta":
            raise UserError(f"{name} lies on the meta device and has no values: load the weights first")


def beneath_accelerate(wrapper: Any) -> Any:
    """Return the optimizer or the scheduler that one of Accelerate holds, whose steps inside of ``accelerator.accumulate(model)``
    it would leave out without a word; anything else as it is.

    Raises:
        UserError: it would divide what it is given by a loss scale.
    """
    if type(wrapper).__module__.partition(".")[0] != "accelerate":
        return wrapper
    if getattr(wrapper, "scaler", None) is not None:
        raise UserError(
            "the optimizer comes from an Accelerator with mixed_precision='fp16', whose scaler would divide the noisy gradient "
            "by its scale: use Accelerator(mixed_precision='bf16')"
        )
    inside = "optimizer" if isinstance(wrapper, torch.optim.Optimizer) else "scheduler"
    return getattr(wrapper, inside, wrapper)


def check_rule(rule: str, allocation: str) -> None:
    """Refuse to clip nothing, and a name that is no way to share the noise.

    Raises:
        UserError: one of them.
    """
    if allocation not in ALLOCATIONS:
        raise UserError(f"allocation={allocation!r} is not known; choose {', '.join(ALLOCATIONS)}")
    if rule == "none":
        raise UserError(f'rule="none" clips nothing, and noise would hide nothing: choose {either(CLIPPING)}')


def checked_schedule(schedule: str | Mapping[str, Any]) -> Schedule:
    """Return how the noise changes over time.

    Raises:
        UserError: it is no schedule, or one that follows the training.
    """
    found = Schedule.of(schedule)
    if found.adaptive:
        raise UserError(
            f"schedule={found.name} follows the training, which a loop of your own does not tell: train with dpexp.train, or "
            "choose a schedule that is fixed beforehand"
        )
    return found
