"""Where Opacus' hooks fail or are wrong, ``engine="opacus"`` says at which layer, and leaves the model as it was."""

import copy
import inspect

import pytest
import torch
from torch import nn

from dpexp.clipping import attach
from dpexp.conform.adapters import ours, quiet
from dpexp.conform.judge import Reference, judge
from dpexp.conform.traps import trap_case
from dpexp.errors import UserError


@pytest.mark.parametrize(
    ("trap", "verdict"),
    [
        ("functional_call with derived weights", "refused"),
        ("an activation that writes over its input", "refused"),
        ("in-place writes to what a layer gave", "refused"),
        ("a bilinear layer", "refused"),
        ("a packed sequence", "refused"),
        ("multi-head attention", "refused"),
        ("a mask over heads, flattened", "refused"),
        ("an example squeezed away when it is alone", "refused"),
        ("activation checkpointing", "refused"),
        ("reentrant activation checkpointing", "refused"),
        ("a gradient penalty: the loss contains a gradient", "refused"),
        ("an example whose gradient is infinite", "refused"),
        ("an example whose values are NaN", "exact"),
        ("bf16 autocast", "exact"),
        ("convolutions over images in another layout of memory", "exact"),
        ("layers that see [B·T, d]", "refused"),
    ],
)
def test_a_layer_is_named_where_opacus_cannot(trap, verdict):
    case = trap_case(trap)
    with quiet():
        found = judge(case, Reference(case), ours("opacus", "flat"))
    assert found.verdict == verdict, found.message


def test_the_error_says_where_and_what_else_to_take():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    attach(model, engine="opacus")
    with pytest.raises(UserError, match=r"forward pass, at 1 \(ReLU\): .*engine='auto'"):
        model(torch.randn(2, 3))


def test_small_gradients_are_looked_at_too():
    """Opacus unfolds a convolution of groups that pads in a circle wrongly; behind a norm its gradient may be the smallest."""
    torch.manual_seed(0)
    convolution = nn.Conv1d(4, 4, 3, padding=1, groups=2, padding_mode="circular")
    model = nn.Sequential(convolution, nn.GroupNorm(2, 4)).double()
    clipper = attach(model, engine="opacus")
    losses = model(30 * torch.randn(2, 4, 2).double()).square().flatten(1).sum(1)
    with pytest.raises(UserError, match=r"per-example gradients of 0\.weight do not add up"):
        clipper.backward(losses)


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.head = nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        prompts = self.prompt(torch.arange(3)[None]).repeat(len(x), 1, 1)
        return self.head(torch.cat([prompts, x[:, None]], 1).mean(1))


def test_a_model_that_gives_each_example_its_rows_of_a_table_is_refused():
    model = Prompted()
    attach(model, engine="opacus")
    with pytest.raises(
        UserError, match=r"Opacus fails in the forward pass, .*Sizes of tensors.*engine='auto'"
    ):
        model(torch.randn(2, 4))


def test_an_error_of_the_models_own_stays_what_it_is():
    model = nn.Sequential(nn.Linear(3, 4))
    attach(model, engine="opacus")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 5))


def test_a_copy_computes_with_its_own_weights_and_a_detached_model_is_as_before():
    model = nn.Sequential(nn.Linear(3, 2))
    before = inspect.signature(model.forward)
    clipper = attach(model, engine="opacus")
    assert inspect.signature(model.forward) == before
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_(), twin[0].bias.fill_(7.0)
    assert (twin.eval()(torch.randn(2, 3)) == 7).all()
    clipper.detach()
    assert "forward" not in model.__dict__


def test_nothing_of_the_library_stays_in_a_detached_model():
    model = nn.Sequential(nn.Linear(3, 2))
    before = set(model[0].__dict__)
    clipper = attach(model, engine="opacus")
    clipper.backward(model(torch.randn(4, 3)).square().sum(1))
    clipper.detach()
    assert set(model[0].__dict__) == before


def test_a_forward_that_nobody_needed_is_forgotten_while_the_last_losses_are_held():
    model = nn.Sequential(nn.Linear(3, 2))
    clipper = attach(model, engine="opacus", clip_norm=1e9)
    losses = model(torch.randn(4, 3)).square().sum(1)
    clipper.backward(losses)
    model(torch.randn(5, 3))
    model.zero_grad()
    x = torch.randn(2, 3)
    clipper.backward(model(x).square().sum(1))
    plain = copy.deepcopy(model[0].weight).requires_grad_()
    (x @ plain.T + model[0].bias).square().sum().backward(inputs=[plain])
    torch.testing.assert_close(model[0].weight.grad, plain.grad)
    assert losses.requires_grad
