"""What a run says about itself."""

import json
import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dpexp import provenance, record, statement
from dpexp.durable import write_json
from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import composed, decode
from dpexp.privacy.keys import COPIED
from dpexp.privacy.plan import make_plan
from dpexp.privacy.searches import SearchBudget
from dpexp.privacy.shown import upwards
from dpexp.schemas import RunConfig
from dpexp.tasks import DataInfo
from dpexp.training.export import privacy_card

TASK = SimpleNamespace(
    num_examples=100, data=DataInfo("files", "here", {"train": 100, "dev": 5}, {"train": "ab"}, [])
)


def plan(**changes):
    settings = {
        "num_examples": 100, "expected_batch_size": 10, "steps": 5, "delta": "1e-3", "accountant": "rdp",
        "noise_multiplier": 1.0,
    }  # fmt: skip
    return make_plan(**(settings | changes))


def block(run=None, made=None, spent=None, charged=5, again=0):
    return statement.privacy_block(
        run or RunConfig(),
        made or plan(),
        spent or {"rdp": 2.0, "gdp": 1.0, "prv": 1.5, "pld": 1.4},
        3,
        charged,
        again=again,
    )


def summary(privacy, **performance):
    return record.summarise(
        RunConfig(), TASK, privacy=privacy, metrics={"accuracy": 0.5}, performance=performance, wall_s=1.0, status="finished",
        details={"code": provenance.code_hash()},
    )  # fmt: skip


def test_the_summary_has_the_fixed_keys_and_is_strict_json():
    written = json.loads(json.dumps(summary(block()), allow_nan=False))
    assert tuple(written)[: len(record.SUMMARY_KEYS)] == record.SUMMARY_KEYS
    assert set(written["data"]) == {"source", "name", "rows", "sha256"}
    fixed = [
        "epsilon",
        "delta",
        "accountant",
        "noise_multiplier",
        "sigma_new",
        "sigma_b",
        "sample_rate",
        "steps",
        "sampling",
        "released",
    ]
    assert list(written["privacy"])[: len(fixed)] == fixed
    assert set(written["privacy"]["epsilon"]) == {"rdp", "gdp", "prv", "pld"}
    assert set(written["git"]) == {"commit", "dirty"}
    assert all(isinstance(written[key], str) for key in ("task", "model", "clip", "engine", "scale"))


def test_an_epoch_takes_all_examples_at_the_measured_speed():
    assert summary(block(), examples_per_s=5.0, step_s=2.0)["performance"]["epoch_s"] == 20.0
    assert summary(block())["performance"] == {}


def test_without_privacy_the_numbers_are_null():
    run = RunConfig()
    run.clip.private = False
    privacy = statement.privacy_block(run, None, {}, 0, 0)
    assert privacy["epsilon"] == dict.fromkeys(("rdp", "gdp", "prv", "pld"))
    assert privacy["delta"] is privacy["noise_multiplier"] is privacy["sigma_b"] is None


def test_the_split_of_the_budget_is_stated():
    made = plan(quantile_budget=0.1)
    privacy = block(made=made)
    assert privacy["released"] == ["gradients", "counts"]
    assert privacy["sigma_new"] ** -2 + 3 / (4 * privacy["sigma_b"] ** 2) == pytest.approx(1.0)
    assert block()["released"] == ["gradients"]
    assert block()["sigma_b"] is None


def test_an_infinite_epsilon_is_null_and_said():
    privacy = block(spent={"rdp": math.inf, "gdp": 1.0, "prv": None, "pld": math.inf})
    assert privacy["epsilon"]["rdp"] is None
    assert "epsilon has no finite value: there is no guarantee to speak of" in privacy["notes"]


def test_where_one_accountant_gives_up_the_others_still_hold():
    privacy = block(spent={"rdp": 7.99964, "gdp": 5.0, "prv": math.inf, "pld": 7.1})
    assert privacy["epsilon"]["prv"] is None
    (said,) = [note for note in privacy["notes"] if "no finite" in note]
    assert said.startswith("prv found no finite epsilon, which is a limit of its arithmetic")
    assert "rdp 7.9997, pld 7.1000 is an upper bound" in said
    assert not any("no guarantee to speak of" in note for note in privacy["notes"])


