"""Networks by name without their weights, and what their layers look like on an input of a given size.

Everything is built on torch's meta device: shapes are computed and nothing else, so the largest network takes seconds and
no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpexp.errors import UserError, either, first_line
from dpexp.models.custom import custom_network
from dpexp.models.images import OWN_FAMILIES, build_own_network, sees_images
from dpexp.models.images import PUBLISHED as PUBLISHED_FOR
from dpexp.models.networks import load_config
from dpexp.models.sources import Source, locate
from dpexp.models.tokenizer import DEMO_VOCABULARIES, demo_tokenizer, fit_together
from dpexp.schemas import ModelConfig

# Sizes as published with the weights; what is not named is transformers' default, which is the smallest published size.
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "distilgpt2": ("gpt2", {"n_layer": 6}),
    "roberta-base": ("roberta", _ROBERTA),
    "roberta-large": ("roberta", _ROBERTA | _LARGE),
    "distilroberta-base": ("roberta", _ROBERTA | {"num_hidden_layers": 6}),
    "bert-base": ("bert", {}),
    "bert-large": ("bert", _LARGE),
    "distilbert-base": ("distilbert", {}),
    "minilm": ("bert", _MINI),
}
# The paper's short names for what timm names in full.
TIMM_SHORT = {
    "vit_base": "vit_base_patch16_224",
    "vit_large": "vit_large_patch16_224",
    "beit_base": "beit_base_patch16_224",
    "beit_large": "beit_large_patch16_224",
}
DEFAULT_TOKENS = {"gpt2": 100}  # section 2.3: E2E has about 100 tokens, GLUE is run with 256
OTHER_TOKENS = 256


@dataclass
class Network:
    """A network on the meta device and an input for it of one example.

    Attributes:
        source: what was built, for the reader.
        size: "image" or "tokens", and how large.
        notes: what was changed to make the input fit.
    """

    model: nn.Module
    inputs: dict[str, Any]
    source: str
    size: dict[str, int]
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """One forward pass. Gradients stay enabled: without them torch takes fused paths that hide layers.

        Raises:
            UserError: the network does not take this input, or asks for values where there are only shapes.
        """
        images = self.inputs.get("images")
        with torch.device("meta"), quiet(), torch.enable_grad():
            try:
                self.model(**self.inputs) if images is None else self.model(images)
            except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
                size = ", ".join(f"{key}={value}" for key, value in self.size.items())
                raise UserError(f"{self.source} does not run with {size}: {first_line(error)}") from error


def build(
    name: str, model: ModelConfig | None = None, *, image: int | None = None, tokens: int | None = None
) -> Network:
    """The network of that name, in evaluation mode.

    Args:
        name: one of `PUBLISHED` (``_`` for ``-`` and a hub's owner in front will do), any name of timm, a folder with a
            ``config.json``, or ``OWNER/NAME`` on the hub. Only shown where the model's settings say what to build.
        model: its family, architecture and config (arguments of the constructor, for timm), its factory, and, of networks with
            an architecture, the tokenizer of embedded words that they are fitted to; other settings are not read.
        image: height and width; None: what the network was published for.
        tokens: None: 100 for GPT-2, 256 otherwise (section 2.3).

    Raises:
        UserError: no such name, or an input that does not fit it.
    """
    for key, value in (("image", image), ("tokens", tokens)):
        if value is not None and value < 1:
            raise UserError(f"{key}={value} must be 1 or larger")
    model = model or ModelConfig()
    config = model.config
    if model.family in OWN_FAMILIES:
        return _own(name, model, image, tokens)
    if model.family == "custom":
        return _custom(model, image, tokens)
    if model.family in ("mpnet", "smollm2"):
        with quiet():
            found = load_config(model, locate(model))
        return _from_config(_with_head(found), name, image, tokens)
    if model.architecture is not None:
        found = _random_config(model.architecture, config)
        if model.tokenizer in DEMO_VOCABULARIES:
            fit_together(demo_tokenizer(model.tokenizer), found, resize="vocab_size" not in config)
        return _from_config(found, name, image, tokens)
    if Path(name).expanduser().is_dir() or name.startswith((".", "/", "~")):
        return _from_config(_saved_config(name, config, folder=True), name, image, tokens)
    owner, _, last = name.rpartition("/")
    if (short := last.replace("_", "-").removesuffix("-uncased")) in PUBLISHED:
        architecture, sizes = PUBLISHED[short]
        return _from_config(_random_config(architecture, sizes | config), f"{short}'s sizes", image, tokens)
    known = timm_names()
    if owner in ("", "timm") and (full := TIMM_SHORT.get(last, last)).partition(".")[0] in known:
        return _timm(full, config, image, tokens)
    if owner and owner != "timm":
        return _from_config(_saved_config(name, config, folder=False), name, image, tokens)
    names = [*PUBLISHED, *TIMM_SHORT, *known]
    near = get_close_matches(last, names, n=3, cutoff=0.6)
    hint = f"; did you mean {either(near)}?" if near else ""
    missing = "" if known else "; for ResNet, VGG, ViT, BEiT and many more: pip install timm"
    others = f" ({', '.join(PUBLISHED)}; a name of timm; a folder with config.json)" if not near else ""
    raise UserError(f"model={name} is not known{hint}{missing}{others}")


def timm_names() -> list[str]:
    """Every architecture that timm has; none where it is not installed."""
    try:
        import timm
    except ImportError:
        return []
    return list(timm.list_models())


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries warn about weights that nobody asked for."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def _refuse(given: int | None, what: str, name: str, instead: str) -> None:
    if given is not None:
        sees = "images" if instead == "image" else "tokens"
        raise UserError(f"{what}={given}: {name} sees {sees}; give {instead}=… instead")


def _own(name: str, model: ModelConfig, image: int | None, tokens: int | None) -> Network:
    _refuse(tokens, "tokens", name, "image")
    key = "wide_resnet" if model.family == "wide_resnet" else f"cnn {model.architecture}"
    channels, height, width = PUBLISHED_FOR.get(key, (3, 32, 32))
    shape = (channels, image or height, image or width)
    with torch.device("meta"):
        network = build_own_network(model, shape, 10)
        images = torch.empty(1, *shape)
    return Network(network.eval(), {"images": images}, "dpexp.models", {"image": shape[1]})


def _custom(model: ModelConfig, image: int | None, tokens: int | None) -> Network:
    if (image is None) == (tokens is None):
        raise UserError("model=custom: give image=… or tokens=…, whichever your network takes")
    shape = None if image is None else (3, image, image)
    head = "classifier" if image is None else "image_classifier"
    with torch.device("meta"):
        network = custom_network(model, head=head, num_labels=10, image_shape=shape, tokenizer=None)
        ids = torch.zeros(1, tokens or 1, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs = inputs if shape is None else {"images": torch.empty(1, *shape)}
    size = {"tokens": tokens} if image is None else {"image": image}
    return Network(network.eval(), inputs, str(model.factory), {k: v for k, v in size.items() if v})


def _timm(name: str, config: dict[str, Any], image: int | None, tokens: int | None) -> Network:
    import timm

    _refuse(tokens, "tokens", name, "image")
    sizes: dict[str, Any] = {} if image is None else {"img_size": image}
    with torch.device("meta"), quiet():
        try:
            try:  # vision transformers are built for a size, convolutional networks take any
                model = timm.create_model(name, **config, **sizes)
            except TypeError:
                model = timm.create_model(name, **config)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise UserError(f"timm cannot build {name}: {first_line(error)}") from error
    channels, *sides = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    sides = [image, image] if image is not None else sides
    images = torch.empty(1, channels, *sides, device="meta")
    return Network(model.eval(), {"images": images}, f"timm {name}", {"image": sides[0]})


def _random_config(architecture: str, config: dict[str, Any]) -> Any:
    return _with_head(load_config(ModelConfig(architecture=architecture, config=config), None))


def _with_head(found: Any) -> Any:
    """Name the head that such a network is usually trained with, where a configuration names none."""
    text = "ForCausalLM" if _is_causal(found) else "ForSequenceClassification"
    found.architectures = ["ForImageClassification" if sees_images(found) else text]
    return found


def _saved_config(name: str, config: dict[str, Any], *, folder: bool) -> Any:
    """Of a folder, or of the hub."""
    location = str(Path(name).expanduser()) if folder else name
    if folder and not (Path(location) / "config.json").is_file():
        what = "holds no config.json" if Path(location).is_dir() else "is no folder"
        raise UserError(f"model={name} {what}: give a folder written by save_pretrained, or a name")
    if not folder and name.count("/") > 1:
        raise UserError(f"model={name}: no such folder (and not the form of a hub id, which is OWNER/NAME)")
    with quiet():
        return load_config(ModelConfig(id=name, config=config), Source(location, name))


_HEADS = {
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
}


def _from_config(config: Any, source: str, image: int | None, tokens: int | None) -> Network:
    """A network of transformers, with the head that its configuration names."""
    import transformers

    notes: list[str] = []
    visual = hasattr(config, "image_size")
    if visual:
        _refuse(tokens, "tokens", config.model_type, "image")
        config.image_size = size = image or config.image_size
    else:
        _refuse(image, "image", config.model_type, "tokens")
        size = tokens or DEFAULT_TOKENS.get(config.model_type, OTHER_TOKENS)
        notes += _make_room(config, size)
        config.use_cache = False
    architecture = (config.architectures or [""])[0]
    auto = next((auto for suffix, auto in _HEADS.items() if architecture.endswith(suffix)), "AutoModel")
    with torch.device("meta"), quiet():
        try:
            model = getattr(transformers, auto).from_config(config, attn_implementation="eager")
        except (ValueError, TypeError, AssertionError, ZeroDivisionError, RuntimeError) as error:
            reason = first_line(error)
            raise UserError(f"transformers cannot build {source} for this input: {reason}") from error
    if visual:
        channels = getattr(config, "num_channels", 3)
        inputs = {"pixel_values": torch.empty(1, channels, size, size, device="meta")}
    else:
        ids = torch.zeros(1, size, dtype=torch.long, device="meta")
        inputs = {"input_ids": ids}
        if _is_causal(config):  # without a mask it asks where packed sequences begin, and shapes can't tell
            inputs["attention_mask"] = torch.ones_like(ids)
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
    return Network(model.eval(), inputs, source, {"image" if visual else "tokens": size}, notes)


def _is_causal(config: Any) -> bool:
    from transformers.models.auto import modeling_auto

    causal, masked = (
        getattr(modeling_auto, f"MODEL_FOR_{kind}_LM_MAPPING_NAMES") for kind in ("CAUSAL", "MASKED")
    )
    return config.model_type in causal and config.model_type not in masked


def _make_room(config: Any, tokens: int) -> list[str]:
    """Longer tables of positions where an input has more tokens than the published network."""
    reserved = config.pad_token_id + 1 if "roberta" in config.model_type else 0  # RoBERTa counts from there
    have = getattr(config, "max_position_embeddings", None)
    if have is None or tokens + reserved <= have:
        return []
    config.max_position_embeddings = tokens + reserved
    positions = f"the {have - reserved} positions published"
    return [f"{tokens} tokens are more than {positions}: the table was made longer"]
