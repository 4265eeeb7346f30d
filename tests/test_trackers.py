"""Trackers take what they are given, offline."""

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
