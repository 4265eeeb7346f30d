"""The optional C++ kernels: the same gradients as torch, noise of the right distribution, and nothing is lost without them."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpexp import native
from dpexp.clipping import attach
from dpexp.clipping.choice import Methods
from dpexp.clipping.gradients import Conv, Geometry
from dpexp.errors import UserError
from dpexp.privacy.noise import KeyedGenerator, add_gaussian_
from tests.conftest import KERNELS

# Of the noise of `blocks_and_noise`: no build, and no later version, may draw another.
NOISE = "24175b6001775a69"
needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="no C++ compiler builds the kernels")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DPEXP_NATIVE", "0")
    monkeypatch.setattr(native, "_loaded", functools.cache(native._loaded.__wrapped__))


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    target = torch.zeros(numel)
    add_gaussian_(target, 1.0, seeded(seed))
    return target


@needs_kernels
def test_noise_is_standard_normal_far_into_the_tails():
    drawn = noise(4_000_000).double()
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-4
    assert abs(drawn.mean()) < 5 / len(drawn) ** 0.5
    assert abs(drawn.std() - 1) < 5 / (2 * len(drawn)) ** 0.5
    for threshold in (2.0, 3.0, 4.0):
        beyond = stats.norm.sf(threshold) * 2 * len(drawn)
        assert abs(int((drawn.abs() > threshold).sum()) - beyond) < 5 * beyond**0.5
    assert 4.5 < drawn.abs().max() < 7


DRAW = """
import sys, torch
from dpexp import native
native.FLAGS += sys.argv[2:]
from tests.test_native import blocks_and_noise
torch.save(blocks_and_noise(), sys.argv[1])
"""


def blocks_and_noise() -> list[torch.Tensor]:
    """The block that RFC 8439 gives as an example, and noise of several lengths and tensors."""
    block = torch.empty(1, 16, dtype=torch.int32)
    key = torch.frombuffer(bytearray(range(32)), dtype=torch.int32)
    native.kernels().chacha_(block, key, 0x0900000000000001, 0x4A000000, 0, 20)
    tensors = [torch.zeros(100_000), torch.ones(129, dtype=torch.float64)]
    add_gaussian_(tensors, 1.0, KeyedGenerator(bytes(range(32))))
    return [block, *tensors]


@needs_kernels
@pytest.mark.parametrize("flags", [[], ["-mno-avx512f"], ["-mno-avx2"]], ids=" ".join)
def test_noise_is_that_of_the_published_cipher_in_every_build(flags: list[str], tmp_path: Path):
    """Whatever the processor has: registers of 16, 8 or 4 lanes. Who asks first builds, and the machine keeps what was built."""
    if flags and platform.machine() != "x86_64":
        pytest.skip("the flags are those of another processor")
    if flags:  # another library of the same operators: in a process of its own
        kept = os.environ | {"DPEXP_CACHE": str(KERNELS.parent / "tests")}
        subprocess.run([sys.executable, "-c", DRAW, tmp_path / "drawn", *flags], env=kept, check=True)
        block, *drawn = torch.load(tmp_path / "drawn")
    else:
        block, *drawn = blocks_and_noise()
    # RFC 8439, section 2.3.2
    assert block.numpy().tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in drawn)).hexdigest()
    assert digest[:16] == NOISE


def test_a_remembered_choice_of_kernels_that_are_gone_is_made_again(without_kernels):
    geometry = Geometry((2, 2), (0, 0), (1, 1), 1, False, ())
    conv = Conv(torch.randn(4, 16, 13, 13), torch.randn(4, 32, 5, 5), (32, 16, 4, 4), geometry, 4)
    methods = Methods(1 << 30)
    methods.choose(conv, "measured")
    assert methods.measured
    methods.load_state({"choices": dict.fromkeys(methods.measured, "cores")})
    assert methods.choose(conv, "measured") in conv.methods()


@needs_kernels
def test_neighbours_lanes_and_streams_are_independent():
    drawn = noise(1 << 20)
    for lag in (1, 2, 16, 64, 128, 256, 2048):
        a, b = drawn[:-lag], drawn[lag:]
        for f in (lambda x: x, torch.square, torch.abs):
            correlation = np.corrcoef(f(a).numpy(), f(b).numpy())[0, 1]
            assert abs(correlation) < 5 / len(a) ** 0.5, lag
    other = noise(1 << 20, seed=1)
    assert abs(np.corrcoef(drawn.numpy(), other.numpy())[0, 1]) < 5 / 2**10
    first, second = torch.zeros(5000), torch.zeros(5000)
    add_gaussian_([first, second], 1.0, seeded(0))
    assert not torch.equal(first, second)


@needs_kernels
@pytest.mark.parametrize("numel", [1, 63, 257, 4096, 4097, 100_003])
def test_threads_and_length_do_not_change_the_noise(numel: int):
    before = torch.get_num_threads()
    try:
        drawn = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            drawn.append(noise(numel))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0], noise(numel + 1000)[:numel])


@needs_kernels
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("groups", "rows", "stride"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (4, 2, 1)])
def test_convolutions_over_cores_equal_the_loop(transposed, dtype, groups, rows, stride):
    layer: nn.Module
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 12, 3, stride=stride, padding=1, groups=groups, bias=False).to(dtype)
    x = torch.randn(5 * rows, 8, 9, 7, dtype=dtype, generator=seeded(0))
    gy = torch.randn(layer(x).shape, dtype=dtype, generator=seeded(1))
    geometry = Geometry((stride, stride), (1, 1), (1, 1), groups, transposed, (0, 0) if transposed else ())
    conv = Conv(x, gy, layer.weight.shape, geometry, 5)
    factors = torch.linspace(0, 1, 5, dtype=conv.dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    norms, total = conv.norms_and_sum("cores", lambda _, where: (factors[where], None))
    expected_norms, expected = conv.norms_and_sum("loop", lambda _, where: (factors[where], None))
    torch.testing.assert_close(norms, expected_norms, rtol=tolerance, atol=0)
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@needs_kernels
@pytest.mark.parametrize("examples", [1, 2, 5])
def test_a_convolution_leaves_the_process_its_threads(examples):
    """That of a single example is computed outside of any team, where a number of threads that is set stays."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        x = torch.randn(examples, 3, 9, 9, generator=seeded(0))
        conv = Conv(
            x, torch.ones(examples, 4, 9, 9), (4, 3, 3, 3), Geometry((1, 1), (1, 1), (1, 1)), examples
        )
        conv.sq_norms("cores")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_them_torch_computes_and_says_so(without_kernels):
    assert native.kernels() is None
    assert native.backend() == "torch"
    assert stats.kstest(noise(200_000).numpy(), "norm").pvalue > 1e-4
    x = torch.randn(2, 3, 5, 5)
    assert "cores" not in Conv(x, x, (3, 3, 3, 3), Geometry((1, 1), (1, 1), (1, 1)), 2).methods()


