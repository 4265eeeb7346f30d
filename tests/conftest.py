"""What every test gets: no network, few threads, and nothing written outside its own folder."""

import hashlib
import itertools
import os
import secrets
import sys
from pathlib import Path

import hypothesis
import pytest
from absl import logging as absl_logging

# Before torch, transformers or datasets is imported anywhere.
for name, value in {
    "OMP_NUM_THREADS": "1",  # the suite runs one process per core
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}.items():
    os.environ.setdefault(name, value)
# Hydra shuts every log handler down, and absl's then closes the stream that it was made with unless that is the standard one:
# here it would be the file into which pytest captures.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__
# A test that reads real files asks for them (`real_data`); no other finds them by accident. The name is another one, so that the
# processes that a parallel run starts know the folder too.
if given := os.environ.pop("DPEXP_DATA", None):
    os.environ["DPEXP_TEST_DATA"] = given

# Native kernels of this machine, before a test's own cache hides them.
KERNELS = Path(os.environ.get("DPEXP_CACHE") or "~/.cache/dpexp").expanduser() / "native"

# The same examples in every run: what fails here fails for the next one too. More examples: HYPOTHESIS_PROFILE=explore.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def same_keys(request, monkeypatch):
    """Keys and salts that this process draws are a function of the test: a statistic does not fail by an unlucky draw.

    A process that a test starts draws its own.
    """
    count = itertools.count()

    def token_bytes(nbytes=None):
        seed = f"{request.node.nodeid} {next(count)}".encode()
        return hashlib.shake_256(seed).digest(32 if nbytes is None else nbytes)

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes=None: token_bytes(nbytes).hex())


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Tokenised data of a test session stays in its temporary folder; native kernels are the machine's.

    This process may have loaded them before: another one that a test starts would compute without them, and round another way.
    """
    cache = tmp_path_factory.getbasetemp() / "cache"
    if not cache.exists():
        (cache / "native").mkdir(parents=True)
        for library in KERNELS.glob("*.so"):
            (cache / "native" / library.name).symlink_to(library)
    monkeypatch.setenv("DPEXP_CACHE", str(cache))


@pytest.fixture
def runs_dir(tmp_path):
    """A folder for runs, to be given as ``runtime.runs_dir``."""
    return tmp_path / "runs"
