"""BERTScore and BLEURT: metrics that are models. Only models on this machine are used; nothing is downloaded."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dpexp.errors import UserError, first_line

MODELS = {"bertscore": "distilbert-base-uncased", "bleurt": "Elron/bleurt-base-128"}
"""The model that each metric means where nothing else is said, an id on the Hugging Face hub: those of GEM-metrics, with which
Li et al. evaluate DART. BLEURT's is the published checkpoint BLEURT-base-128 as a Hugging Face classifier with one output."""

BERTSCORE_LAYERS = {("distilbert", 6): 5, ("roberta", 24): 17}
"""(architecture, layers) -> the layer that bert-score reads: of distilbert-base-uncased, of roberta-large. Others: the last."""


def locate(metric: str, models: Mapping[str, str] | None = None) -> Path | None:
    """The folder of a metric's model, or None where neither a person nor the hub's cache on this machine has it.

    Args:
        metric: a key of `MODELS`.
        models: metric -> folder, or id in the hub's cache, instead of `MODELS`.

    Raises:
        UserError: a person named a model that is not there.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    named = (models or {}).get(metric)
    wanted = named or MODELS[metric]
    if (Path(wanted) / "config.json").is_file():
        return Path(wanted)
    try:
        folder = Path(snapshot_download(wanted, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        folder = None
    if folder is not None and any(
        (folder / name).exists() for name in ("model.safetensors", "pytorch_model.bin")
    ):
        return folder
    if named is None:
        return None
    raise UserError(
        f"{metric}: no model in {named}: give a folder with config.json, weights and tokenizer, or an id that is in "
        "the Hugging Face cache of this machine"
    )


@torch.no_grad()
def bert_score(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    folder: str | Path,
    device: str | torch.device = "cpu",
    batch_size: int = 32,
) -> float:
    """The mean over texts of BERTScore's F1 with the best reference (Zhang et al., 2020), neither weighted nor rescaled.

    Each token is matched with the token of the other text whose contextual vector is most alike (cosine); precision
    goes over the prediction's tokens, recall over the reference's. The special tokens at both ends can be matched but
    are not counted, as in bert-score.

    Args:
        predictions: N texts; an empty one scores 0.
        references: N times one or more texts.
        folder: an encoder with its tokenizer; see `locate`.
        device: where the model runs.
        batch_size: texts per forward pass.
    """
    from transformers import AutoModel, AutoTokenizer

    tokenizer = _load("bertscore", AutoTokenizer, folder, "tokenizer", add_prefix_space=True)
    model = _load("bertscore", AutoModel, folder).to(device).eval()
    layers = model.config.num_hidden_layers
    layer = BERTSCORE_LAYERS.get((model.config.model_type, layers), layers)
    # RoBERTa's positions begin at 2
    longest = min(tokenizer.model_max_length, model.config.max_position_embeddings - 2)
    texts = sorted({text for group in references for text in group} | set(predictions), key=len, reverse=True)
    # text -> unit vectors [T, d], which tokens count [T]
    vectors: dict[str, tuple[Tensor, Tensor]] = {}
    for batch in _batches(texts, batch_size):
        tokens = tokenizer(
            batch,
            padding=True,
            truncation=True,
            max_length=longest,
            return_special_tokens_mask=True,
            return_tensors="pt",
        )
        special = tokens.pop("special_tokens_mask").bool()
        hidden = model(**tokens.to(device), output_hidden_states=True).hidden_states[layer].float().cpu()
        present = tokens["attention_mask"].bool().cpu()
        for i, text in enumerate(batch):
            unit = torch.nn.functional.normalize(hidden[i][present[i]], dim=-1)
            vectors[text] = (unit, ~special[i][present[i]])

    def alike(prediction: str, reference: str) -> float:
        (given, counted), (wanted, needed) = vectors[prediction], vectors[reference]
        if not counted.any() or not needed.any():
            return 0.0
        similar = given @ wanted.T
        precision = float(similar.max(1).values[counted].mean())
        recall = float(similar.max(0).values[needed].mean())
        return 2 * precision * recall / (precision + recall) if precision + recall else 0.0

    return fmean(
        max(alike(text, wanted) for wanted in group)
        for text, group in zip(predictions, references, strict=True)
    )


@torch.no_grad()
def bleurt(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    folder: str | Path,
    device: str | torch.device = "cpu",
    batch_size: int = 32,
) -> float:
    """The mean over texts of BLEURT's mean rating against their references (Sellam et al., 2020); about -2 to 1.

    Args:
        predictions: N texts.
        references: N times one or more texts.
        folder: a classifier of text pairs (reference, prediction) with one output, and its tokenizer; see `locate`.
        device: where the model runs.
        batch_size: pairs per forward pass.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = _load("bleurt", AutoTokenizer, folder, "tokenizer")
    model = _load("bleurt", AutoModelForSequenceClassification, folder).to(device).eval()
    if model.config.num_labels != 1:
        raise UserError(
            f"bleurt: the model in {folder} has {model.config.num_labels} outputs; a BLEURT model has one"
        )
    pairs = [(wanted, text) for text, group in zip(predictions, references, strict=True) for wanted in group]
    ratings: list[float] = []
    for batch in _batches(pairs, batch_size):
        left, right = [list(side) for side in zip(*batch, strict=True)]
        longest = min(tokenizer.model_max_length, model.config.max_position_embeddings)
        tokens = tokenizer(
            left, right, padding=True, truncation=True, max_length=longest, return_tensors="pt"
        )
        ratings += model(**tokens.to(device)).logits.float().flatten().tolist()
    of = iter(ratings)
    return fmean(fmean(next(of) for _ in group) for group in references)


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def _load(metric: str, kind: Any, folder: str | Path, what: str = "model", **options: Any) -> Any:
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"{metric}: the {what} in {folder} can't be read: {first_line(error)}") from None
