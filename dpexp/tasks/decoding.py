"""Beam search over many prompts, in batches, kept in a file as it goes, so that an interrupted evaluation goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dpexp.durable import flush_file, write_atomic

if TYPE_CHECKING:
    from dpexp.schemas import GenerationConfig


@dataclass(frozen=True)
class Context:
    """One prompt and what there is to compare with.

    source: the text that the prompt was made of.
    references: one or more.
    prompt: `[P]` int32.
    """

    source: str
    references: list[str]
    prompt: np.ndarray


def decode(
    model: nn.Module,
    device: torch.device,
    tokenizer: Any,
    contexts: Sequence[Context],
    settings: GenerationConfig,
    rows: int,
    path: Path | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[str]:
    """The predictions for `contexts`, in their order, by beam search.

    Args:
        model: in evaluation mode; called without autograd.
        device: where it is.
        tokenizer: with a padding token.
        contexts: any number.
        settings: `num_beams`, `length_penalty`, `max_target` (the most new tokens).
        rows: beams at once; a batch holds `rows / num_beams` prompts.
        path: predictions are appended to this file, a line each with input, references and prediction, and those that stand there
            already are not made again. A file of other weights, other settings or other data is begun anew.
        progress: called with the number of predictions done.
    """
    head = {"weights": weights_hash(model), "settings": asdict(settings), "contexts": _hash(contexts)}
    done = _read(path, head) if path is not None else {}
    left = [i for i in range(len(contexts)) if i not in done]
    left.sort(key=lambda i: -len(contexts[i].prompt))  # longest first: a lack of memory shows at once
    size = max(1, rows // settings.num_beams)
    for start in range(0, len(left), size):
        chosen = left[start : start + size]
        if progress is not None:
            progress(len(done))
        texts = beam_search(model, device, tokenizer, [contexts[i].prompt for i in chosen], settings)
        done |= dict(zip(chosen, texts, strict=True))
        if path is not None:
            _append(path, chosen, contexts, texts)
    if progress is not None:
        progress(len(done))
    return [done[i] for i in range(len(contexts))]


def beam_search(
    model: nn.Module,
    device: torch.device,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    settings: GenerationConfig,
) -> list[str]:
    """The best continuation of every prompt, as text without special tokens.

    Prompts are padded on the left, so that all go on at the same place; the padding is masked, and positions are counted from the
    first real token. So a prompt's continuation does not depend on its neighbours.
    """
    from transformers import GenerationConfig as Settings

    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    generate: Any = model.generate
    found = generate(
        input_ids=input_ids.to(device),
        attention_mask=mask.to(device),
        generation_config=Settings(
            num_beams=settings.num_beams,
            length_penalty=settings.length_penalty,
            max_new_tokens=settings.max_target,
            do_sample=False,
            use_cache=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
    )
    texts = tokenizer.batch_decode(found[:, longest:], skip_special_tokens=True)
    return [text.strip() for text in texts]


def weights_hash(model: nn.Module) -> str:
    """16 hex digits of everything that a prediction is made with."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _hash(contexts: Sequence[Context]) -> str:
    digest = hashlib.sha256()
    for context in contexts:
        digest.update(json.dumps([context.prompt.tolist(), context.references]).encode())
    return digest.hexdigest()[:16]


def _read(path: Path, head: dict[str, Any]) -> dict[int, str]:
    """The predictions in a file; it is begun anew where it belongs to something else, and a torn last line is dropped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    done: dict[int, str] = {}
    kept = [json.dumps(head)]
    if lines and lines[0] == kept[0]:
        for line in lines[1:]:
            try:
                row = json.loads(line)
                done[row["index"]] = row["prediction"]
            except (ValueError, KeyError, TypeError):
                break
            kept.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "\n".join(kept) + "\n")
    return done


def _append(path: Path, chosen: Sequence[int], contexts: Sequence[Context], texts: Sequence[str]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        for i, text in zip(chosen, texts, strict=True):
            row = {
                "index": i,
                "input": contexts[i].source,
                "references": contexts[i].references,
                "prediction": text,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        flush_file(file)
