"""The order in which data is looked for, and that nothing is ever put in its place."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from dpexp.errors import UserError
from dpexp.models import sources
from dpexp.schemas import DataConfig, TaskConfig
from dpexp.tasks.tables import find_tables

Data = Callable[..., DataConfig]


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "hub_unreachable", lambda: "no network in this test")


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None], Any]:
    """Data sets that `datasets.load_dataset` finds; the hub counts as reachable."""
    there: dict[tuple[str, str | None], Any] = {}
    monkeypatch.setattr(sources, "hub_unreachable", lambda: None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config=None, revision=None: there[name, config]
    )
    return there


def glue(labels: list[str], **columns: list[Any]) -> datasets.Dataset:
    features = {name: datasets.Value("string") for name in columns if name != "label"}
    return datasets.Dataset.from_dict(
        columns, features=datasets.Features({**features, "label": datasets.ClassLabel(names=labels)})
    )


def write(root: Path, splits: tuple[str, ...] = ("train", "dev")) -> None:
    (root / "sst2").mkdir(parents=True, exist_ok=True)
    for split in splits:
        (root / "sst2" / f"{split}.tsv").write_text(f"sentence\tlabel\nfrom a {split} file\t1\n")


def test_files_come_before_the_hub(tmp_path: Path, sst2: TaskConfig, data: Data, fake_hub: dict) -> None:
    split = glue(["negative", "positive"], sentence=["from the hub"], label=[0])
    fake_hub["nyu-mll/glue", "sst2"] = {"train": split, "validation": split}
    write(tmp_path, ("train",))
    from_hub = find_tables(sst2, data(root=str(tmp_path)), "paper")
    assert from_hub.source == "hub"  # dev is not below the root, and one source gives all splits
    assert from_hub.splits["train"].columns == {"sentence": ["from the hub"], "label": ["0"]}
    write(tmp_path)
    from_files = find_tables(sst2, data(root=str(tmp_path)), "paper")
    assert from_files.source == "files"
    assert from_files.splits["dev"].columns == {"sentence": ["from a dev file"], "label": ["1"]}
    assert find_tables(sst2, data(root=str(tmp_path), source="hub"), "paper").source == "hub"


def test_the_error_names_all_that_was_tried(
    tmp_path: Path, sst2: TaskConfig, data: Data, no_hub: None
) -> None:
    with pytest.raises(UserError) as error:
        find_tables(sst2, data(root=str(tmp_path)), "paper")
    for part in (
        "sst2/train.tsv",
        "sst2/dev.tsv",
        ".gz",
        ".xz",
        str(tmp_path),
        "nyu-mll/glue/sst2",
        "no network in",
    ):
        assert part in str(error.value)
    with pytest.raises(UserError, match=r"neither data\.root nor DPEXP_DATA is set"):
        find_tables(sst2, data(), "small")
    with pytest.raises(UserError, match="no such folder"):
        find_tables(sst2, data(root=str(tmp_path / "gone")), "small")
    with pytest.raises(UserError) as error:
        find_tables(sst2, data(source="files"), "small")
    assert "hub, data set" not in str(error.value)


def test_synthetic_data_only_where_it_is_asked_for(sst2: TaskConfig, data: Data, no_hub: None) -> None:
    found = find_tables(sst2, data(), "demo")
    assert found.source == "demo"
    assert "synthetic" in found.name
    with pytest.raises(UserError):
        find_tables(sst2, data(source="files"), "demo")


def test_own_files_win_even_over_the_demo(tmp_path: Path, sst2: TaskConfig, data: Data) -> None:
    write(tmp_path)
    own = data(train=str(tmp_path / "sst2" / "train.tsv"))
    assert find_tables(sst2, own, "demo").source == "own files"
    with pytest.raises(UserError, match=r"data\.dev is given without data\.train"):
        find_tables(sst2, data(dev=own.train), "demo")


def test_a_task_without_data_says_how_to_give_some(own: TaskConfig, data: Data) -> None:
    with pytest.raises(UserError, match=r"data\.train=FILE data\.text=COLUMN data\.label=COLUMN"):
        find_tables(own, data(), "small")


@pytest.mark.parametrize("how", ["same", "link", "copy", "compressed", "shuffled", "as csv"])
def test_a_dev_set_that_is_the_training_data_is_refused(
    tmp_path: Path, own: TaskConfig, data: Data, how: str
) -> None:
    """What is measured on dev is published as if dev were public."""
    rows = [f"text {i}\t{i % 2}\n" for i in range(6)]
    train, dev = tmp_path / "train.tsv", tmp_path / "dev.tsv"
    train.write_text("text\tlabel\n" + "".join(rows))
    if how == "same":
        dev = tmp_path / "." / "train.tsv"
    elif how == "link":
        dev.symlink_to(train)
    elif how == "compressed":
        dev = tmp_path / "dev.tsv.gz"
        dev.write_bytes(gzip.compress(train.read_bytes()))
    elif how == "as csv":
        dev = tmp_path / "dev.csv"
        dev.write_text(train.read_text().replace("\t", ","))
    else:
        dev.write_text("text\tlabel\n" + "".join(rows if how == "copy" else rows[:0:-1]))
    with pytest.raises(UserError, match=r"data\.dev=.*most of its rows are in data\.train too"):
        find_tables(own, data(train=str(train), dev=str(dev)), "small")


def test_a_few_shared_rows_are_told_to_the_holder_of_the_data(
    tmp_path: Path, own: TaskConfig, data: Data
) -> None:
    for name, texts in {"train": range(6), "dev": range(5, 9)}.items():
        (tmp_path / f"{name}.tsv").write_text(
            "text\tlabel\n" + "".join(f"text {i}\t{i % 2}\n" for i in texts)
        )
    found = find_tables(own, data(train=str(tmp_path / "train.tsv"), dev=str(tmp_path / "dev.tsv")), "small")
    assert found.notes == ["1 of 4 rows of dev are in train too (counted without noise on private data)"]


def test_equal_rows_of_the_training_data_are_told_to_the_holder_of_the_data(
    tmp_path: Path, own: TaskConfig, data: Data
) -> None:
    (file := tmp_path / "train.tsv").write_text("text\tlabel\n" + "one\t0\n" * 3 + "two\t1\nthree\t1\n")
    (note,) = find_tables(own, data(train=str(file)), "small").notes
    assert note.startswith(
        "train: 3 of its rows are equal to another one: where they are copies of one example"
    )
    assert "unless unit=user and one user has them all" in note
    assert "without noise on private data" in note


def test_dev_may_be_held_out_of_the_training_file(tmp_path: Path, own: TaskConfig, data: Data) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("text\tlabel\nbroken\n" + "".join(f"text {i}\t{i % 2}\n" for i in range(5)))
    own.held_out, own.malformed = 2, "skip"
    tables = find_tables(own, data(train=str(path)), "small").splits
    assert tables["train"].columns["text"] == ["text 0", "text 1", "text 2"]
    assert tables["dev"].columns["text"] == ["text 3", "text 4"]
    assert (tables["train"].skipped, tables["dev"].skipped) == (1, 0), "one file, one malformed row"
    other = tmp_path / "dev.tsv"
    other.write_text("text\tlabel\n" + "".join(f"other {i}\t{i % 2}\n" for i in range(4)))
    given = find_tables(own, data(train=str(path), dev=str(other)), "small").splits
    assert (len(given["train"]), len(given["dev"])) == (5, 4), "a dev file comes first"
    own.held_out = 5
    with pytest.raises(UserError, match=r"task\.held_out=5 of 5 rows leaves nothing to train on"):
        find_tables(own, data(train=str(path)), "small")


def test_held_out_rows_that_are_in_the_other_rows_too_are_told(
    tmp_path: Path, own: TaskConfig, data: Data
) -> None:
    """They are measured on, which publishes something of their copies."""
    (path := tmp_path / "rows.tsv").write_text("text\tlabel\none\t0\ntwo\t1\nthree\t0\ntwo\t1\n")
    own.held_out = 2
    assert (
        find_tables(own, data(train=str(path)), "small")
        .notes[-1]
        .startswith("1 of 2 rows of dev are in train too")
    )


def test_qqp_of_the_hub_gets_the_published_column_names_and_labels(data: Data, fake_hub: dict) -> None:
    split = glue(["not_duplicate", "duplicate"], question1=["p"], question2=["q"], label=[1])
    fake_hub["nyu-mll/glue", "qqp"] = {"train": split, "validation": split}
    task = TaskConfig(
        name="qqp",
        labels=["0", "1"],
        text="question1",
        text_pair="question2",
        label="is_duplicate",
        hub_id="nyu-mll/glue",
        hub_config="qqp",
        files={"train": "qqp/train.tsv", "dev": "qqp/dev.tsv"},
    )
    tables = find_tables(task, data(), "paper").splits
    assert tables["train"].columns == {"question1": ["p"], "question2": ["q"], "is_duplicate": ["1"]}


def test_mnli_of_the_hub_gets_the_published_column_names(data: Data, fake_hub: dict) -> None:
    names = ["entailment", "neutral", "contradiction"]
    split = glue(names, premise=["p"], hypothesis=["h"], label=[2])
    splits = {"train": split, "validation_matched": split, "validation_mismatched": split}
    fake_hub["nyu-mll/glue", "mnli"] = splits
    task = TaskConfig(
        name="mnli",
        labels=names,
        text="sentence1",
        text_pair="sentence2",
        label="gold_label",
        hub_id="nyu-mll/glue",
        hub_config="mnli",
        files={
            "train": "mnli/train.tsv",
            "dev": "mnli/dev_matched.tsv",
            "dev_mismatched": "mnli/dev_mismatched.tsv",
        },
    )
    tables = find_tables(task, data(), "paper").splits
    assert set(tables) == {"train", "dev", "dev_mismatched"}
    assert tables["dev"].columns == {"sentence1": ["p"], "sentence2": ["h"], "gold_label": ["contradiction"]}
    del splits["validation_mismatched"]
    with pytest.raises(UserError, match="no split for dev_mismatched"):
        find_tables(task, data(), "paper")
