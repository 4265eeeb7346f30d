"""The benchmark: its sums are compared honestly, its failures are rows, and its search and its files are exact."""

import csv
import io
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpexp.bench import BenchArguments, bench, is_special
from dpexp.benchmark import measure as measuring
from dpexp.benchmark import render
from dpexp.benchmark.disturbance import Stolen
from dpexp.benchmark.exactness import max_relative_error
from dpexp.benchmark.measure import Protocol, Row, largest, measure
from dpexp.benchmark.methods import (
    LEAN,
    METHODS,
    NONPRIVATE,
    OTHERS,
    OURS,
    Ours,
    Settings,
    chosen_methods,
    make_method,
)
from dpexp.benchmark.processes import Failed, Worker
from dpexp.benchmark.workloads import workload_named
from dpexp.clipping.attach import Clipper
from dpexp.config import compose, conf_dir
from dpexp.errors import LateError, UserError
from tests.commands import called

PROTOCOL = Protocol(
    rounds=3, steps=2, seconds=1e-3, threads=1, device="cpu", precision="fp32", compile=False, size="tiny", batch=None,
    noise=1.0, check="tiny", memory_gib=None, resolution=0.0, patience=300.0,
)  # fmt: skip
SEVEN = ("gpt2", "gpt2_tied", "gpt2_lora", "roberta", "wrn", "mlp", "vit")


def error_of(workload, method):
    torch.manual_seed(0)
    described = workload_named(workload)
    parts = described.parts("tiny")
    batch = parts.batch(described.default_batch("tiny"), torch.Generator().manual_seed(1))
    forward = parts.lean if method.endswith(LEAN) else parts.losses
    return max_relative_error(method, parts, batch, parts.model().train(), lambda network: network, forward)


# Workloads and their check


@pytest.mark.parametrize("method", ["nonprivate", "auto/flat", "auto/layer"])
@pytest.mark.parametrize("workload", [*SEVEN, "vit_timm", "lstm", "lstm_opacus", "mixtral"])
def test_our_sums_are_those_of_the_naive_loop(workload, method):
    assert error_of(workload, method) < 1e-4


@pytest.mark.parametrize("method", ["nonprivate+lean", "auto/flat+lean", "auto/layer+lean"])
@pytest.mark.parametrize("workload", ["gpt2", "gpt2_tied", "gpt2_lora"])
def test_the_lean_losses_change_no_sum(workload, method):
    assert error_of(workload, method) < 1e-4


@pytest.mark.parametrize("method", OTHERS[:3])
@pytest.mark.parametrize("workload", ["mlp", "lstm_opacus"])
def test_so_are_those_of_opacus_on_a_plain_network(workload, method):
    assert error_of(workload, method) < 1e-3


def test_opacus_gets_activations_that_are_not_in_place():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 1))
    opacus = make_method("opacus:ghost", Settings(model, 5, 1.0, 0.0, 0.1))
    opacus.step(lambda network: network(torch.randn(5, 3)).squeeze(1))


@pytest.mark.parametrize(("spoil", "expected"), [(2.0, 1.0), (float("nan"), float("nan")), (0.0, 1.0)])
def test_a_wrong_sum_is_seen(monkeypatch, spoil, expected):
    step = Ours.step

    def spoiled(self, losses):
        step(self, losses)
        self.settings.parameters[-1].grad.mul_(spoil)

    monkeypatch.setattr(Ours, "step", spoiled)
    assert error_of("mlp", "auto/flat") == pytest.approx(expected, rel=1e-3, nan_ok=True)


def test_a_step_that_has_to_begin_again_does_so(monkeypatch):
    backward, raised = Clipper.backward, []

    def late(self, *arguments):
        if not raised:
            raised.append(True)
            raise LateError("a row does not tell whose it is: run this step again")
        return backward(self, *arguments)

    monkeypatch.setattr(Clipper, "backward", late)
    assert error_of("mlp", "auto/flat") < 1e-4
    assert raised


def test_a_gradient_that_never_came_is_seen(monkeypatch):
    step = Ours.step

    def spoiled(self, losses):
        step(self, losses)
        self.settings.parameters[0].grad = None

    monkeypatch.setattr(Ours, "step", spoiled)
    assert error_of("mlp", "auto/layer") == pytest.approx(1.0)


