"""The ledger: charged before, replayed once, charged again when anything differs, and never silently wrong."""

import errno
import hashlib
import json
import os
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import composed, decode, step_event
from dpexp.privacy.ledger import Ledger, Seal

KEY = b"k" * 32
EVENT = step_event(0.02, [1.1, 3.0])
DELTA = 1e-5


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "ledger.jsonl"


def trained(path, steps, fingerprint="a", start=0):
    """A run of the steps; the ledger and the attempts it handed out."""
    ledger = Ledger(path, KEY)
    return ledger, [ledger.begin_step(step, EVENT, f"{fingerprint}{step}") for step in range(start, steps)]


def test_a_run_is_charged_step_by_step(path):
    ledger, attempts = trained(path, 5)
    assert attempts == [0] * 5
    assert ledger.steps_charged == ledger.next_step == 5
    expected = epsilon(composed([(EVENT, 5)]), DELTA)
    assert ledger.epsilon(DELTA) == expected == Ledger(path, KEY).epsilon(DELTA)
    assert Ledger(path, KEY).epsilons(DELTA)["rdp"] == expected
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[0].keys() == {"step", "attempt", "event", "fingerprint", "time", "check"}


def test_an_empty_ledger_costs_nothing(path):
    ledger = Ledger(path, KEY)
    assert ledger.epsilon(DELTA) == 0
    assert not path.exists()


def test_the_line_is_on_the_disk_when_begin_step_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    Ledger(path, KEY).begin_step(0, EVENT, "a")
    assert synced[0] == path.stat().st_size
    assert len(synced) == 2  # and the folder, which holds the new file's name


def test_the_same_fingerprint_is_a_replay_and_counts_once(path):
    trained(path, 10)
    ledger, attempts = trained(path, 12, start=6)
    assert attempts == [0] * 6
    assert ledger.steps_charged == 12
    assert ledger.epsilon(DELTA) == epsilon(composed([(EVENT, 12)]), DELTA)


def test_another_fingerprint_gets_fresh_noise_and_pays_again(path):
    trained(path, 10)
    ledger, attempts = trained(path, 12, fingerprint="b", start=6)
    assert attempts == [1, 1, 1, 1, 0, 0]
    assert ledger.steps_charged == 16
    assert ledger.epsilon(DELTA) == epsilon(composed([(EVENT, 16)]), DELTA)
    assert ledger.fingerprints(7) == ["a7", "b7"]
    assert ledger.fingerprints(99) == []
    third, attempts = trained(path, 8, fingerprint="c", start=6)
    assert attempts == [2, 2]
    assert third.steps_charged == 18
    # Each earlier attempt can still be replayed: it would release what has been released.
    assert trained(path, 8, fingerprint="a", start=6)[1] == [0, 0]
    assert trained(path, 8, fingerprint="b", start=6)[1] == [1, 1]
    assert Ledger(path, KEY).steps_charged == 18


def test_another_event_under_the_same_fingerprint_pays_again(path):
    trained(path, 3)
    ledger = Ledger(path, KEY)
    assert ledger.begin_step(2, step_event(0.02, [0.9, 3.0]), "a2") == 1
    assert ledger.steps_charged == 4


def test_different_events_are_all_in_epsilon(path):
    ledger = Ledger(path, KEY)
    events = [step_event(0.02, [1.0]), step_event(0.05, [2.0]), step_event(0.02, [1.0])]
    for step, event in enumerate(events):
        ledger.begin_step(step, event, "a")
    assert Ledger(path, KEY).epsilon(DELTA) == epsilon(composed([(events[0], 2), (events[1], 1)]), DELTA)


def test_a_gap_is_refused(path):
    trained(path, 3)
    with pytest.raises(UserError, match="step 5 cannot follow 3 charged steps"):
        Ledger(path, KEY).begin_step(5, EVENT, "a5")
    with pytest.raises(UserError):
        Ledger(path, KEY).begin_step(-1, EVENT, "a")


