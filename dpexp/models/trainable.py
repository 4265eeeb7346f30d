"""Which parameters train: derived from the structure of the network, not from lists of names.

* *head*: everything outside the pretrained base model, and the base model's pooler, which feeds nothing but the head
  (RoBERTa's own classification head contains the same dense layer).
* *attention*: the outermost modules whose class is an attention (`BertAttention`, `RobertaAttention`,
  `DistilBertSelfAttention`, `GPT2Attention`, ...) with everything that these own; in BERT and RoBERTa this includes the
  output projection and its LayerNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from dpexp.errors import UserError

CHOICES = ("all", "attention+head", "bias", "head")


def set_trainable(model: nn.Module, choice: str) -> list[str]:
    """Set `requires_grad` of every parameter.

    Args:
        model: a Hugging Face model with a head on a base model.
        choice: "all"; "attention+head" (He et al. 2022, App. A.2); "bias" (BiTFiT: all biases and the head);
            "head".

    Returns:
        The names of the parameters that train, in the order of `named_parameters()`.

    Raises:
        UserError: an unknown choice, or one that selects nothing in this network.
    """
    names = [name for name, _ in model.named_parameters()]
    if choice == "all":
        selected = names
    elif choice == "head":
        selected = head_parameters(model)
    elif choice == "attention+head":
        selected = _with_head(
            model, choice, lambda name: any(_inside(name, owner) for owner in attention_modules(model))
        )
    elif choice == "bias":
        selected = _with_head(model, choice, lambda name: name.rsplit(".", 1)[-1].endswith("bias"))
    else:
        raise UserError(f"model.trainable={choice} is unknown: choose one of {', '.join(CHOICES)}")
    wanted = set(selected)
    if not wanted:
        raise UserError(
            f"model.trainable={choice}: nothing would train in {type(model).__name__}{_example(names)}"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    return [name for name in names if name in wanted]


def head_parameters(model: nn.Module) -> list[str]:
    """The parameters of the head (see above); none where the model has no base model to tell them from."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not hasattr(model, prefix):
        return []
    pooler = f"{prefix}.pooler"
    return [
        name for name, _ in model.named_parameters() if not _inside(name, prefix) or _inside(name, pooler)
    ]


def head_modules(model: nn.Module) -> list[str]:
    """The outermost modules that own the head's parameters."""
    depth = {True: 2, False: 1}  # the pooler is a child of the base model, the rest are children of the model
    prefix = getattr(model, "base_model_prefix", "")
    owners = [".".join(name.split(".")[: depth[_inside(name, prefix)]]) for name in head_parameters(model)]
    return list(dict.fromkeys(owners))


def attention_modules(model: nn.Module) -> list[str]:
    """The outermost attention modules, by name."""
    found: list[str] = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Attention") and not any(_inside(name, owner) for owner in found):
            found.append(name)
    return found


def projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers with a two-dimensional weight inside the attention modules: name of the module, module."""
    owners = attention_modules(model)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if (
            isinstance(weight, nn.Parameter)
            and weight.ndim == 2
            and any(_inside(name, owner) for owner in owners)
        ):
            yield name, module


def _with_head(model: nn.Module, choice: str, select: Callable[[str], bool]) -> list[str]:
    head = set(head_parameters(model))
    names = [name for name, _ in model.named_parameters()]
    body = {name for name in names if name not in head and select(name)}
    if not body or not head:
        lacks = (
            f"no {choice.split('+')[0]} parameters below the head"
            if head
            else "no head apart from a base model"
        )
        raise UserError(
            f"model.trainable={choice}: {type(model).__name__} has {lacks}{_example(names)}; take "
            "model.trainable=all"
        )
    return [name for name in names if name in head or name in body]


def _inside(name: str, owner: str) -> bool:
    return name == owner or name.startswith(owner + ".")


def _example(names: list[str]) -> str:
    return f" (its parameters: {', '.join(names[:2])}, ..., {names[-1]})" if len(names) > 2 else ""
