"""The model of what clipping costs in a pipeline."""

import pytest

from dpexp.complexity.pipeline import Assumptions, cost
from dpexp.reproduce.exact import communication_he

SMALL = Assumptions(
    stages=2, layers=4, width=16, rank=2, batch=8, tokens=7, microbatch=4, activation=8, gradient=8
)


def test_bytes_are_those_that_two_stages_count():
    """tests/pipeline/test_schedules.py: activations and gradients of a boundary, 8 bytes a norm."""
    for way in ("flat, idle", "flat, once at the end"):
        assert cost(way, 2, SMALL).norms == 8 * 8
    per_device = cost("per device", 2, SMALL)
    assert (per_device.norms, per_device.host, per_device.waits, per_device.sums) == (0, 0, 0, 0)
    assert per_device.between == 2 * 8 * 7 * 16 * 8


def test_more_devices_share_the_batch_and_send_sums():
    given = Assumptions()
    one, many = cost("per device", 16, given), cost("per device", 512, given)
    assert one.sums == 0 < many.sums
    assert many.between == pytest.approx(one.between / 32)
    turns = {devices: given.batch * 16 // devices + 15 for devices in (16, 512)}
    assert (many.seconds - many.sums / given.between) / one.seconds == pytest.approx(turns[512] / turns[16])


def test_the_page_orders_the_ways_as_he_et_al_do():
    rows = communication_he().sections[0].rows
    assert len(rows) == 20
    ratios = {row["clipping"]: float(row["step / per device"]) for row in rows[:5]}
    assert (
        ratios["per device"]
        == 1
        < ratios["flat, offload"]
        < ratios["flat, second backward"]
        < ratios["flat, idle"]
    )
