"""The key is secret and lasts as long as its run; a copy of the folder draws for itself."""

import json
import os
import shutil
import stat
import subprocess

import pytest
from dp_accounting import GaussianDpEvent

from dpexp.errors import UserError
from dpexp.privacy.keys import KEY, LEDGER, PLACE, delete_key, open_keys
from dpexp.privacy.ledger import Ledger


def charged_folder(folder):
    """A folder whose run has released something."""
    keys = open_keys(folder)
    (folder / LEDGER).write_text("{}\n")
    return keys


def test_the_key_is_secret_and_lasts(tmp_path):
    folder = tmp_path / "run"
    keys = open_keys(folder)
    assert len(keys.run) == len(keys.draws) == 32
    assert stat.S_IMODE((folder / KEY).stat().st_mode) == 0o600
    assert open_keys(folder) == keys
    assert not keys.copied
    assert open_keys(tmp_path / "other").run != keys.run
    assert sorted(os.listdir(folder)) == [KEY, PLACE]
    assert keys.run.hex()[:8] not in repr(keys)
    assert repr(keys.run)[2:10] not in repr(keys)


def test_a_damaged_or_published_key_is_refused(tmp_path):
    open_keys(tmp_path)
    (tmp_path / KEY).chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        open_keys(tmp_path)
    (tmp_path / KEY).chmod(0o600)
    (tmp_path / KEY).write_bytes(b"short")
    with pytest.raises(UserError, match="not a noise key"):
        open_keys(tmp_path)


def test_a_fixed_seed_makes_no_file_and_serves_one_run(tmp_path):
    assert open_keys(tmp_path, fixed_seed=3, name="a") == open_keys(tmp_path, fixed_seed=3, name="a")
    assert open_keys(tmp_path, fixed_seed=3, name="a") != open_keys(tmp_path, fixed_seed=3, name="b")
    assert open_keys(tmp_path, fixed_seed=3, name="a") != open_keys(tmp_path, fixed_seed=4, name="a")
    assert not list(tmp_path.iterdir())


def all_attributes(source, target):
    subprocess.run(["cp", "-a", source, target], check=True)


@pytest.mark.parametrize("copy", [shutil.copytree, all_attributes])
def test_a_copy_draws_for_itself_and_signs_as_before(tmp_path, copy):
    keys = charged_folder(tmp_path / "run")
    copy(tmp_path / "run", tmp_path / "copy")
    copy(tmp_path / "copy", tmp_path / "second")
    copies = [open_keys(tmp_path / name) for name in ("copy", "second")]
    assert all(other.copied and other.run == keys.run for other in copies)
    assert len({keys.draws, *(other.draws for other in copies)}) == 3
    assert open_keys(tmp_path / "copy") == copies[0]  # from then on it is a folder like any other
    assert open_keys(tmp_path / "run") == keys  # and the original never knew


def test_a_copy_without_the_file_that_says_where_the_key_was_is_a_copy(tmp_path):
    charged_folder(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "copy" / PLACE).unlink()
    assert open_keys(tmp_path / "copy").copied


@pytest.mark.parametrize("left", ["a line without its mark", "a part of a line"])
def test_a_ledger_whose_beginning_was_cut_off_is_missed_when_it_is_gone(tmp_path, left):
    keys = open_keys(tmp_path)
    if left == "a part of a line":
        (tmp_path / LEDGER).write_bytes(b'{"step"')
    Ledger(tmp_path / LEDGER, keys.run).begin_step(0, GaussianDpEvent(1.0), "f")
    if left == "a line without its mark":
        place = json.loads((tmp_path / PLACE).read_text())
        (tmp_path / PLACE).write_text(json.dumps(place | {"charged": False}))
        assert open_keys(tmp_path) == keys
    (tmp_path / LEDGER).unlink()
    with pytest.raises(UserError, match="is gone or empty, and steps of this run were charged there"):
        open_keys(tmp_path)


def test_moving_a_folder_changes_nothing(tmp_path):
    keys = charged_folder(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "run", tmp_path / "elsewhere" / "run")
    assert open_keys(tmp_path / "elsewhere" / "run") == keys


def test_killed_before_it_knew_its_place_a_run_begins_as_usual(tmp_path):
    keys = open_keys(tmp_path)
    (tmp_path / PLACE).unlink()
    assert open_keys(tmp_path) == keys


def test_without_its_key_a_run_that_has_released_does_not_go_on(tmp_path):
    charged_folder(tmp_path)
    delete_key(tmp_path)
    delete_key(tmp_path)  # a second time is no error
    assert os.listdir(tmp_path) == [LEDGER]
    with pytest.raises(UserError, match="is gone, and without it this run cannot go on"):
        open_keys(tmp_path)
    assert os.listdir(tmp_path) == [LEDGER]
