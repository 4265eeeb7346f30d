"""Measurements beside the goals and beside printed bounds: which block, what is met, and what a record does not say."""

from __future__ import annotations

from typing import Any

import pytest

from dpexp.benchmark.methods import ENGINE
from dpexp.reproduce import benchmarks
from dpexp.reproduce.benchmarks import Measurement
from dpexp.reproduce.documents import Document


def _row(
    workload: str, method: str, time: float | None, memory: float | None, speed: float = 10.0
) -> dict[str, Any]:
    return {
        "workload": workload, "method": method, "status": "ok", "reason": "", "batch_size": 8, "examples_per_s": speed,
        "time_ratio": time, "memory_ratio": memory, "error": 1e-6, "max_batch": None, "max_batch_reason": "",
        "max_batch_throughput_ratio": None,
    }  # fmt: skip


def _record(*rows: dict[str, Any], **settings: Any) -> dict[str, Any]:
    said = {
        "size": "full",
        "device": "cpu",
        "precision": "fp32",
        "native": True,
        "workloads": ["gpt2"],
    } | settings
    return {
        "settings": said, "hardware": {"cpu": "a processor", "threads": 2}, "versions": {"torch": "2"}, "command": "bench",
        "git": {"commit": "a" * 40, "dirty": False}, "rows": list(rows), "status": "finished", "engine": ENGINE,
    }  # fmt: skip


def _build(*records: dict[str, Any]) -> Document:
    return benchmarks.efficiency(
        [Measurement(f"{number}.json", record) for number, record in enumerate(records)]
    )


@pytest.mark.parametrize(
    ("time", "memory", "said"),
    [
        (1.05, 1.08, "met"), (1.054, 1.084, "met"), (1.06, 1.0, "time missed"), (1.0, 1.09, "memory missed"),
        (1.06, 1.09, "time and memory missed"), (None, None, "not measured"),
    ],
)  # fmt: skip
def test_a_goal_is_met_to_the_printed_digit(time: float | None, memory: float | None, said: str):
    (row,) = _build(_record(_row("gpt2", "auto/layer", time, memory))).rows
    assert row["goals"] == said
    assert (row["goal for time"], row["goal for memory"]) == ("1.05", "1.08")


def test_with_and_without_a_compiler_are_two_blocks_with_goals_of_their_own():
    row = _row("wrn", "auto/flat", 1.5, 1.3)
    native, torch = _build(_record(row), _record(row, native=False)).sections
    assert (native.rows[0]["goal for time"], native.rows[0]["goals"]) == ("1.18", "time missed")
    assert (torch.rows[0]["goal for time"], torch.rows[0]["goals"]) == ("1.70", "met")
    told = "1 of 2 pairs of a network and a method meet both goals"
    assert told in _build(_record(row), _record(row, native=False)).paragraphs[1]
    # one goal met in one of two measurements is not met, and an earlier engine's decides nothing
    slower = _record(_row("wrn", "auto/flat", 9.0, 1.3), native=False)
    assert "0 of 2 pairs" in _build(_record(row), _record(row, native=False), slower).paragraphs[1]
    assert told in _build(_record(row), _record(row, native=False), slower | {"engine": None}).paragraphs[1]


def test_other_machines_and_sizes_are_not_what_the_goals_are_for():
    row = _row("gpt2", "auto/layer", 1.0, 1.0)
    others = ({"size": "tiny"}, {"device": "cuda"}, {"precision": "bf16"}, {"native": None})
    document = _build(*(_record(row, **other) for other in others))
    assert document.rows == []
    assert document.status == "not run"
    assert "python -m dpexp.bench native=true" in document.sections[0].paragraphs[0]


def test_a_library_has_its_numbers_and_no_goal():
    (row,) = _build(_record(_row("gpt2", "opacus:flat", 2.0, 3.0))).rows
    assert (row["time / non-private"], row["goals"]) == ("2.00", "")


def test_the_papers_ratio_stands_beside_the_like_of_its_network():
    assert benchmarks.for_the_like("gpt2", "auto/flat") == "1.20 (GPT2-large, Bu et al.)"  # 1 / 0.83
    assert benchmarks.for_the_like("gpt2", "auto/layer") == "below 1.18 (GPT-2, He et al.)"  # 1 / (1 - 15%)
    assert benchmarks.for_the_like("mlp", "auto/flat") == ""


