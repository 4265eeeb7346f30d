"""Every file of conf/ composes, every preset has a privacy plan, and bad input gets one clear sentence."""

import dataclasses
import itertools
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from dpexp import config
from dpexp.checks import TRIALS_LAWS
from dpexp.config import compose, conf_dir, run_folder, signature, to_dict
from dpexp.declared import declared_num_examples
from dpexp.durable import flattened
from dpexp.errors import INTERRUPTED, UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.tuning import LAWS
from dpexp.schemas import CHOICES, RunConfig
from dpexp.training.planning import budget_groups, build_plan
from tests.commands import called

JOB = ("task=sst2", "clip=adaptive_perlayer")
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
    "text_generation": OWN_DATA,
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
    config._register("train", RunConfig)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose("train", [*JOB, f"sweep={sweep}"], return_hydra_config=True)
    assert OmegaConf.select(cfg, "hydra.mode").name == "MULTIRUN"
    axes = [
        [f"{key}={value}" for value in values.split(",")] for key, values in cfg.hydra.sweeper.params.items()
    ]
    corners = list(itertools.product(*((axis[0], axis[-1]) for axis in axes)))
    signatures = {signature(compose([*JOB, f"sweep={sweep}", *corner])) for corner in corners}
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

SAME_RUN = (
    "seed=3", "trials=9", "trials_law=geometric", "tracker=tensorboard", "data.root=/x", "data.cache=/y", "runtime.eval_every=5",
    "runtime.log_every=7", "runtime.checkpoint_every=1", "runtime.eval_batch_size=3", "runtime.runs_dir=/z",
    "data.source=files", "task.hub_id=mirror/glue", "optim.lr=0.0004", "optim.batch_size=1024.0", "engine=auto",
)  # fmt: skip
ANOTHER_RUN = (
    "model=roberta_large", "model.trainable=bias", "model.dropout=0.0", "clip=perlayer", "clip.clip_norm=0.5",
    "clip.quantile_budget=0.2", "clip.allocation=weighted", "privacy=eps3", "privacy.delta=1e-5", "accountant=prv",
    "privacy.sampling=shuffle", "optim.lr=0.0002", "optim.epochs=3", "optim.batch_size=512", "peft=lora", "scale=small",
    "runtime.precision=bf16", "engine=opacus", "engine.choice=rule", "runtime.device=cpu",
    "runtime.physical_batch_size=8", "runtime.threads=2", "data.num_examples=2000", "data.max_length=32",
    "data.source=demo", "task.labels=[no,yes]",
)  # fmt: skip


@pytest.mark.parametrize("change", SAME_RUN)
def test_what_cannot_change_a_result_does_not_change_the_signature(change):
    assert signature(compose([*JOB, change])) == signature(compose(JOB))


def test_all_that_can_change_a_result_changes_the_signature():
    signatures = [
        signature(compose([*JOB, *change])) for change in ([], *([change] for change in ANOTHER_RUN))
    ]
    assert len(set(signatures)) == len(signatures)


def test_settings_that_a_fixed_threshold_ignores_are_the_same_run():
    fixed = ["task=sst2", "clip=flat"]
    assert signature(compose([*fixed, "clip.target_quantile=0.3"])) == signature(compose(fixed))
    assert compose(fixed).clip.quantile_budget == 0.0


def test_a_new_field_with_a_default_keeps_old_signatures():
    run = compose(JOB)
    before = signature(run)
    larger = dataclasses.make_dataclass("ClipConfig", [("novelty", float, 0.5)], bases=(type(run.clip),))
    schema = dataclasses.make_dataclass(
        "RunConfig", [("clip", larger, dataclasses.field(default_factory=larger))], bases=(RunConfig,)
    )
    changed = schema(**{**vars(run), "clip": larger(**vars(run.clip))})
    neutral = config.RunConfig
    try:
        config.RunConfig = schema
        assert signature(changed) == before
        changed.clip.novelty = 0.6
        assert signature(changed) != before
    finally:
        config.RunConfig = neutral


