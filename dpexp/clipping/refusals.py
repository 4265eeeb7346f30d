"""Modules that cannot be part of a clipped model, frozen or not, and the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpexp.clipping.sharding import is_shard
from dpexp.errors import UserError

STRIDED = (
    "a nested tensor of the strided layout, which enters the model or meets a parameter of it, has no shape by which rows could "
    "be told apart: make it with torch.nested.nested_tensor(rows, layout=torch.jagged), which is clipped exactly, or pad the "
    "rows and mask them"
)
COMPLEX = (
    "only real floating-point parameters can be clipped: hold complex numbers as real ones. Without a change of the layer, "
    "torch.nn.utils.parametrize.register_parametrization(layer, name, Parts()) does it before the clipper is made, where Parts "
    "is an nn.Module with forward(self, real, imag), which returns torch.complex(real, imag), and right_inverse(self, w), which "
    "returns w.real.clone(), w.imag.clone()"
)
BATCH_NORM = (
    "replace it by nn.GroupNorm(groups, channels); to keep the statistics of a public model as constants, call "
    ".eval() on it, behind each model.train() too, and set its track_running_stats=False"
)


def _batch_norm(module: Any) -> str | None:
    if module.training or module.running_mean is None:
        why = (
            "it normalises by statistics of the whole batch, so one example's gradient depends on the others"
        )
    elif module.track_running_stats:
        why = "in training mode it tracks statistics of the private data, which leave the model without noise"
    else:
        return None
    return f"{why}: {BATCH_NORM}"


def _instance_norm(module: Any) -> str | None:
    if module.track_running_stats or module.running_mean is not None:
        return (
            "its running statistics are averages over the examples of a batch and leave the model without noise: "
            "set track_running_stats=False"
        )
    return None


def _embedding(module: Any) -> str | None:
    if module.scale_grad_by_freq:
        return (
            "scale_grad_by_freq divides by how often an index occurs in the whole batch, so one example's "
            "gradient depends on the others: set it to False"
        )
    if module.max_norm is not None:
        return (
            "max_norm rewrites the rows that a batch looks up, which releases without noise which rows these "
            "were: set it to None"
        )
    if module.sparse:
        return (
            "sparse=True gives sparse gradients, but noise makes every row's gradient dense: set it to False"
        )
    return None


def refuse_lookup(func: Any, args: tuple, kwargs: dict) -> None:
    """Refuse a table that is looked up by a function with the options that `nn.Embedding` is refused for.

    Raises:
        UserError: names the table as far as it is known.
    """
    if func not in (F.embedding, F.embedding_bag):
        return
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    if (reason := _embedding(SimpleNamespace(**given.arguments))) is not None:
        table = given.arguments["weight"]
        name = getattr(table, "key", None) or f"a table {list(table.shape)}"
        raise UserError(f"{name} (F.{func.__name__}): {reason}")


def refuse_hooks(params: Mapping[str, nn.Parameter]) -> None:
    """Refuse hooks on the gradients of parameters: no gradient of a single example would pass through them.

    Raises:
        UserError: names the parameter.
    """
    for name, param in params.items():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise UserError(
                f"{name} has a hook on its gradient (register_hook, register_post_accumulate_grad_hook), which would never be "
                "called: gradients are found by example, and clipped. Remove it (handle.remove()). A part of a parameter that is "
                "to stay as it is belongs into a frozen tensor: torch.where(mask, self.frozen, self.trained) in the forward"
            )


def refuse_devices(params: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters on several devices: the norm of an example's gradient is a sum over all of them, formed in one place.

    Raises:
        UserError: names two of them.
    """
    found: dict[torch.device, str] = {}
    for name, param in params.items():
        found.setdefault(param.device, name)
    if len(found) > 1:
        (here, first), (there, other) = list(found.items())[:2]
        raise UserError(
            f"{first} lies on {here} and {other} on {there}, and norms are formed on one device: move the model to one "
            "(model.to(device); load it without device_map), shard it over processes (fully_shard, runtime=fsdp), or train it in "
            "stages (runtime=pipeline)"
        )


REFUSALS: dict[type[nn.Module], Callable[[Any], str | None]] = {
    _InstanceNorm: _instance_norm,
    _BatchNorm: _batch_norm,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding,
}


def _of_peft(module: nn.Module) -> str | None:
    """Of the layer of PEFT's whose forward makes a new `torch.nn.Parameter` of its adapter; PEFT need not be installed."""
    kind = type(module)
    if kind.__name__ != "MultiheadAttention" or not kind.__module__.startswith("peft."):
        return None
    if not any(p.requires_grad for p in module.parameters()):
        return None
    return (
        "LoRA of nn.MultiheadAttention merges its weights into new parameters within every forward, where no gradient of an "
        "example can be followed: leave this layer out of target_modules, or write the attention with nn.Linear for query, key, "
        "value and output, and adapt these"
    )


def _of_bitsandbytes(module: nn.Module) -> str | None:
    """Of eight bits with a threshold (LLM.int8()); bitsandbytes need not be installed."""
    kind = type(module)
    if kind.__name__ != "Linear8bitLt" or not kind.__module__.startswith("bitsandbytes."):
        return None
    if not getattr(getattr(module, "state", None), "threshold", 0.0):
        return None
    return (
        "a GPU multiplies whole columns of the batch in 16 bits as soon as one number of a column passes the threshold, so what "
        "an example gets depends on the others: load the model with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
    )


def refusal(module: nn.Module) -> str | None:
    """Say why a module cannot be part of a clipped model, and the way out; None where nothing speaks against it.

    Subclasses answer for their base, whatever they override: a batch norm with another forward still is one.
    """
    for cls, reason in REFUSALS.items():
        if isinstance(module, cls):
            return reason(module)
    return _of_peft(module) or _of_bitsandbytes(module)


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model with parameters that get their shapes from a first batch.

    Raises:
        UserError: names the first of them.
    """
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise UserError(
                f"{name} has no shape yet (a lazy module): run the model once, on an example of your own making, before the "
                "clipper or the PrivacyEngine is made"
            )


def refuse_couplings(model: nn.Module) -> None:
    """Refuse a model with modules that mix examples or cannot be clipped, whether they train or not.

    Raises:
        UserError: names the module or the parameter.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("a TorchScript model cannot be clipped: attach to the original nn.Module")
    for name, module in model.named_modules():
        reason = refusal(module)
        if reason:
            raise UserError(f"{name or '(root)'} ({type(module).__name__}): {reason}")
    refuse_lazy(model)
    for name, param in model.named_parameters():
        if param.requires_grad and not param.is_floating_point():
            raise UserError(f"{name} has dtype {param.dtype}; {COMPLEX}")
        kind = type(param.data)
        # shards are another matter, see `sharding`
        own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not is_shard(param)
        if param.requires_grad and own:
            raise UserError(
                f"{name} is a {kind.__name__}, which stands for other tensors (quantised, packed), and no per-example gradient "
                "of one can be summed: train plain parameters beside it (LoRA), or load the model unquantised"
            )
