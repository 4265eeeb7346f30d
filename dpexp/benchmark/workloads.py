"""What is trained in a benchmark: a model with random weights, a fixed batch of random data, one loss per example.

The classes are those that people use (transformers, peft, timm, torch); nothing is downloaded. Dropout is off, so that every
method computes the same thing. Position ids are given as ``[B, T]``: the libraries beside ours cannot handle the ``[1, T]``
that the classes would make for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpexp.errors import UserError, did_you_mean
from dpexp.tasks.target_loss import example_losses

SIZES = ("full", "tiny")
TINY_BATCH = 4

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Parts:
    """What a family of workloads makes of its sizes.

    model: a new network, drawn from torch's global generator, float32, in training mode.
    batch: (B, generator) -> inputs and labels, the first dimension of every tensor being the batch.
    losses: (network, batch) -> ``[B]``.
    lean: the same with the cross-entropy of this project's tasks (`dpexp.tasks.target_loss`), where that is another way.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    losses: Callable[[Callable[..., Any], Batch], Tensor]
    lean: Callable[[Any, Batch], Tensor] | None = None


@dataclass(frozen=True)
class Workload:
    """One row of `WORKLOADS`: a family, its sizes, the sizes for tests, and the batch."""

    family: Callable[..., Parts]
    batch_size: int
    full: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)

    def parts(self, size: str) -> Parts:
        """At size "tiny" a network of the same structure that takes milliseconds."""
        return self.family(**{**self.full, **(self.tiny if size == "tiny" else {})})

    def default_batch(self, size: str) -> int:
        return TINY_BATCH if size == "tiny" else self.batch_size


def workload_named(name: str) -> Workload:
    """Look a workload up: NAME, or NAME@B with another batch. A wrong name gets the list and the closest match."""
    plain, at, batch = name.partition("@")
    if plain not in WORKLOADS:
        raise UserError(f"workloads=[{name}] is not known{did_you_mean(plain, list(WORKLOADS))}")
    if at and not (batch.isdecimal() and int(batch)):
        raise UserError(f"workloads=[{name}]: after the @ stands a batch, as in {plain}@16")
    workload = WORKLOADS[plain]
    return replace(workload, batch_size=int(batch)) if at else workload


def _transformer(family: str, head: str, **sizes: Any) -> nn.Module:
    """A network of transformers: GPT2LMHeadModel of a GPT2Config, say."""
    import transformers

    network: nn.Module = getattr(transformers, f"{family}{head}")(
        getattr(transformers, f"{family}Config")(**sizes)
    )
    return network


# of a language model that only trains
_TRAINS = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def gpt2_network(**sizes: Any) -> nn.Module:
    """GPT-2 without dropout, its sizes by the names of GPT2Config."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _transformer("GPT2", "LMHeadModel", **dropout, **_TRAINS, **sizes)


def gpt2(
    *, layers: int, width: int, heads: int, vocabulary: int, length: int, tied: bool, rank: int = 0
) -> Parts:
    """GPT-2 with a loss on every token; `rank` > 0: LoRA on the attention's input projection, the rest frozen."""

    def model() -> nn.Module:
        network = gpt2_network(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=max(length, 1024),
            tie_word_embeddings=tied,
        )  # fmt: skip
        return with_lora(network, rank) if rank else network

    def lean(network: Any, batch: Batch) -> Tensor:
        every = {"positions": batch["position_ids"], "targets": batch["labels"]}
        return example_losses(network, {k: x for k, x in batch.items() if k != "labels"} | every)

    return replace(_language(model, vocabulary, length, positions=True), lean=lean)


