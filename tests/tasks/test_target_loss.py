"""The loss at the targets is that of the whole model, whatever its output layer: trained, frozen, tied, or capped behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.tasks import target_loss
from dpexp.tasks.target_loss import IGNORED, example_losses, token_losses

WORDS, WIDTH, LENGTH = 31, 16, 9


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=1, n_embd=WIDTH, n_head=2, vocab_size=WORDS, n_positions=LENGTH, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **settings,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL))


def capped() -> nn.Module:
    """tanh behind the output layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.5))


def scaled() -> nn.Module:
    """A factor behind the output layer."""
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3))


SMALL = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": WORDS, "max_position_embeddings": LENGTH, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "gpt2": gpt2,
    "untied": lambda: gpt2(tie_word_embeddings=False),
    "llama": llama,
    "capped": capped,
    "scaled": scaled,
}


def built(name: str, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    if frozen:
        for parameter in model.get_output_embeddings().parameters():
            parameter.requires_grad_(False)
    return model


@pytest.fixture
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(1, WORDS, (4, 3), generator=generator)
    targets[1, 2] = targets[3, 1] = targets[3, 2] = IGNORED
    return {
        "input_ids": torch.randint(1, WORDS, (4, LENGTH), generator=generator),
        "positions": torch.tensor([[4, 5, 6], [2, 3, 0], [6, 7, 8], [1, 0, 0]]),
        "targets": targets,
    }


def textbook(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    picked = logits[torch.arange(len(logits))[:, None], batch["positions"]]
    losses = F.cross_entropy(picked.flatten(0, 1), batch["targets"].flatten(), reduction="none").view(4, 3)
    return losses.sum(1) / (batch["targets"] != IGNORED).sum(1)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two cross-entropies were asked."""
    names: list[str] = []
    for name in ("cross_entropy_", "frozen_head_cross_entropy"):
        real = getattr(target_loss, name)

        def spy(*args: Any, name: str = name, real: Any = real) -> Tensor:
            names.append(name)
            return real(*args)

        monkeypatch.setattr(target_loss, name, spy)
    return names


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_whole_model(
    name: str, frozen: bool, batch: dict[str, Tensor], used: list[str]
):
    model = built(name, frozen)
    twin = copy.deepcopy(model)
    for _ in range(2):  # the second time, what the first has found out of the model is remembered
        losses, wanted = example_losses(model, batch), textbook(twin, batch)
        torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-12)
        model.zero_grad(), twin.zero_grad()
        losses.sum().backward()
        wanted.sum().backward()
        for (key, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None), key
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-12)
    lean = frozen and name not in ("capped", "scaled")
    assert set(used) == {"frozen_head_cross_entropy" if lean else "cross_entropy_"}


def test_logits_that_are_written_to_afterwards_are_not_the_output_layers(
    batch: dict[str, Tensor], used: list[str]
):
    model = built("gpt2", True)
    model.register_forward_hook(lambda module, args, output: output.logits.mul_(2) is None or None)
    with torch.no_grad():
        torch.testing.assert_close(example_losses(model, batch), textbook(model, batch))
    assert used == ["cross_entropy_"]


ENGINES = [(engine, groups) for engine in ("auto", "ghost", "bk", "fastgrad") for groups in ("flat", "layer")]


@pytest.mark.parametrize(("engine", "groups"), [*ENGINES, ("onepass", "layer")])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "untied", "capped"])
def test_engines_clip_it_as_the_loop_does(
    name: str, frozen: bool, groups: str, engine: str, batch: dict[str, Tensor]
):
    found = []
    for one in (engine, "loop"):
        model = built(name, frozen)
        clipper = attach(model, groups=groups, clip_norm=0.05, engine=one)
        for _ in range(2):
            report = clipper.backward(example_losses(model, batch))
        found.append([report.norms, *(p.grad for p in model.parameters() if p.grad is not None)])
    for mine, loop in zip(*found, strict=True):
        torch.testing.assert_close(mine, loop, rtol=1e-6, atol=1e-8)  # Gemma's norms are in float32


def test_lora_never_makes_the_logits(batch: dict[str, Tensor], used: list[str]):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = get_peft_model(gpt2(), lora).double()
    twin = copy.deepcopy(model)
    example_losses(model, batch).sum().backward()
    textbook(twin, batch).sum().backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-12)
    assert used == ["frozen_head_cross_entropy"]


def test_a_layer_that_is_wrapped_or_hooked_is_applied_as_it_is(batch: dict[str, Tensor], used: list[str]):
    model = built("gpt2", True)
    example_losses(model, batch)
    handle = model.get_output_embeddings().register_forward_hook(lambda module, args, output: output * 2)
    doubled = example_losses(model, batch)
    wanted = textbook(model, batch)
    torch.testing.assert_close(doubled, wanted, rtol=1e-9, atol=1e-12)
    handle.remove()
    assert used == ["frozen_head_cross_entropy", "cross_entropy_"]


def test_losses_may_be_asked_for_in_inference_mode_first(batch: dict[str, Tensor], used: list[str]):
    model = built("gpt2", True)
    with torch.inference_mode():
        first = example_losses(model, batch)
    torch.testing.assert_close(first, example_losses(model, batch).detach(), rtol=1e-9, atol=1e-12)
    assert used == ["frozen_head_cross_entropy"] * 2


def test_asking_what_comes_last_draws_no_random_numbers(batch: dict[str, Tensor]):
    """A resumed run asks again, and must draw the same dropout masks."""
    model = built("gpt2", True)
    model.transformer.drop.p = 0.5
    found = []
    for _ in range(2):  # the first asks, the second does not
        torch.manual_seed(3)
        found.append(token_losses(model, batch))
    assert torch.equal(*found)
