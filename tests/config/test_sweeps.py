"""A multirun: every job is a row, failed or not, in one process or several; an interrupted one goes on where it stopped."""

import importlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from rich.console import Console

from dpexp import provenance, record
from dpexp.config import compose, run_folder, sweeps
from dpexp.durable import read_json, write_json
from dpexp.errors import UserError
from dpexp.training import release
from tests.commands import called, in_background
from tests.parallel import slurm

ROOT = Path(__file__).parents[2]
# by which a process that a launcher starts finds dpexp
FOUND = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
SCRIPT = """
import os, signal, time
from dpexp.config import RunConfig, hydra_entry
from dpexp.errors import UserError
from dpexp.config.sweeps import Result

@hydra_entry("train")
def main(run: RunConfig) -> dict[str, float]:
    "Fail for some seeds."
    if run.seed == 13:
        raise UserError("this seed is refused")
    if run.seed == 14:
        raise RuntimeError("out of memory")
    if run.seed == 15:
        # the other job has begun, too
        while len(open("grid/jobs.jsonl").readlines()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return Result({"loss": 1.0, "accuracy": 0.1 * run.seed}, run.task.metric)

main()
"""


def call(folder, *arguments):
    def before():
        os.environ["COLUMNS"] = "160"
        if "hydra/launcher=joblib" in arguments:
            # its processes are forks, and need not import everything again
            importlib.import_module("joblib.externals.loky.backend.context").set_start_method(
                "fork", force=True
            )

    (folder / "script.py").write_text(SCRIPT)
    return called(folder / "script.py", "task=sst2", "clip=flat", *arguments, cwd=folder, before=before)


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_failed_job_is_a_row_and_not_the_end(tmp_path, launcher):
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = call(tmp_path, "seed=1,13,14,2", f"hydra/launcher={launcher}", "hydra.sweep.dir=grid", "-m")
    assert done.returncode == 2
    rows = sweeps.jobs(tmp_path / "grid")
    assert [row["status"] for row in rows] == ["finished", "failed", "failed", "finished"]
    assert [row["error"] for row in rows] == [
        None,
        "this seed is refused",
        "RuntimeError: out of memory",
        None,
    ]
    assert rows[3]["metrics"] == {"loss": 1.0, "accuracy": 0.2}
    assert "4 jobs, 2 failed" in done.stdout
    assert "repeat its command with trials=4" in " ".join(done.stdout.split())
    assert "failed: RuntimeError: out of memory" in done.stdout
    assert "Traceback" not in done.stderr + done.stdout


