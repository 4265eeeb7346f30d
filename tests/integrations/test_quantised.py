"""LoRA on quantised weights: 4 bits (QLoRA) and 8 bits of bitsandbytes, and what others make, where they are installed."""

import copy

import peft
import pytest
import torch
import transformers
from torch import nn

from dpexp import PrivacyEngine
from dpexp.clipping import attach
from dpexp.errors import UserError


def of_bitsandbytes(bits, threshold=0.0):
    bnb = pytest.importorskip("bitsandbytes")

    def layer(old):
        if bits == 4:
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.float32
            )
            new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
        else:
            new = bnb.nn.Linear8bitLt(
                old.in_features, old.out_features, bias=False, has_fp16_weights=False, threshold=threshold
            )
            new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
        return new

    def quantise(model):
        replace(model, layer)
        # which quantises
        model.to("cpu")
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8

    return quantise


def of_torchao(config):
    torchao = pytest.importorskip("torchao.quantization")
    return lambda model: torchao.quantize_(
        model,
        getattr(torchao, config)(),
        lambda layer, name: isinstance(layer, nn.Linear) and "lm_head" not in name,
    )


def of_quanto(weights):
    quanto = pytest.importorskip("optimum.quanto")

    def quantise(model):
        quanto.quantize(model, weights=getattr(quanto, weights), exclude="lm_head")
        quanto.freeze(model)

    return quantise


def of_hqq(bits):
    hqq = pytest.importorskip("hqq.core.quantize")
    config = hqq.BaseQuantizeConfig(nbits=bits, group_size=64)
    return lambda model: replace(
        model,
        lambda old: hqq.HQQLinear(copy.deepcopy(old), config, compute_dtype=torch.float32, device="cpu"),
    )


def replace(model, layer):
    for parent in list(model.modules()):
        for name, old in list(parent.named_children()):
            if isinstance(old, nn.Linear) and name != "lm_head":
                setattr(parent, name, layer(old))


def network(quantise):
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        quantise(model)
        # factors that are not zero, so that both of each pair have a gradient
        lora = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        return peft.get_peft_model(model, lora)


def losses_of(model, ids):
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


IDS = torch.randint(1, 40, (6, 7), generator=torch.Generator().manual_seed(1))


KINDS = [
    (of_bitsandbytes, 4),
    (of_bitsandbytes, 8),
    (of_torchao, "Int8WeightOnlyConfig"),
    (of_torchao, "Int4WeightOnlyConfig"),
    (of_torchao, "Float8WeightOnlyConfig"),
    (of_quanto, "qint8"),
    (of_quanto, "qint4"),
    (of_hqq, 4),
]


@pytest.mark.parametrize(("library", "kind"), KINDS)
def test_clipped_sums_are_those_of_one_example_at_a_time(library, kind):
    model, clip_norm = network(library(kind)), 0.5
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = [torch.zeros_like(p) for p in trained]
    for row in IDS:
        gradients = torch.autograd.grad(losses_of(model, row[None])[0], trained)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient * min(1.0, clip_norm / float(norm))
    clipper = attach(model, clip_norm=clip_norm)
    report = clipper.backward(losses_of(model, IDS))
    assert (report.norms > clip_norm).any()
    assert not clipper.notes
    for parameter, total in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=0, atol=1e-5 * clip_norm)


@pytest.mark.parametrize(("library", "kind"), KINDS)
def test_it_trains_and_resumes(tmp_path, library, kind):
    quantise = library(kind)

    def engine():
        model = network(quantise)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        return PrivacyEngine(
            model, optimizer, list(IDS), folder=tmp_path, batch_size=3, steps=3, noise_multiplier=1.0, delta=1e-3,
            noise_seed=5, checkpoint_every=1,
        )  # fmt: skip

    def train(engine, steps):
        for batch in engine.batches(steps=steps):
            engine.step(losses_of(engine.model, batch))
        return torch.cat([p.detach().flatten() for p in engine.model.parameters() if p.requires_grad])

    with engine() as first:
        after_two = train(first, 2)
    with engine() as again:
        assert again.steps_taken == 2
        assert not torch.equal(train(again, 1), after_two)
        assert again.ledger.steps_charged == 3


def test_a_threshold_that_moves_whole_columns_is_refused():
    with pytest.raises(UserError, match="whole columns of the batch"):
        attach(network(of_bitsandbytes(8, threshold=6.0)), clip_norm=0.5)