def test_killed_at_any_byte_a_run_never_undercounts(path, monkeypatch):
    """Whatever prefix of the file reached the disk, complete lines count, and the run goes on from there."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    trained(path, 3)
    content = path.read_bytes()
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        complete = sum(length >= end for end in ends)  # without its line break a line is complete
        ledger = Ledger(path, KEY)
        assert ledger.steps_charged == complete
        if length % 17 == 0 or length in ends:
            trained(path, 4, start=complete)
            assert Ledger(path, KEY).steps_charged == 4


@settings(max_examples=50, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True, allow_subnormal=False), flip=st.integers(1, 255))
def test_corruption_anywhere_is_noticed(tmp_path_factory, where, flip):
    """Any changed byte of the first two of three lines: an error with file and line, never another epsilon."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    event = trained(path, 3)[0].event()
    before = path.read_bytes()
    content = bytearray(before)
    end_of_second = content.index(b"\n", content.index(b"\n") + 1)
    content[int(where * end_of_second)] ^= flip
    path.write_bytes(content)
    if json_content(bytes(content)) == json_content(before):  # another blank, or 1E-5 for 1e-5
        assert Ledger(path, KEY).event() == event
    else:
        with pytest.raises(UserError, match=r"ledger.jsonl, line [123]"):
            Ledger(path, KEY)


def json_content(lines):
    try:
        return [json.loads(line) for line in lines.splitlines()]
    except ValueError:
        return None


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_line_is_noticed(path, lost):
    trained(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[lost]
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=f"line {lost + 1} was changed, or the line before it is missing"):
        Ledger(path, KEY)


def rewritten(path, change, key):
    """The ledger with every event changed, signed again by somebody who has this key."""
    events = [change(json.loads(line)["event"]) for line in path.read_text().splitlines()]
    path.unlink()
    forged = Ledger(path, key)
    for step, event in enumerate(events):
        forged.begin_step(step, decode(event), f"a{step}")


def louder(event):
    """A hundred times less noise was added than this says."""
    event["event"]["events"][0]["noise_multiplier"] *= 100
    return event


@pytest.mark.parametrize("forger", [b"", b"o" * 32, b"secret of another run"])
def test_a_forged_ledger_is_refused(path, forger):
    honest = trained(path, 5)[0].epsilon(DELTA)
    rewritten(path, louder, forger)
    assert Ledger(path, forger).epsilon(DELTA) < honest / 2  # it is a sound one, but for the key
    with pytest.raises(UserError, match=r"line 1 was changed.* secret.key is not the one"):
        Ledger(path, KEY)


def test_a_strict_ledger_tells_no_times(path):
    """How long a step took follows from how many examples it drew."""
    strict = Ledger(path, KEY, times=False)
    for step in range(3):
        strict.begin_step(step, EVENT, f"a{step}")
    assert [json.loads(line)["time"] for line in path.read_text().splitlines()] == [None] * 3
    assert Ledger(path, KEY).epsilon(DELTA) == strict.epsilon(DELTA)
    Ledger(path, KEY).begin_step(3, EVENT, "a3")
    assert json.loads(path.read_text().splitlines()[3])["time"] > 0


def test_a_ledger_of_an_earlier_version_is_named(path):
    trained(path, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    previous = ""
    for line in lines:  # as they were before: a chain that anybody can compute
        del line["check"]
        previous = line["check"] = hashlib.sha256(
            (previous + json.dumps(line, sort_keys=True)).encode()
        ).hexdigest()[:16]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="line 1 was written by an earlier version of dpexp"):
        Ledger(path, KEY)


def test_a_changed_last_line_is_no_torn_one(path):
    """Without its line break, too: taken for the remains of a crash, it would be dropped and never be charged."""
    trained(path, 3)
    content = path.read_bytes()
    for end in (b"\n", b""):
        path.write_bytes(content.rstrip(b"\n").replace(b'"a2"', b'"b2"') + end)
        with pytest.raises(UserError, match="line 3 was changed"):
            Ledger(path, KEY)


