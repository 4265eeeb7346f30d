"""Small models of the kinds that people train, and one run of `PrivacyEngine` on each, to compare numbers of processes."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine
from dpexp.clipping.devices import device_groups
from dpexp.training import release

EXAMPLES, TOKENS, VOCABULARY = 24, 6, 23


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str = "mlp"
    clip: str = "flat"  # flat | layer | adaptive | device: a threshold for each half of the blocks
    peft: str = "full"  # full | lora
    precision: str = "fp32"  # fp32 | bf16
    pieces: int = 1  # physical batches of a rank
    engine: str = "auto"
    batch_size: float = 9.0
    checkpointing: bool = False

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=TOKENS, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


class Normed(nn.Module):
    """Blocks whose weights are computed from their parameters."""

    def __init__(self) -> None:
        super().__init__()
        linears = (nn.utils.parametrizations.weight_norm(nn.Linear(10, 10)) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(linear, nn.Tanh()) for linear in linears)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS = {"mlp": mlp, "gpt2": gpt2, "llama": llama, "vit": vit, "bert": bert, "normed": Normed}
TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "llama": ["q_proj", "v_proj"],
    # what older and newer versions of transformers call them
    "vit": r".*\.(query|value|q_proj|v_proj)",
    "mlp": ["0", "2"],
}


def made(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = MODELS[case.model]()
        if case.peft == "lora":
            import peft

            config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=TARGETS[case.model])
            model = peft.get_peft_model(model, config)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


@functools.cache
def dataset(model: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(3, (EXAMPLES,), generator=generator)
    if model in ("mlp", "normed"):
        return TensorDataset(torch.randn(EXAMPLES, 10, generator=generator), labels)
    if model == "vit":
        return TensorDataset(torch.randn(EXAMPLES, 3, 8, 8, generator=generator), labels)
    return TensorDataset(torch.randint(VOCABULARY, (EXAMPLES, TOKENS), generator=generator), labels)


def losses(case: Case, model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
        if case.model not in ("gpt2", "llama"):
            found = model(x)
            logits = getattr(found, "logits", found)
            return F.cross_entropy(logits.float(), y, reduction="none")
        logits = model(input_ids=x).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none").mean(1)


class NumberedNoise:
    """The same noise for the n-th release of every run, whatever its sums: noise is seeded with them, and rounding changes them.

    Keeps what was summed before the noise. Of a shard, its part of the noise of the whole.
    """

    def __init__(self) -> None:
        self.released: list[list[Tensor]] = []

    def __call__(self, tensors: list[Tensor], std: Any, generator: Any = None) -> None:
        stds = std if isinstance(std, list) else [std] * len(tensors)
        self.released.append([whole(tensor).clone() for tensor in tensors])
        own = torch.Generator().manual_seed(len(self.released))
        for tensor, sigma in zip(tensors, stds, strict=True):
            noise = torch.randn(tensor.shape, generator=own, dtype=torch.float64).to(tensor.dtype) * sigma
            if hasattr(tensor, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                noise = distribute_tensor(noise, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.add_(noise)


def whole(tensor: Tensor) -> Tensor:
    """A tensor, or all shards of one together."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(
    case: Case, folder: Path, wrap: Any = None, steps: int = 3, ranks: int = 1, **changes: Any
) -> dict[str, Any]:
    """Train a case for some steps; weights, thresholds, sums before the noise, and ε.

    Args:
        case: what is trained.
        folder: of the run.
        wrap: model -> what the loop calls and the engine is given.
        steps: of the training.
        ranks: how many processes share a batch.
        changes: of the engine's arguments.
    """
    noise = NumberedNoise()
    before, release.add_gaussian_ = release.add_gaussian_, noise
    try:
        model = made(case)
        groups: Any = "flat" if case.clip == "flat" else "layer"
        if case.clip == "device":
            groups = device_groups(model, 2)
        model = wrap(model) if wrap is not None else model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        settings: dict[str, Any] = dict(
            batch_size=case.batch_size, steps=steps, noise_multiplier=0.5, delta=1e-3, noise_seed=11, checkpoint_every=0,
            clip_norm=0.5, groups=groups,
            target_quantile=0.5 if case.clip == "adaptive" else None, engine=case.engine,
        )  # fmt: skip
        size = 64 if case.pieces == 1 else -(-int(case.batch_size) // (case.pieces * ranks))
        with PrivacyEngine(
            model, optimizer, dataset(case.model), folder=folder, **(settings | changes)
        ) as engine:
            for batch in engine.batches(physical_batch_size=size):
                engine.step(losses(case, model, batch))
            return {
                "weights": {
                    n: whole(p).clone() for n, p in engine.model.named_parameters() if p.requires_grad
                },
                "thresholds": engine.policy.values.clone(),
                "released": noise.released,
                "epsilon": engine.epsilon(),
                "charged": engine.ledger.steps_charged,
                "loss": engine.private_loss,
            }
    finally:
        release.add_gaussian_ = before


def check_same(found: dict[str, Any], expected: dict[str, Any], case: Case) -> None:
    """All that one process and several must agree on."""
    tolerance = 1e-3 if case.precision == "bf16" else 1e-6
    assert found["epsilon"] == expected["epsilon"]
    assert found["charged"] == expected["charged"]
    torch.testing.assert_close(found["thresholds"], expected["thresholds"], rtol=0, atol=0)
    assert len(found["released"]) == len(expected["released"])
    for step, (ours, theirs) in enumerate(zip(found["released"], expected["released"], strict=True)):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            gap = float((a.double() - b.double()).norm())
            # the clipped sum of a batch has about this norm
            assert gap <= tolerance * max(1.0, float(b.double().norm())), (str(case), step, number, gap)
    for name, value in expected["weights"].items():
        gap = float((found["weights"][name] - value).abs().max())
        assert gap <= 3 * tolerance, (str(case), name, gap)
    assert abs(found["loss"] - expected["loss"]) <= 10 * tolerance * abs(expected["loss"]), str(case)
