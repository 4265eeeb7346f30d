"""`runtime.dry_run=true`: every command of a cell that was not run finds its data or names the missing file, and takes a step."""

from __future__ import annotations

import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dpexp import dry, train
from dpexp.config import RunConfig, compose, conf_dir
from dpexp.errors import UserError
from dpexp.reproduce import tables
from dpexp.training.planning import build_plan, number_of_steps
from tests.commands import called
from tests.tasks import image_data

# Their values change how long a run takes and how well it ends, not whether it begins.
VALUES = re.compile(
    r"(privacy\.epsilon|optim\.(lr|batch_size|epochs|steps)|clip\.(clip_norm|target_quantile|quantile_budget)"
    r"|individual\.epsilons|seed|peft\.rank)="
)


# The same runs of larger models, and of the tasks of one kind: test_presets composes them all.
OTHERS = {"model=roberta_large", "model=gpt2_medium", "model=dialogpt_medium"}


def commands() -> set[tuple[str, ...]]:
    found = set()
    for key, claim in tables.claims().items():
        for slot in [claim.slot(cell, "paper") for cell in tables.printed_cells(*key)]:
            if " dpexp.train " in slot.command:
                words = [word for word in shlex.split(slot.command)[3:] if word != "-m"]
                found.add(tuple(word for word in words if not VALUES.match(word)))
    return {command for command in found if OTHERS.isdisjoint(command)}


def kind(run: RunConfig) -> tuple[str, ...]:
    """What a step depends on: runs of one kind take the same step."""
    ways = run.clip.name, run.peft.name, run.optim.name, run.schedule.name, run.individual.name
    return run.task.kind, *ways


@pytest.mark.slow
def test_every_kind_of_run_that_a_table_asks_for_takes_a_step():
    asked = [compose(command) for command in sorted(commands())]
    cheap_last = sorted(asked, key=lambda run: run.model.family != "wide_resnet")
    kinds = {kind(run): run for run in cheap_last}
    assert len(kinds) >= 20
    for run in kinds.values():
        if run.model.family == "wide_resnet":
            # layers of the same kinds
            run = replace(
                run, model=replace(run.model, config={**run.model.config, "depth": 10, "widening": 1})
            )
        assert dry.one_step(run).startswith("taken with")
    nowhere = [replace(run, data=replace(run.data, root=None, source="files")) for run in asked]
    assert all(dry.whereabouts(run).startswith("missing: ") for run in nowhere)


@pytest.mark.slow
def test_every_preset_of_the_review_takes_a_step():
    """Figures ask for no cell, so that these are in no table's commands. Their plans: tests/config/test_compositions.py."""
    names = sorted(path.stem for path in (conf_dir() / "experiment").glob("monir2023_*.yaml"))
    assert len(names) >= 15
    runs = [compose([f"experiment={name}"]) for name in names]
    for run in {(kind(run), run.task.name): run for run in runs}.values():
        assert dry.one_step(run).startswith("taken with")


def test_what_is_there_is_found_and_what_is_missing_is_named(tmp_path: Path):
    run = compose(["task=sst2", "scale=small", f"data.root={tmp_path}", "data.source=files", "clip=flat"])
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.tsv.xz").touch()
    assert dry.whereabouts(run) == f"missing: sst2/dev.tsv, plain, .gz or .xz, below data.root={tmp_path}"
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "sst2" / "dev.tsv").touch()
    assert dry.whereabouts(run) == f"files below {tmp_path}"
    assert dry.whereabouts(compose(["task=sst2", "scale=demo"])) == "embedded"