def _language(model: Callable[[], nn.Module], vocabulary: int, length: int, positions: bool = False) -> Parts:
    """Random texts with a loss on every token; ``positions``: their position ids are given, see above."""

    def batch(size: int, generator: torch.Generator) -> Batch:
        return {
            "input_ids": torch.randint(vocabulary, (size, length), generator=generator),
            **({"position_ids": torch.arange(length).repeat(size, 1)} if positions else {}),
            "labels": torch.randint(vocabulary, (size, length), generator=generator),
        }

    def losses(network: Callable[..., Any], batch: Batch) -> Tensor:
        logits = network(**{name: rows for name, rows in batch.items() if name != "labels"}).logits
        per_token = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return per_token.view(batch["labels"].shape).mean(1)

    return Parts(model, batch, losses)


def with_lora(network: Any, rank: int) -> nn.Module:
    """Wrap GPT-2 by PEFT: LoRA of its joint maps to queries, keys and values, away from its start at zero."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        network,
        LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True),
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            # it starts at zero, and then no gradient reaches A
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return wrapped


def llama(*, layers: int, width: int, heads: int, vocabulary: int, length: int) -> Parts:
    """Llama with a loss on every token, half as many heads of keys as of queries, and a small vocabulary."""

    def model() -> nn.Module:
        return _transformer(
            "Llama", "ForCausalLM", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
            num_key_value_heads=heads // 2, intermediate_size=8 * width // 3, vocab_size=vocabulary,
            max_position_embeddings=length, **_TRAINS,
        )  # fmt: skip

    return _language(model, vocabulary, length)


def mixtral(*, layers: int, width: int, heads: int, experts: int, vocabulary: int, length: int) -> Parts:
    """Mixtral with two experts for each token and a loss on every token."""

    def model() -> nn.Module:
        return _transformer(
            "Mixtral", "ForCausalLM", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
            num_key_value_heads=heads // 2, intermediate_size=2 * width, num_local_experts=experts, vocab_size=vocabulary,
            max_position_embeddings=length, **_TRAINS,
        )  # fmt: skip

    return _language(model, vocabulary, length)


def roberta(*, layers: int, width: int, heads: int, vocabulary: int, length: int) -> Parts:
    """RoBERTa with a head for two classes; the second half of the rows is padded from the middle on."""

    def model() -> nn.Module:
        return _transformer(
            "Roberta", "ForSequenceClassification", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
            intermediate_size=4 * width, vocab_size=vocabulary, max_position_embeddings=max(length, 512) + 2, type_vocab_size=1,
            pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
        )  # fmt: skip

    def batch(size: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(4, vocabulary, (size, length), generator=generator)
        mask = torch.ones(size, length, dtype=torch.long)
        mask[size // 2 :, length // 2 :] = 0
        return {
            "input_ids": tokens.masked_fill(mask == 0, 1),
            "attention_mask": mask,
            "labels": torch.randint(2, (size,), generator=generator),
        }

    def losses(network: Callable[..., Any], batch: Batch) -> Tensor:
        logits = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits, batch["labels"], reduction="none")

    return Parts(model, batch, losses)


class _Recurrent(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module], width: int, vocabulary: int, classes: int):
        super().__init__()
        self.embedding, self.output = nn.Embedding(vocabulary, width), nn.Linear(width, classes)
        self.recurrent = layer(width, width, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(tokens))[0][:, -1])


def lstm(*, width: int, vocabulary: int, length: int, opacus: bool, classes: int = 4) -> Parts:
    """A classifier of texts with one recurrent layer, torch's; `opacus`: its DPLSTM, without which Opacus takes none."""

    def model() -> nn.Module:
        if opacus:
            from opacus.layers import DPLSTM

            return _Recurrent(DPLSTM, width, vocabulary, classes)
        return _Recurrent(nn.LSTM, width, vocabulary, classes)

    return _classified(model, (length,), classes, words=vocabulary)


def _classified(
    model: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, words: int = 0
) -> Parts:
    """Random inputs of one shape, one of so many classes each: numbers, or with ``words`` so many different ones."""

    def batch(size: int, generator: torch.Generator) -> Batch:
        drawn = (size, *shape)
        return {
            "inputs": torch.randint(words, drawn, generator=generator)
            if words
            else torch.randn(drawn, generator=generator),
            "labels": torch.randint(classes, (size,), generator=generator),
        }

    def losses(network: Callable[..., Any], batch: Batch) -> Tensor:
        return F.cross_entropy(network(batch["inputs"]), batch["labels"], reduction="none")

    return Parts(model, batch, losses)


