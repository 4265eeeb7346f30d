"""What a person sees while a run goes on: a live bar in a terminal, plain lines elsewhere, a table at the end."""

import contextlib
import statistics
import sys
import time
from collections import deque
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from dpexp.errors import UserError
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.shown import upwards
from dpexp.privacy.tradeoff import FPR, TPR
from dpexp.provenance import peak_memory_mib
from dpexp.statement import ACCOUNTANTS, with_choice

EPSILON_EVERY_S = 5.0
LINE_EVERY_S = 10.0
# of a run with a strict release
STRICT_LINES = 20
# the time left is their median times the steps left
RECENT_STEPS = 101


class Progress:
    """Progress of one run, with loss (unless None is given), ε so far, examples/s, time left and peak memory.

    Args:
        steps: total number of steps.
        start: steps done before this session.
        delta: of the guarantee; None for a non-private run.
        device: whose peak memory to show.
        console: where to write; standard output by default.
        strict: leave out times and memory, which depend on private rows, as the record does.
    """

    def __init__(
        self,
        steps: int,
        start: int,
        delta: float | None,
        device: torch.device,
        console: Console | None = None,
        strict: bool = False,
    ):
        self.strict = strict
        self.steps, self.start, self.delta, self.device = steps, start, delta, device
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            *([] if strict else [TimeElapsedColumn(), TextColumn("{task.fields[left]}")]),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.training = self.bar.add_task("training", total=steps, completed=start, facts="", left="")
        self.epsilon: float | None = None
        self.ended = self.epsilon_at = self.line_at = time.monotonic()
        self.times: deque[float] = deque(maxlen=RECENT_STEPS)
        self.stale = True

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """One line above the bar."""
        self.console.print(text, markup=False)

    def step(self, step: int, loss: float | None, rate: float, ledger: Ledger | None) -> None:
        """A step is done.

        Args:
            step: steps done.
            loss: mean training loss, None where it is withheld.
            rate: expected examples per second.
            ledger: for ε so far, by the RDP accountant, which is quick; asked every few seconds only.
        """
        now = time.monotonic()
        last = step == self.steps
        self.times.append(now - self.ended)
        self.ended = now
        # with a strict release by their number: when a line comes would tell how long steps took
        every = self.steps // STRICT_LINES
        counted, late = every > 0 and step % every == 0, now - self.line_at > LINE_EVERY_S
        due = last or step == self.start + 1 or (counted if self.strict else late)
        old = due if self.strict else last or now - self.epsilon_at > EPSILON_EVERY_S
        if ledger is not None and self.delta is not None and (self.stale or old):
            self.epsilon_at, self.stale = now, False
            # an accountant that cannot treat the event has nothing to show
            with contextlib.suppress(UserError):
                self.epsilon = ledger.epsilon(self.delta, "rdp")
        facts = self.facts(loss, rate)
        left = self.time_left(step)
        self.bar.update(self.training, completed=step, facts=facts, left=left)
        if due and not self.console.is_terminal:
            self.line_at = now
            self.say("  ".join(filter(None, [f"step {step}/{self.steps}", facts, left])))

    def time_left(self, step: int) -> str:
        """In words; empty after the first step of a session, which may still measure and compile, and with a strict release."""
        if step == self.start + 2:
            # the first step's, which is no guide
            self.times.popleft()
        if self.strict or step < self.start + 2:
            return ""
        return f"{_duration(statistics.median(self.times) * (self.steps - step))} left"

    def facts(self, loss: float | None, rate: float) -> str:
        """The numbers beside the bar."""
        mark = "" if self.delta is None else " (not private)"
        shown = [] if loss is None else [f"loss {loss:.4f}{mark}"]
        if self.epsilon is not None:
            shown.append(f"ε {upwards(self.epsilon, '.3f')} (rdp)")
        if not self.strict:
            shown += [f"{rate:.0f} examples/s", f"peak {peak_memory_mib(self.device):.0f} MiB"]
        return "  ".join(shown)

    def evaluation(self, done: int, total: int) -> None:
        """The dev set is being measured: examples done, and in all."""
        self.bar.update(self.training, facts=f"evaluating {done}/{total}")

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """The dev set has been measured."""
        if metrics:
            self.say(
                f"step {step}/{self.steps}  dev: " + "  ".join(f"{k} {v:.4f}" for k, v in metrics.items())
            )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def summary_table(summary: dict[str, Any]) -> Table:
    """The final table of a run."""
    table = Table(title=f"{summary['task']}  {summary['clip']}  scale={summary['scale']}", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    data, privacy, performance = summary["data"], summary["privacy"], summary["performance"]
    rows = ", ".join(f"{split} {count}" for split, count in data["rows"].items())
    table.add_row("model", summary["model"])
    table.add_row("data", f"{data['name']} ({data['source']}): {rows}")
    for name, value in summary["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    if privacy["delta"] is None:
        table.add_row("privacy", "none")
    else:
        for name in ACCOUNTANTS:
            value = privacy["epsilon"][name]
            decides = "  (decides)" if name == privacy["accountant"] else ""
            clt = "  (approximation)" if name == "gdp" else ""
            shuffled = "  (no guarantee: batches were shuffled)" if privacy["sampling"] == "shuffle" else ""
            table.add_row(f"ε {name}", upwards(value) + decides + clt + shuffled)
        for number, group in enumerate(privacy.get("individual", {}).get("groups", ()), start=1):
            spent = group["epsilon"][privacy["accountant"]]
            table.add_row(
                f"ε of group {number}",
                f"{upwards(spent)} ({group['examples']} examples, budget {group['target']:g})",
            )
        if (tuned := with_choice(privacy)) is not None:
            clt = ", an approximation" if tuned[0] == "gdp" else ""
            table.add_row("ε with tuning", f"{upwards(tuned[1])}  (by {tuned[0]}{clt})")
        table.add_row("δ", upwards(privacy["delta"], ".3g"))
        if privacy.get("mu") is not None:
            table.add_row("μ of Gaussian DP", f"{upwards(privacy['mu'])}, regret {privacy['mu_regret']:.2g}")
            table.add_row(f"TPR at FPR {FPR:g}", f"{upwards(privacy[TPR])} at most, of any membership test")
        multiplier, of_gradients = privacy["noise_multiplier"], privacy["sigma_new"]
        shared = (
            "" if of_gradients == multiplier else f" of all releases, {of_gradients:.4f} of the gradients"
        )
        table.add_row("noise multiplier", f"{multiplier:.4f}{shared}")
    if performance.get("step_s"):
        table.add_row("examples/s", f"{performance['examples_per_s']:.1f}")
        table.add_row("seconds per step", f"{performance['step_s']:.3f}")
        table.add_row("peak memory", f"{performance['peak_memory_mib']:.0f} MiB")
    table.add_row("engine", f"{summary['engine']} on {performance['device']}")
    return table
