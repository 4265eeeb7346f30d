"""The command itself, on the embedded data: to its end, a second time, interrupted, killed, and on bad input."""

import json
import os
import signal
import stat
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from dpexp import record, siblings
from dpexp.clipping.engines import ENGINES
from dpexp.config import compose, run_folder, to_dict
from dpexp.errors import UserError
from dpexp.models.precision import slowdown
from dpexp.privacy import accountants
from dpexp.privacy.events import decode
from dpexp.privacy.shown import upwards
from dpexp.schemas import ClipConfig, DataConfig, ModelConfig, RunConfig, TaskConfig
from dpexp.train import report_finished, train
from dpexp.training import release
from dpexp.training.loop import Trainer
from dpexp.training.planning import build_plan, choose_device, number_of_steps
from tests.commands import called

ROOT = Path(__file__).parents[1]
JOB = ["task=sst2", "clip=adaptive_perlayer", "scale=demo", "optim.epochs=null", "runtime=cpu"]
# The papers' rule decides the same every time; a measurement may come out differently in another folder.
SHORT = [
    *JOB, "optim.steps=3", "data.num_examples=1000", "optim.batch_size=100", "runtime.physical_batch_size=64",
    "engine.choice=rule", "data.cache=null",
]  # fmt: skip


def prepare(runs, *overrides):
    run = compose([*SHORT, f"runtime.runs_dir={runs}", *overrides])
    folder = run_folder(run)
    folder.mkdir(parents=True)
    return run, folder


@pytest.mark.parametrize(("times", "said"), [(40.0, True), (1.2, False)])
def test_a_precision_that_the_processor_computes_slowly_is_told(tmp_path, monkeypatch, times, said):
    monkeypatch.setattr("dpexp.train.slowdown", lambda precision, device: times)
    run, folder = prepare(tmp_path, "optim.steps=1", "runtime.dry_run=true")
    console = Console(record=True, width=400)
    train(run, folder, console)
    assert ("take 40 times as long as with runtime.precision=fp32" in console.export_text()) == said


def test_how_much_slower_a_precision_is_is_measured():
    assert slowdown("fp32", torch.device("cpu")) == 1
    assert slowdown("bf16", torch.device("cpu")) > 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run, folder = prepare(tmp_path_factory.mktemp("runs"))
    console = Console(record=True, width=160)
    return train(run, folder, console), folder, console.export_text()


def test_the_folder_holds_what_a_run_leaves(finished):
    summary, folder, _ = finished
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert tuple(summary)[: len(record.SUMMARY_KEYS)] == record.SUMMARY_KEYS
    assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["steps"] == 3
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == summary["privacy"]["steps"] == 3
    assert stat.S_IMODE((folder / "secret.key").stat().st_mode) == 0o600
    assert (folder / "metrics.jsonl").exists()
    assert (folder / "checkpoint" / "latest.json").exists()


def test_the_epsilon_asked_for_is_met_and_all_accountants_are_shown(finished):
    summary, _, printed = finished
    epsilon = summary["privacy"]["epsilon"]
    assert 7.9 < epsilon["rdp"] <= 8.0
    assert 0 < epsilon["gdp"] < epsilon["prv"] <= epsilon["rdp"]
    for value in epsilon.values():
        assert upwards(value) in printed
    privacy = summary["privacy"]
    assert 0 < privacy["mu_regret"] < privacy["mu"] < 3
    assert f"{upwards(privacy['mu'])}, regret" in printed
    assert f"{privacy['tpr_at_fpr_0.001']:.4f} at most" in printed
    (released,) = privacy["events"]
    assert accountants.epsilon(decode(released), privacy["delta"]) == epsilon["rdp"]
    assert "synthetic" in printed


def test_the_exported_model_is_the_trained_one(finished):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    summary, folder, _ = finished
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(folder / "model")("a film")["input_ids"]
    checkpoint = torch.load(folder / "checkpoint" / "state-3.pt", weights_only=True)["model"]
    trained = {name: p for name, p in model.named_parameters() if name in checkpoint}
    assert trained
    assert all(torch.equal(p, checkpoint[name]) for name, p in trained.items())
    card = (folder / "model" / "PRIVACY.md").read_text()
    assert f"({upwards(summary['privacy']['epsilon']['rdp'])}, " in card


