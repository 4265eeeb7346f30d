"""Training on another device than the CPU, where there is no GPU: `second_device/device.cpp` is one."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import KERNELS
from tests.second_device.device import built, compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler builds the device"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the program has found: name of a check -> what was wrong."""
    library = built(compiler(), KERNELS.parent / "tests")
    program = [sys.executable, "-m", "tests.second_device.programs", str(library)]
    done = subprocess.run(
        [*program, str(tmp_path_factory.mktemp("second"))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_tensors_of_two_devices_are_no_operands_there(found):
    assert "same device" in found.pop("mixed")


def test_all_is_clipped_watched_and_trained_there_as_on_the_cpu(found):
    wrong = {name: what for name, what in found.items() if what and name != "mixed"}
    assert len(found) > 30
    assert not wrong
