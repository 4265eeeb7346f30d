"""Which parameters train: derived from the structure of the network, not from lists of names.

* *head*: everything outside the pretrained base model, and the base model's pooler, which feeds nothing but the head
  (RoBERTa's own classification head contains the same dense layer). What is tied to the embedding belongs to the base
  model. In timm's models, what `get_classifier()` returns.
* *attention*: the outermost modules whose class is an attention (`BertAttention`, `RobertaAttention`,
  `DistilBertSelfAttention`, `GPT2Attention`, ...) with everything that these own; in BERT and RoBERTa this includes the
  output projection and its LayerNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from torch import nn

from dpexp.errors import UserError
from dpexp.models.structure import blocks

CHOICES = ("all", "attention+head", "bias", "head")


def set_trainable(model: nn.Module, choice: str, setting: str = "model.trainable") -> list[str]:
    """Set `requires_grad` of every parameter.

    Args:
        model: a Hugging Face model with a head on a base model.
        choice: "all"; "attention+head" (He et al. 2022, App. A.2); "bias" (BiTFiT: all biases and the head);
            "head".
        setting: who asks, for errors.

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
            model,
            choice,
            setting,
            lambda name: any(_inside(name, owner) for owner in attention_modules(model)),
        )
    elif choice == "bias":
        selected = _with_head(model, choice, setting, lambda name: name.rsplit(".", 1)[-1].endswith("bias"))
    else:
        raise UserError(f"model.trainable={choice} is unknown: choose one of {', '.join(CHOICES)}")
    if not selected:
        why = (
            ": its output layer is tied to the embedding" if choice == "head" and has_tied_head(model) else ""
        )
        raise UserError(
            f"{_said(setting, choice)}: nothing would train in {type(model).__name__}{why}{_example(names)}"
        )
    return train_only(model, selected)


def set_top_blocks(model: nn.Module, count: int) -> list[str]:
    """Train the last `count` of the repeated blocks and what comes after them (Li et al. 2022, section 5.2, "top2").

    What comes after: the final norm, a pooler, the head; not a head that is tied to the embedding, which lies below.

    Returns:
        As `set_trainable`.

    Raises:
        UserError: a count below one, or above the number of blocks; no blocks to be found.
    """
    stack = list(blocks(model))
    if not 1 <= count <= len(stack):
        raise UserError(
            f"peft.blocks={count}: {type(model).__name__} has {len(stack)} blocks; give a number from 1 to {len(stack)}"
        )
    names = [name for name, _ in model.named_parameters()]
    last = max(i for i, name in enumerate(names) if any(_inside(name, block) for block in stack))
    top = {name for name in names if any(_inside(name, block) for block in stack[-count:])}
    return train_only(model, {*top, *names[last + 1 :], *head_parameters(model)})


def train_only(model: nn.Module, selected: Collection[str]) -> list[str]:
    """Freeze every other parameter; returns the selected names in the order of `named_parameters()`."""
    wanted = set(selected)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    return [name for name, _ in model.named_parameters() if name in wanted]


def trainable_names(model: nn.Module) -> list[str]:
    """The names of the parameters that train, in the order of `named_parameters()`."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def train_mode(model: nn.Module) -> nn.Module:
    """Set a model to training, but for frozen parts that are in evaluation mode: batch norm with constant statistics, say."""
    kept = [
        module
        for module in model.modules()
        if not module.training
        and (own := list(module.parameters()))
        and not any(p.requires_grad for p in own)
    ]
    model.train()
    for module in kept:
        module.eval()
    return model


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode comes back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def has_tied_head(model: nn.Module) -> bool:
    """Whether the output layer of a language model is its embedding."""
    tables = [getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output")]
    if not all(callable(get) for get in tables):
        return False
    weights = [getattr(get(), "weight", None) for get in tables if get is not None]
    return weights[0] is not None and weights[0] is weights[1]


def head_parameters(model: nn.Module) -> list[str]:
    """The parameters of the head (see above); none where the model has no base model to tell them from."""
    if callable(classifier := getattr(model, "get_classifier", None)):
        mine = {id(parameter) for parameter in classifier().parameters()}
        return [name for name, parameter in model.named_parameters() if id(parameter) in mine]
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not hasattr(model, prefix):
        return []
    pooler = f"{prefix}.pooler"
    return [
        name for name, _ in model.named_parameters() if not _inside(name, prefix) or _inside(name, pooler)
    ]


def head_modules(model: nn.Module) -> list[str]:
    """The outermost modules that own parameters of the head and nothing else, by name.

    The decoder of a language model that is tied to the embedding is none of them, nor is what contains it.
    """
    names = set(head_parameters(model))
    mine = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    found: list[str] = []
    for name, module in model.named_modules():
        owned = {id(parameter) for parameter in module.parameters()}
        if owned and owned <= mine and not any(_inside(name, owner) for owner in found):
            found.append(name)
    return found


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


def _with_head(model: nn.Module, choice: str, setting: str, select: Callable[[str], bool]) -> list[str]:
    head = set(head_parameters(model))
    names = [name for name, _ in model.named_parameters()]
    body = {name for name in names if name not in head and select(name)}
    if not body or not (head or has_tied_head(model)):
        lacks = (
            f"no {choice.split('+')[0]} parameters below the head"
            if head or has_tied_head(model)
            else "no head apart from a base model"
        )
        raise UserError(
            f"{_said(setting, choice)}: {type(model).__name__} has {lacks}{_example(names)}; take "
            + ("model.trainable=all" if setting == "model.trainable" else "another peft")
        )
    return [name for name in names if name in head or name in body]


def _said(setting: str, choice: str) -> str:
    return f"{setting}={choice}" if setting == "model.trainable" else setting


def _inside(name: str, owner: str) -> bool:
    return name == owner or name.startswith(owner + ".")


def _example(names: list[str]) -> str:
    return f" (its parameters: {', '.join(names[:2])}, ..., {names[-1]})" if len(names) > 2 else ""