def test_asking_for_a_finished_run_reports_it_and_whether_the_code_is_the_same(finished):
    summary, folder, _ = finished
    console = Console(record=True, width=160)
    report_finished(record.finished_summary(folder), folder, console)
    same = console.export_text()
    assert "is finished" in same
    assert "has changed" not in same
    report_finished({**summary, "details": {"code": "older"}}, folder, console)
    assert "the code has changed since" in console.export_text()


def test_asking_for_a_finished_run_says_whether_its_data_were_written_since(finished, tmp_path):
    summary, folder, _ = finished
    (data := tmp_path / "mine.csv").write_text("text,label\n")
    console = Console(record=True, width=400)
    begun = (folder / "config.yaml").stat().st_mtime
    asked = RunConfig(data=DataConfig(train=str(data), dev=str(tmp_path / "gone.csv")))
    for time, said in ((begun - 60, False), (begun + 60, True)):
        os.utime(data, (time, time))
        report_finished(summary, folder, console, asked)
        assert ("mine.csv was written after this run had begun" in console.export_text()) == said


@pytest.mark.parametrize("named", ["mine.py:small", "mine:small"])
def test_asking_for_a_finished_run_says_whether_code_of_ones_own_was_written_since(
    finished, tmp_path, monkeypatch, named
):
    """Who compares two rules by editing one file would get the result of the first for both."""
    summary, folder, _ = finished
    monkeypatch.chdir(tmp_path)
    (code := tmp_path / "mine.py").write_text("")
    console = Console(record=True, width=400)
    begun = (folder / "config.yaml").stat().st_mtime
    asked = [
        RunConfig(clip=ClipConfig(rule=named)),
        RunConfig(model=ModelConfig(factory=named)),
        RunConfig(task=TaskConfig(factory=named)),
    ]
    for time, said in ((begun - 60, 0), (begun + 60, 3)):
        os.utime(code, (time, time))
        for run in asked:
            report_finished(summary, folder.resolve(), console, run)
        assert console.export_text().count(f"this result is of what {named} was before") == said


def test_asking_for_a_finished_run_says_where_its_data_lay(finished):
    summary, folder, _ = finished
    console, run = Console(record=True, width=400), compose(SHORT)
    read = {**summary, "data": {**summary["data"], "source": "files"}}
    report_finished(read, folder, console, run)
    assert "read its data with" not in console.export_text()
    run.data.root, run.task.files = "other", {"train": "other.tsv", "dev": "sst2/dev.tsv"}
    report_finished(read, folder, console, run)
    said = console.export_text()
    assert "this run read its data with data.root=None, and" in said
    assert "with task.files.train=sst2/train.tsv, and" in said
    assert "task.files.dev" not in said
    report_finished(summary, folder, console, run)
    assert "read its data with" not in console.export_text()


def test_without_privacy_epsilon_is_null_and_there_is_no_ledger(tmp_path):
    run, folder = prepare(tmp_path, "clip=nonprivate", "optim.steps=1")
    summary = train(run, folder, Console(quiet=True))
    assert set(summary["privacy"]["epsilon"].values()) == {None}
    assert summary["engine"] == "none"
    assert not (folder / "ledger.jsonl").exists()


def test_a_corrupt_checkpoint_and_a_missing_device_are_refused(tmp_path):
    run, folder = prepare(tmp_path, "optim.steps=2")
    train(run, folder, Console(quiet=True))
    state = folder / "checkpoint" / "state-2.pt"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(UserError, match="corrupt checkpoint"):
        train(run, folder, Console(quiet=True))


@pytest.mark.parametrize("name", ["gpu7", "meta", "mps", "cuda:99", "cpu:1", ""])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(UserError, match=r"is no device|this machine has"):
        choose_device(name)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_run_that_diverges_fails_and_leaves_no_model(tmp_path):
    run, folder = prepare(tmp_path, "optim.lr=1e30")
    with pytest.raises(UserError, match=r"diverged: .*optim.lr=1e\+30"), record.failures(run, folder):
        train(run, folder, Console(quiet=True))
    written = (folder / "summary.json").read_text()
    assert json.loads(written)["status"] == "failed"
    assert json.loads(written)["privacy"]["steps"] == 3
    assert not (folder / "model").exists()
    for line in (written, *(folder / "metrics.jsonl").read_text().splitlines()):
        json.loads(line, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))


