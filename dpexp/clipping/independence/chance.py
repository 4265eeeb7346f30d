"""A forward without chance: random operations give constants that do not depend on the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

UNTAGGED = {"random", "binomial", "sample_dirichlet"}
INDEXING = {"embedding", "index", "index_select", "gather"}


class WithoutChance(TorchDispatchMode):
    """While active, random operations give constants, whatever the batch; permutations are turned round.

    Indices out of range raise on GPUs as on CPUs, where they would end the process's use of the GPU.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.strip("_")
        if torch.Tag.nondeterministic_seeded in func.tags or name in UNTAGGED:
            known = func._schema.arguments
            # what equals its default is left out of args
            given = {a.name: a.default_value for a in known if a.has_default_value()}
            given |= dict(zip([a.name for a in known], args, strict=False)) | kwargs
            return _constant(func, name, given)
        if name in INDEXING and args and isinstance(args[0], Tensor) and args[0].is_cuda:
            _check_indices(name, args)
        return func(*args, **kwargs)


def _constant(func: Any, name: str, given: dict[str, Any]) -> Any:
    """A random operation's result without chance."""
    x: Any = given.get("self", given.get("input"))
    if name in ("native_dropout", "fused_dropout"):
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    for key in ("dropout_p", "dropout"):
        if isinstance(given.get(key), float):
            return func(**(given | {key: 0.0}))
    if name in ("dropout", "alpha_dropout"):
        return x
    if name.startswith("rrelu"):
        return func(**(given | {"training": False}))
    if name == "multinomial":
        return x.topk(given["num_samples"], dim=-1).indices
    value: Any = None
    low: Any = given.get("from", given.get("low")) or 0
    high: Any = given.get("to", given.get("high"))
    if name == "bernoulli":
        # without p: the probabilities are in x
        p = given.get("p", x)
        value = p >= 0.5 if isinstance(p, Tensor) else float(p > 0)
    elif name.startswith(("randint", "random")):
        value = 0 if high is None else (low + high) // 2
    elif name.startswith("rand") and name != "randperm":
        value = 0.5
    elif name == "uniform":
        value = (given["from"] + given["to"]) / 2
    elif name.startswith("normal"):
        value = given["mean"] + 0.5 * given["std"]
    elif name == "binomial":
        value = given["count"] * given["prob"]
    elif name in ("exponential", "geometric", "cauchy", "log_normal"):
        value = 1
    elif name in ("poisson", "standard_gamma", "sample_dirichlet"):
        value = x
    result = func(**given)
    if name == "randperm":
        return result.copy_(torch.arange(len(result) - 1, -1, -1, device=result.device))
    if isinstance(value, Tensor):
        return result.copy_(value)
    return result if value is None else result.fill_(value)


def _check_indices(name: str, args: tuple) -> None:
    table, indices = args[0], args[2] if name in ("index_select", "gather") else args[1]
    along = args[1] if name in ("index_select", "gather") else 0
    for dim, index in enumerate(indices if isinstance(indices, list | tuple) else [indices]):
        if not isinstance(index, Tensor) or index.dtype in (torch.bool, torch.uint8) or not index.numel():
            continue
        size = table.shape[dim if name == "index" else along] if table.dim() else 1
        if int(index.max()) >= size or int(index.min()) < -size:
            raise IndexError(f"{name}: an index is out of range for {size} rows")
