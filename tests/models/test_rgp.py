"""RGP: the carriers' gradients are projections, the assembled update is one too, and the weights alone move."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dpexp.errors import UserError
from dpexp.models import rgp
from dpexp.models.structure import linear_layers, matrix
from dpexp.schemas import PeftConfig

from .test_build import build, config
from .ways import batch_of, bundle_of, losses, problem_of


def layer(kind: str, rank: int, carriers: str = "weights", seed: int = 0) -> tuple[rgp.Carried, nn.Module]:
    """A carried layer of 5 outputs and 7 inputs, and the plain one."""
    torch.manual_seed(1)
    plain = (nn.Linear(7, 5) if kind == "linear" else Conv1D(5, 7)).double()
    return rgp.Carried(copy.deepcopy(plain), rank, seed, "somewhere", carriers), plain


def gradients(carried: rgp.Carried, plain: nn.Module) -> torch.Tensor:
    """Back-propagates one loss through both; returns G of the plain one as [outputs, inputs]."""
    x = torch.randn(3, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for module in (carried, plain):
        module(x).sin().sum().backward()
    gradient = plain.weight.grad
    return gradient.t() if isinstance(plain, Conv1D) else gradient


def projected(gradient: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The orthogonal projection by brute force: least squares over a basis of {L·A + B·R}."""
    p, d = gradient.shape
    columns = [
        torch.outer(column, e).reshape(-1) for column in left.t() for e in torch.eye(d, dtype=left.dtype)
    ]
    rows = [torch.outer(e, row).reshape(-1) for row in right for e in torch.eye(p, dtype=left.dtype)]
    basis = torch.stack(columns + rows, 1)
    return (basis @ (torch.linalg.pinv(basis) @ gradient.reshape(-1))).reshape(p, d)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_gradients_of_the_carriers_and_the_update(kind: str, rank: int) -> None:
    carried, plain = layer(kind, rank)
    left, right = carried.left.weight.detach(), carried.right.weight.detach()
    torch.testing.assert_close(left.t() @ left, torch.eye(rank, dtype=left.dtype))
    torch.testing.assert_close(right @ right.t(), torch.eye(rank, dtype=left.dtype))
    gradient = gradients(carried, plain)
    torch.testing.assert_close(carried.left.weight.grad, gradient @ right.t())
    torch.testing.assert_close(carried.right.weight.grad, left.t() @ gradient)
    carried.assemble()
    update = carried.weight.grad
    assert update.shape == plain.weight.shape
    update = update.t() if kind == "conv1d" else update
    torch.testing.assert_close(update, projected(gradient, left, right), rtol=1e-9, atol=1e-12)
    assert (rank == 5) == torch.allclose(update, gradient)
    assert carried.left.weight.grad is None
    assert carried.right.weight.grad is None


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_values_and_gradients_of_inputs_are_those_of_the_plain_layer(kind: str) -> None:
    carried, plain = layer(kind, 2)
    x = torch.randn(3, 7, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    values = [module(it) for module, it in zip((carried, plain), inputs, strict=True)]
    assert torch.equal(*values)
    for value in values:
        value.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    with torch.no_grad():
        assert torch.equal(carried(x), plain(x))


def test_the_power_iteration_finds_the_directions_of_a_low_rank_matrix() -> None:
    torch.manual_seed(3)
    for kind in ("linear", "conv1d"):
        carried, _ = layer(kind, 2)
        low = torch.randn(5, 2, dtype=torch.float64) @ torch.randn(2, 7, dtype=torch.float64)
        with torch.no_grad():
            carried.weight.copy_(low.t() if kind == "conv1d" else low)
        carried.draw_carriers()
        left, right = carried.left.weight, carried.right.weight
        torch.testing.assert_close(left @ left.t() @ low @ right.t() @ right, low)


def test_history_decomposes_the_update_and_weights_the_weights() -> None:
    for carriers in ("history", "weights"):
        carried, plain = layer("linear", 1, carriers)
        update = torch.outer(torch.arange(5.0).double(), torch.ones(7).double())
        first = carried.left.weight.detach().clone()
        with torch.no_grad():
            carried.weight.add_(1e-3 * update)
        carried.draw_carriers()
        aligned = (carried.left.weight.t() @ update / update.norm() @ carried.right.weight.t()).abs().item()
        assert (aligned > 1 - 1e-9) == (carriers == "history")
        # before any update there is no history to decompose: the weights stand in
        assert first.abs().sum() > 0
        torch.testing.assert_close(carried.weight, plain.weight + 1e-3 * update)


def test_no_weights_at_all_still_give_orthonormal_carriers() -> None:
    carried, _ = layer("linear", 3)
    with torch.no_grad():
        carried.weight.zero_()
    carried.draw_carriers()
    torch.testing.assert_close(carried.left.weight.t() @ carried.left.weight, torch.eye(3).double())
    torch.testing.assert_close(carried.right.weight @ carried.right.weight.t(), torch.eye(3).double())


def test_every_draw_is_new_and_a_function_of_the_seed_the_layer_and_its_number() -> None:
    one, same, other = layer("linear", 2)[0], layer("linear", 2)[0], layer("linear", 2, seed=1)[0]
    assert torch.equal(one.left.weight, same.left.weight)
    assert not torch.equal(one.left.weight, other.left.weight)
    first = one.left.weight.detach().clone()
    one.draw_carriers()
    assert not torch.equal(one.left.weight, first)
    torch.rand(5)  # the global generator plays no part
    same.draw_carriers()
    assert torch.equal(one.left.weight, same.left.weight)


def test_a_step_of_sgd_moves_the_weights_by_the_projected_gradient_and_nothing_else() -> None:
    problem = problem_of("gpt2", "rgp")
    model = problem.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(rgp.moved_tensors(model), lr=0.5)
    rgp.follow(model, optimizer)
    problem.losses(model, problem.batch).sum().backward()
    expected = {}
    for name, module in model.named_modules():
        if isinstance(module, rgp.Carried):
            left, right = module.left.weight, module.right.weight
            update = left.grad @ right + left @ right.grad - left @ left.t() @ left.grad @ right
            expected[f"{name}.base.weight"] = update.detach().t()  # GPT-2's are Conv1D
    optimizer.step()
    assert len(expected) == 8
    for name, tensor in model.state_dict().items():
        if name in expected:
            torch.testing.assert_close(tensor, before[name] - 0.5 * expected[name])
        elif ".left." in name or ".right." in name:
            assert not torch.equal(tensor, before[name]), name
        elif name.endswith("draws"):
            assert int(tensor) == 2
        else:
            assert torch.equal(tensor, before[name]), name
    assert all(layer.weight.grad is None for layer in rgp.carried_layers(model))


def test_what_trains_and_what_moves() -> None:
    bundle = bundle_of("bert", "rgp")
    blocks = bundle.model.bert.encoder.layer
    assert len(list(rgp.carried_layers(bundle.model))) == 2 * 6
    assert {name.split(".")[-2] for name in bundle.trainable} == {"left", "right", "dense", "classifier"}
    assert {n for n in bundle.trainable if ".left." not in n and ".right." not in n} == {
        "bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias",
    }  # fmt: skip
    moved = {id(tensor) for tensor in rgp.moved_tensors(bundle.model)}
    assert id(blocks[0].intermediate.dense.base.weight) in moved
    assert id(blocks[0].intermediate.dense.left.weight) not in moved
    assert id(bundle.model.classifier.weight) in moved
    plain = bundle_of("bert", "full").model
    assert [id(t) for t in rgp.moved_tensors(plain)] == [id(p) for p in plain.parameters()]


def test_restored_layers_are_the_architecture_that_was_loaded() -> None:
    for network in ("bert", "gpt2"):
        bundle, plain = bundle_of(network, "rgp_history"), bundle_of(network, "full")
        assert torch.equal(losses(bundle.model, batch_of(network)), losses(plain.model, batch_of(network)))
        rgp.restore_layers(bundle.model)
        assert bundle.model.state_dict().keys() == plain.model.state_dict().keys()
        assert [type(m) for m in bundle.model.modules()] == [type(m) for m in plain.model.modules()]
        assert torch.equal(losses(bundle.model, batch_of(network)), losses(plain.model, batch_of(network)))


def test_chosen_targets_and_what_cannot_be() -> None:
    some = build(config("bert"), PeftConfig(name="rgp", rank=1, targets=["query"])).model
    carried = {name for name, module in some.named_modules() if isinstance(module, rgp.Carried)}
    assert carried == {f"bert.encoder.layer.{i}.attention.self.query" for i in range(2)}
    with pytest.raises(
        UserError, match=r"peft\.targets=\['quary'\]: quary is no linear layer .*dense, key, query"
    ):
        build(config("bert"), PeftConfig(name="rgp", rank=1, targets=["quary"]))
    with pytest.raises(UserError, match="give a rank from 1 to 8"):
        build(config("bert"), PeftConfig(name="rgp", rank=9))
    with pytest.raises(UserError, match=r"peft\.carriers=updates is unknown"):
        build(config("bert"), PeftConfig(name="rgp", rank=1, carriers="updates"))
    images = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    with pytest.raises(UserError, match="the blocks of Sequential have no linear layer"):
        rgp.add_carriers(images, PeftConfig(name="rgp", rank=1), [], 0)
    with pytest.raises(UserError, match="no repeated blocks"):
        rgp.add_carriers(nn.Linear(2, 2), PeftConfig(name="rgp", rank=1), [], 0)


def test_an_optimiser_without_gradients_is_told_so() -> None:
    carried, _ = layer("linear", 1)
    with pytest.raises(RuntimeError, match="somewhere: the carriers have no gradient"):
        carried.assemble()


def test_the_matrix_view_has_the_outputs_first() -> None:
    for _, module in linear_layers(nn.Sequential(nn.Linear(7, 5), Conv1D(5, 7))):
        assert matrix(module).shape == (5, 7)
