"""Every formula with the options of its layers against one autograd pass per example, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.gradients import instantiated
from dpexp.clipping.operations.norms import channel_gradients
from dpexp.clipping.refusals import refusal
from tests.clipping.naive import assert_exact, naive_per_example, per_examples_of

fast = settings(max_examples=20, deadline=None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    """In float64, with parameters away from the ones and zeros that norm layers start from."""
    module.double()
    for k, p in enumerate(module.parameters()):
        p.data.copy_(normal(*p.shape, seed=100 + k))
    return module


def check(module: nn.Module, x: Tensor, num_examples: int | None = None, rtol: float = 1e-9) -> None:
    """All parameters of the module, together and each alone, by every method."""
    module = randomised(module)
    num_examples = x.shape[0] if num_examples is None else num_examples
    with torch.no_grad():
        probe = normal(*module(x).shape, seed=1)
    expected = naive_per_example(module, nonlinear, x, probe, num_examples)
    found = per_examples_of(module, x, probe, num_examples, loss_fn=nonlinear)
    assert found.keys() == expected.keys()
    for name, grads in expected.items():
        assert_exact(found[name], grads, rtol)
        alone = per_examples_of(module, x, probe, num_examples, {name}, nonlinear)
        assert alone.keys() == {name}
        torch.testing.assert_close(
            alone[name].weighted_sum(torch.ones(len(grads))), grads.sum(0), rtol=1e-7, atol=1e-7
        )


def nonlinear(y: Tensor, probe: Tensor) -> Tensor:
    return (y * probe + y.sin() / 2).sum()


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_linear(rank: int, bias: bool, rows: int):
    middle = (3, 2)[: rank - 2]
    check(nn.Linear(4, 5, bias=bias), normal(3 * rows, *middle, 4), 3)


def test_linear_of_width_one():
    check(nn.Linear(1, 1), normal(1, 1))


def test_transformers_conv1d():
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    module = pytorch_utils.Conv1D(5, 4)
    check(module, normal(3, 2, 4))
    check(module, normal(6, 4), 3)


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("shape", [(3, 6), (3,), (3, 2, 3), (6, 4)])
def test_embedding(padding_idx: int | None, shape: tuple[int, ...]):
    module = nn.Embedding(4, 5, padding_idx=padding_idx)
    ids = torch.randint(4, shape, generator=torch.Generator().manual_seed(0))
    check(module, ids, 3)


CONV_OPTIONS = [
    {},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2, "bias": False},
    {"kernel_size": 1, "stride": 3},
    {"kernel_size": 1, "padding": 1},
    {"kernel_size": 1, "groups": 2},
    {"stride": 2, "padding": 1},
    {"stride": 3, "padding": 2},
    {"dilation": 2},
    {"dilation": 2, "stride": 2, "padding": 2},
    {"groups": 2},
    {"groups": 4, "padding": 1},
    {"padding": "same"},
    {"padding": "valid"},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 4, "padding": "same", "dilation": 1},
    {"kernel_size": 2, "padding": "same", "dilation": 3, "groups": 2},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": 2, "padding_mode": "reflect", "stride": 2},
    {"padding": 1, "padding_mode": "replicate", "groups": 4},
    {"kernel_size": 2, "padding": "same", "padding_mode": "circular"},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", CONV_OPTIONS, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution(options: dict, dims: int):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    module = kind(4, 8, **({"kernel_size": 3} | options))
    size = (7, 6, 5)[:dims]
    check(module, normal(2, 4, *size))


@pytest.mark.parametrize("options", [{}, {"groups": 2, "stride": 2}, {"kernel_size": 1}], ids=str)
def test_convolution_of_several_rows_per_example(options: dict):
    check(nn.Conv2d(4, 6, **({"kernel_size": 3} | options)), normal(6, 4, 5, 5), 2)
    check(nn.ConvTranspose2d(4, 6, **({"kernel_size": 3} | options)), normal(6, 4, 3, 4), 2)


def test_channels_last():
    for options in ({}, {"groups": 2}, {"kernel_size": 1}):
        module = nn.Conv2d(4, 6, **({"kernel_size": 3} | options))
        check(module, normal(3, 4, 5, 5).contiguous(memory_format=torch.channels_last))
    x = normal(3, 4, 5, 5).float().contiguous(memory_format=torch.channels_last)
    module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    probe = normal(3, 6, 3, 3).float().contiguous(memory_format=torch.channels_last)
    weight = per_examples_of(module, x, probe, 3, {"weight"})["weight"]
    expected = weight.instantiate().square().flatten(1).sum(1)
    for method in weight.methods():
        norms, total = weight.norms_and_sum(method, lambda norms, _: (torch.ones_like(norms), None))
        torch.testing.assert_close(norms, expected)
        torch.testing.assert_close(total, weight.weighted_sum(torch.ones(3)))
        held = instantiated(weight, method) if weight.instantiates(method) else weight
        torch.testing.assert_close(held.sq_norms(method), expected)
        torch.testing.assert_close(held.weighted_sum(torch.ones(3)), total)


@fast
@given(st.data())
def test_convolution_of_any_shape(data: st.DataObject):
    kernel, stride, dilation = (data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) for _ in range(3))
    padding = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    groups = data.draw(st.sampled_from([1, 2]))
    size = [d * (k - 1) + 1 + data.draw(st.integers(0, 3)) for k, d in zip(kernel, dilation)]
    module = nn.Conv2d(2, 2 * groups, kernel, stride, padding, dilation, groups)
    check(module, normal(data.draw(st.integers(1, 3)), 2, *size))


@pytest.mark.parametrize("shape", [(1, 1), (13, 1), (20, 20), (21, 20)])
def test_pixels_only_where_they_are_few(shape: tuple[int, int]):
    few = shape[0] * shape[1] <= 400
    module = nn.Conv2d(2, 2, 1, groups=2).double()
    x = normal(1, 2, *shape)
    weight = per_examples_of(module, x, x, 1)["weight"]
    assert ("pixel" in weight.methods()) == few


TRANSPOSED_OPTIONS = [
    {},
    {"stride": 2},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": 1, "dilation": 3, "output_padding": 2},
    {"groups": 2, "stride": 3, "padding": 2},
    {"kernel_size": 1, "stride": 2, "output_padding": 1},
    {"kernel_size": 2, "stride": 2, "bias": False},
]


@pytest.mark.parametrize("options", TRANSPOSED_OPTIONS, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolution(options: dict, dims: int):
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    check(kind(4, 6, **({"kernel_size": 3} | options)), normal(2, 4, *(4, 3, 2)[:dims]))


@pytest.mark.parametrize("shape", [(5,), (4, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(shape: tuple[int, ...], bias: bool):
    for middle in ((), (3,), (2, 3)):
        check(nn.LayerNorm(shape, eps=0.1, bias=bias), normal(6, *middle, *shape), 3)


@pytest.mark.parametrize("eps", [None, 0.1])
def test_rms_norm(eps: float | None):
    check(nn.RMSNorm(5, eps=eps), normal(3, 2, 5))
    check(nn.RMSNorm((4, 5), eps=eps), normal(6, 4, 5), 3)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("size", [(3,), (2, 2), (), (3, 1, 2)])
def test_group_norm(groups: int, size: tuple[int, ...]):
    check(nn.GroupNorm(groups, 6, eps=0.1), normal(6, 6, *size), 3, rtol=1e-8)
    if groups < 6 or size:  # torch itself refuses to normalise one number
        check(nn.GroupNorm(groups, 6, eps=0.1), 100 + normal(3, 6, *size), rtol=1e-8)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm(dims: int):
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    check(kind(4, affine=True, eps=0.1), normal(6, 4, *(5, 3, 2)[:dims]), 3, rtol=1e-8)


def test_batch_norm_with_constant_statistics():
    for kind, size in (
        (nn.BatchNorm1d, ()),
        (nn.BatchNorm1d, (3,)),
        (nn.BatchNorm2d, (2, 3)),
        (nn.BatchNorm3d, (2, 1, 2)),
    ):
        module = kind(4).eval()
        module.track_running_stats = False
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2)
        assert refusal(module) is None
        check(module, normal(6, 4, *size), 3)


@pytest.mark.parametrize("name", ["StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "bias": True}, {"kernel_size": 1}, {"groups": 2}], ids=str
)
def test_standardised_convolution(name: str, options: dict):
    std_conv = pytest.importorskip("timm.layers.std_conv")
    module = getattr(std_conv, name)(4, 6, **({"kernel_size": 3} | options))
    check(module, normal(2, 4, 6, 5), rtol=1e-8)


LAYERS = [
    (nn.Linear(4, 5), (3, 4)),
    (nn.Embedding(4, 5), (3,)),
    (nn.Conv2d(4, 5, 3), (4, 5, 5)),
    (nn.Conv2d(4, 5, 1), (4, 5, 5)),
    (nn.ConvTranspose1d(4, 5, 3), (4, 5)),
    (nn.LayerNorm(5), (3, 5)),
    (nn.RMSNorm(5), (3, 5)),
    (nn.GroupNorm(2, 4), (4, 5)),
    (nn.InstanceNorm1d(4, affine=True), (4, 5)),
]


@pytest.mark.parametrize(("module", "shape"), LAYERS, ids=lambda v: type(v).__name__)
def test_empty_batch(module: nn.Module, shape: tuple[int, ...]):
    lookup = isinstance(module, nn.Embedding)
    x = torch.zeros(0, *shape, dtype=torch.int64 if lookup else torch.float32)
    clipper = attach(module)
    report = clipper.backward(
        torch.zeros(0) if isinstance(module, nn.InstanceNorm1d) else module(x).flatten(1).sum(1)
    )
    assert report.norms.shape == (1, 0)
    for p in module.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))
    clipper.detach()


@pytest.mark.parametrize(("module", "shape"), LAYERS, ids=lambda v: type(v).__name__)
def test_low_precision_inputs_give_float32_norms(module: nn.Module, shape: tuple[int, ...]):
    """As under autocast: 16-bit activations."""
    if isinstance(module, nn.Embedding):
        pytest.skip("looks up integers")
    x = normal(3, *shape).bfloat16()
    module = module.float()
    with torch.no_grad():
        probe = normal(*module(x.float()).shape, seed=1)
    double = per_examples_of(module.double(), x.double(), probe, 3)
    with torch.autocast("cpu", torch.bfloat16):
        low = per_examples_of(module.float(), x.float(), probe.float(), 3)
    for name in double:
        exact = double[name].sq_norms("instantiate")
        for method in low[name].methods():
            norms = low[name].sq_norms(method)
            assert norms.dtype == torch.float32
            torch.testing.assert_close(norms.double(), exact, rtol=6e-2, atol=1e-3)


REFUSED = [
    (nn.BatchNorm2d(4), "GroupNorm"),
    (nn.BatchNorm2d(4).eval(), "tracks statistics"),
    (nn.BatchNorm1d(4, track_running_stats=False).eval(), "statistics of the whole batch"),
    (nn.BatchNorm3d(4, affine=False), "statistics of the whole batch"),
    (nn.SyncBatchNorm(4), "statistics of the whole batch"),
    (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
    (nn.Embedding(4, 5, scale_grad_by_freq=True), "scale_grad_by_freq"),
    (nn.Embedding(4, 5, max_norm=1.0), "max_norm"),
    (nn.Embedding(4, 5, sparse=True), "sparse"),
    (type("OwnBatchNorm", (nn.BatchNorm2d,), {"forward": lambda self, x: x})(4), "GroupNorm"),
]


@pytest.mark.parametrize(("module", "way_out"), REFUSED, ids=lambda v: type(v).__name__)
def test_refusals_name_the_way_out(module: nn.Module, way_out: str):
    for p in module.parameters():
        p.requires_grad_(False)
    assert way_out in refusal(module)


def test_nothing_speaks_against_the_rest():
    for module, _ in LAYERS:
        assert refusal(module) is None
    assert refusal(nn.Dropout()) is None


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(x, weight, bias)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * super().forward(x)


def test_a_layer_is_what_it_computes_not_what_it_is_called():
    check(Doubled(3, 4), normal(3, 2, 3))
    check(OwnConvolution(3, 4, 1), normal(3, 3, 2, 2))
    check(Scaled(), normal(3, 2, 3))
    check(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), normal(3, 3))
    with pytest.warns(FutureWarning):
        check(nn.utils.weight_norm(nn.Linear(3, 3)), normal(3, 3))
    patched = nn.Linear(3, 4)
    patched.forward = lambda x: torch.tanh(nn.functional.linear(x, 2 * patched.weight, patched.bias))
    check(patched, normal(5, 3))


@pytest.mark.parametrize("shape", [(0, 6, 3), (4, 6, 0)])
def test_rows_that_nobody_sends_through_a_norm_and_images_without_pixels_add_nothing(shape: tuple[int, ...]):
    nothing = torch.zeros(shape)
    found = channel_gradients(nothing, nothing, 2, 1e-5, 4, {"weight", "bias"})
    assert all(torch.equal(gradient.instantiate(), torch.zeros(4, 6)) for gradient in found.values())
