"""Beam search or nucleus sampling over many prompts, kept in a file as it goes: an interrupted evaluation goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dpexp.durable import flush_file, write_atomic
from dpexp.models.prompts import UNPADDED
from dpexp.parallel.sharing import by_one, shared_out, writes
from dpexp.tasks.beams import whole_lengths
from dpexp.tasks.sequences import find_speakers

if TYPE_CHECKING:
    from dpexp.schemas import GenerationConfig


class Written(NamedTuple):
    """text: a prediction, without special tokens; ended: by the model or a string of `stop`, not cut off by `max_target`."""

    text: str
    ended: bool


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
) -> list[Written]:
    """The predictions for `contexts`, in their order, by beam search or nucleus sampling.

    Args:
        model: in evaluation mode; called without autograd.
        device: where it is.
        tokenizer: with a padding token.
        contexts: any number.
        settings: `num_beams`, `length_penalty`, `beam_length`, `max_target` (the most new tokens), `banned`, `stop`; `top_p`
            samples instead.
        rows: beams at once; a batch holds `rows / num_beams` prompts.
        path: predictions are appended to this file, a line each with input, references and prediction, and those that stand there
            already are not made again. A file of other weights, other settings or other data is begun anew.
        progress: called with the number of predictions done.
    """
    names = (
        ("num_beams", "length_penalty", "max_target") if settings.top_p is None else ("top_p", "max_target")
    )
    terms = {name: getattr(settings, name) for name in names}
    if settings.beam_length != "target" and settings.top_p is None:
        terms["beam_length"] = settings.beam_length
    if settings.banned:
        terms["banned"] = list(settings.banned)
    if settings.stop:
        terms["stop"] = list(settings.stop)
    head = {"weights": weights_hash(model), "settings": terms, "contexts": _hash(contexts)}
    done = by_one(partial(_read, path, head)) if path is not None else {}
    left = [i for i in range(len(contexts)) if i not in done]
    # longest first: a lack of memory shows at once
    left.sort(key=lambda i: -len(contexts[i].prompt))
    size = max(1, rows // settings.num_beams) if settings.top_p is None else 1

    def search_for(chosen: Sequence[int]) -> list[Written]:
        if progress is not None:
            progress(len(done))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # a sampled text depends on its number alone, not on what was sampled before
            torch.manual_seed(chosen[0])
            return continued(model, device, tokenizer, [contexts[i].prompt for i in chosen], settings)

    batches = [left[start : start + size] for start in range(0, len(left), size)]
    for chosen, texts in shared_out(batches, search_for):
        done |= dict(zip(chosen, texts, strict=True))
        if path is not None and writes():
            _append(path, chosen, contexts, texts)
    if progress is not None:
        progress(len(done))
    return [done[i] for i in range(len(contexts))]


def continued(
    model: nn.Module,
    device: torch.device,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    settings: GenerationConfig,
) -> list[Written]:
    """The best continuation of every prompt; with `top_p`, one that is sampled (Holtzman et al. 2020).

    Prompts are padded on the left, so that all go on at the same place; the padding is masked, and positions are counted from the
    first real token. So a prompt's continuation does not depend on its neighbours.
    """
    from transformers import GenerationConfig as Settings

    if len(prompts) > 1 and getattr(model, UNPADDED, False):
        return [text for one in prompts for text in continued(model, device, tokenizer, [one], settings)]
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    types = {}
    if (speakers := find_speakers(tokenizer, settings)) is not None:
        # a prompt ends with the one who answers, whose type every new token gets
        types["token_type_ids"] = torch.from_numpy(speakers.types(input_ids.numpy())).to(device)
    generate: Any = model.generate
    end = tokenizer.eos_token_id
    scored = (
        whole_lengths(model, (longest - mask.sum(1)).to(device), end, settings.length_penalty)
        if settings.beam_length == "whole" and settings.top_p is None and settings.num_beams > 1
        else nullcontext()
    )
    with scored:
        found = generate(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            **types,
            # a sharded model is held whole here: other processes write other texts, of other lengths, and wait for none of ours
            synced_gpus=False,
            tokenizer=tokenizer,
            generation_config=Settings(
                max_new_tokens=settings.max_target,
                stop_strings=list(settings.stop) or None,
                **(
                    {
                        "num_beams": settings.num_beams,
                        "length_penalty": settings.length_penalty,
                        "do_sample": False,
                    }
                    if settings.top_p is None
                    else {"do_sample": True, "top_p": settings.top_p, "top_k": 0}
                ),
                bad_words_ids=banned_tokens(tokenizer, settings.banned) or None,
                use_cache=True,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=end,
                pad_token_id=tokenizer.pad_token_id,
            ),
        )
    new = found[:, longest:]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    return [_written(text, end in row, settings.stop) for text, row in zip(texts, new.tolist(), strict=True)]


def _written(text: str, ended: bool, stop: Sequence[str]) -> Written:
    """A text up to the first of the strings that end it."""
    until = min((text.partition(each)[0] for each in stop), key=len, default=text)
    return Written(until.strip(), ended or until != text)


def banned_tokens(tokenizer: Any, banned: Sequence[str]) -> list[list[int]]:
    """The tokens of strings that may not be written; a string that the tokenizer has no token for can't be."""
    found = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in banned)
    return [list(tokens) for tokens in found if tokens]


def weights_hash(model: nn.Module) -> str:
    """16 hex digits of everything that a prediction is made with."""
    digest = hashlib.sha256()
    # not of state_dict(), which would make a sharded model give up what it has gathered
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # a copy: what numpy has looked at cannot be freed, and a sharded model must free what it has gathered
        here = tensor.detach().to("cpu", copy=True)
        digest.update(here.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _hash(contexts: Sequence[Context]) -> str:
    digest = hashlib.sha256()
    for context in contexts:
        digest.update(json.dumps([context.source, context.prompt.tolist(), context.references]).encode())
    return digest.hexdigest()[:16]


def _read(path: Path, head: dict[str, Any]) -> dict[int, Written]:
    """The predictions in a file; it is begun anew where it belongs to something else, and a torn last line is dropped."""
    try:
        # texts may hold what else ends a line in Unicode
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    done: dict[int, Written] = {}
    kept = [json.dumps(head)]
    if lines and lines[0] == kept[0].encode():
        for line in lines[1:]:
            try:
                # the last line may be torn inside a character
                content = line.decode()
                row = json.loads(content)
                done[row["index"]] = Written(row["prediction"], row["ended"])
            except (ValueError, KeyError, TypeError):
                break
            kept.append(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "\n".join(kept) + "\n")
    return done


def _append(path: Path, chosen: Sequence[int], contexts: Sequence[Context], texts: Sequence[Written]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        for i, written in zip(chosen, texts, strict=True):
            row = {
                "index": i,
                "input": contexts[i].source,
                "references": contexts[i].references,
                "prediction": written.text,
                "ended": written.ended,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        flush_file(file)
