"""What a step sends, counted: clipping by layer or device sends what training without privacy sends."""

import pytest

from dpexp.benchmark.ranks import METHODS, SIZES, _measure
from dpexp.benchmark.ranks_page import ranks_page, ranks_plot
from dpexp.parallel import Ranks
from dpexp.pipeline.flat import WAYS
from tests.parallel.pool import run_ranks
from tests.versions import needs_torch

# FSDP2 is one of the runtimes
pytestmark = needs_torch(2, 15)


def measured(ranks: Ranks):
    return [
        row
        for size in SIZES["tiny"]
        for runtime in METHODS
        for row in _measure(ranks, runtime, size, 1, 1, 1.0, warm=2)
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return run_ranks(2, tmp_path_factory.mktemp("ranks"), measured)[0]


@pytest.mark.parametrize("lora", [0, 2])
def test_clipping_by_layer_or_device_sends_nothing_more(rows, lora):
    rows = [row for row in rows if row["lora"] == lora]
    sent = {(row["runtime"], row["method"]): row["bytes"] for row in rows}
    assert not any(sent["alone", method] for method in METHODS["alone"])
    size = SIZES["tiny"][0]
    layers, width = size["n_layer"], size["n_embd"]
    # of each map to queries, keys and values: down from the width, and up to three times the width
    trained, groups = layers * lora * 4 * width if lora else rows[0]["parameters"], layers + 1
    for method in METHODS["ddp"]:
        # each process gives the sums of all that is trained, in float32
        assert sent["ddp", method] == {"sums": 2 * 4 * trained}
    plain = sent["fsdp", "nonprivate"]
    for method in ("layer", "flat"):
        # one number for each module that is sharded, and seven for all
        assert sent["fsdp", method] == plain | {"messages": 2 * 4 * (groups + 7)}
    plain = sent["pipeline", "nonprivate"]
    assert plain["activations"] == plain["gradients"] > 0
    assert sent["pipeline", "device"] == plain
    for way in WAYS:
        found = dict(sent["pipeline", f"flat, {way}"])
        assert found.pop("norms") == 2 * 8 * 2 * size["examples"]
        assert (found.pop("parked", 0) > 0) == (way == "offload")
        assert found == plain


def test_page_and_plot_show_every_way(rows):
    page, plot = ranks_page(rows), ranks_plot(rows)
    for row in rows:
        trained = "LoRA 2" if row["lora"] else "all"
        assert f"| {row['length']} | {trained} | {row['runtime']} | {row['method']} |" in page
        if row["method"] != "nonprivate":
            assert f"{row['runtime']}: {row['method']}" in plot
            assert row["wall_ratio"] > 0 < row["cpu_ratio"]


def test_a_number_of_processes_is_asked_for_with_an_at():
    from dpexp.bench import is_special

    assert [is_special(name) for name in ("ranks", "ranks@4", "noise", "ranks@1", "gpt2")] == [True] * 3 + [
        False
    ] * 2
