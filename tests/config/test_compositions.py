"""Every file of conf/ composes, every preset has a privacy plan, and who wins is as train.yaml says."""

import dataclasses
import itertools
import shlex
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from dpexp.config import compose, composing, conf_dir, signature, to_dict
from dpexp.privacy.accountants import epsilon
from dpexp.schemas import CHOICES, RunConfig
from dpexp.schemas.declared import declared_num_examples
from dpexp.training.planning import budget_groups, build_plan, number_of_steps

JOB = ("task=sst2", "clip=adaptive_perlayer")
OWN_PAGE = Path(__file__).parents[2] / "docs" / "own_data.md"
SCALES = ("paper", "small", "demo")
OWN_DATA = (
    "data.train=rows.csv",
    "data.text=words",
    "data.label=kind",
    "data.num_examples=5000",
    "task.labels=[a,b]",
)
TASK_NEEDS = {  # what some tasks ask a person for
    "custom": ("task.factory=m:Mine", "model.factory=m:make", "data.num_examples=5000"),
    "images": ("data.train=folder", "data.num_examples=5000", "task.labels=[a,b]"),
    "text_classification": OWN_DATA,
    "text_generation": OWN_DATA[:-1],
    "text_infilling": (
        *OWN_DATA,
        "task.template='<S1> It is [MASK] .'",
        "task.label_words={a: good, b: bad}",
    ),
}


def choices(group):
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


TASKS, PRESETS, SWEEPS = choices("task"), choices("experiment"), choices("sweep")
GROUPS = (
    "model",
    "clip",
    "privacy",
    "accountant",
    "schedule",
    "optim",
    "peft",
    "engine",
    "runtime",
    "tracker",
    "scale",
)
EVERY_FILE = [(group, choice) for group in GROUPS for choice in choices(group)]
NEEDED = {  # what some choices ask a person for
    ("model", "hf"): ["model.id=somebody/something"],
    ("model", "causal_lm"): ["model.id=somebody/something"],
    ("model", "custom"): ["model.factory=somebody:something"],
    ("privacy", "noise"): ["privacy.noise_multiplier=1.0"],
    ("privacy", "none"): ["clip=nonprivate"],
    ("accountant", "gdp"): ["accountant.allow_clt=true"],
    ("optim", "sgd"): ["optim.lr=1.0"],
    ("optim", "custom"): ["optim.factory=torch.optim:RMSprop"],
    ("schedule", "given"): ["schedule.factors=[1,0.5]"],
}


# Every file


@pytest.mark.parametrize(("group", "choice"), EVERY_FILE, ids=lambda value: value)
def test_every_file_of_every_group_composes(group, choice):
    job = ["task=text_classification", *OWN_DATA] if choice == "own" else JOB
    run = compose([*job, f"{group}={choice}", *NEEDED.get((group, choice), [])])
    assert isinstance(run, RunConfig)
    if group not in ("privacy", "runtime"):  # these are settings rather than things, and have no name
        assert getattr(run, group).name == choice, "a file's name is the name of what it holds"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_settings_for_every_scale(task, scale):
    run = compose([f"task={task}", "clip=flat", f"scale={scale}", *TASK_NEEDS.get(task, ())])
    assert run.task.name == task
    assert run.scale.name == scale
    assert run.model.name
    assert (conf_dir() / "task_at_scale" / task / f"{scale}.yaml").is_file()


def test_every_folder_of_conf_is_a_group_of_the_schema():
    known = {field.name for field in dataclasses.fields(RunConfig)} | {
        "experiment",
        "recipe",
        "common",  # what the presets of a paper share
        "sweep",
        "hydra",
        "bench",  # presets of the bench command, which has its own primary config
        "task_at_scale",
    }
    assert {path.name for path in conf_dir().iterdir() if path.is_dir()} <= known


def test_every_word_the_schema_allows_has_a_file_and_every_file_is_allowed():
    for group in ("accountant", "schedule", "optim", "peft", "engine", "tracker", "scale"):
        assert choices(group) == sorted(CHOICES[f"{group}.name"])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_plan(preset):
    run = compose([f"experiment={preset}"])
    total = declared_num_examples(run)
    steps = run.optim.steps or round(run.optim.epochs * total / run.optim.batch_size)
    made = build_plan(run, total, steps, budget_groups(run, total))
    for budget, target in enumerate(run.individual.epsilons):
        assert 0.99 * target < epsilon(made.event(budget=budget), made.delta) <= target * (1 + 1e-6)
    if run.privacy.epsilon is not None:
        assert made.epsilon() <= run.privacy.epsilon
        assert made.epsilon() == pytest.approx(run.privacy.epsilon, rel=1e-2)
    assert made.noise_multiplier > 0.3