def _held_out_and_used(run: RunConfig) -> None:
    run.task.held_out, run.schedule.name = 20, "validation"
    run.clip.name = run.clip.method = "ellipsoid"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: setattr(run.privacy, "noise_seed", 3), "only while that seed is secret"),
        (
            lambda run: setattr(run, "trials", 12),
            "chosen from 12 configurations, each taken to have cost what this one did; epsilon excludes the tuning",
        ),
        (lambda run: None, "dev set"),
        (lambda run: None, "N is public and stays, so the example is zeroed out"),
        (
            lambda run: setattr(run.task, "held_out", 20),
            "the last 20 rows of the training file are the dev set",
        ),
        (lambda run: setattr(run.task, "held_out", 20), "(task.held_out): nothing is learnt from them and"),
        (
            _held_out_and_used,
            "(task.held_out): clip=ellipsoid takes gradients of them for public, schedule=validation",
        ),
        (lambda run: None, "Poisson sampling, as the accountants assume"),
        (lambda run: setattr(run.runtime, "precision", "bf16"), "are rounded otherwise, each by some 2^-8"),
    ],
)
def test_what_a_reader_must_know_is_in_the_notes(change, words):
    run = RunConfig()
    change(run)
    assert any(words in note for note in block(run)["notes"])


def test_sums_in_full_precision_need_no_word_of_16_bits():
    assert not any("rounded otherwise" in note for note in block(RunConfig())["notes"])


@pytest.mark.parametrize(("private", "release"), [(True, "normal"), (True, "strict"), (False, "strict")])
def test_a_strict_release_withholds_the_hash_of_the_training_data(private, release):
    """Whoever knows all rows but one could test guesses at that one."""
    run = RunConfig()
    run.privacy.release, run.clip.private = release, private
    hashes = {"train": "a", "dev": "a", "test": "b"}  # dev: the last rows of the training file
    task = SimpleNamespace(data=SimpleNamespace(sha256=hashes))
    withheld = private and release == "strict"
    expected = {"train": None, "dev": None, "test": "b"} if withheld else hashes
    assert record.data_hashes(run, task) == expected


def test_a_finished_run_learns_how_many_were_tried_and_never_forgets():
    written = summary(block())
    assert "no other trial was declared; epsilon excludes the tuning" in written["privacy"]["notes"]
    number = len(written["privacy"]["notes"])
    assert statement.declare_trials(written, 12)
    assert not statement.declare_trials(written, 1)
    assert written["privacy"]["trials"] == 12
    assert (
        "chosen from 12 configurations, each taken to have cost what this one did; epsilon excludes the tuning"
        in written["privacy"]["notes"]
    )
    assert len(written["privacy"]["notes"]) == number
    assert written["privacy"]["epsilon_with_tuning"] is None  # nothing is known of what this one released


def test_the_record_holds_what_an_attacker_can_do_and_what_choosing_costs():
    run, made = RunConfig(), plan(noise_multiplier=2.0)
    written = summary(statement.privacy_block(run, made, made.epsilons(), 3, 5, events=[made.event()]))
    privacy = written["privacy"]
    assert 0 < privacy["mu_regret"] < privacy["mu"] < 2
    assert 1e-3 < privacy["tpr_at_fpr_0.001"] < 0.1
    assert epsilon(decode(privacy["events"][0]), privacy["delta"]) == privacy["epsilon"]["rdp"]
    assert privacy["epsilon_with_tuning"] is None
    assert statement.declare_trials(written, 3)
    assert privacy["epsilon_with_tuning"]["rdp"] == epsilon(composed([(made.event(), 3)]), made.delta)
    assert statement.declare_trials(written, 3, "geometric")
    assert privacy["epsilon_with_tuning"]["pld"] is None
    assert not statement.declare_trials(written, 3, "geometric")
    assert (
        "the best of a geometric number of trials, 3 on average; epsilon excludes the tuning"
        in privacy["notes"]
    )
    # of a random number of trials rdp alone has a price, whoever decided the noise
    for privacy["accountant"] in ("pld", "rdp"):
        card = privacy_card(written)
        assert f"| μ of Gaussian DP, with its regret Δ | {privacy['mu']:.4f}, " in card
        top = card.partition("| | |")[0]
        with_choice = upwards(privacy["epsilon_with_tuning"]["rdp"])
        assert "**Chosen among 3 trials.** The ε above" in top
        assert f"the guarantee has ε = {with_choice}, by the RDP accountant" in top
        assert (
            f"ε with the choice among 3 trials, by RDP | {upwards(privacy['epsilon_with_tuning']['rdp'])} |"
            in card
        )