def test_a_job_whose_process_was_killed_is_counted(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    done = call(tmp_path, "seed=1,15", *launcher, "hydra.sweep.dir=grid", "-m")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    assert "error: a process that ran jobs was killed" in done.stderr
    assert "run the same command again" in done.stderr
    assert "without an end" in done.stdout
    assert "have tried 2" in " ".join(done.stdout.split())


def test_two_grids_in_one_folder_are_counted_together(tmp_path):
    for seeds in ("1,2", "3,2,4"):
        done = call(tmp_path, f"seed={seeds}", "hydra.sweep.dir=grid", "-m")
    assert "4 jobs, 0 failed" in done.stdout
    assert "trials=4 or more" in " ".join(done.stdout.split())


def test_what_spends_nothing_is_not_told_of_trials(tmp_path, monkeypatch, capsys):
    lines = [{"job": n, "overrides": [f"seed={n}"], "status": "finished", "metrics": {}} for n in range(2)]
    (tmp_path / sweeps.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {}
    for program in ("train", "pate", "account"):
        monkeypatch.setattr(sweeps, "_started", [tmp_path])
        sweeps.report(program, Console(width=160))
        told[program] = capsys.readouterr().out
        assert "2 jobs, 0 failed" in told[program]
    assert "trials=2" in told["train"]
    assert "trials=" not in told["pate"] + told["account"]
    assert "dpexp report run" in told["pate"]
    assert "epsilon" not in told["account"]
    for line in lines:
        line["overrides"].append("runtime.dry_run=True")
    (tmp_path / sweeps.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sweeps, "_started", [tmp_path])
    sweeps.report("train", Console(width=160))
    assert "epsilon" not in capsys.readouterr().out, "a dry run tries nothing"


def test_a_single_run_has_no_table_and_leaves_no_line(tmp_path, capsys):
    done = call(tmp_path, "seed=1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    sweeps.report(console=Console())
    assert capsys.readouterr().out == ""


def test_the_last_line_of_a_job_counts_and_rows_stand_in_the_order_of_the_grid(tmp_path):
    lines = [
        {"job": 1, "overrides": ["seed=1"], "status": "failed"},
        {"job": 0, "overrides": ["seed=0"], "status": "finished"},
        {"job": 1, "overrides": ["seed=1"], "status": "finished"},
    ]
    (tmp_path / sweeps.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(row["job"], row["status"]) for row in sweeps.jobs(tmp_path)] == [
        (0, "finished"),
        (1, "finished"),
    ]
    assert sweeps.jobs(tmp_path / "nowhere") == []
    with (tmp_path / sweeps.FILE).open("a") as file:
        # two machines at one moment, on a file system that does not append as a whole
        file.write('{"job": 2, "sta{"job": 3, "status": "finished"}\n')
        file.write('{"job": 4, "overrides": ["seed=4"], "status": "finished"}\n')
    assert [row["job"] for row in sweeps.jobs(tmp_path)] == [0, 1, 4]


def test_jobs_side_by_side_write_one_file_of_their_machine(tmp_path, monkeypatch):
    """As two processes do: the second begins and ends while the first one is about to put its file in place."""
    path, real = tmp_path / "choices.json", os.replace

    def other_first(*arguments):
        monkeypatch.setattr(os, "replace", real)
        write_json(path, {"job": 2})
        real(*arguments)

    monkeypatch.setattr(os, "replace", other_first)
    write_json(path, {"job": 1})
    assert (read_json(path), list(tmp_path.iterdir())) == ({"job": 1}, [path])


def test_a_result_is_its_metrics_and_the_tasks_own_metric_as_a_number():
    result = sweeps.Result({"loss": 2.0, "accuracy": 0.5}, "accuracy")
    assert result == {"loss": 2.0, "accuracy": 0.5}
    assert float(result) == 0.5
    assert float(sweeps.Result({"bleu": 60.0}, "no such metric")) == 60.0


def test_a_failed_run_leaves_a_summary_and_is_tried_again(tmp_path):
    run = compose(["task=sst2", "clip=flat"])
    (tmp_path / "ledger.jsonl").write_text("{}\n{}\n")
    with pytest.raises(UserError, match="no such file"), record.failures(run, tmp_path):
        raise UserError("no such file")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert tuple(summary)[: len(record.SUMMARY_KEYS)] == record.SUMMARY_KEYS
    assert (summary["status"], summary["details"]["error"]) == ("failed", "UserError: no such file")
    assert summary["privacy"]["steps"] == 2
    assert "ledger" in summary["privacy"]["notes"][0], "epsilon is null, and yet privacy was spent"
    assert record.finished_summary(tmp_path) is None
    with record.failures(run, tmp_path):
        assert not (tmp_path / "summary.json").exists(), "an old failure must not stand beside a new attempt"


def test_an_interruption_is_no_failure(tmp_path):
    run = compose(["task=sst2", "clip=flat"])
    with pytest.raises(SystemExit), record.failures(run, tmp_path):
        sys.exit(130)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.slow
def test_a_second_multirun_trains_only_what_the_first_left(tmp_path):
    settings = [
        "task=sst2", "scale=demo", "runtime=cpu", "optim.epochs=null", "optim.steps=1", "data.cache=null",
        "data.num_examples=1000", "optim.batch_size=100", "runtime.physical_batch_size=64",
        "engine.choice=rule", f"runtime.runs_dir={tmp_path}",
    ]  # fmt: skip
    command = [*settings, "seed=0,1", "clip=flat,nonprivate", "-m"]
    folder = run_folder(compose([*settings, "clip=flat", "seed=1"]))
    folder.mkdir(parents=True)
    (folder / "ledger.jsonl").write_text("this is no ledger\n")  # this job fails
    first = called("dpexp.train", *command, cwd=ROOT)
    assert first.returncode == 2, first.stdout + first.stderr
    assert "4 jobs, 1 failed" in first.stdout
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"

    (folder / "ledger.jsonl").unlink()
    second = called("dpexp.train", *command, cwd=ROOT)
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stdout.count("nothing was trained again") == 3
    assert "4 jobs, 0 failed" in second.stdout


def killed_in_the_second_job():
    """Patch this process: it is killed when the second job has charged five steps and is about to charge the sixth."""
    begin_step, jobs = release.Ledger.begin_step, []

    def watched(ledger, step, *rest):
        if not any(ledger is known for known in jobs):
            jobs.append(ledger)
        if (len(jobs), step) == (2, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        return begin_step(ledger, step, *rest)

    release.Ledger.begin_step = watched


@pytest.mark.slow
def test_a_multirun_that_was_killed_goes_on_within_the_job(tmp_path):
    """SIGKILL in the middle of the second job: the first is not trained again, the second goes on from its checkpoint."""
    settings = [
        "task=sst2", "scale=demo", "clip=flat", "runtime=cpu", "optim.epochs=null", "optim.steps=8", "data.cache=null",
        "data.num_examples=1000", "optim.batch_size=100", "runtime.physical_batch_size=64",
        "runtime.checkpoint_every=3", "engine.choice=rule", f"runtime.runs_dir={tmp_path}",
    ]  # fmt: skip
    command = [*settings, "seed=0,1,2", "-m"]
    first, second, third = (run_folder(compose([*settings, f"seed={seed}"])) for seed in range(3))
    done = called("dpexp.train", *command, cwd=ROOT, before=killed_in_the_second_job)
    assert done.returncode == -signal.SIGKILL
    finished = (first / "summary.json").read_bytes()
    assert charged(second) == 5
    assert not (second / "summary.json").exists()
    assert not third.exists()

    again = called("dpexp.train", *command, cwd=ROOT)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("nothing was trained again") == 1
    assert again.stdout.count("going on after step 3") == 1
    assert "3 jobs, 0 failed" in again.stdout
    assert (first / "summary.json").read_bytes() == finished
    for folder in (first, second, third):
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["privacy"]["steps"], charged(folder)) == ("finished", 8, 8)


def charged(folder):
    """Steps in the ledger of a run."""
    ledger = folder / "ledger.jsonl"
    return len(ledger.read_text().splitlines()) if ledger.exists() else 0


def test_a_job_of_several_tasks_is_one_run_of_several_processes(tmp_path):
    """The preset that stands for nodes × GPUs, on this machine: two tasks, one run, one line."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    settings = [
        "task=mnist", "scale=demo", "model=cnn_small", "clip=perlayer", "optim.steps=2", "optim.epochs=null",
        "optim.batch_size=24", "runtime=ddp", "runtime.threads=1", "runtime.physical_batch_size=8", "runtime.runs_dir=runs",
        "hydra.sweep.dir=grid", "hydra/launcher=local_ranks", "-m",
    ]  # fmt: skip
    done = called("dpexp.train", *settings, cwd=tmp_path, before=partial(os.environ.update, FOUND))
    assert done.returncode == 0, done.stderr[-2000:]
    # where it began, and where it ended
    assert len((tmp_path / "grid" / sweeps.FILE).read_text().splitlines()) == 2
    (summary,) = (json.loads(path.read_text()) for path in (tmp_path / "runs").rglob("summary.json"))
    assert (summary["status"], summary["details"]["processes"]) == ("finished", 2)


@pytest.mark.slow
def test_a_job_of_slurm_goes_on_where_it_was_when_its_time_is_over(tmp_path):
    """Two tasks, and programs in the place of Slurm's: SIGTERM ends nothing, SIGUSR2 asks for another turn."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    settings = [
        "task=mnist", "scale=demo", "model=cnn_small", "clip=perlayer", "optim.steps=45", "optim.epochs=null",
        "optim.batch_size=24", "runtime=ddp", "runtime.threads=1", "runtime.physical_batch_size=16", "runtime.runs_dir=runs",
        "runtime.checkpoint_every=10", "hydra.sweep.dir=grid", "hydra/launcher=slurm_nodes", "hydra.launcher.partition=any",
        "hydra.launcher.tasks_per_node=2", "hydra.launcher.gpus_per_node=null", "-m",
    ]  # fmt: skip
    given = slurm.install(tmp_path / "slurm") | FOUND
    sweep = in_background("dpexp.train", *settings, cwd=tmp_path, before=partial(os.environ.update, given))
    for number, least in ((signal.SIGTERM, 8), (signal.SIGUSR2, 20)):
        while sum(map(charged, (tmp_path / "runs").glob("*/*/seed0"))) < least:
            assert not sweep.done()
            time.sleep(0.05)
        for pid in (tmp_path / "slurm" / "101.pids").read_text().split():
            os.kill(int(pid), number)
    done = sweep.result(timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "slurm" / "101.turns").read_text() == "2"
    assert "'requeue': ''" in (tmp_path / "slurm" / "101.job").read_text()
    (folder,) = (tmp_path / "runs").glob("*/*/seed0")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["details"]["processes"], charged(folder)) == ("finished", 2, 45)


def test_an_exit_that_a_library_turned_into_an_error_is_an_exit(tmp_path):
    """Submitit notes the end of a job that it has queued again, where anything but an exit comes out of it."""
    try:
        try:
            raise SystemExit(-1)
        finally:
            raise RuntimeError("unexpected pos 3840 vs 3734")
    except RuntimeError as error:
        failed = JobReturn(overrides=[], status=JobStatus.FAILED, _return_value=error)
    config = OmegaConf.create({"hydra": {"job": {"num": 0}, "sweep": {"dir": str(tmp_path)}}})
    with pytest.raises(SystemExit):
        sweeps.Jobs().on_job_end(config, failed)
    assert sweeps.jobs(tmp_path) == []


@pytest.mark.parametrize(
    "launcher", ["joblib.externals.loky.backend.popen_loky_posix", "submitit.core._submit"]
)
def test_a_job_in_a_process_of_a_launcher_is_recorded_with_a_command_that_runs_it(
    tmp_path, monkeypatch, launcher
):
    monkeypatch.setattr(provenance, "_jobs", [])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=launcher))
    overrides = ["task=sst2", "task.labels=[bad, good]", "seed=1"]
    hydra = {
        "job": {"num": 1, "config_name": "train"}, "sweep": {"dir": str(tmp_path)}, "overrides": {"task": overrides},
    }  # fmt: skip
    sweeps.Jobs().on_job_start(OmegaConf.create({"hydra": hydra}))
    assert provenance.command_line() == "python -m dpexp.train task=sst2 'task.labels=[bad, good]' seed=1"
    assert [row["status"] for row in sweeps.jobs(tmp_path)] == [sweeps.BEGUN]


@pytest.mark.parametrize("release", ["normal", "strict"])
def test_the_words_of_an_error_stay_out_of_what_a_strict_release_keeps(tmp_path, release):
    hydra = {"job": {"num": 0}, "sweep": {"dir": str(tmp_path)}}
    config = OmegaConf.create({"hydra": hydra, "privacy": {"release": release}})
    failed = JobReturn(overrides=[], status=JobStatus.FAILED, _return_value=KeyError("a private row"))
    sweeps.Jobs().on_job_end(config, failed)
    (line,) = sweeps.jobs(tmp_path)
    assert ("a private row" in line["error"]) == (release == "normal")
    assert ("KeyError" in line["error"]) == (release == "strict")
