"""Which run a folder belongs to: its settings, data and model, with which a later session is compared."""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from dpexp import native, provenance
from dpexp.clipping.independence.comparison import held_in
from dpexp.clipping.sharding import is_shard
from dpexp.durable import read_json, write_json
from dpexp.errors import UserError
from dpexp.parallel import Ranks
from dpexp.privacy.fingerprint import checksum
from dpexp.privacy.keys import LEDGER
from dpexp.training import generators

if TYPE_CHECKING:
    from dpexp.privacy.plan import Plan
    from dpexp.schemas import ClipConfig

RUN = "run.json"
# examples that processes compare
LOOKED_AT = 8
# settings that are kept as hashes under the run's key: another key makes others of both
_KEYED = {"data", "frozen weights"}


def refuse_other_ledgers(folder: Path) -> None:
    """Raise `UserError` where a folder has the ledger of a run that `recognise` knows nothing of."""
    if (folder / LEDGER).exists() and not (folder / RUN).exists():
        raise UserError(f"{folder} holds the ledger of another run: take an empty folder for this one")


def recognise(folder: Path, settings: Mapping[str, Any]) -> str:
    """Write the settings of a run to its folder, or compare them with those that it was begun with.

    Returns:
        Their hash, 16 hexadecimal digits.

    Raises:
        UserError: they differ; the first of the settings that does is named.
    """
    path = folder / RUN
    present = json.loads(json.dumps(settings, default=str))
    if not path.exists():
        write_json(path, present)
    elif not (before := read_json(path)):
        raise UserError(f"{path} is damaged: restore it, or begin a new run in another folder")
    elif odd := [name for name in present | before if present.get(name) != before.get(name)]:
        name = odd[0]
        if name in _KEYED and _KEYED.issubset(odd):
            what = "noise_seed is not what it was, or secret.key is another (or both the data and the frozen weights differ)"
        elif name in {*_KEYED, "trained parameters"}:
            what = f"the {name} differ"
        elif "unit" in odd:
            what = "one of the two protects users, and the other examples"
        elif name == "sample_rate":
            # of as many examples: a person gives the batch
            was, now = (f"{run['sample_rate'] * run['num_examples']:g}" for run in (before, present))
            what = f"batch_size was {was} there and is {now} here"
        else:
            what = f"{name} was {before.get(name)} there and is {present.get(name)} here"
        raise UserError(
            f"{folder} holds a run with other settings: {what}. One folder is one run, whose "
            "noise may be used for nothing else: take another folder (of dpexp train: another seed; of the Trainer: another "
            "output_dir), or go back to what it was"
        )
    return hashlib.sha256(json.dumps(present, sort_keys=True).encode()).hexdigest()[:16]


def refuse_other_data(
    folder: Path, key: bytes, hashes: Mapping[str, str], weights: str | None, *, places: bool = False
) -> None:
    """Let a run go on from its checkpoint on the data that it has learnt from, and on no other: a record names one data set.

    A run without a checkpoint begins on what is there now. What it has charged before still bounds what one example has given,
    but not what one user has: who is two users of then would pay twice, and the ledger cannot say so. Nor where what an example
    pays goes by its place: who has moved to a place of a smaller budget has been charged for the larger, and who has moved to
    another part of the data (`dpexp.privacy.sampling.CyclicSampler`) is drawn again before its b steps are over.

    Args:
        folder: of the run.
        key: of the run.
        hashes: of the data, see `dpexp.tasks.base.DataInfo`.
        weights: SHA-256 of the pretrained ones, where it is known.
        places: whether what an example pays goes by its place.

    Raises:
        UserError: the training rows, their users or the pretrained weights are not those of the checkpoint, or of the charges.
    """
    charged = (folder / LEDGER).exists() and (folder / LEDGER).stat().st_size > 0
    apart = places or "users" in hashes
    if not ((folder / "checkpoint" / "latest.json").exists() or (charged and apart)):
        (folder / RUN).unlink(missing_ok=True)
    private = json.dumps([hashes.get(name) for name in ("train", "users")])
    data = hmac.digest(key, private.encode(), "sha256").hex()
    recognise(folder, {"data": data, "pretrained weights": weights})


def settings_of(
    plan: "Plan",
    clip: "ClipConfig",
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: str,
    key: bytes,
) -> dict[str, Any]:
    """List what must be the same in every session of a run.

    Args:
        plan: how many steps, with which noise.
        clip: groups, rule and thresholds.
        model: with the parameters that train, and frozen ones.
        optimizer: of which the type counts; its step size may be changed.
        data: of `data_identity`.
        key: of the run. Data and frozen weights are hashed with it: plain hashes would let who has the folder, and not the
            key, test guesses at the data.
    """
    trained, frozen = model_identity(model)
    return {
        # what was asked for first: a mismatch is named by the first that differs
        "target_epsilon": plan.target_epsilon,
        **plan.to_dict(),
        **{name: value for name, value in vars(clip).items() if name != "name"},
        "optimizer": type(optimizer).__name__,
        "trained parameters": trained,
        "data": hmac.digest(key, data.encode(), "sha256").hex(),
        "frozen weights": hmac.digest(key, frozen, "sha256").hex(),
    }


def facts_of(device: torch.device, **of_the_run: Any) -> dict[str, Any]:
    """List what makes two computations of a step equal, besides its number and its noise.

    Libraries, and files that a configuration names, are among it although the checksum of the sums is a part of the fingerprint
    too: code that does something else with some examples alone would have those steps charged again that have drawn one of them,
    and the ledger would tell which. The code of a person's own loop is missing: whoever mends what a run has stopped at would pay
    for its last steps again.
    """
    return {
        **of_the_run,
        "libraries": _libraries(),
        "device": provenance.device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        # draws the sample
        "numpy": np.__version__,
        "kernels": native.backend(),
    }


