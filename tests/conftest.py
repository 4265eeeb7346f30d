"""What every test gets: no network, few threads, and nothing written outside its own folder."""

import os
import sys

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


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Tokenised data of a test session stays in its temporary folder."""
    monkeypatch.setenv("DPEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def runs_dir(tmp_path):
    """A folder for runs, to be given as ``runtime.runs_dir``."""
    return tmp_path / "runs"
