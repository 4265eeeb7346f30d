"""What survives a crash: checkpoints, and the lock of a run's folder.

A checkpoint is a file `state-<step>.pt` and a pointer `latest.json` that names it with its SHA-256. Both are written to
a temporary name, flushed to the disk and renamed; the pointer moves last. A process killed at any instant leaves a
pointer to a complete checkpoint; a second one of the same step has another name.

No random state is kept, because none is needed: batches, dropout and noise of step t are drawn from seeds that
depend on t alone, and the learning rate is a function of t.
"""

import _codecs
import contextlib
import errno
import fcntl
import gc
import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpexp.clipping.thresholds import FixedThresholds
from dpexp.durable import (
    FULL,
    UNUSABLE,
    error_number,
    flush_file,
    flush_folder,
    make_folder,
    read_json,
    write_json,
)
from dpexp.errors import UserError, first_line
from dpexp.parallel import Ranks
from dpexp.parallel.sharded import like, write_into
from dpexp.parallel.shards import is_sharded
from dpexp.privacy.ledger import GONE, Ledger, Seal

FOLDER_SETTING = "runtime.runs_dir, or folder= of PrivacyEngine"


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, or a folder that can't be used, into one clear error."""
    try:
        yield
    except Exception as error:
        number, name = error_number(error), getattr(error, "filename", None) or folder
        if number in FULL:
            raise UserError(
                f"the disk is full: could not write to {folder}. The last checkpoint there is still good: "
                "free some space and run the same command again to go on"
            ) from error
        within = Path(name).is_relative_to(folder)
        if number == errno.ENOENT and name != folder and within and not folder.exists():
            raise UserError(GONE.format(what=folder)) from error
        if number in UNUSABLE and within:
            raise UserError(
                f"cannot use {name} ({os.strerror(number)}): choose another folder with {FOLDER_SETTING}"
            ) from error
        raise


@contextlib.contextmanager
def exclusive(folder: Path, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a run's folder: two processes must not write one ledger.

    Args:
        folder: of the run.
        waiting: called where another process holds the folder, which is then waited for; None refuses.

    Raises:
        UserError: another process holds it, or its file system has no locks. A lock goes with its process, also when that is
            killed.
    """
    make_folder(folder, FOLDER_SETTING)
    with open(folder / ".lock", "w") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    # an engine that nobody has any more may be held by a cycle, such as that of an error and its traceback
                    gc.collect()
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                else:
                    waiting()
                    fcntl.flock(file, fcntl.LOCK_EX)
        except BlockingIOError:
            raise UserError(
                f"{folder} is in use: by another process (wait for it, or take another folder or seed), or by a PrivacyEngine of "
                "this process that is still open (call its close() first, in a notebook too)"
            ) from None
        except OSError as error:
            # some file systems of clusters have no locks
            raise UserError(
                f"{folder} can't be locked ({error.strerror}), and two processes must not write one ledger: choose a folder on "
                f"another file system with {FOLDER_SETTING}"
            ) from error
        holder = os.getpid()
        try:
            yield
        finally:
            # processes that were forked meanwhile (workers of a DataLoader) have the file open too, and may live longer
            if os.getpid() == holder:
                fcntl.flock(file, fcntl.LOCK_UN)


@dataclass
class Checkpoint:
    """The state after `step` steps; `step` = 0 is the state before training."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    thresholds: dict[str, Any]
    signature: str
    wall_s: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    # of the ledger that this state rests on, with the check of the last one
    charges: int = 0
    last_charge: str = ""
    # the folder beside it that holds the tensors, where each rank wrote its own
    parts: str = ""
    # what else the run keeps, by name: averages, the best weights, a search, the loop's own scheduler
    kept: dict[str, Any] = field(default_factory=dict)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters and all buffers by name; frozen parameters come from the model's source again."""
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return state | {name: b.detach() for name, b in model.named_buffers()}


def load_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Write a `model_state` back in place.

    Raises:
        UserError: the names or shapes are not those of this model.
    """
    current = model_state(model)
    if current.keys() != state.keys():
        odd = sorted(current.keys() ^ state.keys())[0]
        raise UserError(
            f"the checkpoint does not fit the model ({odd!r} is in one and not in the other): the model's code or "
            "its libraries have changed since; start again with another seed, or delete the run's folder"
        )
    with torch.no_grad():
        for name, tensor in current.items():
            if tensor.shape != state[name].shape:
                raise UserError(
                    f"the checkpoint does not fit the model: {name!r} has shape {tuple(state[name].shape)} there and "
                    f"{tuple(tensor.shape)} here; start again with another seed, or delete the run's folder"
                )
            write_into(tensor, state[name])


def _numpys() -> list[Any]:
    """What `torch.load` has to know to read numpy's numbers and arrays: a learning rate may be one."""
    made = [np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]]
    return [*made, np.ndarray, np.dtype, _codecs.encode, *map(type, map(np.dtype, np.typecodes["All"]))]


