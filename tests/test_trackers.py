"""Trackers take what they are given, offline."""

import itertools

import pytest

from dpexp import trackers
from dpexp.errors import UserError
from dpexp.schemas import RunConfig
from dpexp.trackers import flatten, tracking


def test_values_are_flattened_to_numbers():
    values = {"lr": 0.1, "dev": {"accuracy": 1}, "thresholds": [0.5, 0.25], "name": "x"}
    assert flatten(values) == {"lr": 0.1, "dev/accuracy": 1.0, "thresholds/0": 0.5, "thresholds/1": 0.25}


def test_nobody_is_told_by_default(tmp_path):
    with tracking(RunConfig(), {}, tmp_path) as tracker:
        assert tracker is None


def test_tensorboard_writes_into_the_folder(tmp_path):
    pytest.importorskip("tensorboard")
    run = RunConfig()
    run.tracker.name = "tensorboard"
    with tracking(run, {}, tmp_path) as tracker:
        tracker.log({"lr": 0.1}, 1)
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_wandb_is_offline_unless_asked(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunConfig()
    run.tracker.name = "wandb"
    with tracking(run, {"seed": 0}, tmp_path) as tracker:
        tracker.log({"lr": 0.1}, 1)
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_a_missing_package_is_one_clear_error(tmp_path, monkeypatch):
    def missing(*args):
        raise ImportError("No module named 'wandb'", name="wandb")

    monkeypatch.setattr(trackers, "WandbTracker", missing)
    run = RunConfig()
    run.tracker.name = "wandb"
    with pytest.raises(UserError, match="pip install wandb"), tracking(run, {}, tmp_path):
        pass


@pytest.mark.parametrize("release", ["normal", "strict"])
def test_a_strict_release_tells_a_tracker_no_times(tmp_path, release, monkeypatch):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    clock = itertools.count(1000, 100)
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    run = RunConfig()
    run.tracker.name, run.privacy.release = "tensorboard", release
    with tracking(run, {}, tmp_path) as tracker:
        for step in range(5):
            tracker.log({"lr": 0.1}, step)
    (file,) = (tmp_path / "tensorboard").glob("events*")
    events = [event for event in loader.EventFileLoader(str(file)).Load() if event.HasField("summary")]
    times = [event.wall_time for event in events]
    assert len(times) == 5
    assert len(set(times)) == (1 if release == "strict" else 5)


def test_what_a_tracker_notes_by_itself_is_said():
    run = RunConfig()
    run.tracker.name, run.privacy.release = "wandb", "strict"
    assert "how long steps took" in trackers.what_is_told(run)
    run.privacy.release = "normal"
    assert "how long steps took" not in trackers.what_is_told(run)
