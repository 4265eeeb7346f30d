"""What a run has really released, step by step. Epsilon is always computed from here.

One JSON object per line, appended and flushed to the disk *before* the noisy step is applied: killed at any
instant, a run never under-counts. A line holds

    {"step": 12, "attempt": 0, "event": {…}, "fingerprint": "…", "time": 1700000000.0, "check": "…"}

where ``time`` is null in a strict release (how long a step takes follows from how many examples were drawn), and ``check`` is the
beginning of an HMAC-SHA-256, under the run's secret key, of the line and the check before it: without the
key nobody can alter, remove, add or displace a line unnoticed. Lines that are missing at the end leave a sound ledger behind;
so a checkpoint keeps the `seal` of the charges that it rests on, and the ledger is asked for them (`require`). Steps count
from 0, and each line is charged in full.

A step that comes up again (after a crash, from the last checkpoint) is either the same computation or
another one. With the same fingerprint it is replayed with the same noise: nothing new is released, and it
is charged once. With any difference (code, runtime, data, state) the same noise under another sum would
reveal the difference of the two, so the step gets a new attempt number, from which fresh noise and a fresh
sample follow, and is charged again.

Where groups of examples have budgets of their own, the event of a line is one for each group (`events.GroupEvents`).

Several processes that train together have one ledger: rank 0 reads and writes the file, and every other rank keeps its own copy
in memory, from the lines that rank 0 sends. None begins where one of them finds charges under that name that rank 0 does not.
Each rank checks the signature of each line, that it continues what the rank knows, and that it is the charge that the rank has
computed itself; no rank goes on before all have done so."""

from __future__ import annotations

import copy
import fcntl
import hmac
import json
import math
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_accounting import DpEvent

from dpexp.durable import flush_file, flush_folder
from dpexp.errors import UserError
from dpexp.privacy import accountants
from dpexp.privacy.events import GroupEvents, composed, decode, decode_groups, encode
from dpexp.privacy.keys import note_charged

if TYPE_CHECKING:
    from dpexp.parallel import Ranks

_FIELDS: dict[str, Any] = {
    "step": int, "attempt": int, "event": dict, "fingerprint": str,
    "time": float | None, "check": str,
}  # fmt: skip
_DIGITS = 32
_UNKEYED_DIGITS = 16
GONE = (
    "{what} was deleted or moved while its run was going on; the step was not taken. Put it back and start again, or "
    "begin a new run in another folder, whose epsilon is added to what this one has released"
)
_WAY_OUT = "restore the file from a copy: without it nobody can say what was released"


@dataclass(frozen=True)
class Entry:
    """One charge: step and attempt, the event as canonical JSON, the fingerprint of the state and code that
    made it."""

    step: int
    attempt: int
    event: str
    fingerprint: str


@dataclass(frozen=True)
class Seal:
    """The ledger at one moment: how many charges it held, and the check of the last one (empty without any)."""

    charges: int
    check: str