DEFAULTS = {
    "task.name": "",
    "task.kind": "text_classification",
    "task.labels": [],
    "task.text": "text",
    "task.text_pair": None,
    "task.label": "label",
    "task.metric": "accuracy",
    "task.max_length": 128,
    "data.train": None,
    "data.dev": None,
    "data.text": None,
    "data.text_pair": None,
    "data.label": None,
    "data.num_examples": None,
    "data.max_length": None,
    "model.name": "",
    "model.id": None,
    "model.family": "hf",
    "model.architecture": None,
    "model.tokenizer": None,
    "model.trainable": "all",
    "model.dropout": None,
    "model.attention_dropout": None,
    "clip.name": "",
    "clip.private": True,
    "clip.groups": "flat",
    "clip.clip_norm": 1.0,
    "clip.init_threshold": None,
    "clip.adaptive": False,
    "clip.target_quantile": 0.5,
    "clip.quantile_lr": 0.3,
    "clip.quantile_update": "geometric",
    "clip.follows": "quantile",
    "clip.quantile_budget": 0.0,
    "clip.rescale": True,
    "clip.allocation": "global",
    "clip.rule": "abadi",
    "clip.threshold_floor": 1e-06,
    "privacy.epsilon": None,
    "privacy.noise_multiplier": None,
    "privacy.delta": "n_pow_-1.1",
    "privacy.sampling": "poisson",
    "privacy.release": "normal",
    "privacy.noise_seed": None,
    "privacy.keep_key": False,
    "privacy.secure": False,
    "accountant.name": "rdp",
    "accountant.allow_clt": False,
    "schedule.name": "constant",
    "schedule.decay_rate": None,
    "schedule.period": None,
    "schedule.end_ratio": None,
    "schedule.updates_per_epoch": 1,
    "schedule.condition": None,
    "schedule.influences": None,
    "optim.name": "adam",
    "optim.lr": 0.001,
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-08,
    "optim.weight_decay": 0.0,
    "optim.momentum": 0.0,
    "optim.lr_schedule": "constant",
    "optim.warmup_ratio": 0.0,
    "optim.batch_size": 1024.0,
    "optim.epochs": None,
    "optim.steps": None,
    "peft.name": "full",
    "peft.rank": 0,
    "peft.alpha": 0.0,
    "peft.dropout": 0.0,
    "peft.targets": [],
    "peft.carriers": "weights",
    "peft.placement": "both",
    "peft.blocks": 0,
    "peft.prefix_length": 0,
    "peft.prefix_hidden": 0,
    "engine.name": "auto",
    "engine.choice": "measured",
    "engine.memory_cap_mib": 2048,
    "runtime.device": "auto",
    "runtime.precision": "fp32",
    "runtime.physical_batch_size": "auto",
    "runtime.threads": None,
    "scale.name": "paper",
}


def test_defaults_of_the_schemas_stay_what_they_were():
    """Signatures leave out values that equal the default, so another default would give old runs a new meaning."""
    now = dict(flattened(to_dict(RunConfig())))
    assert {key: now[key] for key in DEFAULTS} == DEFAULTS


def test_what_a_schedule_does_not_take_is_neutral():
    """A preset's parameters do not follow it to another schedule, and a constant one has none."""
    preset = ["experiment=monir2023_table8_mnist_polynomial"]
    assert compose(preset).schedule.period == 100
    constant = compose([*preset, "schedule=constant"])
    assert constant.schedule == type(constant.schedule)()
    decayed = compose([*preset, "schedule=time", "schedule.updates_per_epoch=2"]).schedule
    assert (decayed.name, decayed.period, decayed.end_ratio, decayed.updates_per_epoch) == (
        "time",
        None,
        None,
        2,
    )
    assert (
        len(
            {signature(compose([*preset, *more])) for more in ([], ["schedule.period=50"], ["schedule=time"])}
        )
        == 3
    )


def test_the_folder_of_a_run(runs_dir):
    run = compose([*JOB, "seed=2", f"runtime.runs_dir={runs_dir}"])
    assert run_folder(run) == runs_dir / "sst2" / signature(run) / "seed2"
    assert len(signature(run)) == 10
    assert int(signature(run), 16) >= 0


# Bad input, one sentence each