def test_a_task_of_ones_own_folder_is_found_there_too(tmp_path: Path):
    for file in (conf_dir() / "task_at_scale" / "sst2").iterdir():
        own = tmp_path / "presets" / "task_at_scale" / "mine" / file.name
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "presets" / "task").mkdir()
    (tmp_path / "presets" / "task" / "mine.yaml").write_text("defaults: [sst2, _self_]\nname: mine\n")
    words = ["--config-dir", "presets", "task=mine", "scale=demo", "clip=flat", "runtime.dry_run=true"]
    done = called("dpexp.train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing was trained; this run would start" in done.stdout


def test_a_task_without_settings_for_the_step_is_told_which_file_to_write():
    run = compose(["task=sst2", "scale=small", "clip=flat"])
    with pytest.raises(
        UserError, match=r"takes its step at scale=demo, and task=mine .* Write task_at_scale/mine/demo\.yaml"
    ):
        dry.miniature(replace(run, task=replace(run.task, name="mine")))


def test_the_plan_is_that_of_the_run():
    run = compose(["task=mnist", "clip=flat", "privacy=eps3"])
    plan = build_plan(run, 60000, number_of_steps(run, 60000))
    assert f"noise multiplier {plan.noise_multiplier:.4f}, ε = 3" in dry.plan(run)


def test_a_grid_gets_a_line_for_each_point_and_a_step_for_each_kind(monkeypatch):
    taken = []
    monkeypatch.setattr(dry, "_steps", {})
    monkeypatch.setattr(dry, "one_step", lambda run: taken.append(run) or "taken")
    console = Console(file=(said := io.StringIO()), soft_wrap=True)
    points = ["optim.lr=0.1", "optim.lr=0.2", "privacy.epsilon=1", "optim.batch_size=512", "clip=perlayer"]
    for point in points:
        dry.dry_run(compose(["task=mnist", "scale=demo", "clip=flat", point]), console, in_grid=True)
    assert len(taken) == 2
    lines = said.getvalue().splitlines()
    assert len(lines) == len(points)
    assert all("noise multiplier" in line for line in lines)


def test_a_dry_start_writes_nothing_and_fails_where_something_is_missing(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = compose(["task=mnist", "scale=demo", "clip=adaptive_perlayer"])
    assert dry.dry_run(run, Console(quiet=True)).missing == []
    assert not list(tmp_path.iterdir())
    missing = compose(["task=mnist", f"data.root={tmp_path}", "data.source=files", "clip=flat"])
    with pytest.raises(UserError, match="can't start here: missing: mnist/train-images"):
        train.dry_start(missing, Console(quiet=True))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            ["task=sst2", "data.num_examples=8", "optim.batch_size=8", "task.labels=[a,b]"],
            "is none of the 2 classes a, b",
        ),
        (["task=sst2", "data.text=words"], "no column words"),
        (["task=sst2"], "67349 examples are declared"),
        (["task=sst2", "scale=demo", "model.config.hidden_size=abc"], "hidden_size=abc is not a number"),
        (
            ["task=sst2", "scale=demo", "unit=user", "unit.file=no.txt", "unit.num_users=4000"],
            "no.txt cannot be read",
        ),
        (["task=sst2_infilling", "scale=demo", "task.template=<S1> It was."], "once each, and holds <S1>"),
        (
            ["task=sst2_infilling", "scale=demo", "task.label_words.0=not good"],
            "is not a single token",
        ),
        (
            ["task=sst2", "scale=demo", "model.config.hidden_size=-32"],
            "no encoder can be made of this bert config",
        ),
        (
            ["task=sst2", "scale=demo", "model.config.hidden_act=foo"],
            "no encoder can be made of this bert config",
        ),
    ],
)
def test_what_the_run_would_refuse_a_dry_start_refuses(tmp_path: Path, asked: list[str], says: str):
    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev"):
        rows = "".join(f"{split} {i}\t{i % 2}\n" for i in range(8))
        (tmp_path / "sst2" / f"{split}.tsv").write_text(f"sentence\tlabel\n{rows}")
    small = ["scale=small", "model=bert_tiny", "clip=flat", f"data.root={tmp_path}"]
    with pytest.raises(UserError) as raised:
        train.dry_start(compose([*small, *asked]), Console(quiet=True))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "3 examples are declared, and"),
        (["task.labels=[cat,dog,cow]"], "class cow has no images"),
        (["task.labels=[cat,cow]"], "1 of its subfolders are none of the classes"),
        (["data.num_examples=4", "data.dev={root}/cat"], "0 subfolders, and every class is one"),
    ],
)
def test_the_folders_of_own_images_are_read(tmp_path: Path, asked: list[str], says: str):
    root = image_data.folder(tmp_path / "mine", {"cat": 2, "dog": 2})
    own = ["task=images", "scale=own", "clip=flat", f"data.train={root}", "data.num_examples=3"]
    asked = [word.format(root=root) for word in ["task.labels=[cat,dog]", *asked]]
    with pytest.raises(UserError) as raised:
        train.dry_start(compose([*own, *asked]), Console(quiet=True))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "asked",
    [
        ["optim.batch_growth={name: step, decay_rate: 0.5, period: 1}"],
        ["individual=sampling", "individual.groups=nowhere.txt"],
        ["individual=scaling", "individual.budgets=nowhere.txt"],
        ["privacy.bands=4"],
    ],
)
def test_what_has_a_value_for_each_step_or_each_example_takes_a_step(asked: list[str]):
    run = compose(["task=mnist", "scale=demo", "clip=flat", *asked])
    assert dry.one_step(run).startswith("taken with")


def test_the_plan_says_whether_n_counts_users() -> None:
    users = ["unit=user", "unit.size=5", "optim.batch_size=40"]
    assert dry.plan(compose(["task=sst2", "scale=demo", *users])).startswith("N = 3200 users, ")
    assert dry.plan(compose(["task=sst2", "scale=demo"])).startswith("N = 16000, ")
