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


def test_all_is_clipped_watched_and_trained_there_as_on_the_cpu(tmp_path):
    library = built(compiler(), KERNELS.parent / "tests")
    done = subprocess.run(
        [sys.executable, "-m", "tests.second_device.programs", str(library), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # name of a check -> what was wrong
    found = json.loads(done.stdout.splitlines()[-1])
    assert "same device" in found.pop("mixed")
    assert len(found) > 30
    assert not {name: what for name, what in found.items() if what}
