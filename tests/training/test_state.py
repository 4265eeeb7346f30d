"""Checkpoints against crashes, corruption and full disks; decisions; the lock."""

import contextlib
import errno
import gc
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError

from dpexp.errors import UserError
from dpexp.training import state
from dpexp.training.decisions import Decisions
from dpexp.training.state import Checkpoint, load_checkpoint, save_checkpoint


def checkpoint(step: int, signature: str = "abc") -> Checkpoint:
    tensors = {"weight": torch.full((50, 50), float(step))}
    return Checkpoint(
        step, tensors, {"state": {}, "param_groups": []}, {"estimates": torch.ones(2)}, signature, 1.5
    )


def test_a_checkpoint_comes_back_and_replaces_its_predecessor(tmp_path):
    for step in (3, 7):
        save_checkpoint(tmp_path, checkpoint(step))
    loaded = load_checkpoint(tmp_path, "abc")
    assert loaded is not None
    assert (loaded.step, loaded.wall_s) == (7, 1.5)
    assert torch.equal(loaded.model["weight"], torch.full((50, 50), 7.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "state-7.pt"]


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert load_checkpoint(tmp_path / "absent", "abc") is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "pointer"])
def test_a_corrupt_checkpoint_is_one_clear_error(tmp_path, damage):
    save_checkpoint(tmp_path, checkpoint(3))
    path = tmp_path / "state-3.pt"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-100])
    elif damage == "remove":
        path.unlink()
    else:
        (tmp_path / "latest.json").write_text("{")
    with pytest.raises(UserError, match="corrupt checkpoint") as error:
        load_checkpoint(tmp_path, "abc")
    assert str(tmp_path) in str(error.value)
    assert "delete" in str(error.value)


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    save_checkpoint(tmp_path, checkpoint(3))
    with pytest.raises(UserError, match="another configuration"):
        load_checkpoint(tmp_path, "xyz")


@pytest.mark.parametrize("step", [7, 3])
@pytest.mark.parametrize("instant", ["while writing", "before the rename", "before the pointer"])
def test_a_full_disk_or_a_crash_at_any_instant_leaves_the_last_checkpoint(
    tmp_path, monkeypatch, instant, step
):
    save_checkpoint(tmp_path, checkpoint(3))
    then = replace(checkpoint(7), step=step)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args, **kwargs):
        raise full

    with monkeypatch.context() as patch:
        if instant == "while writing":
            patch.setattr(state._HashingWriter, "write", fail)
        elif instant == "before the rename":
            patch.setattr(os, "replace", fail)
        else:
            patch.setattr(state, "write_json", fail)
        with pytest.raises(UserError, match="disk is full") as error, state.disk_errors(tmp_path):
            save_checkpoint(tmp_path, then)
    assert "same command" in str(error.value)
    loaded = load_checkpoint(tmp_path, "abc")
    assert loaded is not None
    assert loaded.step == 3
    assert torch.equal(loaded.model["weight"], torch.full((50, 50), 3.0))
    assert not list(tmp_path.glob("*.tmp"))
    save_checkpoint(tmp_path, then)
    save_checkpoint(tmp_path, then)
    loaded = load_checkpoint(tmp_path, "abc")
    assert loaded is not None
    assert torch.equal(loaded.model["weight"], torch.full((50, 50), 7.0))
    assert len(list(tmp_path.iterdir())) == 2