def test_epochs_of_less_than_a_step_are_refused():
    run = compose([*JOB, "optim.epochs=1e-9"])
    with pytest.raises(UserError, match=r"less than one step of .* give 0.1 epochs or more"):
        number_of_steps(run, 16000)


def test_a_finished_run_whose_model_is_gone_says_how_to_get_it_back(finished, tmp_path):
    console = Console(record=True, width=160)
    report_finished(finished[0], tmp_path, console)
    assert "the folder of the model is gone. Put a copy back" in console.export_text()
    (tmp_path / "secret.key").touch()
    report_finished(finished[0], tmp_path, console)
    assert "the folder of the model is gone. Delete" in console.export_text()


def test_an_unfinished_run_of_the_same_settings_is_named_with_its_epsilon(tmp_path):
    started, folder = prepare(tmp_path, "runtime.threads=1")
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(started)))
    (folder / "ledger.jsonl").write_text("{}\n{}\n")
    run, own = prepare(tmp_path, "engine=ghost")
    plan = build_plan(run, 16000, 3)
    said = siblings.sentence(run, to_dict(run), own, plan)
    assert str(folder) in said
    assert f"with 2 charges (ε = {upwards(plan.epsilon(2, 'rdp'))}" in said
    assert said.endswith("engine=auto runtime.threads=1")
    other, elsewhere = prepare(tmp_path, "optim.lr=0.5")
    assert siblings.sentence(other, to_dict(other), elsewhere, plan) is None
    (folder / "summary.json").write_text('{"status": "finished"}')
    assert siblings.sentence(run, to_dict(run), own, plan) is None


def command(runs, *overrides, before=lambda: None):
    return called("dpexp.train", *SHORT, f"runtime.runs_dir={runs}", *overrides, cwd=ROOT, before=before)


def ledger_lines(folder):
    ledger = folder / "ledger.jsonl"
    return len(ledger.read_text().splitlines()) if ledger.exists() else 0


def signalled(number):
    """Patch this process: a signal comes when four steps are charged and the fifth is about to be."""
    begin_step = release.Ledger.begin_step

    def watched(ledger, step, *rest):
        if step == 4:
            os.kill(os.getpid(), number)
        return begin_step(ledger, step, *rest)

    release.Ledger.begin_step = watched


@pytest.mark.slow
def test_interrupted_or_killed_the_same_command_goes_on_to_the_same_model(tmp_path):
    longer = ["optim.steps=10", "privacy.noise_seed=7", "runtime.checkpoint_every=3"]
    whole = command(tmp_path / "whole", *longer)
    assert whole.returncode == 0, whole.stderr
    model = next((tmp_path / "whole").rglob("model.safetensors")).read_bytes()

    done = command(tmp_path / "cut", *longer, before=partial(signalled, signal.SIGINT))
    assert done.returncode == 130, done.stderr
    assert "run the same command again" in done.stdout
    assert not list((tmp_path / "cut").rglob("summary.json"))
    done = command(tmp_path / "killed", *longer, before=partial(signalled, signal.SIGKILL))
    assert done.returncode == -signal.SIGKILL

    for runs in (tmp_path / "cut", tmp_path / "killed"):
        folder = next(runs.rglob("ledger.jsonl")).parent
        assert 4 <= ledger_lines(folder) < 10
        again = command(runs, *longer)
        assert again.returncode == 0, again.stderr
        assert (folder / "model" / "model.safetensors").read_bytes() == model
        assert (
            json.loads((folder / "summary.json").read_text())["privacy"]["steps"]
            == ledger_lines(folder)
            == 10
        )


