"""What is shown, and what is not."""

import io
import json
import math

import numpy as np
import torch
from rich.console import Console

from dpexp.training.progress import Progress, summary_table
from tests.test_record import TASK, block, summary
from tests.training.tiny import TinyTask, make_trainer, tiny_run


class Spent:
    asked = 0

    def epsilon(self, delta, accountant):
        self.asked += 1
        return 1.234


def output(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=200, highlight=False)


def test_plain_lines_where_there_is_no_terminal():
    console, ledger = output(), Spent()
    with Progress(500, 0, 1e-5, torch.device("cpu"), console) as progress:
        for step in range(1, 501):
            progress.step(step, 0.5, 100.0, ledger)
        progress.evaluated(500, {"accuracy": 0.75})
        # without a dev set there is nothing to tell
        progress.evaluated(500, {})
    # rich 13.0 ends with an empty one
    lines = [line for line in console.file.getvalue().splitlines() if line]
    assert lines[0].startswith("step 1/500  loss 0.5000 (not private)  ε 1.234 (rdp)  100 examples/s  peak ")
    assert lines[-2].startswith("step 500/500")
    assert lines[-1] == "step 500/500  dev: accuracy 0.7500"
    assert len(lines) < 10  # not a line for every step
    assert ledger.asked <= 4  # nor an accountant


def test_a_bar_in_a_terminal():
    console = output(terminal=True)
    with Progress(3, 1, 1e-5, torch.device("cpu"), console) as progress:
        progress.step(2, 0.25, 10.0, Spent())
        progress.evaluation(5, 10)
        progress.step(3, 0.25, 10.0, Spent())
    assert "3/3" in console.file.getvalue()
    assert "loss 0.2500" in console.file.getvalue()


def test_the_time_left_is_the_median_step_without_the_first(monkeypatch):
    clock = iter([0.0, 100.0, 101.0, 102.0, 103.0, 153.0])  # the first step compiles, the fifth waits
    monkeypatch.setattr("dpexp.training.progress.time.monotonic", lambda: next(clock))
    progress = Progress(65, 0, None, torch.device("cpu"), output())
    assert progress.time_left(1) == ""
    for step in range(1, 6):
        progress.step(step, None, 1.0, None)
    assert progress.time_left(5) == "1:00 left"


def test_a_strict_release_shows_neither_times_nor_memory():
    progress = Progress(3, 0, 1e-5, torch.device("cpu"), output(), strict=True)
    for step in (1, 2, 3):
        progress.step(step, None, 10.0, Spent())
    assert progress.console.file.getvalue().splitlines() == [
        "step 1/3  ε 1.234 (rdp)",
        "step 3/3  ε 1.234 (rdp)",
    ]


def test_no_loss_where_it_is_withheld_and_no_epsilon_without_privacy():
    progress = Progress(3, 0, None, torch.device("cpu"), output())
    progress.step(1, None, 10.0, None)
    text = progress.console.file.getvalue()
    assert "loss" not in text
    assert "ε" not in text


def test_losses_that_are_no_numbers_are_told_once_and_not_where_they_are_withheld(tmp_path):
    for release, times in (("normal", 1), ("strict", 0)):
        run, task, console = tiny_run(steps=3), TinyTask(), output()
        run.privacy.release = release
        for x, _ in task.train[::2]:
            x.fill_(math.nan)
        trainer = make_trainer(tmp_path / release, run, task=task)
        with Progress(3, 0, 1e-3, torch.device("cpu"), console, strict=release == "strict") as progress:
            trainer.train(progress)
        assert console.file.getvalue().count("step 1: losses are NaN or infinite") == times
        assert console.file.getvalue().count("losses are NaN") == times


def test_the_final_table_shows_all_accountants_and_which_decides():
    console = output()
    written = summary(block())
    written["performance"] = {
        "examples_per_s": 12.3,
        "step_s": 0.5,
        "peak_memory_mib": 99.0,
        "device": "cpu: x",
    }
    console.print(summary_table(json.loads(json.dumps(written))))
    text = console.file.getvalue()
    for expected in (
        "2.0000  (decides)",
        "1.0000  (approximation)",
        "1.5000",
        "1.4000",
        "0.5000",
        "12.3",
        "99 MiB",
    ):
        assert expected in text
    assert TASK.data.name in text
    assert "with tuning" not in text


def test_an_epsilon_is_rounded_upwards_as_in_cards():
    progress = Progress(1, 0, 1e-5, torch.device("cpu"), output())
    progress.epsilon = 1.2342
    assert "ε 1.235 (rdp)" in progress.facts(None, 1.0)
    written = summary(block())
    written["performance"] = {"device": "cpu: x"}
    written["privacy"]["epsilon"] |= {"rdp": 1.23441, "pld": None}
    console = output()
    console.print(summary_table(written))
    assert "1.2345" in console.file.getvalue()


def test_the_final_table_shows_what_the_choice_among_trials_adds():
    console = output()
    written = summary(block())
    tuned = {"rdp": 5.4321, "gdp": None, "prv": None, "pld": None}
    written["privacy"] |= {"accountant": "pld", "epsilon_with_tuning": tuned}
    written["performance"] = {"device": "cpu"}
    console.print(summary_table(json.loads(json.dumps(written))))
    assert "5.4321  (by rdp)" in console.file.getvalue()


def test_the_lines_of_a_strict_release_come_at_steps_that_no_clock_decides(monkeypatch):
    """Steps of very different lengths: the same lines, with the ε of their own step."""

    def lines(seconds):
        clock = iter(np.cumsum([0.0, *seconds]))
        monkeypatch.setattr("dpexp.training.progress.time.monotonic", lambda: next(clock))
        progress, taken = Progress(100, 0, 1e-5, torch.device("cpu"), output(), strict=True), Taken()
        for taken.steps in range(1, 101):
            progress.step(taken.steps, None, 10.0, taken)
        return progress.console.file.getvalue().splitlines()

    quick = lines([0.01] * 100)
    assert quick == lines([7.0 if step % 3 else 0.1 for step in range(100)])
    assert quick[0] == "step 1/100  ε 0.010 (rdp)"
    assert quick[1:] == [f"step {step}/100  ε {step / 100:.3f} (rdp)" for step in range(5, 101, 5)]


class Taken:
    """What so many steps have spent."""

    steps = 0

    def epsilon(self, delta, accountant):
        return self.steps / 100