def test_no_price_of_tuning_is_made_of_a_course_that_a_filter_ended():
    made = plan(search=SearchBudget("laplace", 0.3))
    written = summary(statement.privacy_block(RunConfig(), made, {"rdp": 2.0}, 1, 5, events=[made.event()]))
    assert statement.declare_trials(written, 3)
    assert written["privacy"]["trials"] == 3
    assert written["privacy"]["epsilon_with_tuning"] is None


def test_shuffling_and_double_charges_are_said():
    notes = block(made=plan(sampling="shuffle"), charged=7, again=2)["notes"]
    assert any("shuffling" in note and "not a guarantee" in note for note in notes)
    assert not any("as the accountants assume" in note for note in notes)
    assert any(note.startswith("2 steps were charged twice") and "could have been" in note for note in notes)


def test_without_git_the_caller_says_what_runs(monkeypatch):
    monkeypatch.setenv("DPEXP_COMMIT", "abc123")
    monkeypatch.setenv("DPEXP_DIRTY", "1")
    assert provenance.git_state() == {"commit": "abc123", "dirty": True}
    monkeypatch.delenv("DPEXP_DIRTY")
    assert provenance.git_state() == {"commit": "abc123", "dirty": False}


def test_a_copy_says_that_there_is_another_one():
    made = plan()
    assert COPIED in statement.privacy_block(RunConfig(), made, made.epsilons(), 3, 5, copied=True)["notes"]
    assert COPIED not in block()["notes"]


def test_git_is_asked_about_this_code_and_no_other(monkeypatch, tmp_path):
    monkeypatch.delenv("DPEXP_COMMIT", raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "venv" / "dpexp").mkdir(parents=True)
    monkeypatch.setattr(provenance, "_PACKAGE", tmp_path / "venv" / "dpexp")
    # installed inside someone else's repository
    assert provenance.git_state() == {"commit": None, "dirty": None}
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    monkeypatch.setattr(provenance, "_PACKAGE", tmp_path / "dpexp")
    (tmp_path / "dpexp").mkdir()
    (tmp_path / "dpexp" / "a.py").write_text("1")
    subprocess.run(["git", "-C", str(tmp_path), "add", "dpexp"], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "-q", "-m", "x"], check=True)
    state = provenance.git_state()
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "dpexp" / "a.py").write_text("2")
    assert provenance.git_state()["dirty"] is True


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """A commit of some code, a choice, a table and a page; the folder."""
    monkeypatch.delenv("DPEXP_COMMIT", raising=False)
    for name in ("dpexp/a.py", "conf/clip/flat.yaml", "results/tables/a.md", "docs/a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    (tmp_path / ".gitignore").write_text("*.so\n/runs/\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "x")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(provenance, "_PACKAGE", tmp_path / "dpexp")
    assert provenance.git_state()["dirty"] is False
    return tmp_path


