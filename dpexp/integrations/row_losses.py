"""One loss for each row of a collated batch, and of that row alone, for the heads that Hugging Face's classes have."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dpexp.errors import UserError
from dpexp.tasks.target_loss import IGNORED


def losses_of_rows(model: Any, inputs: dict[str, Any], smoothing: float = 0.0) -> Tensor:
    """Compute `[b]` losses of a batch that has its targets.

    Knows sequence classification (cross-entropy, several labels, regression), question answering by spans, causal, masked and
    encoder-decoder language models and token classification. Of tokens it is the mean over the row's own targets: Hugging Face's
    mean over all targets of a batch would couple the rows.

    Args:
        model: one of transformers', plain or wrapped by peft.
        inputs: what it is called with, and `labels`, or `start_positions` and `end_positions`.
        smoothing: of the labels in cross-entropies of classes and of tokens, as Hugging Face's `label_smoothing_factor`.

    Raises:
        UserError: the head is another one, or none whose labels can be smoothed, or the batch has no labels.
    """
    if "start_positions" in inputs:
        _refuse_smoothing(smoothing, "positions of answers")
        return _losses_of_spans(model, inputs)
    if "labels" not in inputs:
        raise UserError(
            f"a batch has no labels, it has {', '.join(inputs)}: name the column of targets labels and make numbers of it "
            "(collators leave texts out), or, for another head, write per_example_losses(model, inputs) in a subclass, one "
            "loss per row"
        )
    labels = inputs["labels"]
    if not isinstance(labels, Tensor):
        raise UserError(
            f"labels of a batch are a {type(labels).__name__} and no tensor (boxes of a detector, masks): write "
            "per_example_losses(model, inputs) in a subclass, one loss per row, with nothing counted over the batch"
        )
    features = {name: value for name, value in inputs.items() if name != "labels"}
    base: Any = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    config = getattr(base, "config", None)
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    tokens = labels.dim() == 2 and not labels.is_floating_point()
    if encoder_decoder and tokens and "decoder_input_ids" not in features:
        features |= _shifted(base, labels)
    output = model(**features)
    if not isinstance(output, Mapping) or "logits" not in output:
        given = ", ".join(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
        raise UserError(
            f"{type(base).__name__} gives {given} and no logits by name: subclass the Trainer and write "
            "per_example_losses(model, inputs), one loss per row"
        )
    logits = output["logits"]
    # as Hugging Face's ForSequenceClassificationLoss decides it
    kind = getattr(config, "problem_type", None) or ("regression" if logits.shape[1:] == (1,) else "")
    if logits.dim() == 2 and kind == "regression" and labels.numel() == logits.numel():
        _refuse_smoothing(smoothing, "numbers")
        return F.mse_loss(logits.float(), labels.float().view_as(logits), reduction="none").mean(1)
    # of tokens (ELECTRA's discriminator) a mean would count the padding, which goes by the longest row of the batch
    tokens_have = getattr(features.get("input_ids"), "shape", None)
    by_token = labels.shape == tokens_have and labels.shape[1:] != (getattr(config, "num_labels", None),)
    if logits.dim() == 2 and labels.shape == logits.shape and not by_token:
        _refuse_smoothing(smoothing, "several labels at once")
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
        return losses.mean(1)
    if logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
        return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)
    ahead = False if encoder_decoder else _writes_the_next(base)
    if ahead and logits.dim() == 3 and labels.dim() == 2:
        # Behind a prompt that is learnt the first token is a target, too; the prompt itself is none.
        labels = F.pad(labels, (max(0, logits.shape[1] - labels.shape[1]), 0), value=IGNORED)
        logits, labels = logits[:, :-1], labels[:, 1:]
    if ahead is not None and logits.dim() == 3 and labels.shape == logits.shape[:2]:
        losses = F.cross_entropy(
            logits.float().transpose(1, 2),
            labels,
            reduction="none",
            ignore_index=IGNORED,
            label_smoothing=smoothing,
        )
        return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)
    raise UserError(
        f"no per-example loss is known for {type(base).__name__} (logits {list(logits.shape)}, labels {list(labels.shape)}): "
        "subclass the Trainer and write per_example_losses(model, inputs), one loss per row"
    )


def _refuse_smoothing(smoothing: float, targets: str) -> None:
    if smoothing:
        raise UserError(
            f"label_smoothing_factor={smoothing}: targets are {targets} here, and no classes that can be smoothed: leave it out"
        )


def _losses_of_spans(model: Any, inputs: dict[str, Any]) -> Tensor:
    """`[b]`: the mean of the cross-entropies of beginning and end, as Hugging Face's question answering has it of a row alone.

    Beside longer rows it would let an answer stand in the padding, too: what a row loses would go by their lengths.
    """
    targets = ("start_positions", "end_positions")
    outputs = model(**{name: value for name, value in inputs.items() if name not in targets})
    text, losses = inputs.get("attention_mask"), []
    for name in targets:
        logits = outputs[name.replace("positions", "logits")].float()
        # an answer that was cut off has no loss
        outside = logits.shape[1]
        positions = inputs[name].clamp(0, outside)
        if text is not None and text.shape == logits.shape:
            logits = logits.masked_fill(text == 0, -math.inf)
            there = F.pad(text, (0, 1)).gather(1, positions[:, None])[:, 0] != 0
            positions = torch.where(there, positions, outside)
        losses.append(F.cross_entropy(logits, positions, ignore_index=outside, reduction="none"))
    return (losses[0] + losses[1]) / 2


def _writes_the_next(base: Any) -> bool | None:
    """Whether a head's logits at one place are for the token at the next one; None where nothing tells."""
    # its own name, or that of a class that it adds to
    if any(kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for kind in type(base).__mro__):
        return True
    # what Hugging Face reads off the name: of a model of texts and pictures, of one that a repository brings along
    kinds = {
        "ForCausalLM": True,
        "ForConditionalGeneration": True,
        "ForMaskedLM": False,
        "ForTokenClassification": False,
    }
    return kinds.get(str(getattr(base, "loss_type", "")))


def _shifted(base: Any, labels: Tensor) -> dict[str, Tensor]:
    """What a decoder reads that is to write the labels; nothing of a head that is no language model."""
    if (prepare := getattr(base, "prepare_decoder_input_ids_from_labels", None)) is not None:
        return {"decoder_input_ids": prepare(labels=labels)}
    shift = getattr(sys.modules[type(base).__module__], "shift_tokens_right", None)
    if shift is None:
        return {}
    return {"decoder_input_ids": shift(labels, base.config.pad_token_id, base.config.decoder_start_token_id)}
