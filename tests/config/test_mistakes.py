"""Bad input gets one clear sentence, from a composed configuration and from a command."""

import dataclasses
import operator
import os
import typing

import pytest
from hydra.errors import MissingConfigException

from dpexp.config import RunConfig, compose, run_folder, to_dict
from dpexp.config.checks import TRIALS_LAWS, check
from dpexp.config.composing import spelled
from dpexp.config.mistakes import explain
from dpexp.config.unread import READ
from dpexp.durable import flattened
from dpexp.errors import INTERRUPTED, UserError
from dpexp.privacy.tuning import LAWS
from dpexp.schemas import CHOICES
from tests.commands import called

JOB = ("task=sst2", "clip=adaptive_perlayer")
MISTAKES = {
    # settings that are not there
    "clip=adaptive_perlyer": "clip=adaptive_perlyer is not a choice; did you mean adaptive_perlayer",
    "=3": "cannot read '=3': write GROUP=CHOICE or KEY=VALUE",
    "clip=3": "clip=3 is not a choice: choose adaclip,",
    "model=null": "model=null is not a choice: choose ",
    "task=sst3": "did you mean sst2",
    "model=roberta_bas": "did you mean roberta_base",
    "scale=smal": "did you mean small",
    "experiment=he2023_tabel4": "did you mean he2023_table4",
    "optim.lrr=1": "there is no setting optim.lrr; did you mean optim.lr",
    "privacy.epsilom=3": "did you mean privacy.epsilon",
    "text.x=1": "there is no setting text.x (choices: accountant, analysis, ",
    "lr=1": "there is no setting lr; did you mean optim.lr?",
    "clpi=flat": "there is no setting clpi; did you mean clip?",
    "+typo=1": "there is no setting typo",
    "+optim.lrr=1": "there is no setting optim.lrr; did you mean optim.lr",
    "~optim": "can't be removed",
    "engine.name=bkk": "engine.name=bkk is not a choice; did you mean bk",
    # values that can't be
    "optim.lr=abc": "optim.lr=abc is not a number: write it out, such as 0.004",
    "optim.lr=[1": "cannot read 'optim.lr=[1'",
    "task.labels=[bad,": "cannot read 'task.labels=[bad,': its bracket is not closed; a list with blanks stands whole in quotes",
    'task.template="<S1> It was [MASK] .': "cannot read 'task.template=\"<S1> It was [MASK] .'",
    "task.labels=bad,good": "a list stands in brackets and in quotes: 'task.labels=[bad,good]'",
    "data.num_examples=60,000": "a number has no commas: data.num_examples=60000",
    "task.labels=2": "task.labels=2 is not a list: write '[a, b]', in quotes",
    "task.labels={a: bad}": "is not a list: write '[a, b]', in quotes",
    "task.label_words={0: bad, 1: good}": "names in a mapping are words; give task.label_words.0=… for each",
    "model.config=3": "model.config=3 is not a mapping: write '{name: value}', in quotes",
    "model.config=[a]": "model.config=[a] is not a mapping",
    "data.text=[review]": "data.text=[review] is not one word or number",
    "tracker.not_private=maybe": "tracker.not_private=maybe is not true or false",
    "data.root=": "data.root= is empty: give a file or a folder",
    "optim.lr=null": "optim.lr=null: this setting needs a value",
    "optim.lr=-1": "optim.lr=-1.0 must be above 0",
    "optim.lr=nan": "optim.lr=nan is not a finite number",
    "optim.lr=inf": "optim.lr=inf is not a finite number",
    "privacy.epsilon=inf": "privacy.epsilon=inf is not a finite number",
    "optim.weight_decay=-inf": "optim.weight_decay=-inf is not a finite number",
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
    "clip.rule=none": "use abadi, automatic, normalized or clip=nonprivate",
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


@pytest.mark.parametrize(
    ("written", "quoted"),
    [
        ("data.root=données", 'data.root="données"'),
        ("data.root=my data (1)", 'data.root="my data (1)"'),
        ("data.root=~/data", 'data.root="~/data"'),
        ("data.root=it's", 'data.root="it\'s"'),
        ("data.root=é,b", 'data.root="é",b'),
        ("task.labels=[très bien, 差, bad]", 'task.labels=["très bien","差", bad]'),
        ("task.label_words={bon: très, mal: bad}", 'task.label_words={bon:"très", mal: bad}'),
        # what Hydra reads stays
        ("optim.lr=range(1,3)", "optim.lr=range(1,3)"),
        ("data.root='é'", "data.root='é'"),
        ("--config-dir=é", "--config-dir=é"),
    ],
)
def test_a_value_may_hold_any_characters(written, quoted):
    """Hydra's grammar knows ASCII letters and a few signs; a file or a class may have any name."""
    assert spelled(written) == quoted


def test_a_file_may_have_any_name():
    run = compose([*JOB, "data.root=Datén (1)", "task.labels=[schlécht, sehr gut]"])
    assert run.data.root == "Datén (1)"
    assert run.task.labels == ["schlécht", "sehr gut"]


def test_of_a_list_and_a_grid_the_grid_is_named():
    with pytest.raises(UserError, match=r"^seed=0,1: several values are a grid of runs, and that needs -m"):
        compose([*JOB, "optim.betas=[0.8,0.9]", "seed=0,1"])


def test_a_comma_in_the_place_of_a_point_is_named():
    with pytest.raises(UserError, match=r"^optim.lr=0,005: decimals stand behind a point: optim.lr=0.005$"):
        compose([*JOB, "optim.lr=0,005"])


def test_the_laws_of_trials_are_those_that_have_a_price():
    assert set(TRIALS_LAWS) == set(LAWS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["clip=nonprivate", "privacy=eps3"], "clip=nonprivate adds no noise"),
        *(
            (["clip=flat", *words], f"{words[0]} and {words[1]} say two things of the noise")
            for words in (
                ["privacy=none", "privacy.epsilon=8"],
                ["privacy=none", "privacy.noise_multiplier=1"],
                ["privacy=noise", "privacy.epsilon=8"],
            )
        ),
        (["clip=nonprivate", "clip.adaptive=true"], "use a private clip"),
        (["clip=flat", "clip.private=false"], "adds no noise"),
        (["clip=flat", "clip.groups=layer"], "its record would name another method"),
        (
            ["clip=perlayer", "clip.adaptive=true", "clip.quantile_budget=0.1"],
            "choose clip=adaptive_perlayer",
        ),
        (["clip=adaptive_flat", "clip.adaptive=false"], "choose clip=flat"),
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


def test_a_choice_and_a_number_that_say_the_same_of_the_noise_are_taken():
    for words in (
        ["privacy=eps3", "privacy.epsilon=8"],
        ["privacy=noise", "privacy.noise_multiplier=1"],
        ["privacy=eps3", "privacy.epsilon=null", "privacy.noise_multiplier=1"],
        ["experiment=he2023_table3", "privacy.epsilon=1"],
    ):
        compose(["task=sst2", "clip=flat", *words])
    with pytest.raises(UserError, match="say two things"):
        compose(["task=sst2", "clip=flat", "privacy=none", "privacy.epsilon=8"], of_grid=True)


FOR_NOTHING = {
    ("clip=flat", "clip.target_quantile=0.7"): "clip=flat: it is for clip.adaptive=true",
    ("clip=norm_perlayer", "clip.target_quantile=0.7"): "clip=norm_perlayer: it is for clip.follows=quantile",
    ("clip=flat", "clip.allocation=weighted"): "clip=flat: it is for clip.groups=layer or",
    ("clip=adaptive_flat", "clip.rescale=true"): "clip=adaptive_flat: it is for clip.groups=layer or",
    ("clip=flat", "clip.basis=8"): "clip=flat: it is for clip.method=embedding",
    (
        "clip=flat",
        "schedule.decay_rate=0.1",
    ): "schedule=constant: it is for schedule=time or schedule=exponential or",
    (
        "clip=flat",
        "schedule=time",
        "schedule.decay_rate=0.1",
        "schedule.period=2",
    ): "schedule=time: it is for",
    ("clip=nonprivate", "schedule=time"): "clip=nonprivate: it is for clip.private=true",
    ("clip=nonprivate", "accountant=pld"): "clip=nonprivate: it is for clip.private=true",
    ("clip=nonprivate", "clip.rule=normalized"): "clip=nonprivate: it is for clip.private=true",
    ("clip=flat", "schedule=validation", "schedule.updates_per_epoch=2"): "schedule=validation: it is for",
    ("clip=nonprivate", "trials_law=geometric"): "clip=nonprivate: it is for clip.private=true",
    ("clip=flat", "engine=loop", "engine.choice=rule"): "engine=loop: it is for engine=auto or",
    ("clip=flat", "engine=loop", "engine.memory_cap_mib=64"): "engine=loop: it is for engine=auto or",
    (
        "clip=flat",
        "model.trainable=head",
        "model.pooling=mean",
        "model.frozen_features=true",
        "model.attention_dropout=0.3",
    ): "it is for model.frozen_features=false",
    (
        "clip=flat",
        "data.max_length=64",
        "task.max_length=32",
    ): "data.max_length=64: it is for data.max_length=null",
    ("clip=flat", "optim=adadp", "optim.weight_decay=0.1"): "optim=adadp: it is for optim=adagrad or",
    ("clip=flat", "optim.momentum=0.9"): "optim=adam: it is for optim=sgd",
    ("clip=flat", "optim=disk", "optim.betas=[0.9,0.9]"): "optim=sgd: it is for optim=adam or",
    ("clip=flat", "peft.rank=8"): "peft=full: it is for peft=lora or peft=rgp or peft=adapters",
    ("clip=flat", "search.tries=3"): "search=none: it is for search=noisybtls",
    ("clip=flat", "unit.rows=3"): "unit=example: it is for unit=user",
    ("clip=flat", "individual=sampling", "individual.bins=4"): "it is for individual.budgets=…",
    ("clip=flat", "model=minilm", "model.id=mine"): "model=minilm: it is for model.family=hf or",
    ("clip=flat", "task.label_words.a=b"): "task=sst2: it is for task.kind=text_infilling or",
    ("clip=flat", "task.generation.num_beams=3"): "task=sst2: it is for task.kind=generation or",
    ("clip=flat", "task=mnist", "data.text=words"): "task=mnist: it is for task.kind=text_classification or",
    ("clip=flat", "runtime.stages=2"): "runtime.parallel=none: it is for runtime.parallel=pipeline",
    ("clip=flat", "tracker.project=mine"): "tracker=none: it is for tracker=wandb",
    ("clip=flat", "accountant.allow_clt=true"): "accountant=rdp: it is for accountant=gdp",
}


@pytest.mark.parametrize("settings", FOR_NOTHING, ids=lambda settings: settings[-1])
def test_a_setting_that_nobody_reads_is_refused(settings):
    with pytest.raises(UserError) as raised:
        compose(["task=sst2", *settings])
    assert f"{settings[-1]} does nothing with " in str(raised.value)
    assert FOR_NOTHING[settings] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_whom_a_setting_is_for_is_a_setting_and_its_choice():
    neutral = to_dict(RunConfig())
    tables = {"task.generation", "task.label_words", "task.files", "optim.config"}
    known = {key for key, _ in flattened(neutral)} | tables
    for chooser, wanted, settings in READ:
        assert set(settings.split()) <= known, settings
        assert chooser == "optim" or chooser in known
        choices = CHOICES.get("optim.name" if chooser == "optim" else chooser)
        assert choices is None or set(wanted) <= set(choices), (chooser, wanted)


def test_everything_that_is_missing_is_one_message():
    with pytest.raises(UserError) as raised:
        compose([])
    assert "task=… (choices: " in str(raised.value)
    with pytest.raises(UserError) as raised:
        compose(["task=text_classification", "clip=flat", "model=hf", "privacy=noise"])
    for key in ("data.train", "data.text", "data.label", "model.id", "privacy.noise_multiplier"):
        assert key in str(raised.value)
    assert "\n" not in str(raised.value)


# of each kind of setting, what nobody can mean or what is close to a mistake
NAN, INF = float("nan"), float("inf")
WRONG = {
    "list[str]": ([], ["a"], ["a", "a"], [""], ["../x", "ü"], [["a"]], [{"a": 1}]),
    "list[float]": (
        [],
        [NAN],
        [-1.0],
        [1.0, 2.0, 3.0],
        [0.0, 0.0],
        [INF, 1.0],
        [[1.0]],
        [{"a": 1}],
        [1e300, 1e300],
    ),
    "dict": ({}, {"x": 1}, {"x": NAN}, {"name": NAN}, {"name": "step", "period": "a"}, {"name": ["a"]}),
    "float": (-1.0, 0.0, 1e-300, 1e-12, 1e300, NAN, INF),
    "int": (-1, 0, 10**12, 2**63),
    "bool": (False, True),
    "str": ("nonsense", "", "../x", "1.5", "a b", "/"),
}
# under which most settings are read
CONTEXTS = (
    "clip=adaptive_flat optim=adam",
    "clip=adaclip optim=sgd unit=user unit.size=2",
    "clip=embedding optim=doppler schedule=step schedule.decay_rate=0.5 schedule.period=1",
    "clip=fedavg unit=user unit.size=2 optim=sgd",
    "clip=flat search=noisybtls optim=sgd",
    "clip=flat privacy=none individual=sampling optim=disk",
    "clip=microbatch peft=lora schedule=validation tracker=wandb",
    "clip=norm_perlayer runtime=pipeline optim=adadp",
)


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_setting_takes_any_value_or_says_why_not(context):
    """Whatever stands in a setting, the checks say so or pass: none of them breaks over it."""
    run = compose(["task=sst2", "scale=demo", *context.split()], of_grid=True)
    refused = 0
    for key, kind in _fields(RunConfig):
        group, _, name = key.rpartition(".")
        holder = operator.attrgetter(group)(run) if group else run
        values = WRONG[next(word for word in WRONG if word in str(kind))]
        before = getattr(holder, name)
        for value in [*values, None] if type(None) in typing.get_args(kind) else values:
            setattr(holder, name, value)
            try:
                check(run)
            except UserError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{key}={value}: {error!r}") from error
        setattr(holder, name, before)
    assert refused > 400
    check(run)


def _fields(schema, prefix=""):
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _fields(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hints[field.name]


def test_several_mistakes_are_listed_together():
    with pytest.raises(UserError) as raised:
        compose([*JOB, "optim.lr=-1", "optim.steps=3", "privacy.delta=2"])
    assert str(raised.value).startswith("3 settings are wrong:")


@pytest.mark.parametrize(
    ("choice", "extra"),
    [("launcher=joblib", "parallel"), ("launcher=submitit_slurm", "slurm"), ("sweeper=optuna", "search")],
)
def test_a_launcher_that_is_not_installed_names_what_brings_it(choice, extra):
    error = MissingConfigException("", f"hydra/{choice.replace('=', '/')}", ["basic"])
    told = explain(error, "train", RunConfig, [])
    assert str(told) == f"hydra/{choice} is not installed: pip install 'dpexp[{extra}]'"


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
import numpy
import torch
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
    if run.seed == 16:
        torch.empty(10**15)
    if run.seed == 17:
        numpy.empty(10**15)
    print("folder", run_folder(run), run.clip.name)

main()
"""


def call(folder, *arguments, **environment):
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    return called(script, *arguments, cwd=folder, before=lambda: os.environ.update(environment))


def test_a_run_leaves_nothing_of_hydras_behind(tmp_path):
    done = call(tmp_path, *JOB)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["folder", str(run_folder(compose(JOB))), "adaptive_perlayer"]
    assert list(tmp_path.iterdir()) == []


def test_a_word_alone_and_options_that_do_not_go_together_get_a_sentence(tmp_path):
    for words, says in (
        (["sst2"], "cannot read 'sst2': write KEY=VALUE; did you mean task=sst2?"),
        (["bert_tiny"], "cannot read 'bert_tiny': write KEY=VALUE; did you mean model=bert_tiny?"),
        (["nonsense"], "cannot read 'nonsense': write KEY=VALUE"),
        (["--resolve"], "The --resolve flag can only be used in conjunction with --cfg or --help"),
        (["--config-name", "mine"], "settings of your own come by --config-dir FOLDER"),
    ):
        done = call(tmp_path, *JOB, *words)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert says in done.stderr


def test_a_grid_without_a_task_asks_for_it(tmp_path):
    done = call(tmp_path, "clip=flat", "-m")
    assert done.returncode == 2
    assert done.stderr.startswith("error: not given: task=… (choices: ")


def test_a_file_of_ones_own_is_told_where_the_scale_wins_and_where_its_header_lacks(tmp_path):
    """`clip=tight` trained with the task's own threshold, without a word."""
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "tight.yaml").write_text("defaults: [flat]\nclip_norm: 0.01\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bare.yaml").write_text("defaults:\n  - override /task: sst2\n")
    own = (f"--config-dir={tmp_path}", "scale=demo")
    done = call(tmp_path, "task=sst2", "clip=tight", *own)
    assert (
        "note: tight.yaml sets clip.clip_norm=0.01, and the task at its scale 2.0, which wins" in done.stderr
    )
    assert not call(tmp_path, "task=sst2", "clip=tight", "clip.clip_norm=0.1", *own).stderr
    for words in (["task=sst2", "experiment=bare"], ["experiment=bare"]):
        assert "begin with the line '# @package _global_'?" in call(tmp_path, *words, *own).stderr


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--privacy.epsilon=8", "privacy.epsilon=…"),
        ("--task", "task=…"),
        ("--model=bert_tiny", "model=…"),
        ("--epsilon", "did you mean privacy.epsilon?"),
        ("-task=sst2", "task=…"),
    ],
)
def test_a_setting_with_dashes_is_shown_without(tmp_path, option, says):
    done = call(tmp_path, *JOB, option, "8")
    assert done.returncode == 2
    assert done.stderr.startswith("error: settings are written without dashes, as KEY=VALUE: ")
    assert says in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("task=sst2", "clip=adaptive_perlyer"),
        ("task=sst2", "clip=flat", "+typo=1"),
        (),
        (*JOB, "--epsilon", "8"),
        (*JOB, "seed=13"),
        (*JOB, "seed=14"),
        (*JOB, "seed=16"),
        (*JOB, "seed=17"),
    ],
    ids=[
        "choice",
        "key",
        "missing",
        "dashes",
        "from the job",
        "a full disk",
        "no memory for torch",
        "no memory for numpy",
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, arguments):
    done = call(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (("task=mnist", "optim=adam"), "optim=adam begins with the learning rate of optim=sgd, 1:"),
        (("task=sst2", "optim=doppler"), "optim=doppler begins with the learning rate of optim=adam"),
        (("task=sst2", "optim=doppler", "optim.base=adamw"), ""),
        (("task=sst2", "optim=adam_bc"), ""),
        (("task=mnist", "optim=adam", "optim.lr=0.01"), ""),
        (
            ("task=sst2", "clip=adaptive_flat", "clip.clip_norm=0.3"),
            "clip.clip_norm=0.3 does nothing with clip=adaptive_flat",
        ),
        (
            ("task=sst2", "clip=adaptive_perlayer", "clip.clip_norm=0.3"),
            "clip.clip_norm=0.3 does nothing with clip=adaptive_perlayer",
        ),
        # thresholds that are rescaled to C
        (("task=cifar10", "clip=adaptive_perlayer", "clip.clip_norm=0.3"), ""),
    ],
)
def test_a_borrowed_learning_rate_and_a_threshold_that_nobody_reads_are_noted(tmp_path, words, noted):
    done = call(tmp_path, "clip=flat", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"note: {noted}") if noted else not done.stderr


def test_the_first_of_several_processes_notes_something_for_all(tmp_path):
    words = ("task=sst2", "clip=adaptive_flat", "clip.clip_norm=0.3")
    first, second = (call(tmp_path, *words, RANK=rank, WORLD_SIZE="2") for rank in "01")
    assert first.stderr.count("note: ") == 1
    assert second.returncode == 0
    assert second.stderr == ""


def test_a_multirun_gives_each_job_its_folder_and_outlives_a_failed_one(tmp_path):
    done = call(tmp_path, "task=sst2", "clip=flat,perlayer", "seed=13,1", "-m")
    folders = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("folder")]
    expected = [compose(["task=sst2", f"clip={clip}", "seed=1"]) for clip in ("flat", "perlayer")]
    assert folders == [[str(run_folder(run)), run.clip.name] for run in expected]
    assert done.returncode == 2
    assert done.stderr.count("error: this seed is refused") == 2
    assert "clip=perlayer seed=13" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_grid_may_give_a_setting_that_some_of_its_jobs_do_not_read(tmp_path):
    done = call(tmp_path, "task=sst2", "clip=flat,adaptive_perlayer", "clip.target_quantile=0.7", "-m")
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("folder") for line in done.stdout.splitlines()) == 2


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