MISTAKES = {
    # settings that are not there
    "clip=adaptive_perlyer": "clip=adaptive_perlyer is not a choice; did you mean adaptive_perlayer",
    "task=sst3": "did you mean sst2",
    "model=roberta_bas": "did you mean roberta_base",
    "scale=smal": "did you mean small",
    "experiment=he2023_tabel4": "did you mean he2023_table4",
    "optim.lrr=1": "there is no setting optim.lrr; did you mean optim.lr",
    "privacy.epsilom=3": "did you mean privacy.epsilon",
    "lr=1": "there is no setting lr; did you mean optim.lr?",
    "clpi=flat": "there is no setting clpi; did you mean clip?",
    "+typo=1": "there is no setting typo",
    "+optim.lrr=1": "there is no setting optim.lrr; did you mean optim.lr",
    "~optim": "can't be removed",
    "engine.name=bkk": "engine.name=bkk is not a choice; did you mean bk",
    # values that can't be
    "optim.lr=abc": "optim.lr=abc is not a number: write it out, such as 0.004",
    "optim.lr=[1": "cannot read 'optim.lr=[1'",
    "optim.lr=-1": "optim.lr=-1.0 must be above 0",
    "optim.lr=nan": "optim.lr=nan must be above 0",
    "optim.lr=inf": "optim.lr=inf must be above 0",
    "optim.betas=[0.9]": "two numbers",
    "optim.warmup_ratio=1": "in [0, 1)",
    "schedule=tme": "did you mean time",
    "schedule.name=step": "not given: schedule.decay_rate",
    "seed=-1": "0 or more",
    "trials=0": "above 0",
    "runtime.physical_batch_size=0": "give auto or a number",
    "runtime.physical_batch_size=big": "give auto or a number",
    "privacy.delta=0": "privacy.delta=0",
    "privacy.delta=n_pow_-1.2": "did you mean n_pow_-1.1",
    "data.root=${oc.env:NO_SUCH_VARIABLE}": "data.root",
    # values that do not go together
    "privacy.noise_multiplier=1": "privacy.epsilon and privacy.noise_multiplier are both given",
    "privacy.epsilon=null": "not given: privacy.epsilon or privacy.noise_multiplier",
    "optim.steps=10": "optim.epochs=20 and optim.steps=10 are both given",
    "optim.epochs=null": "not given: optim.epochs or optim.steps",
    "optim.batch_size=67350": "more than the 67349 examples",
    "accountant=gdp": "accountant.allow_clt=true",
    "clip.quantile_budget=0": "must be in (0, 1)",
    "clip.quantile_budget=1": "must be in (0, 1)",
    "clip.target_quantile=1": "must be in (0, 1)",
    "clip.rule=none": "bounds nothing",
    "model=hf": "not given: model.id",
    "data.train=mine.csv": "task=text_classification",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence(mistake):
    group = mistake.partition("=")[0]
    job = [word for word in JOB if not word.startswith(f"{group}=")]
    with pytest.raises(UserError) as raised:
        compose([*job, mistake])
    message = str(raised.value)
    assert MISTAKES[mistake] in message
    assert "\n" not in message
    assert "To append to your" not in message, "Hydra's advice teaches the wrong lesson"


def test_the_laws_of_trials_are_those_that_have_a_price():
    assert set(TRIALS_LAWS) == set(LAWS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["clip=nonprivate", "privacy=eps3"], "clip=nonprivate adds no noise"),
        (["clip=nonprivate", "clip.adaptive=true"], "use a private clip"),
        (["clip=flat", "clip.private=false"], "adds no noise"),
        (["clip=flat", "peft=lora", "model.trainable=bias"], "both say which parameters train"),
        (["clip=flat", "peft=lora", "peft.rank=0"], "peft.rank=0 must be 1 or more"),
        (["clip=flat", "peft=top2", "peft.blocks=0"], "peft.blocks=0 must be 1 or more"),
        (["clip=flat", "peft=prefix", "peft.prefix_length=0"], "peft.prefix_length=0 must be 1 or more"),
        (["clip=flat", "peft=rgp", "model.trainable=head"], "both say which parameters train"),
        (["clip=flat", "privacy.secure=true", "privacy.noise_seed=1"], "drop privacy.noise_seed"),
        (
            ["clip=flat", "privacy.sampling=fixed", "accountant=pld"],
            "accountant=pld knows nothing of batches of a fixed size",
        ),
        (["clip=flat", "trials_law=geometrical"], "trials_law=geometrical is not a choice"),
        (["clip=flat", "model=bert_tiny", "model.architecture=null"], "not given: model.architecture"),
    ],
)
def test_settings_that_contradict_each_other(settings, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        compose(["task=sst2", *settings])


def test_everything_that_is_missing_is_one_message():
    with pytest.raises(UserError) as raised:
        compose([])
    assert "task=… (choices: " in str(raised.value)
    with pytest.raises(UserError) as raised:
        compose(["task=text_classification", "clip=flat", "model=hf", "privacy=noise"])
    for key in ("data.train", "data.text", "data.label", "model.id", "privacy.noise_multiplier"):
        assert key in str(raised.value)
    assert "\n" not in str(raised.value)


def test_several_mistakes_are_listed_together():
    with pytest.raises(UserError) as raised:
        compose([*JOB, "optim.lr=-1", "optim.steps=3", "privacy.delta=2"])
    assert str(raised.value).startswith("3 settings are wrong:")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "optim:\n  lrr: 1\n",
            r"experiment/mine\.yaml: there is no setting optim\.lrr; did you mean optim\.lr",
        ),
        ("optim:\n  lr: x\n", r"experiment/mine\.yaml: optim\.lr: Value 'x'"),
        ("optim: [\n", r"mine\.yaml, line 3: this is no YAML"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(tmp_path, content, words):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{content}")
    with pytest.raises(UserError, match=words):
        compose([*JOB, f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"])


# The command line itself

SCRIPT = """
import errno
import sys
from dpexp.config import RunConfig, hydra_entry, run_folder
from dpexp.errors import UserError

@hydra_entry("train")
def main(run: RunConfig) -> None:
    "Print the folder."
    if run.seed == 13:
        raise UserError("this seed is refused")
    if run.seed == 14:
        raise OSError(errno.ENOSPC, "No space left on device", "results.csv")
    if run.seed == 15:
        raise KeyboardInterrupt
    print("folder", run_folder(run), run.clip.name)

main()
"""


def call(folder, *arguments):
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    return called(script, *arguments, cwd=folder)


def test_a_run_leaves_nothing_of_hydras_behind(tmp_path):
    done = call(tmp_path, *JOB)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["folder", str(run_folder(compose(JOB))), "adaptive_perlayer"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("task=sst2", "clip=adaptive_perlyer"),
        ("task=sst2", "clip=flat", "+typo=1"),
        (),
        (*JOB, "seed=13"),
        (*JOB, "seed=14"),
    ],
    ids=["choice", "key", "missing", "from the job", "a full disk"],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, arguments):
    done = call(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_multirun_gives_each_job_its_folder_and_outlives_a_failed_one(tmp_path):
    done = call(tmp_path, "task=sst2", "clip=flat,perlayer", "seed=13,1", "-m")
    folders = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("folder")]
    expected = [compose(["task=sst2", f"clip={clip}", "seed=1"]) for clip in ("flat", "perlayer")]
    assert folders == [[str(run_folder(run)), run.clip.name] for run in expected]
    assert done.returncode == 2
    assert done.stderr.count("error: this seed is refused") == 2
    assert "clip=perlayer seed=13" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_groups_and_choices_without_asking_for_a_task(tmp_path):
    done = call(tmp_path, "--help")
    assert done.returncode == 0
    assert "Print the folder." in done.stdout
    for words in (
        "task [required]",
        "scale [paper]",
        "adaptive_perlayer",
        "he2023_table8",
        "delta: n_pow_-1.1",
    ):
        assert words in done.stdout


def test_ctrl_c_is_one_word(tmp_path):
    done = call(tmp_path, *JOB, "seed=15")
    assert (done.returncode, done.stderr) == (INTERRUPTED, "interrupted\n")
