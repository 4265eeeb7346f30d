"""QLoRA: LoRA on 4-bit weights of bitsandbytes, on the CPU as on a GPU."""

import peft
import pytest
import torch
import transformers
from torch import nn

from dpexp import PrivacyEngine
from dpexp.clipping import attach

bnb = pytest.importorskip("bitsandbytes")


def network():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear) and name != "lm_head":
                    small = bnb.nn.Linear4bit(
                        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32
                    )
                    small.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                    setattr(parent, name, small)
        model = model.to("cpu")  # quantises
        model.is_loaded_in_4bit = True
        # factors that are not zero, so that both of each pair have a gradient
        lora = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        return peft.get_peft_model(model, lora)


def losses_of(model, ids):
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


IDS = torch.randint(1, 40, (6, 7), generator=torch.Generator().manual_seed(1))


def test_clipped_sums_are_those_of_one_example_at_a_time():
    model, clip_norm = network(), 0.5
    assert type(model.base_model.model.model.layers[0].self_attn.q_proj).__module__ == "peft.tuners.lora.bnb"
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
    for parameter, total in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=0, atol=1e-5 * clip_norm)


def test_it_trains_and_resumes(tmp_path):
    def engine():
        model = network()
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
