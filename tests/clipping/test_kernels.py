"""The Triton kernels: interpreted on the CPU against float64, compiled for a GPU without one, and run where there is one."""

from __future__ import annotations

import pytest
import torch

from dpexp.clipping.gradients import Outer
from tests.triton_tests import compiles_for_a_gpu, interpret

pytest.importorskip("triton", reason="torch was installed without Triton")

INTERPRETED = """
import itertools, torch
from dpexp.clipping.kernels import norms
shapes = [(2, 5, 7, 9), (3, 70, 45, 130), (2, 1, 3, 4), (1, 129, 64, 65), (4, 64, 8, 6)]
for (B, T, d, p), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16, torch.float16)):
    generator = torch.Generator().manual_seed(B * T)
    a = torch.randn(B, d, T, generator=generator).mT.to(dtype)
    g = torch.randn(B, T, 2 * p, generator=generator)[:, :, ::2].to(dtype)
    expected = torch.bmm(g.double().mT, a.double()).square().sum((1, 2))
    products = (a.double() @ a.double().mT) * (g.double() @ g.double().mT)
    found, magnitudes = norms.ghost_norms(a, g)
    torch.testing.assert_close(magnitudes.double(), products.abs().sum((1, 2)), rtol=2e-5, atol=0)
    for norm in (found, norms.outer_norms(a, g)):
        torch.testing.assert_close(norm.double(), expected, rtol=2e-5, atol=0)
a[0, 0, 0] = float("nan")  # one example's NaN stays its own
for norm in (norms.ghost_norms(a, g)[0], norms.outer_norms(a, g)):
    assert norm.isnan().tolist() == [True, False, False, False]
assert norms.trusted(torch.device("cpu"), torch.float32)
norms.trusted.cache_clear()
right = norms.ghost_norms
for wrong in (lambda a, g: (2 * right(a, g)[0], right(a, g)[1]), lambda a, g: (right(a, g)[0], right(a, g)[0])):
    norms.ghost_norms = wrong
    assert not norms.trusted(torch.device("cpu"), torch.float32)
    norms.trusted.cache_clear()
print("agreed")
"""

# its last rows lie more than 2^31 numbers behind its first; memory that nobody touches costs nothing
FAR = """
import torch
from dpexp.clipping.kernels import norms
T, apart = 70, 1 << 25
memory = torch.empty(T * apart, dtype=torch.bfloat16)
far = {"positions": memory.as_strided((1, T, 3), (0, apart, 1)), "features": memory.as_strided((1, 3, T), (0, 1, apart))}
for name, x in far.items():
    x.copy_(torch.randn(x.shape))
    other = torch.randn(1, x.shape[1], 5).to(x.dtype)
    expected = torch.bmm(other.double().mT, x.double()).square().sum((1, 2))
    for pair in ((x, other), (other, x)):
        for norm in (norms.ghost_norms(*pair)[0], norms.outer_norms(*pair)):
            torch.testing.assert_close(norm.double(), expected, rtol=2e-5, atol=0)
"""


def test_interpreted_they_agree_with_float64_however_far_apart_the_numbers_lie():
    interpret(FAR + INTERPRETED)  # in one process, whose start takes seconds


@pytest.mark.parametrize("kernel", ["_ghost", "_outer"])
def test_a_head_or_a_text_of_any_size_fits_into_the_grid(monkeypatch: pytest.MonkeyPatch, kernel: str):
    """CUDA allows 65535 blocks along all axes but the first."""
    from dpexp.clipping.kernels import norms

    grids = []

    class Launched:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments: None

    monkeypatch.setattr(norms, kernel, Launched())
    find = {"_ghost": norms.ghost_norms, "_outer": norms.outer_norms}[kernel]
    for B, T, d, p in [(2, 20_000, 8, 8), (2, 8, 4096, 128_256), (70_000, 8, 8, 8)]:
        find(torch.empty(B, T, d, device="meta"), torch.empty(B, T, p, device="meta"))
    assert all(max(grid[1:], default=1) <= 65535 for grid in grids)


@pytest.mark.parametrize("kernel", ["_ghost", "_outer"])
@pytest.mark.parametrize(("dtype", "precision"), [("fp32", "ieee"), ("bf16", "tf32")])
def test_they_compile_for_a_gpu(kernel: str, dtype: str, precision: str):
    from dpexp.clipping.kernels import norms

    kinds = {"a": f"*{dtype}", "g": f"*{dtype}", "out": "*fp32", "magnitudes": "*fp32"}
    constants = {"tile": norms.TILE, "depth": norms.DEPTH, "precision": precision}
    assert compiles_for_a_gpu(getattr(norms, kernel), kinds, constants)


def test_a_cpu_is_never_offered_them():
    a, g = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    assert Outer(a, g).methods() == ("ghost", "instantiate", "loop")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype):
    a, g = torch.randn(4, 200, 96).cuda().to(dtype), torch.randn(4, 200, 160).cuda().to(dtype)
    outer = Outer(a, g)
    assert {"fused_ghost", "fused_outer"} <= set(outer.methods())
    expected = torch.bmm(g.double().mT, a.double()).square().sum((1, 2))
    for method in outer.methods():
        torch.testing.assert_close(outer.sq_norms(method).double(), expected, rtol=1e-4, atol=0)