@cache
def _libraries() -> dict[str, str]:
    """Once: a loop may ask for the facts in every step."""
    return provenance.versions()


def data_identity(dataset: Any, name: str | None = None) -> str:
    """Tell a data set from others: by the SHA-256 of its content, or by the name that its owner declares.

    The content is hashed where that is cheap and tells the same every time: a `TensorDataset`, a tensor, an array, a list of
    plain values and tensors, a `datasets.Dataset`, or a `Subset` of these. Any other data set may read files or draw random
    numbers for every example; its owner says what it is.

    Args:
        dataset: has a length, and examples at 0 … length - 1.
        name: name and version, of data that cannot be hashed or whose owner knows better.

    Returns:
        Private, like anything unnoised about the data: who knows all rows but one tests guesses at that one with it.

    Raises:
        UserError: no name is given, and the data cannot be hashed.
    """
    if name is not None:
        if not isinstance(name, str) or not name.strip():
            raise UserError(
                f"data_name={name!r} tells no data set from another one: give a name and a version, as text"
            )
        return f"{len(dataset)} examples, declared as {name}"
    digest = hashlib.sha256()
    try:
        _add_data(digest, dataset)
    except _Unknown as unknown:
        raise UserError(
            f"the data set ({type(dataset).__name__}, with {unknown}) cannot be hashed, so a resumed run could not tell it from "
            'another one: give it a name with data_name="name and version"'
        ) from None
    return digest.hexdigest()


def check_examples(ranks: Ranks, dataset: Any, key: bytes) -> None:
    """Raise `UserError` where ranks hold other examples, or each has shuffled them for itself: one example would be drawn twice.

    A few are compared, by a hash under the run's key; not those that are others whenever they are asked for, or cannot be hashed.
    """
    if ranks.several:
        ranks.agree("the data (some examples, by their places)", _a_few_of(dataset, key))


def check_optimizers(ranks: Ranks, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise `UserError` where ranks would move by one sum in several ways: other groups, or a state that not all have loaded."""
    if not ranks.several:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    states = {
        str(names.get(id(p))): {what: value for what, value in state.items() if isinstance(value, Tensor)}
        for p, state in optimizer.state.items()
    }
    known = sorted((name, what) for name, state in states.items() for what in state)
    ranks.agree("the optimizer", {"groups": str(groups), "state": str(known)})
    ranks.agree("the optimizer's state", checksum_of_any(states[name][what] for name, what in known).hex())


def _a_few_of(dataset: Any, key: bytes) -> str:
    last = len(dataset) - 1
    places = sorted({i * last // (LOOKED_AT - 1) for i in range(LOOKED_AT)})

    def told() -> str:
        digest = hmac.new(key, digestmod="sha256")
        with generators.kept():
            generators.seed_public(0)
            _add(digest, [dataset[place] for place in places])
        return digest.hexdigest()

    try:
        once, again = told(), told()
    except Exception:
        # what is wrong with them shows where they are trained on
        return ""
    return once if once == again else ""


def model_identity(model: nn.Module) -> tuple[dict[str, str], bytes]:
    """Name, shape and dtype of what trains, and a checksum of what is frozen (with all buffers left out)."""
    trained = {name: f"{list(p.shape)} {p.dtype}" for name, p in model.named_parameters() if p.requires_grad}
    return trained, checksum_of_any(p for p in model.parameters() if not p.requires_grad)


def checksum_of_any(tensors: Iterable[Tensor]) -> bytes:
    """As `checksum`, also of tensors that are no block of numbers (sparse, quantised): of what holds them."""
    return checksum(
        part for tensor in tensors for part in ([tensor] if is_shard(tensor) else held_in(tensor))
    )


class _Unknown(Exception):
    """A value whose content cannot be told."""


def _add_data(digest: Any, dataset: Any) -> None:
    if isinstance(dataset, TensorDataset):
        _add(digest, dataset.tensors)
    elif isinstance(dataset, Subset):
        _add_data(digest, dataset.dataset)
        _add(digest, [int(i) for i in dataset.indices])
    elif isinstance(dataset, list | tuple | Tensor) or hasattr(dataset, "__array_interface__"):
        _add(digest, dataset)
    elif hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):
        for rows in dataset.with_format("arrow").iter(batch_size=1000):
            for name in rows.column_names:
                _add(digest, [name, rows.column(name).to_pylist()])
    else:
        raise _Unknown("examples that are made when they are asked for")


def _add(digest: Any, value: Any) -> None:
    """Values with the same content give the same bytes, and others give others."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        digest.update(f"{type(value).__name__} {value!r}\0".encode())
    elif isinstance(value, Tensor) and value.layout == torch.strided:
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"tensor {value.dtype} {list(value.shape)}\0".encode())
        digest.update(flat.view(torch.uint8).numpy())
    elif hasattr(value, "__array_interface__") and value.dtype.kind in "biufSU":
        digest.update(f"array {value.dtype} {list(value.shape)}\0".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\0".encode())
        for name, item in value.items():
            _add(digest, name)
            _add(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}\0".encode())
        for item in value:
            _add(digest, item)
    elif hasattr(value, "isoformat"):
        digest.update(f"time {value.isoformat()}\0".encode())
    else:
        raise _Unknown(f"values of the type {type(value).__name__}")