def test_trials_that_an_earlier_session_declared_stay_declared(tmp_path, monkeypatch):
    run, folder = prepare(tmp_path)
    monkeypatch.setattr("dpexp.train.build_tokenizer", lambda *_, **__: 1 / 0)
    for trials, law, told in ((36, "geometric", 36), (1, None, 36), (40, None, 40)):
        run.trials, run.trials_law = trials, law
        with pytest.raises(ZeroDivisionError):
            train(run, folder, Console(quiet=True))
        kept = yaml.safe_load((folder / "config.yaml").read_text())
        assert (kept["trials"], kept["trials_law"]) == (told, "geometric" if told == 36 else None)


def test_a_run_does_not_go_on_with_other_data_than_its_checkpoint_has_learnt_from(tmp_path, monkeypatch):
    data = tmp_path / "mine.csv"
    own = [
        "task=text_classification", f"data.train={data}", "data.text=text", "data.label=label", "task.labels=[a,b]",
        "data.num_examples=8", "optim.batch_size=4", "optim.steps=2", "runtime.checkpoint_every=1", "clip=flat",
    ]  # fmt: skip
    run, folder = prepare(tmp_path / "runs", *own)

    def begin(word, stop):
        data.write_text("text,label\n" + f"{word} film,a\npoor film,b\n" * 4)
        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "affordable", lambda trainer: trainer.step < stop)
            patched.setattr("dpexp.train.refuse_divergence", lambda *_: 1 / 0)
            train(run, folder, Console(quiet=True))

    for word, stop in (("fine", 0), ("good", 1)):
        # a run that has learnt nothing yet begins on what is there
        with pytest.raises(ZeroDivisionError):
            begin(word, stop)
    with pytest.raises(UserError, match="the data differ"):
        begin("fine", 2)
    with pytest.raises(ZeroDivisionError):
        begin("good", 2)


def test_the_key_of_a_finished_run_goes_and_its_record_can_still_be_asked(finished):
    _, folder, _ = finished
    assert (folder / "secret.key").exists()  # `train` itself may still fail to write its record
    for overrides, stays in ((["privacy.keep_key=true"], True), ([], False), ([], False)):
        done = command(folder.parents[2], *overrides)
        assert done.returncode == 0, done.stderr
        assert "this run is finished" in done.stdout
        assert (folder / "secret.key").exists() == stays


def test_bad_input_is_one_line_and_exit_status_2(tmp_path):
    done = command(tmp_path, "clip=adaptive_perlyer")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "adaptive_perlayer" in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_and_runtime_change_no_plan():
    """What must not change the science does not: the same frozen plan, to the last bit, and the same event."""
    settings = ["task=sst2", "scale=demo", "clip=adaptive_perlayer"]
    reference = build_plan(compose(settings), 16000, 120)
    others = [[f"engine={name}"] for name in sorted(ENGINES)]
    others += [
        ["runtime.threads=1"],
        ["runtime.physical_batch_size=8"],
        ["runtime=cpu"],
        ["tracker=tensorboard"],
    ]
    for other in others:
        plan = build_plan(compose([*settings, *other]), 16000, 120)
        assert plan.fingerprint() == reference.fingerprint(), other
        assert plan.event() == reference.event()


@pytest.mark.parametrize("task", ["mnist", "sst2"])
def test_opacus_trains_with_default_settings_on_a_cpu(task, tmp_path):
    """The search for a physical batch runs a forward pass that nobody back-propagates."""
    run = compose(
        [
            f"task={task}", "scale=demo", "engine=opacus", "runtime=cpu", "optim.epochs=null", "optim.steps=2",
            "optim.batch_size=16", "data.num_examples=100", "data.cache=null", f"runtime.runs_dir={tmp_path}",
        ]
    )  # fmt: skip
    folder = run_folder(run)
    folder.mkdir(parents=True)
    assert train(run, folder, Console(record=True))["privacy"]["steps"] == 2


def test_evaluation_without_training(tmp_path):
    """optim.steps=0: the model as it is, and no charge."""
    run, folder = prepare(tmp_path, "optim.steps=0", "clip=nonprivate")
    summary = train(run, folder, Console(record=True))
    assert summary["metrics"]["accuracy"] >= 0
    assert summary["privacy"]["released"] == ["model as it was, untrained"]
    assert not (folder / "ledger.jsonl").exists()
