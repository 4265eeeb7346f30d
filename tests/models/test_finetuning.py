"""The ways to fine-tune: what trains under each, what stays as it was, and one clear error where nothing would train."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from dpexp.models import build_model
from dpexp.models.finetuning import WAYS as NAMED
from dpexp.models.finetuning import prepare
from dpexp.models.networks import random_network
from dpexp.schemas import CHOICES, GenerationConfig, ModelConfig, PeftConfig
from dpexp.tasks.decoding import continued

from .test_build import build, config, needs_minilm
from .ways import WAYS, batch_of, bundle_of, losses, peft_of, problem_of, stirred, vit

HEAD = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
CHANGES_NOTHING_AT_FIRST = ("full", "lora", "rgp", "rgp_history", "top2", "bitfit", "head")


def plain_name(name: str) -> str:
    """Without what the peft library puts around it."""
    return (
        name.removeprefix("base_model.model.")
        .removeprefix("base_model.")
        .replace("modules_to_save.default.", "")
    )


def test_every_choice_of_the_schema_is_a_way() -> None:
    assert set(CHOICES["peft.name"]) == {"full", *NAMED}


@pytest.mark.parametrize("way", WAYS)
def test_a_new_head_trains_under_every_way_and_the_rest_is_the_way_s_own(way: str) -> None:
    bundle = bundle_of("bert", way)
    trains = [name for name, p in bundle.model.named_parameters() if p.requires_grad]
    assert trains == bundle.trainable
    plain = {plain_name(name) for name in trains}
    assert plain >= HEAD
    marks = {
        "lora": (".lora_A.", ".lora_B."), "prefix": ("prompt_encoder.",), "prefix_direct": ("prompt_encoder.",),
        "prompt": ("prompt_encoder.",), "p_tuning": ("prompt_encoder.",),
        "rgp": (".left.", ".right."), "rgp_history": (".left.", ".right."), "top2": (".layer.1.",),
        "bitfit": (".bias",), "head": (), "adapters": (".down.", ".up.", "LayerNorm"), "full": ("",),
        "adapters_feed_forward": (".down.", ".up."),
    }[way]  # fmt: skip
    body = plain - HEAD
    assert all(any(mark in name for mark in marks) for name in body), body
    assert bool(body) == bool(marks)
    bundle.model(**batch_of("bert")).logits.square().sum().backward()
    assert {n for n, p in bundle.model.named_parameters() if p.grad is not None} == set(bundle.trainable)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("network", ["bert", "gpt2"])
def test_a_network_is_a_function_of_the_seed(network: str, way: str) -> None:
    if (network, way) == ("gpt2", "head"):
        pytest.skip("its head is tied")
    one, same = bundle_of(network, way).model, bundle_of(network, way).model
    batch = batch_of(network)
    assert torch.equal(losses(one, batch), losses(same, batch))
    for (name, a), (_, b) in zip(one.state_dict().items(), same.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("way", CHANGES_NOTHING_AT_FIRST)
def test_these_ways_begin_with_the_network_itself(way: str) -> None:
    batch = batch_of("bert")
    torch.testing.assert_close(
        losses(bundle_of("bert", way).model, batch),
        losses(bundle_of("bert", "full").model, batch),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("way", WAYS)
def test_moving_a_network_before_or_after_is_the_same(way: str) -> None:
    """To another dtype, which is what `.to()` can do on every machine; the device goes the same way."""
    after = bundle_of("bert", way).model.double()
    torch.manual_seed(0)
    bare = bundle_of("bert", "full").model.double()
    before, names = prepare(bare, ModelConfig(), peft_of(way), head="classifier", seed=1)
    assert names == [name for name, p in after.named_parameters() if p.requires_grad]
    assert {p.dtype for p in before.parameters()} == {torch.float64}
    before.load_state_dict(after.state_dict())
    batch, grads = batch_of("bert"), []
    for model in (after, before):
        clipper = attach(stirred(model), groups="layer", clip_norm=0.3)
        clipper.backward(losses(model, batch))
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        assert {gradient.dtype for gradient in grads[-1].values()} == {torch.float64}
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name])


@pytest.mark.parametrize("way", ["lora", "prefix", "rgp", "adapters", "bitfit", "top2"])
def test_a_moved_network_keeps_its_clipper(way: str) -> None:
    problem = problem_of("gpt2", way)
    clipper = attach(problem.model, groups="layer", clip_norm=0.3)
    clipper.backward(problem.losses(problem.model, problem.batch))
    double = {n: p.grad.float() for n, p in problem.model.named_parameters() if p.grad is not None}
    problem.model.zero_grad()
    problem.model.float()
    clipper.backward(problem.losses(problem.model, problem.batch))
    for name, parameter in problem.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, double[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parts_are_in_no_group_and_stay_as_they_were(way: str) -> None:
    bundle = bundle_of("bert", way)
    frozen = {n: p.detach().clone() for n, p in bundle.model.named_parameters() if not p.requires_grad}
    clipper = attach(bundle.model, groups="layer")
    assert {name for group in clipper.groups for name in group.params} == set(bundle.trainable)
    clipper.backward(losses(bundle.model, batch_of("bert")))
    torch.optim.SGD([p for p in bundle.model.parameters() if p.requires_grad], lr=0.1).step()
    now = dict(bundle.model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())


def test_the_prefix_of_li_and_liang_has_ten_million_parameters_on_gpt2() -> None:
    """Li et al. 2022, section 5.2: "10 million"; its LoRA of rank 4 has 0.15 million."""
    from transformers import GPT2Config

    with torch.device("meta"):
        network = random_network(GPT2Config(), "causal_lm")
        counts = []
        for peft in (
            PeftConfig(name="prefix", prefix_length=10, prefix_hidden=512),
            PeftConfig(name="lora", rank=4),
        ):
            adapted, _ = prepare(copy.deepcopy(network), ModelConfig(), peft, head="causal_lm", seed=0)
            counts.append(sum(p.numel() for p in adapted.parameters() if p.requires_grad))
    assert counts == [10 * 768 + 769 * 512 - 512 + 512 + 513 * 24 * 768, 12 * 4 * (768 + 3 * 768)]
    assert round(counts[0] / 1e6) == 10
    assert round(counts[1] / 1e6, 2) == 0.15


def test_top2_takes_what_follows_the_blocks_and_not_what_is_tied_below() -> None:
    gpt2 = set(bundle_of("gpt2", "top2").trainable)
    assert {name.split(".")[1] for name in gpt2} == {"h", "ln_f"}
    assert {name.split(".")[2] for name in gpt2 if ".h." in name} == {"1"}
    llama = set(bundle_of("llama", "top2").trainable)
    assert "model.norm.weight" in llama
    assert "model.embed_tokens.weight" not in llama
    both = build(config("bert"), PeftConfig(name="top2", blocks=2))
    assert [n for n, p in both.model.named_parameters() if not p.requires_grad] == [
        name for name, _ in both.model.named_parameters() if name.startswith("bert.embeddings.")
    ]
    with pytest.raises(UserError, match=r"peft\.blocks=3: .* has 2 blocks; give a number from 1 to 2"):
        build(config("bert"), PeftConfig(name="top2", blocks=3))


@pytest.mark.parametrize(
    ("network", "peft", "message"),
    [
        (
            "gpt2",
            {"name": "head"},
            "peft=head: nothing would train in GPT2LMHeadModel: .* tied to the embedding",
        ),
        (
            "llama",
            {"name": "head"},
            "peft=head: nothing would train in LlamaForCausalLM: .* tied to the embedding",
        ),
        ("llama", {"name": "bitfit"}, "peft=bitfit: LlamaForCausalLM has no bias parameters"),
        ("bert", {"name": "lora"}, "rank of at least 1"),
        ("bert", {"name": "lora", "rank": 2, "targets": ["quary"]}, r"peft\.targets=\['quary'\]"),
        ("bert", {"name": "prefix"}, r"peft\.prefix_length=0: a prefix needs at least 1 row"),
        ("bert", {"name": "rgp"}, r"peft\.rank=0: .* give a rank from 1 to 8"),
        ("bert", {"name": "top2"}, r"peft\.blocks=0"),
        ("bert", {"name": "adapters"}, r"peft\.rank=0: an adapter needs"),
        ("bert", {"name": "lorra"}, "peft=lorra is unknown: choose one of full, lora"),
    ],
)
def test_where_nothing_would_train_there_is_one_error(
    network: str, peft: dict[str, Any], message: str
) -> None:
    bare = bundle_of(network, "full").model
    head = "classifier" if network == "bert" else "causal_lm"
    with pytest.raises(UserError, match=message) as error:
        prepare(bare, ModelConfig(), PeftConfig(**peft), head=head, seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "full"])
@pytest.mark.parametrize("trainable", ["head", "bias", "attention+head"])
def test_two_answers_to_what_trains_are_refused(way: str, trainable: str) -> None:
    with pytest.raises(
        UserError, match=f"model.trainable={trainable.replace('+', '.')} .* contradict each other"
    ):
        build(config("bert", trainable=trainable), peft_of(way))


def test_a_network_that_takes_no_prefix_is_refused() -> None:
    for build_it in (lambda: vit("prefix"), lambda: build(config("distilbert"), peft_of("prefix"))):
        with pytest.raises(UserError, match="takes no further keys and values; take another peft"):
            build_it()


def test_a_network_that_takes_no_prompt_is_refused() -> None:
    for way in ("prompt", "p_tuning"):
        with pytest.raises(UserError, match=f"peft={way}: .* takes no vectors before its tokens"):
            vit(way)
        with pytest.raises(UserError, match="reads its last token, which it cannot tell from padding"):
            build(config("gpt2"), peft_of(way))


def test_a_prompt_begins_with_embeddings_of_the_vocabulary_and_its_logits_are_left_out() -> None:
    model = bundle_of("gpt2", "prompt").model
    table = model.get_input_embeddings().weight
    prompt = model.prompt_encoder["default"].embedding.weight
    assert all(bool((table == row).all(1).any()) for row in prompt)
    batch = batch_of("gpt2")
    assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


def test_an_input_too_long_for_the_prefix_is_refused() -> None:
    for architecture, rows in (
        ("bert", "max_position_embeddings"),
        ("roberta", "max_position_embeddings"),
        ("gpt2", "n_positions"),
    ):
        bundle = build(config(architecture, config={rows: 20}), peft_of("prefix"))
        longest = bundle.tokenizer.model_max_length - 3
        ids = torch.full((2, longest), 7)
        bundle.model(input_ids=ids, attention_mask=torch.ones_like(ids))
        more = torch.full((2, longest + 1), 7)
        with pytest.raises(UserError, match=rf"data\.max_length={longest} or less"):
            bundle.model(input_ids=more, attention_mask=torch.ones_like(more))


def test_bitfit_and_head_are_what_model_trainable_says() -> None:
    for way, choice in (("bitfit", "bias"), ("head", "head")):
        assert bundle_of("bert", way).trainable == build(config("bert", trainable=choice)).trainable
    masked = bundle_of("bert_mlm", "head").trainable
    assert masked == [f"cls.predictions.{n}" for n in (
        "bias", "transform.dense.weight", "transform.dense.bias", "transform.LayerNorm.weight", "transform.LayerNorm.bias",
    )]  # fmt: skip
    assert all(name.endswith("bias") for name in bundle_of("gpt2", "bitfit").trainable)


@pytest.mark.parametrize("way", ["lora", "prefix", "rgp", "adapters"])
def test_the_pretrained_head_of_a_language_model_stays(way: str) -> None:
    for network in ("gpt2", "bert_mlm"):
        assert not [n for n in bundle_of(network, way).trainable if "lm_head" in n or "cls." in n]


@needs_minilm
@pytest.mark.parametrize("way", ["lora", "prefix", "rgp", "adapters"])
def test_a_language_model_s_head_that_the_checkpoint_lacks_trains(way: str) -> None:
    minilm = ModelConfig(family="minilm", id="minilm", dropout=0.0)
    bundle = build_model(minilm, peft_of(way), head="masked_lm", num_labels=2, scale="demo", seed=1)
    trains = {plain_name(name) for name in bundle.trainable}
    assert {"cls.predictions.transform.dense.weight", "cls.predictions.transform.LayerNorm.bias"} <= trains
    assert not [name for name in trains if "embeddings" in name or "decoder.weight" in name]


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith(("prefix", "prompt", "p_tuning"))])
def test_image_classifiers(way: str) -> None:
    model, names = vit(way)
    assert any("classifier" in name for name in names)
    batch = batch_of("vit")
    model(**batch).logits.square().sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(names)


def test_timm_networks_know_their_head() -> None:
    import timm

    network = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=8, depth=2, num_heads=2, num_classes=3
    )
    for peft, expected in (
        (PeftConfig(name="head"), {"head"}),
        (PeftConfig(name="top2", blocks=1), {"blocks", "norm", "head"}),
    ):
        _, names = prepare(copy.deepcopy(network), ModelConfig(), peft, head="image_classifier", seed=0)
        assert {name.split(".")[0] for name in names} == expected
    adapted, names = prepare(
        copy.deepcopy(network),
        ModelConfig(),
        PeftConfig(name="adapters", rank=2),
        head="image_classifier",
        seed=0,
    )
    assert sum(isinstance(m, nn.Linear) for m in adapted.modules()) > sum(
        isinstance(m, nn.Linear) for m in network.modules()
    )
    assert {"head.weight", "head.bias"} <= set(names)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "head"])
@pytest.mark.parametrize("network", ["gpt2", "llama"])
def test_text_is_generated_as_it_was_trained(network: str, way: str) -> None:
    """Prompts of several lengths, padded on the left, with a cache: the tokens that the training's forward makes likeliest."""
    if (network, way) == ("llama", "bitfit"):
        pytest.skip("it has no biases")
    bundle = bundle_of(network, way)
    model = bundle.model.eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    prompts = [np.arange(6, 6 + count).astype(np.int32) for count in (2, 5, 9)]
    settings = GenerationConfig(num_beams=1, max_target=4)
    texts = continued(model, torch.device("cpu"), bundle.tokenizer, prompts, settings)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.from_numpy(prompt)[None].long()
        with torch.no_grad():
            for _ in range(4):
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        assert text.text == bundle.tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True).strip()
    beams = continued(
        model, torch.device("cpu"), bundle.tokenizer, prompts, GenerationConfig(num_beams=3, max_target=2)
    )
    for prompt, text in zip(prompts, beams, strict=True):
        likeliest = best_two(model, torch.from_numpy(prompt)[None].long(), 3, bundle.tokenizer.eos_token_id)
        assert text.text == bundle.tokenizer.decode(likeliest, skip_special_tokens=True).strip()


@torch.no_grad()
def best_two(model: nn.Module, ids: torch.Tensor, beams: int, end: int) -> list[int]:
    """The likeliest two tokens after one of the `beams` likeliest first ones, from plain forward passes."""
    first = model(input_ids=ids).logits[0, -1].log_softmax(-1)
    best: list[tuple[float, list[int]]] = []
    for value, token in zip(*first.topk(beams), strict=True):
        longer = torch.cat([ids, token[None, None]], 1)
        second, last = model(input_ids=longer).logits[0, -1].log_softmax(-1).max(-1)
        assert int(token) != end, "an end in between would make the lengths differ"
        best.append((float(value + second), [int(token), int(last)]))
    return max(best)[1]
