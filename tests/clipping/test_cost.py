"""What the engine knows of the cost of norms (Bu et al., Table 3), against what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dpexp.clipping import cost
from dpexp.clipping.gradients import Conv, Dense, Geometry, Outer
from dpexp.clipping.gradients.grams import HALVES_FROM

B, T, p, d = 3, 5, 7, 11


def counted(task) -> int:
    with FlopCounterMode(display=False) as counter:
        task()
    return counter.get_total_flops()


def test_norms_cost_what_torch_counts():
    outer = Outer(torch.zeros(B, T, d), torch.zeros(B, T, p))
    assert T < HALVES_FROM
    assert (
        counted(lambda: outer.sq_norms("ghost"))
        == outer.cost("ghost").flops
        == cost.ghost_norm(B, T, p, d).flops
    )
    for method in ("instantiate", "loop"):
        assert counted(lambda method=method: outer.sq_norms(method)) == outer.cost(method).flops
    assert outer.cost("instantiate") == cost.instantiation(B, T, p, d)
    assert Dense(torch.zeros(B, p, d)).cost("instantiate").flops == 2 * B * p * d


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_a_linear_layer_on_what_it_unfolds(groups: int):
    x, gy = torch.zeros(B, 4, 6, 6), torch.zeros(B, 8, 4, 4)
    conv = Conv(x, gy, (8, 4 // groups, 3, 3), Geometry((1, 1), (0, 0), (1, 1), groups), B)
    assert conv.cost("unfold") == cost.instantiation(B, 16, 8, 9 * 4 // groups)
    assert conv.cost("ghost").flops == cost.ghost_norm(B, 16, 8, 36).flops
    for method in ("unfold", "ghost"):
        assert counted(lambda method=method: conv.sq_norms(method)) == conv.cost(method).flops


def test_half_of_the_gram_matrix_is_not_computed():
    long = Outer(torch.zeros(1, HALVES_FROM, 3), torch.zeros(1, HALVES_FROM, 4))
    assert counted(lambda: long.sq_norms("ghost")) == 3 * long.cost("ghost").flops // 4


def test_resnet18_first_and_last_layer_of_table_4():
    """conv1: 2T² = 3.1e8 against 9.4e3; linear: 2 against 5.1e5."""
    assert cost.ghost_norm(1, 112 * 112, 64, 147).floats == 314_703_872
    assert cost.instantiation(1, 112 * 112, 64, 147).floats == 9408