@pytest.mark.parametrize("preset", PRESETS)
def test_the_header_of_a_preset_is_complete_and_its_command_is_its_own(preset):
    text = (conf_dir() / "experiment" / f"{preset}.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert header[0] == "# @package _global_"
    assert "Table" in header[1] or "Figure" in header[1]
    assert any(f"python -m dpexp.train experiment={preset} " in line for line in header)
    assert any(line.startswith("# Expected") for line in header)
    assert any(line.startswith("# Cost") and "estimate" in line for line in header)


@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_corner_of_every_sweep_composes(sweep):
    composing.register("train", RunConfig)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose("train", [*JOB, f"sweep={sweep}"], return_hydra_config=True)
    assert OmegaConf.select(cfg, "hydra.mode").name == "MULTIRUN"
    axes = [
        [f"{key}={value}" for value in values.split(",")] for key, values in cfg.hydra.sweeper.params.items()
    ]
    corners = list(itertools.product(*((axis[0], axis[-1]) for axis in axes)))
    jobs = [compose([*JOB, f"sweep={sweep}", *corner], of_grid=True) for corner in corners]
    signatures = {signature(job) for job in jobs}
    assert len(signatures) == len(corners), "two jobs of a grid are one run"


# Who wins: command line > experiment > scale > task

HEAD = "experiment=he2023_table4"


def test_the_scale_wins_over_the_task_and_the_groups():
    paper, small, demo = (compose([*JOB, f"scale={scale}"]) for scale in SCALES)
    assert (paper.model.name, small.model.name, demo.model.name) == ("roberta_base", "minilm", "bert_tiny")
    assert len({paper.optim.lr, small.optim.lr, demo.optim.lr}) == 3
    assert small.task.max_length < paper.task.max_length
    assert paper.clip.target_quantile == 0.85, "a task at its scale wins over the clip's own file (0.5)"


def test_the_default_scale_is_the_papers():
    run = compose(JOB)
    assert run.scale.name == "paper"
    assert run.task.num_examples["paper"] == run.task.num_examples["small"] == 67349


def test_an_experiment_wins_over_the_scale():
    assert (
        compose(["experiment=bu2023_table1_qqp_roberta_large_bk", "scale=small"]).model.name
        == "roberta_large"
    )
    run = compose([HEAD, "scale=small"])
    assert run.scale.name == "small"
    assert run.model.trainable == "attention+head", "named by the experiment"
    assert run.optim.lr == compose([*JOB, "scale=small"]).optim.lr, "not named by it, so the scale's"
    assert (run.clip.name, run.privacy.epsilon) == ("flat", 3.0)


@pytest.mark.parametrize("scale", SCALES)
def test_the_command_line_wins_over_all(scale):
    given = [
        "model=distilbert",
        "optim=adamw",
        "optim.lr=0.5",
        "optim.epochs=7",
        "clip.target_quantile=0.2",
        "task.max_length=9",
    ]
    for base in ([*JOB], [HEAD, "clip=adaptive_flat"]):
        run = compose([*base, f"scale={scale}", *given])
        assert (run.model.name, run.optim.name, run.optim.lr) == ("distilbert", "adamw", 0.5)
        assert (run.optim.epochs, run.clip.target_quantile, run.task.max_length) == (7.0, 0.2, 9)
    run = compose([HEAD, "privacy=eps8", "scale=paper"])
    assert run.privacy.epsilon == 8.0


def test_the_order_of_arguments_does_not_matter():
    given = ["task=sst2", "clip=adaptive_flat", "scale=small", "model=distilbert", "optim.lr=0.5"]
    assert to_dict(compose(given)) == to_dict(compose(given[::-1]))


def test_a_nonprivate_run_needs_no_further_word():
    run = compose(["task=sst2", "clip=nonprivate"])
    assert not run.clip.private
    assert run.privacy.epsilon is None
    assert run.privacy.noise_multiplier is None


def test_hyper_parameters_of_the_paper_scale_are_those_of_table_8():
    run = compose(JOB)
    assert (run.optim.name, run.optim.betas, run.optim.eps, run.optim.weight_decay) == (
        "adam",
        [0.9, 0.98],
        1e-6,
        0.0,
    )
    assert (run.optim.warmup_ratio, run.optim.lr_schedule, run.optim.epochs) == (0.06, "linear", 20.0)
    assert run.optim.lr in (1e-4, 2e-4, 4e-4)
    assert run.optim.batch_size in (512, 1024, 2048)
    assert (run.clip.init_threshold, run.clip.quantile_budget, run.clip.quantile_lr) == (1.0, 0.1, 0.3)
    assert run.clip.target_quantile in (0.5, 0.75, 0.85)
    assert run.clip.allocation == "global"
    assert (run.model.dropout, run.model.attention_dropout) == (0.1, 0.1)
    assert run.privacy.delta == "n_pow_-1.1"


def test_data_root_comes_from_the_environment_and_the_command_line_wins(monkeypatch):
    monkeypatch.delenv("DPEXP_DATA", raising=False)
    assert compose(JOB).data.root is None
    monkeypatch.setenv("DPEXP_DATA", "/somewhere")
    assert compose(JOB).data.root == "/somewhere"
    assert compose([*JOB, "data.root=elsewhere"]).data.root == "elsewhere"


def test_the_cache_is_a_path_without_a_tilde(monkeypatch):
    monkeypatch.delenv("DPEXP_CACHE", raising=False)
    assert compose(JOB).data.cache == str(Path("~/.cache/dpexp").expanduser())


def test_mappings_take_new_entries():
    run = compose([*JOB, "scale=demo", "model.config.hidden_size=48", "model.config.hidden_act=relu"])
    assert run.model.config["hidden_size"] == 48
    assert run.model.config["hidden_act"] == "relu"
    assert run.model.config["num_attention_heads"] == 2  # what is not named stays


# Which settings are the same run


def test_jobs_that_differ_in_numbers_share_one_composition():
    """A grid over seeds composes its choices once; a job of it gets its own numbers all the same."""
    found = [compose(["task=mnist", "clip=flat", "scale=demo", "seed=1", "optim.lr=0.5"])]
    before = composing._chosen.cache_info().misses
    found.append(compose(["task=mnist", "clip=flat", "scale=demo", "seed=2", "trials=3", "optim.lr=0.25"]))
    assert composing._chosen.cache_info().misses == before
    assert [(run.seed, run.trials, run.optim.lr) for run in found] == [(1, 1, 0.5), (2, 3, 0.25)]


def test_what_a_composition_leaves_out_changes_nothing_of_it(monkeypatch):
    composing.register("train", RunConfig)
    asked = "train", ("task=sst2", "clip=flat", "scale=small"), RunConfig, 0
    quick = composing._chosen.__wrapped__(*asked)
    monkeypatch.setattr(composing.hydras_defaults, "_create_interpolation_map", composing._every_choice)
    monkeypatch.delattr(composing.ConfigStore, "__deepcopy__")
    assert composing._chosen.__wrapped__(*asked) == quick


def test_the_prompt_that_the_documents_print_can_be_copied():
    (row,) = [
        line for line in OWN_PAGE.read_text(encoding="utf-8").splitlines() if "task=text_infilling" in line
    ]
    words = shlex.split(row.split("|")[2].strip(" `"))
    labels = "task.labels=[bad,good]"
    run = compose([*words, "scale=own", "clip=flat", *OWN_DATA[:-1], labels])
    assert run.task.template == "<S1> It was [MASK] ."


# Settings that follow from N


@pytest.mark.parametrize("task", ["text_classification", "images", "custom"])
@pytest.mark.parametrize(("unit", "count"), [((), 600), (("unit=user", "unit.size=2"), 300)])
def test_own_data_makes_300_steps_of_batches_that_follow_from_what_is_protected(task, unit, count):
    job = [f"task={task}", "scale=own", "clip=flat", *TASK_NEEDS[task], "data.num_examples=600", *unit]
    run = compose(job)
    assert run.optim.batch_size == {600: 256, 300: 128}[count]
    # epochs have two digits
    assert number_of_steps(run, count) == pytest.approx(300, rel=0.05)
