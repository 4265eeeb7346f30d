"""Networks that classify images: our own small ones, timm's, and what Hugging Face's want to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from dpexp.errors import UserError, did_you_mean, first_line
from dpexp.models.cnn import Shape, build_cnn, check_settings
from dpexp.models.scattering import ScatteringClassifier
from dpexp.models.sources import Source, hub, not_found
from dpexp.models.wide_resnet import WideResNet

if TYPE_CHECKING:
    from dpexp.schemas import ModelConfig

OWN_FAMILIES = ("cnn", "wide_resnet", "scattering")
FAMILIES = (*OWN_FAMILIES, "timm", "random_timm")
"""`model.family` of the networks that are made here; Hugging Face's image classifiers belong to "hf" and "random_hf"."""
PUBLISHED = {
    "wide_resnet": (3, 32, 32),
    "cnn mnist": (1, 28, 28),
    "cnn cifar": (3, 32, 32),
    "scattering": (3, 32, 32),
}
"""Own networks -> the images that they were published for."""
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ImageInputs:
    """What a network wants to see; it has the place that a tokenizer has for text. None: as the data is.

    size: height and width; images of another size are scaled.
    channels: of the images; grey ones are repeated.
    mean, std: of every channel, pixels being in [0, 1]; public, because they come with the network.
    """

    size: int | None = None
    channels: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def sees_images(config: Any) -> bool:
    """Whether transformers has an image classifier for a config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    return config.model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES


def inputs_of_config(config: Any, source: Source | None) -> ImageInputs:
    """What a Hugging Face network wants to see: the size of its config, the normalisation of its preprocessor.

    A network without a preprocessor's file, or a random one, gets pixels in [-1, 1].
    """
    size = getattr(config, "image_size", None)
    if isinstance(size, list | tuple):
        if size[0] != size[1]:
            raise UserError(
                f"this {config.model_type} wants images of {size[1]}x{size[0]} pixels, and only squares are made"
            )
        size = size[0]
    channels = getattr(config, "num_channels", 3)
    mean, std = HALF[:channels], HALF[:channels]
    if source is not None:
        from transformers import AutoImageProcessor

        with hub():
            try:
                processor = AutoImageProcessor.from_pretrained(source.location, backend="pil")
                mean, std = tuple(processor.image_mean), tuple(processor.image_std)
            except (OSError, ValueError, AttributeError, ImportError, TypeError):
                # a folder that holds config and weights alone; the record says which constants were used
                pass
    return ImageInputs(size, channels, mean, std)


def image_inputs(model: ModelConfig) -> ImageInputs:
    """What a network of one of `FAMILIES` wants to see.

    Raises:
        UserError: timm has no such model, or is not installed.
    """
    if model.family in OWN_FAMILIES:
        return ImageInputs()
    published = _timm().get_pretrained_cfg(_timm_name(model))
    if published is None:
        return ImageInputs(channels=3, mean=HALF, std=HALF)
    channels, height, _ = published.input_size
    return ImageInputs(
        int(model.config.get("img_size", height)), channels, tuple(published.mean), tuple(published.std)
    )


def build_image_network(
    model: ModelConfig, shape: Shape | None, num_labels: int, scale: str, seed: int
) -> tuple[nn.Module, str]:
    """A network of one of `FAMILIES`, drawn from torch's global generator but for pretrained weights.

    Args:
        model: family, architecture or id, settings.
        shape: channels, height and width of what it will see; None: what it was published for.
        num_labels: classes.
        scale: at "demo" nothing is fetched.
        seed: for the description.

    Returns:
        The network in training mode, float32, and where it comes from.

    Raises:
        UserError: an unknown name or setting, weights that can't be had, dropout where there is none.
    """
    if model.family in OWN_FAMILIES:
        if model.dropout or model.attention_dropout:
            raise UserError(
                f"model.dropout: the networks of model.family={model.family} have no dropout; leave it null"
            )
        return build_own_network(model, shape, num_labels), f"random ({_described(model)}, seed {seed})"
    if model.attention_dropout is not None:
        raise UserError(
            "model.attention_dropout: give timm's own name for it, as in model.config.attn_drop_rate=0.1"
        )
    timm, name = _timm(), _timm_name(model)
    settings = {"num_classes": num_labels, "in_chans": shape[0] if shape else 3, **model.config}
    if model.dropout is not None:
        settings["drop_rate"] = model.dropout
    pretrained = model.family == "timm"
    if pretrained and scale == "demo":
        raise UserError(
            f"scale=demo needs no network, but model.id={name} would come from the hub: take model.family=random_timm, "
            "model=vit_tiny_random, or another scale"
        )
    with hub() as reason:
        try:
            network: nn.Module = _created(timm, name, pretrained, settings)
        except (TypeError, AssertionError) as error:
            raise UserError(f"model.config does not make a {name} of timm: {first_line(error)}") from error
        except Exception as error:
            # the libraries for files, formats and the hub each raise their own
            raise not_found("model.id", name, reason, error) from error
    network.train()
    if not pretrained:
        return network, f"random (timm {name}, seed {seed})"
    tag = getattr(network, "pretrained_cfg", {})
    return (
        network,
        f"timm {timm.__version__} {tag.get('architecture', name)}.{tag.get('tag', '')}, head drawn with seed {seed}",
    )


def _created(timm: Any, name: str, pretrained: bool, settings: dict[str, Any]) -> Any:
    """timm's network. A size of images is only what `image_inputs` has them scaled to, where a network takes every size."""
    try:
        return timm.create_model(name, pretrained=pretrained, **settings)
    except TypeError as error:
        if "'img_size'" not in str(error) or "img_size" not in settings:
            raise
        rest = {key: value for key, value in settings.items() if key != "img_size"}
        return timm.create_model(name, pretrained=pretrained, **rest)


def build_own_network(model: ModelConfig, shape: Shape | None, num_labels: int) -> nn.Module:
    """A network of `OWN_FAMILIES`; `shape` None: for the images that it was published for.

    Raises:
        UserError: an unknown architecture or setting, or images that are too small.
    """
    config = dict(model.config)
    if model.family == "wide_resnet":
        settings = check_settings(WideResNet, config, "a wide ResNet")
        return WideResNet(shape or PUBLISHED["wide_resnet"], num_labels, **settings)
    if model.family == "scattering":
        settings = check_settings(ScatteringClassifier, config, "the network on scattering coefficients")
        return ScatteringClassifier(shape or PUBLISHED["scattering"], num_labels, **settings)
    native = PUBLISHED.get(f"cnn {model.architecture}", (3, 32, 32))
    return build_cnn(model.architecture, shape or native, num_labels, config)


def _described(model: ModelConfig) -> str:
    if model.family == "cnn":
        return f"cnn {model.architecture}"
    if model.family == "scattering":
        return f"scattering coefficients, then {model.config.get('widths') or 'a linear layer'}"
    return f"wide ResNet {model.config.get('depth', 16)}-{model.config.get('widening', 4)}"


def _timm() -> Any:
    try:
        import timm
    except ImportError:
        raise UserError("this model is built by timm, which is not installed: pip install timm") from None
    return timm


def _timm_name(model: ModelConfig) -> str:
    """The id, if timm has it (with or without the tag of its weights)."""
    timm, name = _timm(), (model.id or "").removeprefix("timm/")
    known = timm.list_models()
    if name.partition(".")[0] not in known:
        raise UserError(f"model.id={model.id}: timm has no such model{did_you_mean(name, known)}")
    return name
