"""Bottleneck adapters: where they stand, what they compute, and that they reload."""

import json

import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.models import adapters
from dpexp.schemas import PeftConfig

from .test_build import SIZES, build, config
from .ways import batch_of, bundle_of, losses, peft_of, problem_of, stirred, vit

OUTPUTS = {
    "bert": ("attention.output.dense", "output.dense"),
    "roberta": ("attention.output.dense", "output.dense"),
    "distilbert": ("attention.out_lin", "ffn.lin2"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "vit": ("attention.o_proj", "mlp.fc2"),
}


def adapted_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, adapters.Adapted)]


def network_of(architecture: str, way: str) -> nn.Module:
    if architecture == "vit":
        return vit(way)[0]
    if architecture == "llama":
        return bundle_of("llama", way).model
    return build(config(architecture), peft_of(way)).model


@pytest.mark.parametrize("architecture", OUTPUTS)
def test_they_stand_behind_both_sublayers_of_every_block_or_the_second(architecture: str) -> None:
    for way, outputs in (
        ("adapters", OUTPUTS[architecture]),
        ("adapters_feed_forward", OUTPUTS[architecture][1:]),
    ):
        model = network_of(architecture, way)
        names = adapted_names(model)
        assert len(names) == 2 * len(outputs)
        for block in ("0.", "1."):
            assert sum(name.endswith(tuple(block + output for output in outputs)) for name in names) == len(
                outputs
            )
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        norms = [name for name in trained if "norm" in name.lower() or ".ln_" in name]
        assert bool(norms) == (way == "adapters")
        below = [name for name in trained if ".base." in name]
        assert below == []


def test_they_begin_as_nearly_the_identity() -> None:
    batch = batch_of("bert")
    adapted, plain = (bundle_of("bert", way).model.double() for way in ("adapters", "full"))
    difference = (losses(adapted, batch) - losses(plain, batch)).abs().max()
    assert 0 < difference < 1e-2


def test_the_formula() -> None:
    torch.manual_seed(0)
    base = nn.Linear(4, 6)
    adapted = stirred(adapters.Adapted(base, 6, 3))
    x = torch.randn(2, 5, 4)
    h = base(x)
    inner = h @ adapted.down.weight.t() + adapted.down.bias
    gelu = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
    torch.testing.assert_close(adapted(x), h + gelu @ adapted.up.weight.t() + adapted.up.bias)
    assert adapted.weight is base.weight


def test_what_was_saved_goes_back_onto_the_same_network_alone(tmp_path) -> None:
    trained = problem_of("gpt2", "adapters").model.float()
    batch = batch_of("gpt2")
    adapters.save_adapters(trained, tmp_path, "somewhere")
    assert json.loads((tmp_path / "adapters.json").read_text())["network"] == "somewhere"
    loaded = adapters.load_adapters(bundle_of("gpt2", "full").model, tmp_path)
    assert torch.equal(losses(loaded, batch), losses(trained, batch))
    assert not torch.equal(losses(loaded, batch), losses(bundle_of("gpt2", "full").model, batch))
    with pytest.raises(UserError, match="it is another network"):
        adapters.load_adapters(bundle_of("bert", "full").model, tmp_path)
    wider = {**SIZES["gpt2"], "n_embd": 16}
    with pytest.raises(UserError, match="does not fit GPT2ForSequenceClassification"):
        adapters.load_adapters(build(config("gpt2", config=wider)).model, tmp_path)
    with pytest.raises(UserError, match="holds no adapters"):
        adapters.load_adapters(bundle_of("gpt2", "full").model, tmp_path / "elsewhere")


def test_what_cannot_be() -> None:
    with pytest.raises(UserError, match=r"peft\.rank=0: an adapter needs a bottleneck"):
        build(config("bert"), PeftConfig(name="adapters"))
    with pytest.raises(UserError, match=r"peft\.placement=behind is unknown"):
        build(config("bert"), PeftConfig(name="adapters", rank=2, placement="behind"))
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(UserError, match="is no transformer block"):
        adapters.add_adapters(plain, PeftConfig(name="adapters", rank=2), [])
