"""A head of its own (`model.untied`): the same function, another parameter, clipped by itself; saved and loaded."""

from pathlib import Path

import pytest
import torch

from dpexp.clipping import attach
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import ModelBundle, build_model
from dpexp.schemas import ModelConfig, PeftConfig

from .test_build import config
from .test_causal_lm import tiny

FULL = PeftConfig(name="full")
KINDS = [("gpt2", "causal_lm"), ("bert", "masked_lm"), ("roberta", "masked_lm"), ("distilbert", "masked_lm")]


def described(architecture: str, **values: object) -> ModelConfig:
    values = {"dropout": 0.0, "attention_dropout": 0.0, **values}
    return tiny(architecture, **values) if architecture == "gpt2" else config(architecture, **values)  # type: ignore[arg-type]


def build(model: ModelConfig, head: str, seed: int = 0) -> ModelBundle:
    return build_model(model, FULL, head=head, num_labels=0, scale="small", seed=seed)


@pytest.mark.parametrize(("architecture", "head"), KINDS)
def test_an_untied_head_begins_as_the_embedding_and_is_clipped_by_itself(
    architecture: str, head: str
) -> None:
    tied, apart = (build(described(architecture, untied=untied), head).model for untied in (False, True))
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 5, 11]])
    torch.testing.assert_close(apart(input_ids=ids).logits, tied(input_ids=ids).logits, rtol=0, atol=0)
    width = apart.get_output_embeddings().weight
    assert (
        sum(p.numel() for p in apart.parameters())
        == sum(p.numel() for p in tied.parameters()) + width.numel()
    )

    clipper = attach(apart, groups="flat", clip_norm=1e6)
    norms = clipper.backward(apart(input_ids=ids).logits.logsumexp(-1).sum(1)).norms[0]
    clipper.detach()
    for i in range(2):
        apart.zero_grad()
        apart(input_ids=ids[i : i + 1]).logits.logsumexp(-1).sum().backward()
        wanted = torch.cat([p.grad.flatten() for p in apart.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(norms[i], wanted, rtol=1e-4, atol=0, check_dtype=False)


@pytest.mark.parametrize(("architecture", "head"), KINDS)
def test_a_saved_untied_model_loads_as_it_is(architecture: str, head: str, tmp_path: Path) -> None:
    bundle = build(described(architecture, untied=True), head)
    with torch.no_grad():
        bundle.model.get_output_embeddings().weight.mul_(2.0)
    bundle.model.save_pretrained(tmp_path)
    bundle.tokenizer.save_pretrained(tmp_path)  # type: ignore[union-attr]
    again = build(ModelConfig(family="hf", id=str(tmp_path)), head, seed=5).model
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        one, two = bundle.model.eval()(input_ids=ids).logits, again.eval()(input_ids=ids).logits
    torch.testing.assert_close(two, one, rtol=0, atol=0)
    assert not torch.equal(again.get_output_embeddings().weight, again.get_input_embeddings().weight)


def test_a_tied_checkpoint_can_be_untied(tmp_path: Path) -> None:
    tied = build(described("gpt2"), "causal_lm")
    tied.model.save_pretrained(tmp_path)
    tied.tokenizer.save_pretrained(tmp_path)  # type: ignore[union-attr]
    apart = build(ModelConfig(family="hf", id=str(tmp_path), untied=True), "causal_lm", seed=5)
    assert torch.equal(apart.model.lm_head.weight, tied.model.lm_head.weight)
    assert apart.model.lm_head.weight is not apart.model.transformer.wte.weight
    assert "new" not in apart.source
    assert "lm_head.weight" in apart.trainable


def test_what_has_no_tied_head_is_refused() -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "tie_word_embeddings": False}
    with pytest.raises(UserError, match="the output layer of GPT2LMHeadModel is not tied"):
        build(described("gpt2", config=sizes, untied=True), "causal_lm")
    with pytest.raises(UserError, match=r"about the head of a language model .* task=sst2"):
        compose(["task=sst2", "scale=demo", "clip=flat", "model.untied=true"])
