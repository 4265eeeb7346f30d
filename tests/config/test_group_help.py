"""``--help GROUP``: every setting is named, with what it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dpexp.audit import AuditConfig
from dpexp.config.group_help import group_help, groups_asked, settings
from dpexp.errors import UserError
from dpexp.schemas import CHOICES, RunConfig
from tests.commands import called

GROUPS = [field.name for field in dataclasses.fields(RunConfig) if field.default is dataclasses.MISSING]


@pytest.mark.parametrize("group", GROUPS)
def test_every_setting_of_a_group_is_named_with_what_it_is(group: str) -> None:
    (of_group,) = [field.default_factory for field in dataclasses.fields(RunConfig) if field.name == group]
    text = group_help("train", RunConfig, [group])
    for key, _, about in settings(of_group, group):  # type: ignore[arg-type]
        assert f"  {key}=" in text
        assert about or key in CHOICES or f" {key.rpartition('.')[2]} " in SPEAK_FOR_THEMSELVES, key


SPEAK_FOR_THEMSELVES = " name betas eps weight_decay momentum steps label text file train "
"""What the field calls it."""


def test_comments_above_behind_and_nested_are_found() -> None:
    text = group_help("train", RunConfig, ["task", "optim"])
    assert "  task.generation.banned=[]\n      strings that are never written" in text
    assert "  optim.epochs=null\n      exactly one of epochs and steps" in text
    assert (
        "      of the average of the weights that is evaluated and exported; 0 = the weights themselves"
        in text
    )
    assert "      constant, linear, cosine" in text


def test_a_group_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(UserError, match="optimm is no group of settings; did you mean optim"):
        group_help("train", RunConfig, ["optimm"])


def test_options_and_settings_are_no_groups() -> None:
    words = ["task=sst2", "--config-dir", "presets", "--help", "optim", "-m"]
    assert groups_asked(words) == ["optim"]


def test_from_the_command_line(tmp_path: Path) -> None:
    done = called("dpexp.audit", "--help", "clip", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == group_help("audit", AuditConfig, ["clip"]).strip()
    done = called("dpexp.audit", "--help", "clp", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean clip?" in done.stderr