def refuse_unreadable(checkpoint: Checkpoint) -> None:
    """Raise `UserError` where something besides tensors could be written and not be read again."""
    parts = {f"kept {name}": part for name, part in checkpoint.kept.items()}
    for name, value in ({**vars(checkpoint), "kept": None} | parts).items():
        try:
            torch.save(tree_map_only(Tensor, lambda _: None, value), written := io.BytesIO())
            written.seek(0)
            with torch.serialization.safe_globals(_numpys()):
                torch.load(written, weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            kind = re.search(r"GLOBAL (\S+)", str(error))
            what = {"kept scheduler": "a scheduler", "kept keep": "keep="}.get(name, name)
            raise UserError(
                f"the state of {what} holds what a checkpoint could not give back ({kind[1] if kind else error}): its "
                "state_dict() may hold numbers, text, lists, dicts and tensors"
            ) from None


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint and make it the latest one, then drop its predecessors.

    Raises:
        OSError: the disk is full, for example. The last checkpoint stays as it was.
        UserError: it could not be read again.
    """
    refuse_unreadable(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_free_name(folder, checkpoint.step)}.pt"
    temporary = target.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            writer = _HashingWriter(file)
            try:
                torch.save(vars(checkpoint), cast("IO[bytes]", writer))
            except RuntimeError as error:
                # what torch makes of an error of the disk, and of a signal that ends the process
                raise writer.error or error from error
            flush_file(file)
        os.replace(temporary, target)
        flush_folder(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    write_json(
        folder / "latest.json",
        {"file": target.name, "step": checkpoint.step, "sha256": writer.hash.hexdigest()},
    )
    for old in folder.glob("state-*"):
        if old.is_dir() and old.name != checkpoint.parts:
            shutil.rmtree(old, ignore_errors=True)
        elif not old.is_dir() and old != target:
            old.unlink(missing_ok=True)


def _free_name(folder: Path, step: int) -> str:
    """The name of a checkpoint, another one where the latest is of this step too: that stays until the pointer has left it."""
    name = f"state-{step}"
    return f"{name}-again" if read_json(folder / "latest.json").get("file") == f"{name}.pt" else name


def load_checkpoint(folder: Path, signature: str) -> Checkpoint | None:
    """The latest checkpoint, or None where there is none yet.

    Args:
        folder: the run's checkpoint folder.
        signature: of the run's configuration; a checkpoint of another one is refused.

    Raises:
        UserError: the checkpoint is corrupt, its file is gone, or it belongs to another configuration.
    """
    pointer = folder / "latest.json"
    if not pointer.exists():
        return None
    try:
        latest = json.loads(pointer.read_text(encoding="utf-8"))
        path, expected = folder / latest["file"], latest["sha256"]
    except (ValueError, KeyError, TypeError):
        raise _unusable(folder, f"corrupt checkpoint: {pointer} is no valid pointer") from None
    if not path.exists():
        raise _unusable(folder, f"corrupt checkpoint: {path}, named by {pointer.name}, is gone")
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected:
            raise _unusable(
                folder, f"corrupt checkpoint: {path} does not have the checksum in {pointer.name}"
            )
    with torch.serialization.safe_globals(_numpys()):
        checkpoint = Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    if checkpoint.signature != signature:
        other = f"{checkpoint.signature}, not {signature}"
        raise _unusable(folder, f"{path} belongs to another configuration ({other})")
    return checkpoint


def _unusable(folder: Path, why: str) -> UserError:
    return UserError(
        f"{why}. Put a copy of the folder back, or delete {folder} to train again from the start (the ledger stays: what was "
        "released so far is charged again)"
    )


def resting_on(policy: FixedThresholds, ledger: Ledger | None, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a `Checkpoint` holds besides model and optimiser: thresholds, what has been charged, the states of `parts`."""
    seal = ledger.seal if ledger is not None else Seal(0, "")
    return {
        "thresholds": policy.state_dict(),
        "charges": seal.charges,
        "last_charge": seal.check,
        "kept": {name: part.state_dict() for name, part in parts.items()},
    }


def put_back(
    checkpoint: Checkpoint, policy: FixedThresholds, ledger: Ledger | None, parts: Mapping[str, Any]
) -> None:
    """Write back what `resting_on` gave.

    Raises:
        UserError: the ledger has lost steps that the checkpoint stands on.
    """
    if ledger is not None:
        ledger.require(Seal(checkpoint.charges, checkpoint.last_charge))
    policy.load_state_dict(checkpoint.thresholds)
    for name, state in checkpoint.kept.items():
        if name in parts:
            parts[name].load_state_dict(state)


class _HashingWriter:
    """A file for `torch.save` that hashes what passes through."""

    def __init__(self, file: Any):
        self.file, self.hash = file, hashlib.sha256()
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            self.hash.update(data)
            return self.file.write(data)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_together(folder: Path, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """`save_checkpoint` by rank 0; of a sharded model each rank writes its own part (`torch.distributed.checkpoint`).

    All ranks call it.

    Raises:
        UserError: some rank could not write its part; the last checkpoint stays as it was.
    """
    if not any(map(is_sharded, checkpoint.model.values())):
        ranks.once(lambda: save_checkpoint(folder, checkpoint))
        return
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors, states = _tensors_of(checkpoint)
    parts = folder / f"{ranks.once(lambda: _free_name(folder, checkpoint.step))}.parts"
    ranks.once(lambda: shutil.rmtree(parts, ignore_errors=True))
    try:
        save(tensors, checkpoint_id=str(parts), process_group=ranks.control)
    except CheckpointException as error:
        # raised on all ranks alike; it is no Exception
        rank, (reason, _) = next(iter(error.failures.items()))
        if not isinstance(reason, OSError | RuntimeError):
            raise
        raise ranks.told_once(
            f"rank {rank} could not write its part of a checkpoint to {parts} ({first_line(reason)}); the checkpoint before is "
            "good. If the disk is full, free some space; run the same command again to go on"
        ) from error
    # the pointer moves once all parts are on the disk, where the next rank 0 finds them
    ranks.once(lambda: _refuse_missing(parts))
    ranks.once(lambda: flush_folder(parts))
    rest = replace(
        checkpoint, model={}, optimizer={**checkpoint.optimizer, "state": states}, parts=parts.name
    )
    ranks.once(lambda: save_checkpoint(folder, rest))


def _refuse_missing(parts: Path) -> None:
    """Raise `UserError` where a part that another rank has written cannot be seen from here."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    stored = FileSystemReader(str(parts)).read_metadata().storage_data.values()
    if unseen := sorted(
        {about.relative_path for about in stored if not (parts / about.relative_path).exists()}
    ):
        raise UserError(
            f"a checkpoint is not complete: rank 0 cannot see {unseen[0]} of another rank in {parts}; the one before is good. "
            f"All machines must see one folder under one name: choose it with {FOLDER_SETTING}"
        )


def read_together(
    folder: Path, signature: str, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Checkpoint | None:
    """`load_checkpoint`, with tensors as `model` lies, whole or sharded, whatever wrote them; nothing is written to it yet.

    All ranks call it; None where there is no checkpoint.
    """
    checkpoint: Checkpoint | None = ranks.once(lambda: load_checkpoint(folder, signature))
    if checkpoint is None:
        return None
    owners = [p for group in optimizer.param_groups for p in group["params"]]
    if checkpoint.parts:
        _read_parts(folder / checkpoint.parts, checkpoint, model_state(model), owners, ranks)
    if any(map(is_sharded, owners)):
        for number, values in checkpoint.optimizer.get("state", {}).items():
            checkpoint.optimizer["state"][number] = {
                name: like(owners[number], value) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
    return checkpoint


def _tensors_of(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """All tensors under flat names, and what else the optimiser's states hold."""
    tensors = {f"model/{name}": tensor for name, tensor in checkpoint.model.items()}
    states: dict[int, dict[str, Any]] = {}
    for number, values in checkpoint.optimizer.get("state", {}).items():
        named = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        states[number] = {name: value for name, value in values.items() if name not in named}
        tensors |= {f"optimizer/{number}/{name}": value for name, value in named.items()}
    return tensors, states


def _read_parts(
    parts: Path, checkpoint: Checkpoint, current: dict[str, Tensor], owners: list[Tensor], ranks: Ranks
) -> None:
    """Fill in the tensors of a checkpoint that was written in parts, as the present model lies."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, numbered = FileSystemReader(str(parts)), dict(enumerate(owners))
    targets: dict[str, Any] = {}
    try:
        for name, about in reader.read_metadata().state_dict_metadata.items():
            kind, _, rest = name.partition("/")
            owner: Any = current.get(rest) if kind == "model" else numbered.get(int(rest.partition("/")[0]))
            size, dtype = cast("Any", about).size, cast("Any", about).properties.dtype
            alike = owner is not None and owner.shape == size
            targets[name] = torch.empty_like(owner, dtype=dtype) if alike else torch.empty(size, dtype=dtype)
        load(targets, storage_reader=reader, process_group=ranks.control, no_dist=not ranks.several)
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise _unusable(parts.parent, f"corrupt checkpoint: cannot read {parts} ({error})") from None
    for name, tensor in targets.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            checkpoint.model[rest] = tensor
        else:
            number, _, field_name = rest.partition("/")
            checkpoint.optimizer["state"].setdefault(int(number), {})[field_name] = tensor
