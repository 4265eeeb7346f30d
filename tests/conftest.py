"""What every test gets: no network, few threads, numbers that are the same in any order of the tests, and a folder of its own."""

import contextlib
import gc
import hashlib
import itertools
import os
import random
import secrets
import sys
from pathlib import Path
from unittest import mock

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


# No test cuts the power: of a process that is killed the system keeps what it wrote, synced or not. Tests that ask what is
# synced, and when, put a function of their own here.
os.fsync = lambda descriptor: None

# Native kernels of this machine, before a test's own cache hides them.
KERNELS = Path(os.environ.get("DPEXP_CACHE") or "~/.cache/dpexp").expanduser() / "native"

# The same examples in every run: what fails here fails for the next one too. More examples: HYPOTHESIS_PROFILE=explore.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that the processes that share the tests end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# modules whose objects are frozen
frozen = 0


def pytest_collection_finish():
    freeze_imports()


def pytest_runtest_logfinish():
    freeze_imports()


def freeze_imports():
    """What was imported stays: no collection of garbage has to look at it again, and no fork copies it for that."""
    global frozen
    if len(sys.modules) > frozen + 100:
        gc.collect()
        gc.freeze()
        frozen = len(sys.modules)


@contextlib.contextmanager
def numbers_of(name):
    """Inside, keys, salts and random numbers that this process draws are a function of a name, not of what ran before.

    A statistic does not fail by an unlucky draw. A process that a test starts draws its own; a forked one goes on with these, but
    each rank of torchrun in each of its lives with others: a second life would else take the first one's addresses for its own.
    """

    def drawn(what, size):
        return hashlib.shake_256(f"{name} {what}".encode()).digest(size)

    count = itertools.count()

    def token_bytes(nbytes=None):
        lives = [os.environ[key] for key in ("RANK", "TORCHELASTIC_RESTART_COUNT") if key in os.environ]
        return drawn(" ".join([str(next(count)), *lives]), 32 if nbytes is None else nbytes)

    generators = [(random.seed, random.getstate, random.setstate)]
    # who has not imported them draws nothing from them
    if np := sys.modules.get("numpy"):
        generators.append((np.random.seed, np.random.get_state, np.random.set_state))
    if torch := sys.modules.get("torch"):
        # torch's own function notes who called it, a millisecond for each kind of device that is not in use
        seeded = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
        generators.append((seeded, torch.get_rng_state, torch.set_rng_state))
    before = [state() for _, state, _ in generators]
    for seed, _, _ in generators:
        seed(int.from_bytes(drawn("seed", 4), "big"))
    try:
        with mock.patch.multiple(
            secrets, token_bytes=token_bytes, token_hex=lambda nbytes=None: token_bytes(nbytes).hex()
        ):
            yield
    finally:
        for (_, _, restore), state in zip(generators, before, strict=True):
            restore(state)
        if torch:
            # training sets it for the whole process
            torch.set_flush_denormal(False)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """What a file draws when it is imported does not depend on the files before it."""
    with numbers_of(collector.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share does not depend on which of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with numbers_of(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}"):
        return (yield)


@pytest.fixture(autouse=True)
def same_numbers(request):
    """Each test has its own."""
    with numbers_of(request.node.nodeid):
        yield


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    """The cache of this process's tests; native kernels are the machine's.

    This process may have loaded them before: another one that a test starts would compute without them, and round another way.
    """
    folder = tmp_path_factory.getbasetemp() / "cache"
    (folder / "native").mkdir(parents=True)
    for library in KERNELS.glob("*.so"):
        (folder / "native" / library.name).symlink_to(library)
    return folder


@pytest.fixture(autouse=True)
def own_cache(cache_folder, monkeypatch):
    """Tokenised data of a test session stays in its temporary folder."""
    monkeypatch.setenv("DPEXP_CACHE", str(cache_folder))


@pytest.fixture
def runs_dir(tmp_path):
    """A folder for runs, to be given as ``runtime.runs_dir``."""
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def loops_end_with_their_test():
    """A loop that a test leaves in the middle watches all that torch does until it is collected; an error may have tied it up."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.overrides._get_current_function_mode() is not None:
        gc.collect()
        while torch.overrides._get_current_function_mode() is not None:
            torch.overrides._pop_mode()
