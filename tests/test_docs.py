"""The documents: every page can be found, and what a page names exists."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpexp.config import RunConfig
from dpexp.config.usage import conf_dir, groups_of
from dpexp.schemas import CHOICES, setting_names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = sorted(path for path in (DOCS / "methods").glob("*.md") if path.name != "index.md")
PARTS = ("Equation", "Source", "Switch it on", "What it costs", "When", "Code")


def _named(value: object) -> list[str]:
    """The files in the nested lists of a navigation."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [name for item in items for name in _named(item)]  # type: ignore[union-attr]


def test_every_page_is_in_the_navigation() -> None:
    # the file names functions of Python, which a plain loader does not know
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = _named(yaml.safe_load(text)["nav"])
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", METHODS, ids=lambda path: path.stem)
def test_a_method_has_all_its_parts_and_a_row_in_the_index(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\*\*(.+?)\.\*\*", text, re.M)) == PARTS
    assert f"]({page.name})" in (DOCS / "methods" / "index.md").read_text(encoding="utf-8")
    code = text.split("**Code.**")[1]
    named = re.findall(r"`(dpexp/\S+?\.(?:py|yaml))`", code)
    assert named, "the last part names the files"
    for name in named:
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize(
    "page", sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "results" / "README.md"]), ids=str
)
def test_links_lead_somewhere(page: Path) -> None:
    if not page.exists():
        pytest.skip("not written yet")
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, part = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), target
        if part:
            assert part in _anchors(there.read_text(encoding="utf-8")), target


def _anchors(text: str) -> set[str]:
    """Where a link may lead within a page, on GitHub and on the site: a heading in letters that both keep."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
        if heading.isascii()
    }


PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "results" / "README.md"])
# GROUP.SETTING=VALUE, and GROUP=CHOICE
_SETTING = re.compile(r"(?<![\w.\"/(-])([a-z_]+(?:\.[a-z_]+)*)=([\w.]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known, groups = set(setting_names(RunConfig)), groups_of("train")
    of_groups = {key.partition(".")[0] for key in known}
    code = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"```(?:bash)?\n(.*?)```", text, re.S)]
    for key, value in [found for part in code for found in _SETTING.findall(part)]:
        if "." in key and key.partition(".")[0] in of_groups:
            assert key in known or any(key.startswith(f"{mapping}.") for mapping in known), (
                f"{key} is no setting"
            )
            assert key not in CHOICES or not value.isalpha() or value in CHOICES[key], (
                f"{key}={value} is no choice"
            )
        elif key in groups and re.fullmatch(r"[a-z]\w*", value) and value not in ("mine", key):
            assert (conf_dir() / key / f"{value}.yaml").is_file(), f"{key}={value} is no choice"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_python_that_a_page_names_exists(page: Path) -> None:
    for name in set(re.findall(r"(?<![\w/.])dpexp(?:\.\w+)+", page.read_text(encoding="utf-8"))):
        assert pkgutil.resolve_name(name)


def test_records_are_read_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = sorted((ROOT / "results/runs").glob("mnist*.json"))[:3]
    for place, path in enumerate(kept):
        folder = tmp_path / f"runs/mnist/{place}/seed0"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_bytes(path.read_bytes())
    (code,) = re.findall(r"```python\n(.+?)```", (DOCS / "sweeps.md").read_text(encoding="utf-8"), re.S)
    exec(code, {})
    assert "mnist paper" in re.sub(" +", " ", capsys.readouterr().out)


def test_pages_that_code_names_exist() -> None:
    for folder in ("conf", "dpexp", "tests", "scripts"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (".py", ".yaml") and file.name != "test_record.py":
                for name in re.findall(r"\bdocs/[\w/]+\.md", file.read_text(encoding="utf-8")):
                    assert (ROOT / name).is_file(), f"{file.relative_to(ROOT)} names {name}"


def test_the_cost_of_several_processes_is_that_of_its_record() -> None:
    rows = re.findall(
        r"^\| (all|LoRA).*, (\d+) tokens, ([\w ,]+) \|(.+)$", _text("docs/many_processes.md"), re.M
    )
    assert len(rows) == 6
    named = {"EPYC": "cost", "Xeon": "cost_xeon", "768 wide, EPYC": "cost_wide"}
    for trained, tokens, where, said in rows:
        name = named[where]
        # the oldest record has no column for what is trained
        column = "" if name == "cost" else rf" \| {trained}[ \d]*"
        found = re.findall(
            rf"^\| {tokens}{column} \| (\w+) \| ([\w, ]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|",
            _text(f"results/ranks/{name}.md"),
            re.M,
        )
        ratios = {(runtime, way): float(ratio) for runtime, way, ratio in found}
        flat = [ratio for (runtime, way), ratio in ratios.items() if runtime == "pipeline" and "flat" in way]
        wanted = [
            *(ratios[runtime, way] for runtime in ("alone", "ddp", "fsdp") for way in ("layer", "flat")),
            ratios["pipeline", "device"], min(flat), max(flat),
        ]  # fmt: skip
        assert [float(number) for number in re.findall(r"\d\.\d+", said)] == pytest.approx(wanted, abs=0.006)


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