def test_no_compiler_is_one_clear_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("DPEXP_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"no C\+\+ compiler is installed"):
        native.build()
    monkeypatch.setattr(native, "_loaded", functools.cache(native._loaded.__wrapped__))
    with pytest.warns(
        UserWarning, match=r"no C\+\+ compiler .* twenty times as long; DPEXP_NATIVE=0"
    ) as told:
        assert native.backend() == "torch"
    assert native.kernels() is None
    assert len(told) == 1


def test_kernels_that_draw_other_noise_are_not_used(monkeypatch):
    """As with -ffast-math, where one number of 150 is another one."""

    class Built:
        def add_noise_(self, target, grid, *others):
            target.view(-1)[::150] += grid

    expected = noise(1000)
    monkeypatch.setattr(native, "kernels", Built)
    monkeypatch.setattr(native, "backend", lambda: "native of a bad compiler")
    with pytest.warns(UserWarning, match="native of a bad compiler kernels draw other noise than they must"):
        assert torch.equal(noise(1000), expected)


@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_the_sums_die_with_the_gradients(groups: str):
    """A reference cycle would keep a copy of all gradients until some garbage collection: memory that no profiler explains."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 4), nn.LayerNorm(4))
    clipper = attach(model, groups=groups)
    gc.collect()
    gc.disable()
    try:
        clipper.backward(model(torch.randn(3, 2, 5, 5)).sum(1))
        held = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
        assert len(held) == 6
        model.zero_grad()
        assert [ref() for ref in held] == [None] * 6
    finally:
        gc.enable()
