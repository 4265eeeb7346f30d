"""Each mistake that a person made when they tried this out: one sentence that says what is wrong and what to do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpexp.config import compose, usage
from dpexp.durable import make_folder
from dpexp.errors import UserError
from dpexp.schemas import DataConfig, TaskConfig
from dpexp.tasks.tables import find_tables

ROOT = Path(__file__).parents[1]
DEMO = ["task=sst2", "scale=demo", "clip=flat"]
TEXTS = ["task=e2e", "scale=demo", "clip=flat"]
OWN = [
    "task=text_classification",
    "scale=own",
    "clip=flat",
    "data.train=r.csv",
    "data.text=t",
    "data.label=l",
]
DECLARED = [*OWN, "data.num_examples=100", "task.labels=[a,b]"]

SETTINGS = [
    ([*DEMO, "seed=12345678901234567890123"], "seed=12345678901234567890123 is too large"),
    ([*DEMO, "clip.clip_norm=1e20"], "must be between 1e-12 and 1e+18"),
    ([*DEMO, "clip.clip_norm=1e-20"], "must be between 1e-12 and 1e+18"),
    ([*DEMO, "optim.lr=1e300"], "must be 0 or between 1e-30 and 1e+30"),
    ([*DEMO, "optim=disk", "optim.kappa=1e-300"], "must be 0 or between 1e-30 and 1e+30"),
    ([*DEMO, "optim=doppler", "optim.filter_a=[nan]"], "filter_a=[nan] is not a finite number"),
    ([*DEMO, "optim=doppler", "optim.filter_b=[[1]]"], "filter_b=[[1]] holds another list"),
    ([*DEMO, "task.labels=[[1]]"], "holds another list: give words or numbers"),
    ([*DEMO, "optim.batch_size=0.5"], "optim.batch_size=0.5 must be 1 or more"),
    ([*DEMO, "clip=jl", "clip.projections=1000000"], "clip.projections=1000000 must be at most 10000"),
    ([*DEMO, "unit=user", "unit.size=-2"], "unit.size=-2 must be 0 or more"),
    ([*DEMO, "runtime=pipeline", "runtime.microbatch=0"], "runtime.microbatch=0 must be above 0"),
    ([*DEMO, "optim=sgd", "search=noisybtls", "search.backtrack=0"], "search.backtrack=0.0 must be above 0"),
    ([*DEMO, "analysis.output_specific_every=1", "analysis.rounding=1e-9"], "must be between 0.0001 and 1"),
    (
        [*DEMO, "analysis.output_specific_every=1", "optim=disk", "clip=flat"],
        "optim=disk takes them at a point ahead",
    ),
    ([*TEXTS, "task.generation.splits=[train]"], "text is generated for dev and test alone"),
    ([*TEXTS, "task.generation.length_penalty=1e18"], "must be a power between -100 and 100"),
    (["task=mnist", "scale=demo", "task.image_size=1000000000"], "must be at most 10000"),
    (
        ["task=mnist", "scale=demo", "task.mean=[0.1,0.2,0.3]"],
        "must be 1 numbers, one for each of task.channels",
    ),
    ([*DEMO, "task.name=../x"], "task.name=../x is a folder of the runs"),
    ([*DEMO, "runtime.threads=1000000"], "runtime.threads=1000000 must be at most"),
    ([*DEMO, "optim.learning_rate=1"], "did you mean optim.lr?"),
    ([*DEMO, "learning_rate=1"], "did you mean optim.lr?"),
    ([*DEMO, "max_grad_norm=1"], "did you mean clip.clip_norm?"),
    ([*DEMO, "eps=1"], "did you mean privacy.epsilon?"),
    ([*DEMO, "privacy.noise=1"], "did you mean privacy.noise_multiplier?"),
    ([*DEMO, "clip.rule=abadi2"], "did you mean abadi?"),
    ([*DECLARED, "data.dev=https://x/d.csv"], "data.dev=https://x/d.csv is an address"),
    (["task=sst2", "scale=demo", "clip=flat,perlayer"], "needs -m"),
    ([*DEMO, "seed=range(5)"], "seed=range(5): several values are a grid of runs, and that needs -m"),
    ([*OWN, "task.labels=[a,b]"], "give data.num_examples=N"),
    ([*OWN, "data.num_examples=100"], "task.labels=[a,b] (the classes"),
    ([*DECLARED[:1], *DECLARED[2:]], "give at most 100, or scale=own, whose settings follow from N"),
    ([*DECLARED, "data.label=t"], "name one column twice (t, t): "),
    ([*DECLARED, "data.text_pair=t"], "name one column twice"),
    ([*DECLARED, "task.labels=[a,'']"], "has 1 empty names"),
    ([*DECLARED, "task.labels=[a,a]"], "names a class twice"),
    ([*DEMO, "task.held_out=9"], "there is one (sst2/dev.tsv): set it to 0"),
    ([*DECLARED, "data.dev=d.csv", "task.held_out=9"], "there is one (d.csv): set it to 0"),
    ([*DECLARED, "optim.keep_best_every=9"], "optim.keep_best_every goes by the dev set"),
    ([*DECLARED, "schedule=validation"], "schedule=validation goes by the dev set"),
    ([*DECLARED, "clip=ellipsoid"], "clip=ellipsoid goes by the dev set"),
    (
        ["task=images", "clip=flat", "data.train=f"],
        "data.num_examples=N (the number of rows) and task.labels",
    ),
    ([*DEMO, "privacy=eps2"], "any other epsilon is privacy.epsilon=NUMBER"),
    ([*DEMO, "optim.lr=1/3"], "optim.lr=1/3 is not a number: write it out, such as 0.333333"),
    (
        [*DEMO, "optim.epochs=null", "optim.steps=1e4"],
        "optim.steps=1e4 is not a whole number: write it out, such as 10000",
    ),
    ([*DEMO, "model=custom"], "not given: model.factory"),
    (["task=custom", "scale=own", "clip=flat", "model=minilm"], "not given: task.factory"),
    ([*DECLARED, "peft=lora", "model.trainable=bias"], "both say which parameters train"),
]


@pytest.mark.parametrize(
    ("overrides", "says"), SETTINGS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_setting_that_cannot_be_meant_gets_one_sentence(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as raised:
        compose(overrides)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_goes_by_a_dev_set_may_go_by_rows_that_are_held_out() -> None:
    assert compose([*DECLARED, "optim.keep_best_every=9", "task.held_out=9"]).optim.keep_best_every == 9


def test_what_is_public_is_read_from_the_file_where_nothing_is_private() -> None:
    assert compose([*OWN, "clip=nonprivate", "privacy=none"]).task.labels == []


def test_the_sizes_of_a_scale_are_not_put_on_another_model() -> None:
    assert "hidden_size" in compose(DEMO).model.config
    chosen = compose([*DEMO, "model=gpt2_tiny", "model.config.n_layer=3"]).model.config
    assert chosen == {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 256}


@pytest.mark.parametrize("peft", ["lora", "bitfit", "head"])
def test_the_settings_for_own_data_go_with_any_way_to_fine_tune(peft: str) -> None:
    run = compose([*DECLARED, f"peft={peft}"])
    assert (run.model.trainable, run.model.frozen_features, run.optim.lr) == ("all", False, 1e-3)


def test_a_head_that_trains_alone_reads_features_that_are_computed_once() -> None:
    run = compose(DECLARED)
    assert (run.model.trainable, run.model.frozen_features, run.optim.lr) == ("head", True, 1e-2)
    run = compose([*DECLARED, "model.trainable=bias"])
    assert (run.model.frozen_features, run.optim.lr) == (False, 1e-3)
    run = compose(["task=text_infilling", *DECLARED[1:]])
    assert (run.model.trainable, run.model.pooling, run.optim.lr) == ("bias", "own", 1e-3)


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"), [(12, 4, 100), (100, 32, 96), (10_000, 1024, 31), (10**6, 4096, 1.2)]
)
def test_the_settings_for_own_data_follow_from_its_size(rows: int, batch: int, epochs: float) -> None:
    run = compose([*DECLARED, f"data.num_examples={rows}"])
    assert (run.optim.batch_size, run.optim.epochs) == (batch, epochs)
    steps = epochs * rows / batch
    assert 280 <= steps <= 320


ROWS = "text,label\n"
FILES = [
    (
        "".join(f"film {i},{i / 7}\n" for i in range(60)),
        "60 distinct values in 60 rows, as numbers or texts do",
    ),
    ("a film,a\nanother,\nthird,b\n", "line 3: column label holds no label"),
    ("a film,a\nanother,nan\nthird,b\n", "line 3: column label holds no label"),
    ("a film,a\nanother,a\n", "holds one class alone"),
]


@pytest.mark.parametrize(("rows", "says"), FILES, ids=["numbers", "empty", "nan", "one"])
def test_a_column_that_holds_no_classes_is_told_and_not_quoted(tmp_path: Path, rows: str, says: str) -> None:
    from dpexp.tasks.classification import _classes
    from dpexp.tasks.tables import columns_of

    (tmp_path / "r.csv").write_text(ROWS + rows)
    task, data = TaskConfig(name="text_classification"), DataConfig(train=str(tmp_path / "r.csv"))
    found = find_tables(task, data, "small")
    with pytest.raises(UserError) as raised:
        _classes(task, found, columns_of(task, data))
    assert says in str(raised.value)
    assert "film" not in str(raised.value)


def test_texts_that_are_all_empty_are_refused(tmp_path: Path) -> None:
    from dpexp.models.tokenizer import demo_tokenizer
    from dpexp.tasks import build_task

    (tmp_path / "r.csv").write_text(ROWS + '"",a\n" ",b\n')
    task = TaskConfig(name="text_classification", num_examples={"small": None})
    data = DataConfig(train=str(tmp_path / "r.csv"), cache=str(tmp_path))
    with pytest.raises(UserError, match="column text is empty in all 2 rows"):
        build_task(task, data, "small", demo_tokenizer(), 0)


def test_a_row_of_a_file_without_a_header_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("a very private sentence that somebody wrote,x\nb,y\n")
    data = DataConfig(train=str(tmp_path / "r.csv"))
    with pytest.raises(UserError, match=r"no column text and no column label; the columns are \(a text\), x"):
        find_tables(TaskConfig(name="text_classification"), data, "small")


@pytest.mark.parametrize("place", ["file/below", "file", "/dev/null/x", "/proc/x"])
def test_a_folder_that_cannot_be_made_names_its_setting(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    folder = Path(place) if place.startswith("/") else tmp_path / place
    with pytest.raises(UserError, match=r"can't be made .*: choose another one with runtime\.runs_dir"):
        make_folder(folder, "runtime.runs_dir")


def test_a_cache_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dpexp.training.decisions import machine_file

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPEXP_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"can't be made .*: choose another one with DPEXP_CACHE"):
        machine_file()


# The help, and the words of a command


def test_the_help_names_the_model_the_optimiser_the_usual_settings_and_examples() -> None:
    text = usage.help_text("train", "")
    for part in (
        "model [",
        "minilm",
        "optim [",
        "adamw",
        "privacy.epsilon=",
        "optim.lr=",
        "optim.batch_size=",
        "optim.epochs=",
    ):
        assert part in text
    assert text.count("python -m dpexp.train") >= 4, "three examples and the usage"
    assert "files in conf/experiment: bu2023_... (" in text
    assert ", minilm, " in text, "the name of a choice that has no family"
    assert "schedule [constant]: how the noise changes" in text
    assert len(text) < 6000


def test_the_help_says_what_a_command_does_and_not_what_its_function_returns() -> None:
    text = usage.help_text(
        "account", "Print ε.\n\n    Of every accountant.\n\n    Returns:\n        A table.\n    "
    )
    assert "Print ε.\n\nOf every accountant.\n\npython -m" in text
    assert "Returns:" not in text


@pytest.mark.parametrize("name", sorted(path.stem for path in usage.conf_dir().glob("*.yaml")))
def test_the_help_says_of_each_group_what_it_is_about(name: str) -> None:
    assert set(usage.groups_of(name)) <= set(usage.GROUPS)


@pytest.mark.parametrize(
    ("words", "ordered"),
    [
        ("task=a -m clip=b", "task=a clip=b -m"),
        ("--config-dir x task=a", "task=a --config-dir x"),
        ("task=a --config-dir x=y clip=b", "task=a clip=b --config-dir x=y"),
        ("~a --info config b=c", "~a b=c --info config"),
    ],
)
def test_settings_and_options_may_stand_in_any_order(words: str, ordered: str) -> None:
    assert usage.options_last(words.split()) == ordered.split()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dpexp.account --help | head -n 1", "dpexp completion bash | true"])
def test_what_is_printed_ends_quietly_where_its_reader_leaves(command: str) -> None:
    command = f"{sys.executable} -m {command}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == ""


def test_a_terminal_without_greek_letters_has_a_mark_in_their_place() -> None:
    """As LC_ALL of Latin-1 has none, and a pipe under Windows: a run died of its first line with an ε."""
    code = "from dpexp.config.usage import print_what_can_be; print_what_can_be(); print('ε = 3')"
    environment = dict(os.environ, PYTHONIOENCODING="latin-1")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    assert done.stdout == b"? = 3\n"


@pytest.mark.slow
def test_a_signal_before_the_first_step_says_how_to_go_on(tmp_path: Path) -> None:
    from dpexp.training import interrupt

    code = (
        "import os, signal, sys; from dpexp.training.interrupt import end_like_ctrl_c; end_like_ctrl_c()\n"
        "try: os.kill(os.getpid(), signal.SIGTERM); signal.pause()\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    assert interrupt.SIGNALS == (signal.SIGINT, signal.SIGTERM)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, check=False, timeout=600)
    assert done.returncode == 130
