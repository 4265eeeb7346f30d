"""A network of a person's own: what ``model.factory=package.module:function`` names."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from dpexp.errors import UserError
from dpexp.importing import imported
from dpexp.models.trainable import train_mode

if TYPE_CHECKING:
    from dpexp.schemas import ModelConfig


def custom_network(
    model: ModelConfig, *, head: str, num_labels: int, image_shape: Any, tokenizer: Any
) -> nn.Module:
    """The network that `model.factory` makes.

    The function is called with `model.config` as keywords, and with those of these that it names: ``head`` (see
    `dpexp.tasks.Task.head`), ``num_labels``, ``image_shape`` (channels, height, width; None for text), ``tokenizer``.
    Torch's global generator is seeded with the public seed. The network is called with what the task's `collate` makes
    (``model(pixel_values)`` for images) and returns logits, or an object with ``logits``.

    Raises:
        UserError: no such function, it does not take the configured keywords, or makes something else than a module, or one
            whose parameters have no shapes yet.
    """
    function = imported("model.factory", model.factory)
    offered = {"head": head, "num_labels": num_labels, "image_shape": image_shape, "tokenizer": tokenizer}
    try:
        signature = inspect.signature(function)
        arguments = {
            name: value for name, value in offered.items() if name in signature.parameters
        } | model.config
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"model.factory={model.factory}: {error}; it is called with model.config and with those of {', '.join(offered)} that "
            "it names"
        ) from error
    network = function(**arguments)
    if not isinstance(network, nn.Module):
        raise UserError(
            f"model.factory={model.factory} made a {type(network).__name__}, and a torch.nn.Module is wanted"
        )
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UserError(
                f"model.factory={model.factory}: {name} has no shape yet (a lazy module): give its layer the size, or call the "
                "network once in your function, on an example of your own making"
            )
    return train_mode(network.float())