def test_the_check_would_see_clipping_left_out():
    """C is such that the plain sum is far from the clipped one."""
    flat, plain = "auto/flat", "nonprivate"
    assert error_of("mlp", flat) < 1e-4
    described = workload_named("mlp")
    parts = described.parts("tiny")
    batch = parts.batch(4, torch.Generator().manual_seed(1))
    model = parts.model()

    class NoClipping(Ours):
        def step(self, losses):
            self.clipper.detach()
            losses(self.network).sum().backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpexp.benchmark.methods.Ours", NoClipping)
        assert max_relative_error(flat, parts, batch, model, lambda network: network, parts.losses) > 0.5
    assert error_of("mlp", plain) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "roberta", "wrn", "mlp", "vit"])
def test_the_sizes_are_those_that_were_published(name):
    """Counted on the meta device, where nothing is allocated."""
    with torch.device("meta"):
        model = workload_named(name).parts("full").model()
    count = sum(p.numel() for p in model.parameters())
    layer = 12 * 768**2 + 13 * 768  # a transformer block of width 768
    expected = {
        "gpt2": 6 * layer + 2 * 50257 * 768 + (1024 + 2) * 768,
        "roberta": 6 * layer + (50265 + 514 + 1 + 2) * 768 + 768 * 769 + 2 * 769,
        "wrn": 2_748_890,  # WRN-16-4 for 10 classes
        "mlp": 3073 * 1000 + 9 * 1001 * 1000 + 1001 * 100,
        "vit": 6 * (12 * 384**2 + 13 * 384) + (3 * 256 + 1) * 384 + 2 * 384 + 385 * 1000,
    }
    assert count == expected[name]


def test_half_of_the_rows_are_padded():
    batch = workload_named("roberta").parts("full").batch(8, torch.Generator().manual_seed(0))
    assert batch["attention_mask"].sum(1).tolist() == [128] * 4 + [64] * 4
    assert bool((batch["input_ids"][4:, 64:] == 1).all())
    assert not bool((batch["input_ids"][:4] == 1).any())


def test_lora_trains_the_adapters_alone():
    model = workload_named("gpt2_lora").parts("tiny").model()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 4
    assert all("lora_" in name for name in names)


# Choosing