def test_second_attempts_lost_from_the_end_are_noticed_by_the_seal(path):
    trained(path, 6)
    ledger, attempts = trained(path, 6, fingerprint="b", start=2)
    assert attempts == [1] * 4
    seal, spent, lines = ledger.seal, ledger.epsilon(DELTA), path.read_bytes().splitlines(keepends=True)
    Ledger(path, KEY).require(seal)
    path.write_bytes(b"".join(lines[:-4]))
    short = Ledger(path, KEY)  # a sound ledger in itself, of as many steps
    assert short.next_step == 6
    assert short.epsilon(DELTA) < spent
    with pytest.raises(UserError, match="lost entries: it holds 6 charges, and the checkpoint rests on 10"):
        short.require(seal)


def test_a_seal_is_of_one_ledger(path, tmp_path):
    trained(path, 3)
    seal = Ledger(path, KEY).seal
    other, _ = trained(tmp_path / "other.jsonl", 4, fingerprint="b")
    with pytest.raises(UserError, match="another ledger than the one that the checkpoint rests on"):
        other.require(seal)
    longer, _ = trained(path, 5, start=3)
    longer.require(seal)  # what came after a checkpoint is no fault
    longer.require(Seal(0, ""))


def test_two_runs_in_one_folder_are_noticed(path):
    first, second = Ledger(path, KEY), Ledger(path, KEY)
    first.begin_step(0, EVENT, "a0")
    with pytest.raises(UserError, match="another process"):
        second.begin_step(0, EVENT, "b0")
    assert Ledger(path, KEY).steps_charged == 1


def test_a_full_disk_is_one_clear_error_and_charges_nothing(path, monkeypatch):
    ledger, _ = trained(path, 2)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device; the step was not taken"):
            ledger.begin_step(2, EVENT, "a2")
    assert path.read_bytes() == before
    assert ledger.steps_charged == 2
    assert ledger.begin_step(2, EVENT, "a2") == 0
    assert Ledger(path, KEY).steps_charged == 3


def test_a_disk_that_takes_a_part_of_a_line_leaves_a_ledger_that_goes_on(path):
    """In a notebook it lives on once there is room again; it took the part of its own line for that of another process."""
    ledger, _ = trained(path, 2)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large; the step was not taken"):
            ledger.begin_step(2, EVENT, "a2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert ledger.begin_step(2, EVENT, "a2") == 0
    assert Ledger(path, KEY).seal == ledger.seal


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("thrown", "caught"),
    [(KeyboardInterrupt, KeyboardInterrupt), (RuntimeError, RuntimeError), (TimeoutError, UserError)],
)
def test_what_cuts_off_a_charge_leaves_a_ledger_that_goes_on(path, monkeypatch, before, thrown, caught):
    """In a notebook it lives on (Ctrl-C, a time limit by an alarm), and took its own line for that of another process."""
    (ledger, _), write = trained(path, 2), Ledger._write

    def interrupted(self, line):
        if not before:
            write(self, line)
        raise thrown

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "_write", interrupted)
        with pytest.raises(caught):
            ledger.begin_step(2, EVENT, "a")
    assert ledger.steps_charged == (2 if before else 3)
    assert ledger.begin_step(2, EVENT, "a") == 0
    assert ledger.begin_step(3, EVENT, "a") == 0
    assert Ledger(path, KEY).seal == ledger.seal


def test_a_ledger_that_cannot_be_read_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="cannot read the ledger"):
        Ledger(tmp_path, KEY)


def test_equal_charges_are_grouped(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("dpexp.privacy.ledger.Ledger._write", lambda self, line: None)
    ledger = Ledger(path, KEY)
    for step in range(3_000):
        ledger.begin_step(step, EVENT, "a")
    assert ledger.epsilon(DELTA) == epsilon(composed([(EVENT, 3_000)]), DELTA)
