"""A classifier on a pooled encoder: dropout and a small head on the mean of the last hidden states, on that of every layer's, or
on the first of the last.

The head that an architecture has of its own reads the first position. An encoder that was trained with mean pooling, as sentence
encoders are (Reimers & Gurevych 2019, "Sentence-BERT", section 3), has nothing there that a small head could use.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from dpexp.errors import UserError
from dpexp.schemas.choices import POOLINGS

HEADS = ("linear", "unbiased", "dense")
# in the config.json of an exported model
SETTING, HEAD_SETTING = "dpexp_pooling", "dpexp_head"


def classification_head(config: Any, head: str, width: int) -> nn.Module:
    """What maps pooled states `[B, width]` to logits `[B, classes]`.

    "dense" is the head of RoBERTa (Liu et al. 2019, and `RobertaClassificationHead`): dense `width × width`, tanh, dropout,
    linear. The dense layer starts as the identity, so that before training the head reads what the encoder was trained to give.
    """
    std = getattr(config, "initializer_range", 0.02)
    last = nn.Linear(width, config.num_labels, bias=head != "unbiased")
    nn.init.normal_(last.weight, std=std)
    if last.bias is not None:
        nn.init.zeros_(last.bias)
    if head != "dense":
        return last
    dense = nn.Linear(width, width)
    nn.init.eye_(dense.weight)
    nn.init.zeros_(dense.bias)
    dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.0) or 0.0)
    return nn.Sequential(OrderedDict(dense=dense, activation=nn.Tanh(), dropout=dropout, out_proj=last))


class PooledClassifier(PreTrainedModel):
    """An encoder, and a head on what is pooled of it.

    The encoder stands under the name that its architecture gives it ("bert"), so that every way to fine-tune finds it there, and
    an export has the published names.

    Args:
        encoder: gives `last_hidden_state` `[B, T, d]`; a pooler of its own is dropped.
        pooling: "mean", over the positions that the attention mask keeps; "layers", that of the embeddings and of each of the L
            layers, one beside the other; or "cls", the first position.
        head: see `classification_head`.
    """

    # The encoder has already chosen how to compute its attention.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, encoder: PreTrainedModel, pooling: str, head: str = "linear") -> None:
        config = encoder.config
        super().__init__(config)
        if pooling not in POOLINGS:
            raise UserError(f"model.pooling={pooling} is unknown: choose own, {', '.join(POOLINGS)}")
        if head not in HEADS:
            raise UserError(f"model.head={head} is unknown: choose {', '.join(HEADS)}")
        setattr(config, SETTING, pooling)
        setattr(config, HEAD_SETTING, head)
        self.pooling = pooling
        self.base_model_prefix = encoder.base_model_prefix
        if getattr(encoder, "pooler", None) is not None:
            # it would train without being read
            encoder.pooler = None
        self.add_module(self.base_model_prefix, encoder)
        self.dropout = nn.Dropout(getattr(config, "hidden_dropout_prob", 0.0) or 0.0)
        states = config.num_hidden_layers + 1 if pooling == "layers" else 1
        self.classifier = classification_head(config, head, states * config.hidden_size)

    def pooled(self, **inputs: Any) -> Tensor:
        """What the head reads, `[B, d]` or `[B, (L + 1)d]`, of the encoder's inputs, `[B, T]` (`input_ids`, …)."""
        every = self.pooling == "layers"
        if every:
            inputs["output_hidden_states"] = True
        found = self.get_submodule(self.base_model_prefix)(**inputs)
        hidden: Tensor = found.last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        # a prefix lengthens the mask
        mask = inputs["attention_mask"][:, -hidden.shape[1] :].to(hidden.dtype)
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1)
        states = found.hidden_states if every else (hidden,)
        return torch.cat([torch.einsum("btd,bt->bd", state, weights) for state in states], dim=1)

    def forward(
        self, past_key_values: Any = None, labels: Tensor | None = None, **inputs: Any
    ) -> SequenceClassifierOutput:
        """Logits `[B, classes]`; of `labels` `[B]` the mean loss. Prefix tuning looks for `past_key_values` by this name."""
        if past_key_values is not None:
            inputs["past_key_values"] = past_key_values
        logits = self.classifier(self.dropout(self.pooled(**inputs)))
        # as Hugging Face's models give it, for evaluations
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def encoder_arguments(config: Any) -> dict[str, bool]:
    """For `AutoModel`: no pooler where the architecture lets one choose; what no checkpoint has must not be asked for."""
    try:
        made = AutoModel._model_mapping[type(config)]
    except KeyError:
        raise UserError(
            f"model.pooling: a {config.model_type} has no encoder without a head; leave it at own"
        ) from None
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(made).parameters else {}


# what reads an exported model with transformers alone: for whoever is given one and has no dpexp
LOADING = """\
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModel, AutoTokenizer

encoder, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
head = load_file(f"{folder}/model.safetensors")
inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
with torch.no_grad():
    states = encoder(**inputs, output_hidden_states=True)
"""
MEAN = """\
    weights = inputs["attention_mask"].unsqueeze(-1) / inputs["attention_mask"].sum(1)[:, None, None]
"""
POOLED = {
    "mean": MEAN + "    x = (states.last_hidden_state * weights).sum(1)\n",
    "layers": MEAN
    + "    x = torch.cat([(state * weights).sum(1) for state in states.hidden_states], dim=1)\n",
    "cls": "    x = states.last_hidden_state[:, 0]\n",
}
DENSE = """\
    x = linear(x, head["classifier.dense.weight"], head["classifier.dense.bias"]).tanh()
"""


def loading_code(config: Mapping[str, Any]) -> str:
    """Write the lines that give the `logits` of `texts` by an exported model in `folder`, without dpexp; of its `config.json`."""
    dense = config.get(HEAD_SETTING) == "dense"
    last = "classifier.out_proj" if dense else "classifier"
    return (
        f"{LOADING}{POOLED[config[SETTING]]}{DENSE if dense else ''}"
        f'    logits = linear(x, head["{last}.weight"], head.get("{last}.bias"))\n'
    )


def load_pooled(folder: str | Path) -> PooledClassifier:
    """Read a model that a run with `model.pooling` exported.

    Args:
        folder: holds `config.json` and `model.safetensors`.

    Raises:
        UserError: it is not such a model.
    """
    from safetensors.torch import load_file

    config = AutoConfig.from_pretrained(str(folder))
    if not hasattr(config, SETTING):
        raise UserError(
            f"{folder} was not trained with model.pooling: load it with AutoModelForSequenceClassification"
        )
    encoder = AutoModel.from_config(config, **encoder_arguments(config))
    model = PooledClassifier(encoder, getattr(config, SETTING), getattr(config, HEAD_SETTING, "linear"))
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()
