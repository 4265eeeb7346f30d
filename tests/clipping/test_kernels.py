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
print("agreed")
"""


def test_interpreted_they_agree_with_float64():
    interpret(INTERPRETED)


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