class Ledger:
    """The ledger in the file ``path``, which is made with the first entry and signed with the run's ``key``.

    Reading tolerates a last line that was cut off: its step had not been applied yet, and is not charged (a
    last line that only lacks its line break is complete, and is). Anything else that is wrong raises
    `UserError` with file and line.

    With ``ranks``, all of them make it together, with the same key, and all call `begin_step`. ``times`` says whether lines
    tell when they were written."""

    def __init__(
        self, path: str | os.PathLike[str], key: bytes, ranks: Ranks | None = None, *, times: bool = True
    ) -> None:
        self.path, self.ranks, self.times = Path(path), ranks, times
        self._key = hmac.digest(key, b"ledger", "sha256")
        self._in_folder = self.path.parent.is_dir()
        self._begin()

    def _begin(self) -> None:
        """Know what is in the file, and nothing else."""
        self._entries: dict[int, list[Entry]] = {}
        self._counts: Counter[str] = Counter()
        # after no charge, after the first, ...
        self._checks = [""]
        # bytes of the file that are complete lines
        self._size = 0
        self._line_break_missing = False
        # bytes after these, left by a crash
        self._torn = 0
        self._read()

    @property
    def steps_charged(self) -> int:
        """Charges so far: every step once, and again for each attempt that was not a replay."""
        return sum(self._counts.values())

    @property
    def next_step(self) -> int:
        """The first step that has never been charged."""
        return len(self._entries)

    @property
    def charged_again(self) -> int:
        """Charges beyond the first one of each step."""
        return self.steps_charged - self.next_step

    @property
    def seal(self) -> Seal:
        """What a checkpoint keeps of the ledger that it rests on."""
        return Seal(self.steps_charged, self._checks[-1])

    def require(self, seal: Seal) -> None:
        """Raises `UserError` unless the ledger begins with exactly the charges that were sealed."""
        if self.steps_charged < seal.charges:
            raise UserError(
                f"{self.path} has lost entries: it holds {self.steps_charged} charges, and the checkpoint rests on "
                f"{seal.charges}; {_WAY_OUT}"
            )
        if not hmac.compare_digest(self._checks[seal.charges], seal.check):
            raise UserError(
                f"{self.path} is another ledger than the one that the checkpoint rests on: they differ within the first "
                f"{seal.charges} charges; {_WAY_OUT}"
            )

    @property
    def num_budgets(self) -> int:
        """How many groups of examples have an ε of their own; 1 where all have the same."""
        return max((_num_budgets(encoded) for encoded in self._counts), default=1)

    def fingerprints(self, step: int) -> list[str]:
        """The fingerprints that the step was charged with so far, in the order of its attempts."""
        return [entry.fingerprint for entry in self._entries.get(step, [])]

    def begin_step(self, step: int, event: DpEvent | GroupEvents, fingerprint: str) -> int:
        """Charge the step unless it is a replay, and return the attempt whose noise and sample it must use.

        ``fingerprint`` must differ whenever the sum to be released may: it has to cover the state that the step starts
        from as well as config, data, code and runtime. A keyed hash of the sum itself does.

        Call it before anything noisy is applied; when it returns, the charge is on the disk. Raises
        `UserError` for a step that would leave a gap, and where the disk does not take the line."""
        encoded = _canonical(encode(event))
        attempts = self._entries.get(step, [])
        for entry in attempts:
            if entry.fingerprint == fingerprint and entry.event == encoded:
                return entry.attempt
        if not 0 <= step <= self.next_step:
            raise UserError(
                f"{self.path}: step {step} cannot follow {self.next_step} charged steps: lines are missing"
            )
        if self._counts and _membership(encoded) != _membership(next(iter(self._counts))):
            raise UserError(
                f"{self.path}: examples have changed their budget groups since step 0, and what was spent about each can no "
                "longer be told. Restore individual.groups, or start a new run (another seed)"
            )
        entry = Entry(step, len(attempts), encoded, fingerprint)
        if self.ranks is None:
            self._append(entry)
        else:
            self._append_together(self.ranks, entry)
        return entry.attempt

    def event(self, budget: int = 0) -> DpEvent:
        """Everything released so far about an example (of the group ``budget``)."""
        return composed((_event_of(encoded, budget), count) for encoded, count in self._counts.items())

    def events(self) -> list[DpEvent]:
        """The same for each group of examples."""
        return [self.event(budget) for budget in range(self.num_budgets)]

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """ε of everything released so far; of the least protected group, where they differ."""
        budgets = range(self.num_budgets)
        return max(accountants.epsilon(self.event(budget), delta, accountant) for budget in budgets)

    def epsilons(self, delta: float) -> dict[str, float | None]:
        """The same under every accountant."""
        found = self.epsilons_by_budget(delta)
        worst: dict[str, float | None] = {}
        for name in found[0]:
            values = [group[name] for group in found]
            worst[name] = None if None in values else max(value for value in values if value is not None)
        return worst

    def epsilons_by_budget(self, delta: float) -> list[dict[str, float | None]]:
        """ε of each group of examples under every accountant."""
        return [accountants.epsilons(self.event(budget), delta) for budget in range(self.num_budgets)]

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise UserError(f"cannot read the ledger {self.path}: {error.strerror}") from None

    def _of_all(self, ranks: Ranks) -> bytes:
        """Return what rank 0 has in its file; of what another rank has in the file of that name, it must be the continuation.

        Where each machine has a disk of its own, and rank 0 was another machine before, the charges of that time are not in
        the file of the present rank 0.
        """
        content = ranks.once(self._content)
        own = content if ranks.writes else self._content()
        known = content.startswith(own[: own.rfind(b"\n") + 1])
        if strays := [rank for rank, known_there in enumerate(ranks.gather(known)) if not known_there]:
            raise ranks.told_once(
                f"rank {strays[0]} finds charges in {self.path} that rank 0 does not find there: its machine has another folder "
                "of that name, in which this run has released something. Give all machines one folder, that with these charges"
            )
        return content

    def _read(self) -> None:
        content = self._content() if self.ranks is None else self._of_all(self.ranks)
        lines = content.split(b"\n")
        unfinished = lines.pop()
        for number, line in enumerate(lines, start=1):
            self._take(line, number)
            self._size += len(line) + 1
        if not unfinished:
            return
        try:
            json.loads(unfinished)
        except ValueError:
            self._torn = len(unfinished)
        else:
            # no beginning of a JSON object is one itself: the line is complete
            self._take(unfinished, len(lines) + 1)
            self._size += len(unfinished)
            self._line_break_missing = True

    def _take(self, line: bytes, number: int) -> None:
        """Check one line and add its charge; `UserError` leaves everything as it was."""
        where = f"{self.path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        complete = isinstance(record, dict) and record.keys() == _FIELDS.keys()
        if not complete or not all(isinstance(record[name], kind) for name, kind in _FIELDS.items()):
            raise UserError(f"{where} is not a ledger entry; {_WAY_OUT}")
        if len(record["check"]) == _UNKEYED_DIGITS:
            raise UserError(
                f"{where} was written by an earlier version of dpexp, whose ledgers anybody could rewrite. Finish this run with "
                "the version that began it, or start a new one (another seed)"
            )
        if not hmac.compare_digest(record["check"].encode(), self._sign(record).encode()):
            raise UserError(
                f"{where} was changed, or the line before it is missing, or the run's secret.key is not the one that signed it; "
                f"{_WAY_OUT}"
            )
        if decode_groups(record["event"]) is None:
            decode(record["event"])
        entry = Entry(record["step"], record["attempt"], _canonical(record["event"]), record["fingerprint"])
        if not 0 <= entry.step <= self.next_step or entry.attempt != len(self._entries.get(entry.step, [])):
            raise UserError(
                f"{where}: attempt {entry.attempt} of step {entry.step} is out of order; {_WAY_OUT}"
            )
        self._remember(entry, record["check"])

    def _remember(self, entry: Entry, check: str) -> None:
        self._entries.setdefault(entry.step, []).append(entry)
        self._counts[entry.event] += 1
        self._checks.append(check)

    def _sign(self, record: dict[str, Any]) -> str:
        body = {name: value for name, value in record.items() if name != "check"}
        signed = self._checks[-1] + json.dumps(body, sort_keys=True)
        return hmac.digest(self._key, signed.encode(), "sha256").hex()[:_DIGITS]

    def _append_together(self, ranks: Ranks, entry: Entry) -> None:
        """Rank 0 writes; the others check what it has written, and each waits for all."""
        line = ranks.once(lambda: self._append(entry))
        if not ranks.writes:
            self._take(line.encode(), self.steps_charged + 1)
            if self._entries[entry.step][-1] != entry:
                raise UserError(
                    f"rank 0 has charged another step to {self.path} than rank {ranks.rank} has computed: {_WAY_OUT}"
                )
        ranks.agree("the ledger", self._checks[-1])

    def _append(self, entry: Entry) -> str:
        record: dict[str, Any] = {
            "step": entry.step,
            "attempt": entry.attempt,
            "event": json.loads(entry.event),
            "fingerprint": entry.fingerprint,
            "time": time.time() if self.times else None,
        }
        record["check"] = self._sign(record)
        signed = json.dumps(record, allow_nan=False)
        line = ("\n" if self._line_break_missing else "") + signed + "\n"
        try:
            self._write(line.encode())
            self._size += len(line.encode())
            self._torn, self._line_break_missing = 0, False
            self._remember(entry, record["check"])
        except UserError:
            raise
        except BaseException as error:
            # Ctrl-C, a time limit: the ledger may live on, and only the file knows whether the line is there; ranks end together
            if self.ranks is None:
                found = copy.copy(self)
                found._begin()
                vars(self).update(vars(found))
            if isinstance(error, OSError):
                raise UserError(
                    f"cannot write the ledger {self.path}: {error.strerror or type(error).__name__}; the step was not taken"
                ) from None
            raise
        return signed

    def _write(self, line: bytes) -> None:
        new, folder = not self.path.exists(), self.path.parent
        # by its name alone: some file systems give a folder another number later
        if self._in_folder and not folder.is_dir():
            raise UserError(GONE.format(what=folder))
        if new and self._size:
            raise UserError(GONE.format(what=self.path))
        if new:
            folder.mkdir(parents=True, exist_ok=True)
        # without a buffer: what a full disk has not taken would be written again by what drops it, and in vain
        with open(self.path, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size != self._size + self._torn:
                raise UserError(
                    f"{self.path} was changed by another process: is this run training twice at once?"
                )
            try:
                # drops what a crash left of a line
                file.truncate(self._size)
                left = memoryview(line)
                while left:
                    left = left[file.write(left) :]
                flush_file(file)
            except OSError:
                self._torn = 0
                file.truncate(self._size)
                raise
        if not self._size:
            # a new file's name is on the disk only when its folder is
            flush_folder(folder)
            note_charged(folder)


def _event_of(encoded: str, budget: int) -> DpEvent:
    record = json.loads(encoded)
    groups = decode_groups(record)
    return decode(record) if groups is None else groups.events[budget]


def _num_budgets(encoded: str) -> int:
    groups = decode_groups(json.loads(encoded))
    return 1 if groups is None else len(groups.events)


def _membership(encoded: str) -> str | None:
    groups = decode_groups(json.loads(encoded))
    return None if groups is None else groups.membership


def _canonical(event: dict[str, Any]) -> str:
    if not math.isfinite(_largest(event)):
        raise UserError("a ledger entry needs finite noise multipliers")
    return json.dumps(event, sort_keys=True)


def _largest(value: Any) -> float:
    if isinstance(value, dict):
        return max((_largest(item) for item in value.values()), default=0.0)
    if isinstance(value, list):
        return max((_largest(item) for item in value), default=0.0)
    return abs(value) if isinstance(value, float) else 0.0
