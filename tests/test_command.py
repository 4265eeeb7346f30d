"""``dpexp COMMAND`` and what the tab key offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dpexp
from dpexp.__main__ import COMMANDS, main
from dpexp.config.completion import SHELLS, candidates
from dpexp.errors import INTERRUPTED
from tests.commands import called

ROOT = Path(__file__).parents[1]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)


def test_ctrl_c_while_libraries_are_loaded_is_one_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(*words: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("runpy.run_module", loading)
    assert main(["account"]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_the_engine_is_among_the_names_of_the_package() -> None:
    assert "PrivacyEngine" in dir(dpexp)


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acount"]) == 2
    assert "did you mean account?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_that_runs(name: str) -> None:
    from importlib.util import find_spec

    assert find_spec(f"dpexp.{name}") is not None


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_does_nothing_else(name: str, tmp_path: Path) -> None:
    module = f"dpexp.{name}" if (ROOT / "dpexp" / f"{name}.py").exists() else f"dpexp.{name}.__main__"
    done = called(module, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"python -m dpexp.{name}" in done.stdout
    assert "native kernels:" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_command_is_run_as_by_python_m(tmp_path: Path) -> None:
    words = ["noise_multiplier=1", "sample_rate=1", "steps=1", "delta=1e-5", "format=json"]
    start = [sys.executable, "-m", "dpexp", "account"]
    done = subprocess.run([*start, *words], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == called("dpexp.account", *words, cwd=tmp_path).stdout != ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dpexp tr", ["train"]),
        ("dpexp train task=sst", ["task=sst2", "task=sst2_infilling"]),
        ("dpexp train clip=flat,perb", ["clip=flat,perblock"]),
        ("dpexp train clip.clip_", ["clip.clip_norm="]),
        ("dpexp train mod", ["model=", "model.name=", "model.family="]),
        ("dpexp audit mod", ["model="]),
        ("dpexp account noise", ["noise_multiplier="]),
        ("dpexp train optim.lr=", []),
        ("dpexp report ru", ["run", "runs"]),
    ],
)
def test_the_tab_key(line: str, expected: list[str]) -> None:
    found = candidates(line)
    assert expected == found or (len(expected) > 2 and set(expected) <= set(found))


def test_completion_is_quick_to_start() -> None:
    """No heavy library is imported between the key and the answer."""
    code = "import sys; from dpexp.config.completion import candidates; candidates('dpexp train t'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "hydra", "transformers", "numpy"} & set(done.stdout.split())


def test_the_door_of_the_configuration_opens_what_is_asked_for() -> None:
    code = (
        "import sys, dpexp.config as c; print(len([n for n in sys.modules if n.startswith(('hydra', 'omegaconf', 'dpexp.'))])); "
        "print(*(getattr(c, n).__name__ for n in c.__all__)); print(set(c.__all__) <= set(dir(c)), hasattr(c, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = "RunConfig compose conf_dir hydra_entry resolve run_folder signature to_dict"
    assert done.stdout.splitlines() == ["1", names, "True False"]


def test_no_command_waits_for_the_compiler_or_libraries_of_models() -> None:
    """The compiler takes as long to import as torch, and is there with the first model that is clipped. Formulas of layers load
    without the optional packages that have some of these layers."""
    code = (
        "import sys, dpexp.train, torch; from dpexp.clipping import attach, operations; "
        "print(*[name in sys.modules for name in ('torch._dynamo', 'transformers', 'timm')]); "
        "attach(torch.nn.Linear(1, 1)); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True"]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_prints_what_a_shell_evaluates(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "dpexp completion words" in capsys.readouterr().out