def mlp(*, depth: int, width: int, inputs: int = 3072, classes: int = 100) -> Parts:
    """`depth` hidden layers and a classifier on flattened CIFAR images (Bu et al., Figure 2).

    Initialised as He et al. (2015): with torch's own start nothing of an image is left behind 50 layers, and a clipper looks for
    it in each of its first steps.
    """

    def model() -> nn.Module:
        sizes = [inputs, *[width] * depth]
        hidden = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        for layer in hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return nn.Sequential(*[m for h in hidden for m in (h, nn.ReLU())], nn.Linear(width, classes))

    return _classified(model, (inputs,), classes)


def vit(*, layers: int, width: int, heads: int, image: int, bare: bool, classes: int = 1000) -> Parts:
    """timm's vision transformer on patches of 16 x 16.

    `bare`: with its class token and position table, parameters that belong to no layer. The workload that compares libraries
    does without (the mean of the patches, no positions), because most of them drop such parameters.
    """

    def model() -> nn.Module:
        from timm.models.vision_transformer import VisionTransformer

        token: dict[str, Any] = (
            {} if bare else {"class_token": False, "global_pool": "avg", "pos_embed": "none"}
        )
        return VisionTransformer(
            img_size=image,
            patch_size=16,
            embed_dim=width,
            depth=layers,
            num_heads=heads,
            num_classes=classes,
            **token,
        )

    return _classified(model, (3, image, image), classes)


def by_name(*, name: str, image: int, classes: int = 1000, settings: dict[str, Any] | None = None) -> Parts:
    """A network of timm by its name, without dropout; ResNets with GroupNorm, because BatchNorm couples examples."""

    def model() -> nn.Module:
        import timm

        made: nn.Module = timm.create_model(name, num_classes=classes, drop_rate=0.0, **(settings or {}))
        return made

    return _classified(model, (3, image, image), classes)


def wrn(*, depth: int, widening: int, image: int = 32, classes: int = 10) -> Parts:
    """A wide residual network with GroupNorm (Zagoruyko & Komodakis 2016; De et al. 2022 without weight standardisation)."""
    return _classified(lambda: WideResNet(depth, widening, 16, classes), (3, image, image), classes)


