"""Beam search by whole length, against a plain copy of the rules of transformers 4.8; banned strings."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.models import ModelBundle
from dpexp.models.lora import add_lora
from dpexp.schemas import GenerationConfig, PeftConfig
from dpexp.tasks.beams import whole_lengths
from dpexp.tasks.decoding import Written, continued
from dpexp.tasks.generation import Generation
from tests.tasks.text_tasks import bundle, make

__all__ = ["bundle", "make"]  # fixtures

CPU = torch.device("cpu")
LIKELIER = 1.0  # added to the logit of the end token, so that some texts end and some are cut off


def old_beam_search(
    model: nn.Module, prompt: list[int], beams: int, new: int, end: int, penalty: float
) -> list[int]:
    """`generate` of transformers 4.8 for one prompt: BeamSearchScorer and BeamHypotheses, with early_stopping=False."""
    running = [(0.0, list(prompt))]
    finished: list[tuple[float, list[int]]] = []

    def add(score: float, tokens: list[int]) -> None:
        finished.append((score / len(tokens) ** penalty, tokens))
        if len(finished) > beams:
            finished.remove(min(finished, key=lambda pair: pair[0]))

    done = False
    while len(running[0][1]) < len(prompt) + new and not done:
        logits = model(input_ids=torch.tensor([tokens for _, tokens in running])).logits[:, -1]
        scores = (
            torch.log_softmax(logits.float(), -1) + torch.tensor([score for score, _ in running])[:, None]
        )
        best, at = scores.flatten().topk(2 * beams)
        length, following = len(running[0][1]), []
        for rank, (score, place) in enumerate(zip(best.tolist(), at.tolist(), strict=True)):
            tokens, token = running[place // scores.shape[1]][1], place % scores.shape[1]
            if token == end:
                if rank < beams:
                    add(score, tokens)
            elif len(following) < beams:
                following.append((score, [*tokens, token]))
        running = following
        worst = min(score for score, _ in finished) if finished else 0.0
        done = len(finished) == beams and worst >= float(best.max()) / length**penalty
    if not done:
        for score, tokens in running:
            add(score, tokens)
    return max(finished, key=lambda pair: pair[0])[1][len(prompt) :]


@pytest.mark.parametrize("penalty", [1.0, 2.0])
def test_whole_lengths_are_the_old_rules(bundle: ModelBundle, penalty: float) -> None:
    model, end = bundle.model.eval(), bundle.tokenizer.eos_token_id
    likelier = torch.zeros(len(bundle.tokenizer))
    likelier[end] = LIKELIER
    model.get_output_embeddings().register_forward_hook(lambda module, args, logits: logits + likelier)
    draw = np.random.default_rng(0)
    prompts = [
        draw.integers(5, len(bundle.tokenizer), size=n).astype(np.int32)
        for n in draw.integers(4, 14, size=24)
    ]
    settings = GenerationConfig(max_target=9, num_beams=3, length_penalty=penalty)
    old = GenerationConfig(max_target=9, num_beams=3, length_penalty=penalty, beam_length="whole")
    with torch.no_grad():
        found = continued(model, CPU, bundle.tokenizer, prompts, old)
        today = continued(model, CPU, bundle.tokenizer, prompts, settings)
        wanted = [old_beam_search(model, p.tolist(), 3, 9, end, penalty) for p in prompts]
        again = continued(model, CPU, bundle.tokenizer, prompts, settings)
    texts = [text.strip() for text in bundle.tokenizer.batch_decode(wanted, skip_special_tokens=True)]
    assert [written.text for written in found] == texts
    assert {written.ended for written in found} == {True, False}, "both kinds of ends are tried"
    assert today != found, "the setting makes a difference"
    assert today == again, "the model is as it was"


def test_a_wrapped_model_is_told_too(make: Callable[..., Generation], bundle: ModelBundle) -> None:
    task = make()
    prompts = [task.splits["dev"].prompt(i) for i in range(6)]
    settings = GenerationConfig(max_target=9, num_beams=3, beam_length="whole")
    with torch.no_grad():
        plain = continued(bundle.model.eval(), CPU, bundle.tokenizer, prompts, settings)
        wrapped = add_lora(bundle.model, PeftConfig(name="lora", rank=2, alpha=2.0), "causal_lm", [])
        assert continued(wrapped.eval(), CPU, bundle.tokenizer, prompts, settings) == plain


def test_a_model_without_this_beam_search_is_refused() -> None:
    said = "beam_length=whole works on the beam search of transformers 5"
    with pytest.raises(UserError, match=said), whole_lengths(nn.Linear(1, 1), torch.zeros(1), 0, 1.0):
        pass


def test_banned_strings_are_never_written(make: Callable[..., Generation], bundle: ModelBundle) -> None:
    task, model = make(), bundle.model.eval()
    prompts: list[Any] = [np.asarray(task.splits["dev"].prompt(i)) for i in range(6)]
    free = GenerationConfig(max_target=9, num_beams=2)
    with torch.no_grad():
        before = continued(model, CPU, bundle.tokenizer, prompts, free)
        words = [word for written in before for word in written.text.split()]
        single = {w for w in words if len(bundle.tokenizer(w, add_special_tokens=False)["input_ids"]) == 1}
        word = max(sorted(single), key=words.count)
        settings = GenerationConfig(max_target=9, num_beams=2, banned=[word, "\n"])  # "\n" is no token here
        after = continued(model, CPU, bundle.tokenizer, prompts, settings)
    assert any(word in written.text.split() for written in before)
    assert not any(word in written.text.split() for written in after)


@pytest.mark.parametrize("search", [{"num_beams": 1}, {"num_beams": 3}, {"top_p": 0.9}])
def test_a_text_ends_before_a_string_that_stops_it(
    make: Callable[..., Generation], bundle: ModelBundle, search: dict[str, Any]
) -> None:
    task, model = make(), bundle.model.eval()
    prompts: list[Any] = [np.asarray(task.splits["dev"].prompt(i)) for i in range(6)]

    def written(number: int, stop: list[str]) -> Written:
        torch.manual_seed(number)
        settings = GenerationConfig(max_target=9, stop=stop, **search)
        with torch.no_grad():
            (found,) = continued(model, CPU, bundle.tokenizer, [prompts[number]], settings)
        return found

    free = [written(i, []) for i in range(6)]
    words = [word for each in free for word in each.text.split()[1:]]
    stop = max(sorted(set(words)), key=words.count)
    stopped = [written(i, [stop]) for i in range(6)]
    assert any(each.ended and not other.ended for each, other in zip(stopped, free, strict=True))
    for each, other in zip(stopped, free, strict=True):
        assert stop not in each.text
        if search.get("num_beams") != 3:
            # of one beam, and of one random state, the texts are the same up to there
            assert each.text == other.text.partition(stop)[0].strip()