def test_other_os_errors_are_not_called_a_full_disk(tmp_path):
    with pytest.raises(FileNotFoundError), state.disk_errors(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(UserError, match=r"cannot use .*runtime\.runs_dir"), state.disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "denied")
    (tmp_path / "latest.json").mkdir()
    with pytest.raises(UserError, match=r"cannot use .*runtime\.runs_dir"), state.disk_errors(tmp_path):
        (tmp_path / "latest.json").read_text()
    # as safetensors has it, which is written in Rust
    with pytest.raises(UserError, match="disk is full"), state.disk_errors(tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    # another folder for the run would not help
    with pytest.raises(PermissionError), state.disk_errors(tmp_path / "run"):
        raise PermissionError(errno.EACCES, "denied", str(tmp_path / "a file of the data"))


def test_model_state_is_what_trains_and_the_buffers(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    saved = {name: tensor.clone() for name, tensor in state.model_state(model).items()}
    assert set(saved) == {
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    with torch.no_grad():
        model[0].bias.add_(1)
        model[1].running_mean.add_(1)
    state.load_model_state(model, saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.model_state(model).items())


def test_a_state_of_another_model_is_refused():
    saved = state.model_state(torch.nn.Linear(3, 2))
    with pytest.raises(UserError, match="does not fit"):
        state.load_model_state(torch.nn.Linear(3, 2, bias=False), saved)
    with pytest.raises(UserError, match="shape"):
        state.load_model_state(torch.nn.Linear(4, 2), saved)


def test_decisions_are_durable_and_belong_to_a_device(tmp_path):
    path = tmp_path / "decisions.json"
    Decisions(path, "cpu").keep("physical_batch_size", 32)
    assert Decisions(path, "cpu").get("physical_batch_size") == 32
    assert Decisions(path, "gpu").get("physical_batch_size") is None
    path.write_text('{"torn')
    assert Decisions(path, "cpu").get("physical_batch_size") is None
    Decisions(path, "cpu").keep("physical_batch_size", 8)
    kept = json.loads(path.read_text())
    assert kept.pop("check")
    assert kept == {"device": "cpu", "physical_batch_size": 8}


@pytest.mark.parametrize(
    "damage", ["[]", "7", '{"device": "cpu"}', '{"device": "cpu", "engine": {"choices": 3}, "check": ""}']
)
def test_damaged_or_edited_decisions_are_made_again(tmp_path, damage):
    path = tmp_path / "decisions.json"
    path.write_text(damage)
    assert Decisions(path, "cpu").values == {}


@pytest.mark.parametrize(
    "raised", [OSError(errno.ENOSPC, "No space left"), SystemExit(-1), KeyboardInterrupt()], ids=repr
)
def test_what_ends_a_checkpoint_while_torch_writes_keeps_its_name(tmp_path, monkeypatch, raised):
    """torch.save makes a RuntimeError of what its file raises: of a full disk, and of a signal that submitit exits on."""

    class Ended:
        def write(self, data):
            raise raised

        def flush(self):
            pass

    real = state._HashingWriter
    monkeypatch.setattr(state, "_HashingWriter", lambda file: real(Ended()))
    with pytest.raises(type(raised)):
        save_checkpoint(tmp_path, Checkpoint(0, {"w": torch.zeros(3)}, {}, {}, "s"))
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_refused_while_the_first_holds_the_folder(tmp_path):
    holder = "import sys; from pathlib import Path; import fcntl\n"
    holder += "f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process"), state.exclusive(tmp_path):
            pass
    finally:
        other.kill()
        other.wait()
    with state.exclusive(tmp_path):  # the lock went with its process
        pass


@pytest.mark.parametrize("leaves", [True, False])
def test_a_forked_process_neither_keeps_a_folder_nor_gives_it_back(tmp_path, leaves):
    """As the workers of a DataLoader, which have the lock's file open too."""
    held = contextlib.ExitStack()
    held.enter_context(state.exclusive(tmp_path))
    child = os.fork()
    if not child:
        if leaves:
            held.close()
            os._exit(0)
        signal.pause()
    try:
        if leaves:
            os.waitpid(child, 0)
            with pytest.raises(UserError, match="is in use"), state.exclusive(tmp_path):
                pass
        held.close()
        with state.exclusive(tmp_path):
            pass
    finally:
        if not leaves:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_folder_that_only_a_cycle_holds_is_free(tmp_path):
    """As an engine does that met an error, whose traceback holds both, on Python 3.13."""
    held = state.exclusive(tmp_path)
    held.__enter__()
    cycle: list = [held]
    cycle.append(cycle)
    gc.disable()
    try:
        del held, cycle
        with state.exclusive(tmp_path):
            pass
    finally:
        gc.enable()


def test_a_job_of_a_grid_waits_for_another_one_with_its_settings(tmp_path):
    """Of a search that asks twice at one moment, or of a grid whose points are one run."""
    first = contextlib.ExitStack()
    first.enter_context(state.exclusive(tmp_path))
    with (
        state.exclusive(tmp_path, waiting=first.close),
        pytest.raises(UserError, match="is in use"),
        state.exclusive(tmp_path),
    ):
        pass


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(state.fcntl, "flock", no_locks)
    with (
        pytest.raises(UserError, match=r"can't be locked \(Function not implemented\)"),
        state.exclusive(tmp_path),
    ):
        pass
