"""What trains: as He et al. App. A.2 and BiTFiT say, in every family, and never silently nothing."""

import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.models import build_model
from dpexp.models.lora import query_value_names
from dpexp.models.trainable import set_trainable
from dpexp.schemas import PeftConfig

from .test_build import SIZES, build, config

HEADS = {
    "bert": ("bert.pooler.", "classifier."),
    "roberta": ("classifier.",),
    "distilbert": ("pre_classifier.", "classifier."),
    "gpt2": ("score.",),
}
ATTENTION = {"bert": ".attention.", "roberta": ".attention.", "distilbert": ".attention.", "gpt2": ".attn."}


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize("choice", ["all", "attention+head", "bias", "head"])
def test_the_choice_is_what_trains_and_nothing_else(architecture: str, choice: str) -> None:
    bundle = build(config(architecture, trainable=choice))
    names = [name for name, _ in bundle.model.named_parameters()]

    def expected(name: str) -> bool:
        in_head = name.startswith(HEADS[architecture])
        return {
            "all": True,
            "head": in_head,
            "bias": in_head or name.endswith(".bias"),
            "attention+head": in_head or ATTENTION[architecture] in name,
        }[choice]

    assert bundle.trainable == [name for name in names if expected(name)]
    trains = [name for name, parameter in bundle.model.named_parameters() if parameter.requires_grad]
    assert trains == bundle.trainable
    batch = bundle.tokenizer(["the film is superb", "dull"], padding=True, return_tensors="pt")
    bundle.model(**batch).logits.square().sum().backward()
    assert {name for name, p in bundle.model.named_parameters() if p.grad is not None} == set(
        bundle.trainable
    )


@pytest.mark.parametrize(
    ("network", "choice", "message"),
    [
        (nn.Linear(2, 2), "head", "nothing would train in Linear"),
        (nn.Linear(2, 2), "attention+head", "Linear has no head apart from a base model"),
        (nn.ReLU(), "all", "nothing would train in ReLU"),
        (nn.Linear(2, 2), "heads", r"model\.trainable=heads is unknown"),
    ],
)
def test_nothing_to_train_is_an_error(network: nn.Module, choice: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        set_trainable(network, choice)


def test_no_biases_is_an_error() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(UserError, match="no bias parameters below the head"):
        build(config("llama", config={**sizes, "num_key_value_heads": 2}, trainable="bias"))


@pytest.mark.parametrize("architecture", SIZES)
def test_lora_trains_query_value_and_the_head(architecture: str) -> None:
    lora = PeftConfig(name="lora", rank=2, alpha=4)
    plain = build(config(architecture, dropout=0.0, attention_dropout=0.0), seed=1)
    one, same, other = (
        build(config(architecture, dropout=0.0, attention_dropout=0.0), lora, seed=s) for s in (1, 1, 2)
    )
    adapted = {"distilbert": ("q_lin", "v_lin"), "gpt2": ("c_attn",)}.get(architecture, ("query", "value"))
    assert query_value_names(plain.model) == sorted(adapted)
    for name in one.trainable:
        of_head = ".modules_to_save." in name and any(f".{head}" in name for head in HEADS[architecture])
        assert of_head or any(f".{layer}.lora_" in name for layer in adapted), name
    assert len([name for name in one.trainable if ".lora_A." in name]) == 2 * len(adapted)
    assert any(".modules_to_save." in name for name in one.trainable)
    # B starts at zero: the adapted network computes what the plain one does
    batch = plain.tokenizer(["the film is superb", "dull"], padding=True, return_tensors="pt")
    torch.testing.assert_close(one.model(**batch).logits, plain.model(**batch).logits)
    drawn = [
        dict(bundle.model.named_parameters())[next(n for n in one.trainable if ".lora_A." in n)]
        for bundle in (one, same, other)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_lora_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"peft\.targets=\['quary'\].*key.*query.*value"):
        build(config(), PeftConfig(name="lora", rank=2, targets=["quary"]))
    with pytest.raises(UserError, match="rank of at least 1"):
        build(config(), PeftConfig(name="lora"))
    with pytest.raises(UserError, match="contradict each other"):
        build(config(trainable="head"), PeftConfig(name="lora", rank=1))
    with pytest.raises(UserError, match="peft=lorra is unknown"):
        build(config(), PeftConfig(name="lorra"))


def test_lora_on_chosen_targets() -> None:
    bundle = build_model(
        config(), PeftConfig(name="lora", rank=1, targets=["key"]), num_labels=2, scale="demo", seed=0
    )
    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in bundle.trainable if ".lora_" in name}
    assert layers == {"key"}
