"""The Triton kernels of the noise: interpreted against their twins, compiled for a GPU, and trusted where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.triton_tests import compiles_for_a_gpu, interpret

pytest.importorskip("triton", reason="torch was installed without Triton")

INTERPRETED = """
import torch
from dpexp.privacy import discrete, staircase_gpu
cpu = torch.device("cpu")
staircase_gpu.COMPARED = 2  # an interpreter is slow
assert staircase_gpu.trusted(cpu)
pieces = [discrete.Piece(3, 256, 300), discrete.Piece(4, 0, 1), discrete.Piece(2**31 - 1, 2**40, 5000)]
expected = discrete.integers(bytes(32), pieces, cpu)
discrete._on = lambda device: (staircase_gpu.first_turn, staircase_gpu.settle)
for a, b in zip(discrete.integers(bytes(32), pieces, cpu), expected, strict=True):
    assert torch.equal(a, b)
staircase_gpu.trusted.cache_clear()
staircase_gpu.BITS = (20, *staircase_gpu.BITS[1:])  # another number of rounds: other numbers
assert not staircase_gpu.trusted(cpu)
print("agreed")
"""


def test_interpreted_they_draw_the_numbers_of_their_twins():
    interpret(INTERPRETED)


@pytest.mark.parametrize("kernel", ["_first_turn", "_settle"])
def test_they_compile_for_a_gpu(kernel: str):
    from dpexp.privacy import staircase_gpu

    kinds = dict.fromkeys(("counters", "streams", "places"), "*i64") | {
        "numbers": "*fp64",
        "heights": "*fp64",
    }
    kinds |= {"key": "*i32", "layers": "*i32", "sure": "*i8"}
    kinds |= dict.fromkeys(("firsts", "seconds"), "*i32" if kernel == "_first_turn" else "*i64")
    names = ("rounds", "layer_bits", "low_bits", "width_bits", "blocks")
    constants = dict(zip(names, staircase_gpu.BITS, strict=True))
    if kernel == "_settle":
        constants |= {"total": 6627564.0, "scale_bits": 40}
    assert compiles_for_a_gpu(getattr(staircase_gpu, kernel), kinds, constants)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_may_use_them():
    from dpexp.privacy import staircase_gpu

    assert staircase_gpu.trusted(torch.device("cuda"))