def test_shorthands_and_order():
    assert chosen_methods(["auto/flat"]) == [NONPRIVATE, "auto/flat"]
    assert chosen_methods(["libraries", "auto/flat", NONPRIVATE]) == [NONPRIVATE, *OTHERS, "auto/flat"]
    assert chosen_methods(["all"]) == list(METHODS)
    assert "onepass/block" in chosen_methods(["onepass/block"])
    assert chosen_methods(["nonprivate+lean", "bk/block+lean"]) == [
        NONPRIVATE,
        "nonprivate+lean",
        "bk/block+lean",
    ]
    assert {"loop/flat", "onepass/layer", "bk_mixopt/layer"} < set(OURS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workloads": ["gpt3"]}, "did you mean gpt2"),
        ({"workloads": []}, "nothing to measure"),
        ({"methods": ["auto/flatt"]}, "did you mean auto/flat"),
        ({"methods": ["opacus:block"]}, "is not known"),
        ({"methods": ["opacus:flat+lean"]}, "is not known"),
        ({"methods": ["nonprivate+lean"], "compile": True}, "leave one of them out"),
        ({"size": "huge"}, "choices: full, tiny"),
        ({"rounds": 0}, "rounds=0"),
        ({"max_batch": True}, "memory_gib"),
        ({"precision": "fp8"}, "fp32, bf16"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_measured(changes, message):
    settings = {"workloads": ["mlp"], "methods": ["auto/flat"], **changes}
    with pytest.raises(UserError, match=message):
        bench(BenchArguments(**settings), None)


@pytest.mark.parametrize(
    "preset", [None, *sorted(path.stem for path in (conf_dir() / "bench").glob("*.yaml"))]
)
def test_every_preset_names_what_there_is(preset):
    found = compose([f"bench={preset}"] if preset else [], "bench", BenchArguments)
    assert all(is_special(name) or workload_named(name) for name in found.workloads)
    assert len(chosen_methods(found.methods)) > 2
    if preset:
        header = (conf_dir() / "bench" / f"{preset}.yaml").read_text()
        assert f"python -m dpexp.bench bench={preset} " in header
        assert "Expected" in header


def test_the_command_line_wins_over_a_preset():
    found = compose(["bench=he2023_fig1", "methods=[auto/layer]"], "bench", BenchArguments)
    assert found.methods == ["auto/layer"]
    assert found.workloads == ["gpt2_124m"]


# The search


@given(limit=st.integers(0, 5000), start=st.integers(1, 200))
def test_the_search_finds_the_largest_batch(limit, start):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= limit

    assert largest(fits, start, 0.0) == limit
    assert len(asked) == len(set(asked))
    assert min(asked) >= 1


@given(limit=st.integers(1, 100_000))
def test_a_coarse_search_is_as_close_as_it_says_and_never_too_large(limit):
    found = largest(lambda batch: batch <= limit, 8, 0.05)
    assert found <= limit < found + max(1, 0.05 * found) + 1e-9


# Rounds, with workers that answer at once


class Scripted:
    """A worker whose seconds and failures are given."""

    log: list = []  # noqa: RUF012 - reset by the fixture
    script: dict = {}  # noqa: RUF012

    def __init__(self, threads, patience):
        self.closed = False

    def ask(self, command, **arguments):
        if command == "start":
            self.method = arguments["method"]
        self.log.append((self.method, command))
        told = self.script.get(self.method, {})
        if command == told.get("fails"):
            raise Failed("no such thing")
        slow = told.get("slow", 1.0)
        return {
            "start": {"batch_size": 4, "trainable": 9, "baseline_mib": 100.0, "hardware": {"cpu": "a"}},
            "warm_up": {"seconds": 0.5 * slow, "peak_mib": 100.0 + 30 * slow, "choices": {}},
            "turn": {"seconds": [0.5 * slow, 0.3 * slow], "peak_mib": 100.0 + 20 * slow},
            "tensors": {"tensors_mib": 10 * slow},
            "check": {"error": 1e-6},
        }[command]

    def close(self):
        self.log.append((self.method, "close"))


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(measuring, "Worker", Scripted)
    monkeypatch.setattr(Scripted, "log", [])
    monkeypatch.setattr(Scripted, "script", {})
    return Scripted


def test_ratios_are_of_the_fastest_and_of_the_median(scripted):
    scripted.script.update({"auto/flat": {"slow": 2.0}})
    plain, ours = measure("mlp", [NONPRIVATE, "auto/flat"], PROTOCOL, False, lambda text: None).rows
    assert (plain.fastest_s, plain.median_s, plain.examples_per_s) == (0.3, 0.4, pytest.approx(4 / 0.3))
    assert (plain.peak_mib, plain.steady_mib, plain.time_ratio, plain.memory_ratio) == (30.0, 20.0, 1.0, 1.0)
    assert (ours.time_ratio, ours.median_ratio, ours.memory_ratio, ours.steady_ratio) == (2.0, 2.0, 2.0, 2.0)
    assert (plain.tensors_mib, ours.tensors_mib, ours.tensors_ratio) == (10.0, 20.0, 2.0)
    assert ours.total_ratio == pytest.approx(160 / 130)
    assert ours.steps == 6
    assert ours.error == 1e-6


def test_methods_take_turns_and_none_always_follows_the_same(scripted):
    methods = [NONPRIVATE, "auto/flat", "auto/layer"]
    measure("mlp", methods, PROTOCOL, False, lambda text: None)
    turns = [method for method, command in scripted.log if command == "turn"]
    rounds = [turns[i : i + 3] for i in range(0, 9, 3)]
    assert all(sorted(turn) == sorted(methods) for turn in rounds)
    assert len({turn[0] for turn in rounds}) == 3


@pytest.mark.parametrize("stage", ["start", "warm_up", "turn", "tensors", "check"])
def test_a_method_that_fails_is_a_row_and_not_the_end(scripted, stage):
    scripted.script.update({"auto/flat": {"fails": stage}})
    rows = measure("mlp", [NONPRIVATE, "auto/flat", "auto/layer"], PROTOCOL, False, lambda text: None).rows
    assert [row.status for row in rows] == ["ok", "failed", "ok"]
    assert rows[1].reason == "no such thing"
    assert rows[1].time_ratio is None
    assert rows[2].time_ratio == 1.0
    assert sorted(method for method, command in scripted.log if command == "close") == sorted(
        row.method for row in rows
    )


def test_without_non_private_there_are_no_ratios_but_there_are_times(scripted):
    scripted.script.update({NONPRIVATE: {"fails": "turn"}})
    rows = measure("mlp", [NONPRIVATE, "auto/flat"], PROTOCOL, False, lambda text: None).rows
    assert rows[1].fastest_s == 0.3
    assert rows[1].time_ratio is None


def test_the_search_replaces_a_worker_that_ran_out_of_memory_and_reports_other_failures(monkeypatch):
    started = []

    class Limited:
        def __init__(self, threads, patience):
            started.append(self)

        def ask(self, command, **arguments):
            if command == "fit" and arguments["batch"] > 37:
                raise Failed("out of memory", memory=True)
            if command == "fit" and broken:
                raise Failed("the moon is full")
            return {"seconds": 0.25}

        def close(self):
            pass

    monkeypatch.setattr(measuring, "Worker", Limited)
    broken = False
    row = Row("mlp", "auto/flat", batch_size=4)
    measuring._search(row, PROTOCOL, lambda text: None)
    assert (row.max_batch, row.max_batch_examples_per_s) == (37, 37 / 0.25)
    assert len(started) > 3
    broken = True
    row = Row("mlp", "auto/flat", batch_size=4)
    measuring._search(row, PROTOCOL, lambda text: None)
    assert (row.max_batch, row.max_batch_reason) == (None, "the moon is full")


def test_the_largest_batch_is_one_that_a_fresh_process_can_begin_with(monkeypatch):
    """The first step, in which layouts are proven and methods tried, takes more than those that follow."""

    class Beginning:
        def __init__(self, threads, patience):
            self.fitted = 0

        def ask(self, command, **arguments):
            if command == "fit":
                if arguments["batch"] > (37 if self.fitted else 33):
                    raise Failed("out of memory", memory=True)
                self.fitted += 1
            return {"seconds": 0.5}

        def close(self):
            pass

    monkeypatch.setattr(measuring, "Worker", Beginning)
    row = Row("mlp", "auto/flat", batch_size=4)
    measuring._search(row, PROTOCOL, lambda text: None)
    assert (row.max_batch, row.max_batch_examples_per_s, row.max_batch_reason) == (33, 33 / 0.5, "")


# Real processes


@pytest.fixture
def worker():
    made = Worker(1, 300.0)
    yield made
    made.close()


def job(**changes):
    return {
        "workload": "mlp", "method": NONPRIVATE, "size": "tiny", "batch": None, "threads": 1, "device": "cpu",
        "precision": "fp32", "compile": False, "noise": 1.0, "cap_mib": None, **changes,
    }  # fmt: skip


def test_a_process_that_reaches_its_cap_says_so(worker):
    with pytest.raises(Failed, match="over the memory cap") as failure:
        worker.ask("start", **job(cap_mib=50.0))
    assert failure.value.memory


def test_what_a_process_cannot_do_it_says_and_when_it_is_gone(worker):
    with pytest.raises(Failed, match="no lean form"):
        worker.ask("start", **job(method="nonprivate+lean"))
    with pytest.raises(Failed, match="not installed") as failure:
        worker.ask("start", **job(method="fastdp:flat"))
    assert not failure.value.memory
    worker._process.kill()
    with pytest.raises(Failed, match="killed by the system"):
        worker.ask("start", **job())


@pytest.mark.slow
def test_from_the_command_line_to_the_files(tmp_path):
    """Two real processes; the memory of a step is that of the gradients and little more."""
    words = [
        "size=tiny", "workloads=[mlp]", "methods=[auto/layer]", "rounds=2", "seconds=0.05", "threads=1",
        f"out={tmp_path}/bench/small",
    ]  # fmt: skip
    done = called("dpexp.bench", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["bench"]
    record = json.loads((tmp_path / "bench" / "small.json").read_text())
    assert record["status"] == "finished"
    assert record["command"].startswith("python -m dpexp.bench size=tiny")
    assert {"versions", "git", "hardware", "code"} <= set(record)
    assert record["hardware"]["threads"] == 1
    plain, ours = record["rows"]
    assert (plain["method"], ours["method"]) == (NONPRIVATE, "auto/layer")
    assert ours["status"] == "ok"
    assert 0 < ours["error"] < 1e-4
    assert ours["time_ratio"] == pytest.approx(ours["fastest_s"] / plain["fastest_s"])
    assert plain["peak_mib"] < 20  # what libraries load when they are first used is not in it
    assert [len(turn) > 0 for turn in record["seconds"]["mlp"]["auto/layer"]] == [True, True]
    assert (tmp_path / "bench" / "small.csv").read_text() == render.as_csv(record["rows"])
    assert "auto/layer" in done.stdout


# Rendering


def record_of(*rows):
    return {
        "rows": [{**vars(Row("w", "m", batch_size=4)), **row} for row in rows],
        "settings": {"precision": "fp32"},
    }


MEASURED = record_of(
    {"method": NONPRIVATE, "fastest_s": 1.0, "peak_mib": 10.0, "time_ratio": 1.0, "memory_ratio": 1.0},
    {
        "method": "auto/flat",
        "fastest_s": 1.5,
        "peak_mib": 12.0,
        "time_ratio": 1.5,
        "memory_ratio": 1.2,
        "error": 1e-6,
    },
    {
        "method": "auto/layer",
        "fastest_s": 1.1,
        "peak_mib": 11.0,
        "time_ratio": 1.1,
        "memory_ratio": 1.1,
        "error": 0.5,
    },
    {"method": "opacus:flat", "status": "failed", "reason": "out of memory"},
    {"method": "fastdp:flat", "status": "failed", "reason": "not installed"},
)


def shown(table):
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return text.getvalue()


def test_wrong_and_failed_are_said_in_both_tables():
    table, matrix = shown(render.workload_table(MEASURED["rows"], "fp32")), shown(render.overview(MEASURED))
    for word in ("wrong gradient", "out of memory", "not installed", "1.50", "1.20"):
        assert word in table
    for word in ("1.50 / 1.20", "1.10 / 1.10 wrong", "fails", "not installed"):
        assert word in matrix
    assert render.wrong({"error": float("nan")}, "fp32")
    assert not render.wrong({"error": None}, "fp32")


def test_csv_can_be_read_back():
    rows = list(csv.DictReader(io.StringIO(render.as_csv(MEASURED["rows"]))))
    assert [row["method"] for row in rows] == [row["method"] for row in MEASURED["rows"]]
    assert float(rows[1]["time_ratio"]) == 1.5
    assert rows[3]["time_ratio"] == ""
    assert rows[3]["reason"] == "out of memory"


def test_the_plot_is_the_same_for_the_same_record():
    first = render.plot(MEASURED)
    assert first == render.plot(MEASURED)
    assert "auto/flat" in first
    assert "opacus:flat" not in first  # failed: no bar, no legend
    assert "<dc:date>" not in first


def test_a_workload_can_have_another_batch():
    assert workload_named("roberta@32").default_batch("full") == 32
    with pytest.raises(UserError, match="roberta@16"):
        workload_named("roberta@x")


@pytest.mark.parametrize(
    ("later", "share"),
    [
        ("cpu 300 0 100 400 0 0 0 200 7 7", 0.4),
        ("cpu 200 0 100 500 0 0 0 0 0 0", 0.0),
        ("cpu 100 0 100 300 0 0 0 0 0 0", None),
        ("intr 5", None),
    ],
)
def test_what_the_host_took_is_a_share_of_all_time(tmp_path, later, share):
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 100 300 0 0 0 0 0 0\ncpu0 1 2 3\n")
    stolen = Stolen(stat)
    stat.write_text(later + "\n")
    assert stolen.share() == share
    assert Stolen(tmp_path / "absent").share() is None


def test_a_process_says_what_the_tensors_of_a_step_take(worker):
    worker.ask("start", **job())
    worker.ask("warm_up", steps=1)
    (taken,) = worker.ask("tensors").values()
    # inputs of every layer, and a gradient for every weight
    weights = worker.ask("facts")["trainable"] * 4 / 2**20
    assert weights < taken < 20 * weights
