"""Results that depend on padding are refused; models of transformers are not, and a long text is looked at when it comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.versions import INSTALLED

V, PAD = 30, 3


def texts(masked: bool, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(4, V, (4, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 7:] = mask[2, 9:] = 0
    batch = {"input_ids": ids.masked_fill(mask == 0, PAD)}
    return batch | ({"attention_mask": mask} if masked else {})


def classifier(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    small = dict(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, pad_token_id=PAD,
        max_position_embeddings=40, hidden_dropout_prob=0.1,
    )  # fmt: skip
    if kind == "BigBird":
        small |= dict(block_size=2, num_random_blocks=1, attention_type="block_sparse")
    try:
        config = getattr(transformers, f"{kind}Config")(**small)
    except StrictDataclassError:
        pytest.skip("this version of transformers refuses its own defaults")
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    return model.train(), texts(masked=kind != "FNet")


@pytest.mark.parametrize("kind", ["FNet", "BigBird"])
def test_results_that_depend_on_padding_are_refused_unless_all_lengths_are_equal(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = classifier(kind)
    clipper = attach(model)
    with pytest.raises(UserError, match=r"padded further(.|\n)*task\.pad_to"):
        clipper.backward(
            F.cross_entropy(model(**batch).logits, torch.zeros(4, dtype=torch.long), reduction="none")
        )
    clipper.detach()
    clipper = attach(model, fixed_length=True)
    clipper.backward(
        F.cross_entropy(model(**batch).logits, torch.zeros(4, dtype=torch.long), reduction="none")
    )
    with pytest.raises(UserError, match="one length"):
        model(**{name: tensor[:, :10] for name, tensor in batch.items()})


TINY = dict(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    pad_token_id=PAD,
)
MODELS: dict[str, dict[str, Any]] = {
    "Bert": TINY,
    "ModernBert": TINY | dict(global_attn_every_n_layers=2, local_attention=8, cls_token_id=1, sep_token_id=2,
                              bos_token_id=1, eos_token_id=2),
    "Gemma2": TINY | dict(num_key_value_heads=1, head_dim=8, sliding_window=6),
    "Mixtral": TINY | dict(num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2),
    "Mamba": dict(vocab_size=V, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=PAD),
    "Bart": dict(vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                 decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=40,
                 pad_token_id=PAD, eos_token_id=2, bos_token_id=0, decoder_start_token_id=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_models_of_transformers_are_not_refused(kind: str, side: str) -> None:
    import transformers

    if kind == "Mixtral" and INSTALLED < (2, 9):
        pytest.skip("transformers asks torch 2.8 for a product of experts that it has on GPUs alone")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(
        getattr(transformers, f"{kind}Config")(**MODELS[kind])
    ).train()
    batch = texts(masked=True)
    if side == "left":
        if kind not in ("Gemma2", "Mixtral"):
            pytest.skip("counts positions from the left, or runs over the padding first")
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
    clipper = attach(model)
    hidden = model(**batch).last_hidden_state
    clipper.backward((hidden.square().mean(-1) * batch["attention_mask"]).sum(1))
    assert clipper.notes == []


LONG_TEXTS = {
    "Llama": dict(max_position_embeddings=48, rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=100.0)),
    "Phi3": dict(
        max_position_embeddings=400, original_max_position_embeddings=48,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=100.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
            original_max_position_embeddings=48,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "side", "lengths"),
    [("Llama", "right", (12, 100)), ("Phi3", "left", (12, 100)), ("Phi3", "right", (100, 12))],
)
def test_what_begins_with_a_long_text_is_seen_when_the_first_one_comes(
    kind: str, side: str, lengths: tuple[int, int]
) -> None:
    """Rotary embeddings whose frequencies go by the longest text of a batch: it moves the gradients of all others."""
    import transformers

    torch.manual_seed(0)
    settings = TINY | dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=2) | LONG_TEXTS[kind]
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}Model")(config).train()
    for parameter in model.parameters():
        parameter.data *= 10
    clipper = attach(model)

    def step_of(length: int) -> None:
        batch = texts(masked=True, length=length)
        batch = {name: tensor.flip(1) for name, tensor in batch.items()} if side == "left" else batch
        hidden = model(**batch).last_hidden_state
        clipper.backward((hidden.square().mean(-1) * batch["attention_mask"]).sum(1))

    step_of(lengths[0])
    with pytest.raises(UserError, match="padded further"):
        step_of(lengths[1])


def test_an_empty_batch_that_a_model_cannot_take_is_said_in_words() -> None:
    model, batch = classifier("Bert")
    clipper = attach(model)
    with pytest.raises(UserError, match=r"the batch is empty.*clipper\.backward\(torch\.zeros\(0\)\)"):
        model(**{name: tensor[:0] for name, tensor in batch.items()})
    clipper.backward(torch.zeros(0))
    assert all(not p.grad.any() for p in model.parameters())
    clipper.backward(
        F.cross_entropy(model(**batch).logits, torch.zeros(4, dtype=torch.long), reduction="none")
    )
