"""Frozen weights that are no plain tensors of numbers: of 8 bits, or tensors that stand for others, as quantisers make them."""

import pytest
import torch
from torch import nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.training.own_loop import make, train


class Eighths(torch.Tensor):
    """Whole numbers and their scale, in the place of a matrix: of all functions it has but `detach`."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["numbers"], inner["scale"])

    def whole(self):
        return self.numbers * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"{func} of an {cls.__name__}")


def eighths(weight):
    scale = weight.abs().max() / 127
    return Eighths((weight / scale).round().to(torch.int8), scale)


KINDS = {
    "numbers of 8 bits": (lambda w: w.to(torch.float8_e4m3fn), lambda w: w.float()),
    "whole numbers and their scale": (eighths, Eighths.whole),
    "sparse": (lambda w: (w * (w > 0)).to_sparse(), lambda w: w.to_dense()),
}


class Adapted(nn.Module):
    """A frozen matrix, read by ``whole``, and a low-rank one beside it."""

    def __init__(self, made, whole):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.weight = nn.Parameter(made(torch.randn(3, 10)), requires_grad=False)
            self.down, self.up = nn.Linear(10, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.whole = whole

    def forward(self, x):
        return x @ self.whole(self.weight).T + self.up(self.down(x))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_clipped_sums_are_those_of_one_example_at_a_time(kind):
    model, x = Adapted(*kind), torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = [torch.zeros_like(p) for p in trained]
    for row in x:
        gradients = torch.autograd.grad(model(row[None]).square().sum(), trained)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient * min(1.0, 10.0 / float(norm))
    clipper = attach(model, clip_norm=10.0)
    report = clipper.backward(model(x).square().sum(1))
    assert (report.norms > 10.0).any()
    assert not clipper.notes
    for parameter, total in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_run_over_them_goes_on(tmp_path, kind):
    with make(tmp_path, model=Adapted(*kind), steps=3, checkpoint_every=1) as engine:
        train(engine, steps=2)
    with make(tmp_path, model=Adapted(*kind), steps=3, checkpoint_every=1) as engine:
        assert engine.steps_taken == 2
        assert train(engine).finished


def test_a_run_over_other_ones_is_another_run(tmp_path):
    """Whatever the numbers are held in."""
    model = Adapted(*KINDS["whole numbers and their scale"])
    with make(tmp_path, model=model, steps=3, checkpoint_every=1) as engine:
        train(engine, steps=2)
    other = Adapted(*KINDS["whole numbers and their scale"])
    other.weight.numbers[0, 0] += 1
    with pytest.raises(UserError, match="frozen"):
        make(tmp_path, model=other, steps=3, checkpoint_every=1)


def test_numbers_that_are_none_are_found_within(tmp_path):
    model = Adapted(*KINDS["whole numbers and their scale"])
    model.weight.scale.fill_(torch.nan)
    with pytest.raises(UserError, match="hold NaN or infinity, weight for one"):
        make(tmp_path, model=model)