class WideResNet(nn.Module):
    """(depth - 4) / 6 blocks in each of three stages of width base·widening·(1, 2, 4); 16 groups in every norm."""

    def __init__(self, depth: int, widening: int, base: int, classes: int):
        super().__init__()
        width = base
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        blocks = []
        for stage in range(3):
            wider = base * widening * 2**stage
            for number in range((depth - 4) // 6):
                blocks.append(_Residual(width, wider, stride=2 if stage and not number else 1))
                width = wider
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(16, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(x.mean((2, 3)))


class _Residual(nn.Module):
    """Norm, ReLU, convolution, twice, beside a shortcut; where the shape changes the shortcut is a 1 x 1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(16, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(16, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(y)
        return kept + self.conv2(F.relu(self.norm2(self.conv1(y))))


_TINY_TEXT = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 97, "length": 12}
_TINY_MLP = {"depth": 3, "width": 24, "inputs": 20, "classes": 7}
_TINY_LSTM = {"width": 8, "vocabulary": 11, "length": 5}
_TINY_VIT = {"layers": 2, "width": 32, "heads": 2, "image": 48, "classes": 7}


def _gpt2(layers: int, width: int, *, tied: bool, rank: int = 0) -> Workload:
    full = {"layers": layers, "width": width, "heads": width // 64, "vocabulary": 50257, "length": 100}
    return Workload(gpt2, 8, full | {"tied": tied, "rank": rank}, _TINY_TEXT)


def _llama(length: int) -> Workload:
    """Two blocks, and as many tokens in a batch whatever the length."""
    full = {"layers": 2, "width": 768, "heads": 12, "vocabulary": 1000, "length": length}
    return Workload(llama, max(1, 4096 // length), full, _TINY_TEXT)


def _roberta(layers: int, width: int, length: int) -> Workload:
    full = {"layers": layers, "width": width, "heads": width // 64, "vocabulary": 50265, "length": length}
    return Workload(roberta, 8, full, _TINY_TEXT)


def _resnet(depth: int) -> Workload:
    settings = {"norm_layer": "groupnorm"}
    tiny = settings | {"channels": (64, 64, 64, 64), "layers": (1, 1, 1, 1), "stem_width": 32}
    return Workload(
        by_name, 32, {"name": f"resnet{depth}", "image": 224, "settings": settings},
        {"name": f"resnet{depth}", "image": 16, "classes": 7, "settings": tiny},
    )  # fmt: skip


_LSTM = {"width": 256, "vocabulary": 5000, "length": 64}
_VIT = {"layers": 6, "width": 384, "heads": 6, "image": 224}

WORKLOADS: dict[str, Workload] = {
    # seven that run everywhere, in a few GiB
    "gpt2": _gpt2(6, 768, tied=False),
    "gpt2_tied": _gpt2(6, 768, tied=True),
    "gpt2_lora": _gpt2(6, 768, tied=False, rank=4),
    "roberta": _roberta(6, 768, 128),
    "wrn": Workload(wrn, 32, {"depth": 16, "widening": 4}, {"depth": 10, "widening": 1, "image": 8}),
    "mlp": Workload(mlp, 128, {"depth": 10, "width": 1000}, _TINY_MLP),
    "vit": Workload(vit, 8, _VIT | {"bare": False}, _TINY_VIT),
    # with bare parameters
    "vit_timm": Workload(vit, 8, _VIT | {"bare": True}, _TINY_VIT),
    # recurrent, and the same for Opacus
    "lstm": Workload(lstm, 32, _LSTM | {"opacus": False}, _TINY_LSTM),
    "lstm_opacus": Workload(lstm, 32, _LSTM | {"opacus": True}, _TINY_LSTM),
    # eight experts, of which each token meets two
    "mixtral": Workload(
        mixtral,
        8,
        {"layers": 4, "width": 512, "heads": 8, "experts": 8, "vocabulary": 5000, "length": 128},
        _TINY_TEXT | {"experts": 3},
    ),
    # how cost grows with the length of a text
    "llama_256": _llama(256),
    "llama_1024": _llama(1024),
    "llama_4096": _llama(4096),
    "llama_16384": _llama(16384),
    # the papers' own: He et al., Figure 1 and Li et al., Figure 5 (GPT-2 with T = 100); Bu et al., Figures 2 and 5, Table 1
    "gpt2_124m": _gpt2(12, 768, tied=True),
    "gpt2_medium": _gpt2(24, 1024, tied=True),
    "gpt2_large": _gpt2(36, 1280, tied=True),
    "roberta_base": _roberta(12, 768, 128),
    "roberta_large": _roberta(24, 1024, 256),
    "mlp_deep": Workload(mlp, 128, {"depth": 50, "width": 1000}, _TINY_MLP | {"depth": 6}),
    "mlp_wide": Workload(mlp, 128, {"depth": 10, "width": 5000}, _TINY_MLP | {"width": 48}),
    # Bu et al., Figures 6 and 7, Tables 4 and 8
    "resnet18": _resnet(18),
    "resnet34": _resnet(34),
    "resnet50": _resnet(50),
    "vgg11": Workload(
        by_name, 16, {"name": "vgg11", "image": 224}, {"name": "vgg11", "image": 32, "classes": 7}
    ),
    "beit_large": Workload(
        by_name,
        8,
        {"name": "beit_large_patch16_224", "image": 224},
        {
            "name": "beit_base_patch16_224",
            "image": 32,
            "classes": 7,
            "settings": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2},
        },
    ),
}
