"""The scaffolding: what a fresh clone needs is there and says what it should."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import dpexp

ROOT = Path(dpexp.__file__).resolve().parents[1]
TARGETS = ("help", "setup", "demo", "test", "check", "tables")

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="an installed wheel has no project files"
)


def make(*arguments, **environment):
    clean = {
        key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHON", "MAKEFLAGS")
    }
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", *arguments],
        env=clean | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def normal(requirement):
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def test_help_lists_every_target():
    listed = make("help")
    for target in TARGETS:
        assert re.search(rf"make {target} +\w", listed), target


def test_set_up_comes_first_unless_an_interpreter_is_given(tmp_path):
    for target in ("demo", "test", "check", "tables"):
        fresh = make("-n", target, f"VENV={tmp_path}/env")
        assert "-m venv" in fresh
        assert fresh.index("pip install") < fresh.rindex(f"{tmp_path}/env/bin/python -m")
        given = make("-n", target, "PYTHON=some-python")
        assert "pip install" not in given
        assert "some-python -m" in given
    assert f"{tmp_path}/active/bin/python -m pip" in make("-n", "test", VIRTUAL_ENV=f"{tmp_path}/active")


def test_set_up_happens_once(tmp_path):
    (tmp_path / ".stamp-dpexp").touch()
    assert "pip install" not in make("-n", "test", f"VENV={tmp_path}")


def test_every_dependency_is_pinned_within_its_bounds(project):
    packaging = pytest.importorskip("packaging.requirements")
    pinned = pins()
    requirements = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    for requirement in map(packaging.Requirement, requirements):
        assert requirement.specifier, f"{requirement.name} has no lower bound"
        assert requirement.specifier.contains(pinned[normal(requirement.name)]), requirement


def test_the_lowest_versions_are_the_bounds(project):
    packaging = pytest.importorskip("packaging.requirements")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "lowest.py")], capture_output=True, text=True, check=True
    )
    lowest = dict(word.split("==") for word in done.stdout.split())
    for requirement in map(packaging.Requirement, project["dependencies"]):
        assert f">={lowest.pop(requirement.name)}" in str(requirement.specifier)
    assert not lowest
    assert "scripts/lowest.py" in make("-n", "test-lowest")


def test_constraints_are_versions_and_nothing_else():
    for name, version in pins().items():
        assert re.fullmatch(r"[a-z0-9-]+", name)
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}"


def test_the_version_is_one(project):
    assert project["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", dpexp.__version__)


def test_the_citation_names_the_four_papers():
    citation = OmegaConf.to_container(OmegaConf.load(ROOT / "CITATION.cff"))
    papers = {reference["authors"][0]["family-names"]: reference for reference in citation["references"]}
    assert set(papers) == {"He", "Bu", "Li", "Monir"}
    arxiv = {
        name: paper["identifiers"][0]["value"] for name, paper in papers.items() if "identifiers" in paper
    }
    assert arxiv == {"He": "arXiv:2212.01539", "Bu": "arXiv:2210.00038", "Li": "arXiv:2110.05679"}


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text[:200]
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text
    assert "limitations under the License." in text[-200:]


def imported(path, modules):
    """Names of the modules that a file imports anywhere: at its top, within functions, or for its types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
    return found & modules


def test_no_imports_run_in_a_circle():
    package = ROOT / "dpexp"
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    graph = {name: imported(path, files.keys()) for name, path in files.items()}
    assert len(graph["dpexp.train"]) > 10
    # raises CycleError, which names the modules of a circle
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("said", "found"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_of_openmp_soon_sleep_unless_the_user_says_how_they_wait(said, found):
    others = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    # what torch finds when it is loaded: nothing has loaded it before
    code = "import dpexp, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=others | said, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [found, "False"]


def test_no_file_names_a_package_index():
    for name in ("constraints.txt", "pyproject.toml", "Makefile", ".ci/run"):
        assert not re.search(r"https?://|file://|--index-url|--find-links", (ROOT / name).read_text()), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The unpacked wheel. Built without isolation where the build backend is installed, else as pip does it, with the network."""
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-build-isolation"] if find_spec("hatchling") else []
    words = ["wheel", *offline, "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run(
        [sys.executable, "-m", "pip", *words],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_carries_what_the_commands_need(wheel):
    names = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    travels = ("conf/**/*.yaml", "results/paper/*.csv", "results/runs/*.json", "results/bench/*.json")
    assert {f"dpexp/{path.relative_to(ROOT)}" for pattern in travels for path in ROOT.glob(pattern)} <= names
    assert not [name for name in names if name.startswith(("tests/", "conf/", "runs/", "results/"))]
    (entry,) = wheel.glob("*.dist-info/entry_points.txt")
    assert "dpexp = dpexp.__main__:main" in entry.read_text()


# one after the other in one process: it imports the libraries once
COMMANDS = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv = ["dpexp", *words]
    try:
        runpy.run_module("dpexp", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code:
            raise
"""


@pytest.mark.slow
def test_an_installed_wheel_works_in_an_empty_folder(wheel, tmp_path):
    commands = {
        "epsilon pld": ["account", "noise_multiplier=1.07", "sample_rate=0.0243", "steps=10", "delta=1e-5"],
        "table-he-2: written to results/tables/table-he-2": ["report", "table-he-2"],
        "num_examples:": ["train", "task=sst2", "scale=demo", "--cfg", "job"],
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(list(commands.values()))], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for said in commands:
        assert said in done.stdout
