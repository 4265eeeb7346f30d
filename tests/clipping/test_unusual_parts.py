"""Parts that libraries bring: attention biases, embeddings, scripted parts, nested tensors, adapters; exact, or refused."""

from __future__ import annotations

import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.exact_steps import WIDTH, exact, rows, square
from tests.clipping.test_engines import check, naive
from tests.clipping.zoo import Problem


class LearnedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.out = nn.Parameter(torch.randn(1, 1, 6, 6)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        k = x[:, None]
        return self.out(F.scaled_dot_product_attention(k, k, k, self.bias, 0.5).sum((1, 2)))


@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
def test_dropout_is_drawn_once(engine: str) -> None:
    model, batch = LearnedBias().double(), rows(3, 6)
    params = list(model.parameters())
    torch.manual_seed(5)
    plain = torch.autograd.grad(square(model, batch).sum(), params)
    clipper = attach(model, rule="none", engine=engine)
    torch.manual_seed(5)
    clipper.backward(square(model, batch))
    for p, g in zip(params, plain, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_in_place_operations_may_follow_a_layer_whose_output_is_a_view() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 2)
    )  # fmt: skip
    batch = {"input": torch.randn(3, 2, 6, 6, dtype=torch.float64)}
    exact(model, [batch, batch], "auto")


def test_a_model_with_learned_attention_biases() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4, drop_path_rate=0.0
    )  # fmt: skip
    model = transformers.SwinForImageClassification(config)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    exact(model, [batch, batch], "auto", lambda m, b: (m(**b).logits - 0.3).pow(2).sum(1))


def test_parameters_read_outside_of_a_forward_are_themselves() -> None:
    model = LearnedBias()
    attach(model).backward(square(model.double(), rows(2, 6)))
    assert model.bias.grad is not None
    torch.optim.SGD([model.bias], lr=0.1)


TEXT = {"vocab_size": 20, "num_hidden_layers": 1, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "init_std": 0.3}  # fmt: skip


@pytest.mark.parametrize("name", ["OPT", "Bart"])
@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_embeddings_with_a_forward_of_their_own(name: str, engine: str) -> None:
    """Scaled and shifted lookups, in BART of one table by encoder, decoder and head: no loop, and no V x d tensor."""
    transformers = pytest.importorskip("transformers")
    if name == "OPT":
        options = {"hidden_size": 8, "num_attention_heads": 2, "ffn_dim": 12, "word_embed_proj_dim": 8}
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**TEXT, **options))
    else:
        sides = {f"{side}_{part}": n for side in ("encoder", "decoder")
                 for part, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 12))}  # fmt: skip
        model = transformers.BartForConditionalGeneration(
            transformers.BartConfig(**TEXT, **sides, d_model=8, scale_embedding=True)
        )
    ids = torch.randint(3, 20, (3, 6))
    mask = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]
    batch = {"input_ids": ids.masked_fill(~mask, 2), "attention_mask": mask.long()}
    batch |= {"decoder_input_ids": ids} if name == "Bart" else {}
    problem = Problem(model.double(), batch, lambda m, b: m(**b).logits.pow(2).mean((1, 2)))
    per_example = naive(problem)
    clipper = attach(model, clip_norm=0.5, engine=engine)
    check(problem, clipper, per_example)
    assert "one back-propagation per example" not in clipper.choices.values()


def test_a_scripted_part_keeps_what_it_has_and_is_looked_at() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.Tanh()))
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 2)).double()
    model = nn.Sequential(scripted, nn.Linear(5, 2)).double()
    plain.load_state_dict(model.state_dict())
    batch = {"x": torch.randn(4, 4, dtype=torch.float64)}

    def losses(net: nn.Module, rows: dict[str, Tensor]) -> Tensor:
        return net(rows["x"]).square().sum(1)

    clipper = attach(model, clip_norm=0.5)
    check(Problem(model, batch, losses), clipper, naive(Problem(plain, batch, losses)))
    assert clipper.notes == []


def test_nested_tensors_without_a_shape_are_refused_and_jagged_ones_are_exact() -> None:
    torch.manual_seed(0)

    class Bag(nn.Module):
        def __init__(self, layout: torch.layout) -> None:
            super().__init__()
            self.first, self.last, self.layout = nn.Linear(4, 5), nn.Linear(5, 2), layout

        def forward(self, rows: list[Tensor]) -> Tensor:
            h = self.first(torch.nested.nested_tensor(rows, layout=self.layout))
            return self.last(torch.nested.to_padded_tensor(torch.tanh(h), 0.0).sum(1))

    rows = [torch.randn(n, 4) for n in (3, 1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        strided, jagged = Bag(torch.strided), Bag(torch.jagged)
        attach(strided)
        with pytest.raises(UserError, match=r"layout=torch\.jagged"):
            strided(rows)
        params = list(jagged.parameters())
        alone = [torch.autograd.grad(jagged([row]).square().sum(), params) for row in rows]
        clipper = attach(jagged, clip_norm=0.5)
        clipper.backward(jagged(rows).square().sum(1))
    factors = [min(1.0, 0.5 / float(sum(g.square().sum() for g in grads)) ** 0.5) for grads in alone]
    for i, p in enumerate(params):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, sum(f * g[i] for f, g in zip(factors, alone, strict=True)))


def test_nested_tensors_without_a_shape_may_be_taken_apart_inside() -> None:
    torch.manual_seed(0)

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.nested.as_nested_tensor([row[:2] for row in torch.tanh(self.first(x))])
            return self.last(torch.stack([row.sum(0) for row in rows.unbind()]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exact(Halves(), [{"x": torch.randn(n, 3, 4).double()} for n in (3, 4)], "auto")


def test_an_adapter_that_is_merged_into_new_parameters_in_every_forward_is_named() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.attention(x, x, x)[0].mean(1))

    def adapted(*targets: str) -> nn.Module:
        return peft.get_peft_model(Attends(), peft.LoraConfig(r=2, target_modules=list(targets)))

    with pytest.raises(UserError, match=r"attention \(MultiheadAttention\).*target_modules"):
        attach(adapted("attention", "last"))
    model = adapted("last")
    attach(model).backward(model(torch.randn(3, 2, 4)).square().sum(1))