def test_asking_git_takes_no_lock_that_a_commit_beside_it_would_meet(repository):
    index = repository / ".git" / "index"
    # a file that was only touched: git would note in its index that it is the same
    os.utime(repository / "dpexp" / "a.py", (1, 1))
    before = index.read_bytes()
    assert provenance.git_state()["dirty"] is False
    assert index.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "dirty"),
    [
        ("dpexp/new.py", True), ("dpexp/tasks/rows.tsv", True), ("dpexp/native/kernel.cpp", True), ("conf/clip/mine.yaml", True),
        ("scripts/run.sh", True), ("torch.py", True), ("torch/__init__.py", True), ("dpexp/a b.py", True),
        ("dpexp/ä.py", True), ("results/runs/new.json", False), ("results/bench/new.py", False), ("notes.txt", False),
        ("docs/figure.svg", False), ("runs/sst2/summary.json", False), ("dpexp/kernels.so", False),
    ],
)  # fmt: skip
def test_an_untracked_file_is_dirt_where_it_could_change_what_the_code_does(name, dirty, repository):
    (repository / name).parent.mkdir(parents=True, exist_ok=True)
    (repository / name).write_text("1")
    assert provenance.git_state()["dirty"] is dirty


@pytest.mark.parametrize(
    ("name", "dirty"),
    [
        ("dpexp/a.py", True),
        ("conf/clip/flat.yaml", True),
        ("docs/a.md", True),
        ("results/tables/a.md", False),
    ],
)
@pytest.mark.parametrize("change", ["edited", "staged", "removed"])
def test_a_tracked_file_is_dirt_unless_it_is_what_runs_leave(name, dirty, change, repository):
    if change == "removed":
        (repository / name).unlink()
    else:
        (repository / name).write_text("2")
    if change == "staged":
        subprocess.run(["git", "-C", str(repository), "add", name], check=True)
    assert provenance.git_state()["dirty"] is dirty


def test_changed_code_is_noticed(monkeypatch):
    monkeypatch.setenv("DPEXP_COMMIT", "a" * 40)
    finished = summary(block())
    assert provenance.code_changes(finished) is None
    finished["details"]["code"] = "other"
    assert "at the same commit" in provenance.code_changes(finished)
    monkeypatch.setenv("DPEXP_COMMIT", "b" * 40)
    assert "aaaaaaaaaa, this is bbbbbbbbbb" in provenance.code_changes(finished)
    # both from a wheel
    monkeypatch.setattr(provenance, "git_state", lambda: {"commit": None, "dirty": None})
    finished["git"] = {"commit": None, "dirty": None}
    assert provenance.code_changes(finished) == "the code has changed since"


def test_only_a_finished_summary_counts(tmp_path):
    assert record.finished_summary(tmp_path) is None
    for damaged in ("{", "[]", "7", '{"status": "finished"}', '{"status": "finished", "privacy": []}'):
        (tmp_path / "summary.json").write_text(damaged)
        with pytest.raises(UserError, match=r"summary\.json is damaged"):
            record.finished_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "failed"}')
    assert record.finished_summary(tmp_path) is None
    write_json(tmp_path / "summary.json", summary(block()))
    assert record.finished_summary(tmp_path)["metrics"] == {"accuracy": 0.5}


def test_metrics_after_the_resumed_step_and_torn_lines_are_dropped(tmp_path):
    metrics = record.Metrics(tmp_path / "metrics.jsonl", strict=False)
    for step in (1, 2, 3):
        metrics.write(step, {"lr": 0.1})
    with open(metrics.path, "a") as file:
        file.write('{"step": 4, "l')
    with open(metrics.path, "ab") as file:
        file.write(b"\xff\xfe garbled\n")
    metrics.resume_at(2)
    assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == [1, 2]


def test_a_tracker_sees_names_that_say_what_is_not_private(tmp_path):
    seen = {}
    tracker = SimpleNamespace(log=lambda values, step: seen.update(values))
    for tell_all, told in ((False, {"lr": 0.1}), (True, {"lr": 0.1, "not_private/loss": 2.0})):
        seen.clear()
        metrics = record.Metrics(tmp_path / "metrics.jsonl", False, tracker, tell_all)
        metrics.write(1, {"lr": 0.1})
        metrics.write(1, {"loss": 2.0}, released=False)
        assert seen == told