@pytest.mark.parametrize("target", ["table-bu-1", "figure-li-5"])
def test_a_measurement_that_did_not_finish_says_so(target: str):
    record = _record(_row("gpt2", "auto/flat", 1.2, 1.3), workloads=["gpt2", "vit"]) | {"status": "running"}
    words = "the measurement did not finish: 1 of 2 workloads"
    assert words in _build(record).rows[0]["note"]
    rows = [
        row for row in benchmarks.build(target, [Measurement("0.json", record)]).rows if row.get("workload")
    ]
    assert words in rows[0]["note"]


def test_without_the_kernels_is_said_in_every_row():
    record = _record(_row("gpt2", "auto/flat", 1.2, 1.3), native=False)
    page = benchmarks.build("table-bu-1", [Measurement("0.json", record)])
    rows = [row for row in page.rows if row.get("workload")]
    assert "without the C++ kernels" in rows[0]["note"]


def test_a_printed_bound_decides_for_the_present_engine_alone():
    speeds = {"nonprivate": 2.0, "auto/layer": 1.8, "opacus:flat": 1.5}
    record = _record(*(_row("gpt2", method, 2.0 / speed, 1.0, speed) for method, speed in speeds.items()))
    now = benchmarks.build("figure-he-9", [Measurement("b.json", record)])
    assert [verdict.word for verdict in now.verdicts] == ["supports", "contradicts"]  # 0.9 >= 0.85; 1.2 < 1.4
    assert now.verdicts[1].ours == "1.20 on gpt2 (a processor)"
    before = benchmarks.build("figure-he-9", [Measurement("b.json", record | {"engine": None})])
    assert before.verdicts == ()
    assert "measured with an earlier engine alone" in before.paragraphs[1]
    assert all(benchmarks.EARLIER in row["note"] for row in before.rows if row.get("workload"))


def test_networks_and_pure_torch_are_told_apart_in_a_verdict():
    rows = _row("gpt2", "nonprivate", 1.0, 1.0, 2.0), _row("gpt2", "auto/layer", 1.1, 1.0, 1.8)
    records = [_record(*rows, native=native) for native in (True, True, False)]
    page = benchmarks.build("figure-he-9", [Measurement(f"{n}.json", one) for n, one in enumerate(records)])
    (verdict,) = page.verdicts
    assert verdict.ours == "0.90 on gpt2, 0.90 on gpt2 in pure torch (a processor)"


def test_what_two_machines_say_stands_with_each():
    slow, fast = (
        _record(
            _row("gpt2", "nonprivate", 1.0, 1.0, 2.0), _row("gpt2", "auto/layer", 2.0 / speed, 1.0, speed)
        )
        | {"hardware": {"cpu": name, "threads": 2}}
        for name, speed in (("slow", 1.0), ("fast", 1.2))
    )
    page = benchmarks.build("figure-he-9", [Measurement("a.json", slow), Measurement("b.json", fast)])
    (verdict,) = page.verdicts
    assert verdict.ours == "0.50 on gpt2 (slow), 0.60 on gpt2 (fast)"


def test_a_bound_may_be_about_one_network():
    """Bu et al., Figure 6: the hybrid wins on VGG11, and is like the base on BEiT-large."""
    rows = [
        _row(network, method, 1.0, 1.0, speed)
        for network, gain in (("vgg11@4", 6.0), ("beit_large@1", 1.2))
        for method, speed in (("bk/flat", 1.0), ("bk_mixopt/flat", gain))
    ]
    page = benchmarks.build("figure-bu-6", [Measurement("b.json", _record(*rows))])
    said = [(verdict.word, verdict.ours) for verdict in page.verdicts[:2]]
    assert said == [
        ("supports", "6.00 on vgg11@4 (a processor)"),
        ("contradicts", "1.20 on beit_large@1 (a processor)"),
    ]


def test_a_ratio_is_held_against_a_bound_as_it_is_shown():
    """No page says of 1.40 that it is not at least 1.4."""
    bound = benchmarks.Bound(["ours"], ["theirs"], low=1.4)
    assert bound.holds(1.396)
    assert not bound.holds(1.394)