def test_what_is_no_number_is_null_in_every_file(tmp_path):
    metrics = record.Metrics(tmp_path / "metrics.jsonl", strict=False)
    metrics.write(1, {"dev": {"loss": math.nan, "norms": [math.inf, 1.0]}})
    assert "NaN" not in metrics.path.read_text()
    assert json.loads(metrics.path.read_text())["dev"] == {"loss": None, "norms": [None, 1.0]}
    write_json(tmp_path / "a.json", {"loss": -math.inf})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": None}


def test_a_strict_release_keeps_times_and_sizes_to_itself(tmp_path):
    """How long a step takes, and the memory it needs, follow from how many rows were drawn and how long they are."""
    run = RunConfig()
    run.privacy.release = "strict"
    metrics = record.Metrics(tmp_path / "metrics.jsonl", strict=True)
    metrics.write(1, {"lr": 0.1, "time_s": 1.5})
    assert json.loads(metrics.path.read_text()) == {"step": 1, "lr": 0.1}
    written = record.summarise(
        run, TASK, privacy=block(run), metrics={}, wall_s=1.0, status="finished",
        performance={"examples_per_s": 5.0, "step_s": 1.0, "peak_memory_mib": 9.0, "device": "cpu", "bytes_per_step": {"x": 7}},
        details={"physical_batch_size": 8, "choices": {"x": "ghost"}},
    )  # fmt: skip
    assert written["wall_s"] is None
    assert written["performance"] == {
        "examples_per_s": None,
        "step_s": None,
        "epoch_s": None,
        "peak_memory_mib": None,
        "device": "cpu",
        # of a pipeline, whatever a runtime adds
        "bytes_per_step": None,
    }
    assert written["details"]["physical_batch_size"] is written["details"]["choices"] is None
    with pytest.raises(UserError), record.failures(run, tmp_path):
        raise UserError("row 7 says hello")
    assert "UserError" in (failed := (tmp_path / "summary.json").read_text())
    assert "hello" not in failed


def test_a_damaged_ledger_does_not_hide_what_failed(tmp_path):
    (tmp_path / "ledger.jsonl").write_bytes(b"\xff\xfe garbled\n")
    with pytest.raises(UserError, match="the ledger is damaged"), record.failures(RunConfig(), tmp_path):
        raise UserError("the ledger is damaged")
    written = (tmp_path / "summary.json").read_text()
    assert "its 1 steps are paid for" in written
    assert json.loads(written)["details"]["not_private"] == ["error", "traceback"]


def test_what_a_task_says_of_its_data_goes_with_the_model_unless_it_was_counted():
    notes = ["dev: 3 rows were cut", "train: 3 of 9 rows were cut (counted without noise on private data)"]
    said = statement.privacy_block(RunConfig(), plan(), {"rdp": 2.0}, 3, 5, data=notes)["notes"]
    assert "data: dev: 3 rows were cut" in said
    assert not any("train: 3 of 9" in note for note in said)


def test_an_epsilon_that_protects_nobody_is_called_so():
    assert any("protects nobody" in note for note in block(spent={"rdp": 1e6})["notes"])
    assert not any("protects nobody" in note for note in block(spent={"rdp": 8.0})["notes"])


def test_a_delta_that_a_random_row_would_satisfy_is_called_so():
    assert any(
        "publishing a random example would satisfy it" in n for n in block(made=plan(delta="0.5"))["notes"]
    )
    assert not any("publishing a random example" in note for note in block()["notes"])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_the_high_water_mark_of_the_process():
    pages = torch.ones(8 << 20)  # 32 MiB, touched
    status = Path("/proc/self/status").read_text()
    high_water_kib = int(status.split("VmHWM:")[1].split()[0])
    assert provenance.peak_memory_mib(torch.device("cpu")) == pytest.approx(high_water_kib / 1024, abs=16)
    del pages


def test_a_strict_release_does_not_tell_what_was_counted_on_private_data():
    counted = "train: 3 of 9 rows were cut (counted without noise on private data)"
    task = SimpleNamespace(
        data=DataInfo("files", "x", {}, {}, ["the classes were taken from private data", counted])
    )
    assert record.data_notes(task, strict=False) == task.data.notes
    assert record.data_notes(task, strict=True) == ["the classes were taken from private data"]
