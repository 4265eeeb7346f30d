"""The tasks of GLUE as conf/ declares them: published layouts, N, transferred settings, and runs on the embedded data."""

import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dpexp.config import compose, run_folder
from dpexp.errors import UserError
from dpexp.models import ModelBundle
from dpexp.models.tokenizer import demo_tokenizer
from dpexp.schemas import DataConfig
from dpexp.tasks import build_task
from dpexp.tasks.classification import TextClassification
from dpexp.tasks.tables import find_tables

Data = Callable[..., DataConfig]
Tiny = Callable[..., ModelBundle]

PLAIN = ["sst2", "qnli", "qqp", "mnli"]
INFILLING = [f"{name}_infilling" for name in PLAIN]
SIZES = {"sst2": 67349, "qnli": 104743, "qqp": 363846, "mnli": 392702, "qqp_subset": 21496}
SHAPES = {  # file -> (columns of the published header, a row)
    "QNLI/train.tsv": ("index question sentence label", "0|what ?|the plot .|{label}"),
    "QNLI/dev.tsv": ("index question sentence label", "0|what ?|the plot .|{label}"),
    "QQP/train.tsv": ("id qid1 qid2 question1 question2 is_duplicate", "133273|213221|213222|how ?|why ?|{label}"),
    "QQP/dev.tsv": ("id qid1 qid2 question1 question2 is_duplicate", "1|2|3|how ?|why ?|{label}"),
    "MNLI/train.tsv": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
        "sentence1 sentence2 label1 gold_label",
        "0|31193|31193n|government|( a )|( b )|(ROOT a)|(ROOT b)|the film is \"fair .|a plot .|neutral|{label}",
    ),
    "MNLI/dev_matched.tsv": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
        "sentence1 sentence2 label1 label2 label3 label4 label5 gold_label",
        "0|63735|63735n|slate|( a )|( b )|(ROOT a)|(ROOT b)|the cast|the hero|neutral|neutral|neutral|neutral|neutral"
        "|{label}",
    ),
    "MNLI/dev_mismatched.tsv": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
        "sentence1 sentence2 label1 label2 label3 label4 label5 gold_label",
        "0|75290|75290c|letters|( a )|( b )|(ROOT a)|(ROOT b)|the music|the story|neutral|neutral|neutral|neutral|neutral"
        "|{label}",
    ),
}  # fmt: skip


def configured(name: str, *overrides: str) -> Any:
    return compose([f"task={name}", "clip=flat", "scale=paper", *overrides]).task


def publish(root: Path, name: str, labels: list[str], damage: dict[int, str] | None = None) -> None:
    """Files in the published layout, one row per label; `damage` puts other lines in (counted from 1)."""
    for file, (header, row) in SHAPES.items():
        if file.split("/")[0].lower() == name.removesuffix("_infilling"):
            lines = [
                header.replace(" ", "\t"),
                *(row.replace("|", "\t").format(label=label) for label in labels),
            ]
            for number, line in (damage or {}).items():
                lines.insert(number - 1, line)
            (root / file).parent.mkdir(exist_ok=True)
            (root / file).write_text("\n".join(lines) + "\n")
            damage = None  # the training file alone


def head(path: Path, rows: int) -> str:
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        return "".join(next(file) for _ in range(rows))


# What the configuration declares


@pytest.mark.parametrize("name", [*PLAIN, "qqp_subset", *INFILLING])
def test_n_is_that_of_the_published_training_set(name: str) -> None:
    task = configured(name)
    assert task.num_examples["paper"] == task.num_examples["small"] == SIZES[name.removesuffix("_infilling")]


@pytest.mark.parametrize("suffix", ["", "_infilling"])
@pytest.mark.parametrize("name", ["qnli", "qqp", "mnli", "qqp_subset"])
def test_settings_are_transferred_at_equal_sampling_rate_and_number_of_updates(
    name: str, suffix: str
) -> None:
    """Li et al. Appendix L; He et al. Appendix A.2."""
    if name + suffix == "qqp_subset_infilling":
        return
    scales = ["paper"] if name != "qqp_subset" else ["paper", "small"]
    for scale in scales:
        here, there = (compose([f"task={t}{suffix}", "clip=flat", f"scale={scale}"]) for t in (name, "sst2"))
        total, reference = SIZES[name], SIZES["sst2"]
        rate = there.optim.batch_size / reference
        assert here.optim.batch_size / total == pytest.approx(rate, rel=2e-5)
        steps = round(here.optim.epochs * total / here.optim.batch_size)
        assert steps == round(there.optim.epochs * reference / there.optim.batch_size)
        for setting in ("lr", "betas", "eps", "lr_schedule", "warmup_ratio", "epochs"):
            assert getattr(here.optim, setting) == getattr(there.optim, setting)


def test_infilling_asks_the_same_data() -> None:
    for name in PLAIN:
        plain, asked = configured(name), configured(f"{name}_infilling")
        for field in (
            "files",
            "labels",
            "text",
            "text_pair",
            "label",
            "num_examples",
            "hub_id",
            "hub_config",
        ):
            assert getattr(asked, field) == getattr(plain, field)
        assert set(asked.label_words) == set(asked.labels)


def test_the_templates_and_words_are_those_of_table_10() -> None:
    found = {
        n: (t.template, [t.label_words[k] for k in t.labels])
        for n in PLAIN
        for t in [configured(f"{n}_infilling")]
    }
    assert found == {
        "sst2": ("<S1> It was [MASK] .", ["terrible", "great"]),
        "qnli": ("<S1> ? [MASK] , <S2>", ["Yes", "No"]),
        "qqp": ("<S1> [MASK] , <S2>", ["No", "Yes"]),
        "mnli": ("<S1> ? [MASK] , <S2>", ["Yes", "Maybe", "No"]),
    }


# The published layout


@pytest.mark.parametrize("name", ["qnli", "qqp", "mnli", "qnli_infilling", "qqp_infilling", "mnli_infilling"])
def test_the_published_layout_is_read_and_measured(name: str, tmp_path: Path, data: Data, tiny: Tiny) -> None:
    task = configured(name)
    publish(tmp_path, name, task.labels * 3)
    with pytest.raises(UserError, match=rf"{SIZES[name.removesuffix('_infilling')]} examples are declared"):
        build_task(task, data(root=str(tmp_path)), "paper", demo_tokenizer(), 0)
    built = build_task(
        task, data(root=str(tmp_path), num_examples=3 * len(task.labels)), "paper", demo_tokenizer(), 0
    )
    assert [example.label for example in built.train] == [*range(len(task.labels))] * 3
    bundle = tiny(num_labels=len(task.labels), head=built.head)
    assert built.losses(bundle.model, built.collate(list(built.train))).isfinite().all()
    metrics = built.evaluate(bundle.model, torch.device("cpu"), 4)
    measured = {"accuracy", "loss"}
    if name.startswith("mnli"):
        measured |= {"accuracy_mismatched", "loss_mismatched"}
        assert built.data.rows["dev_mismatched"] == 9
    assert set(metrics) == measured
    assert metrics["accuracy"] == pytest.approx(1 / len(task.labels)), "one text, every label"


@pytest.mark.parametrize("name", ["qnli", "qqp", "mnli"])
def test_a_row_that_can_not_be_is_named_with_file_and_line(name: str, tmp_path: Path, data: Data) -> None:
    task = configured(name)

    def build(**values: Any) -> TextClassification:
        own = data(root=str(tmp_path), **values)
        return build_task(task, own, "paper", demo_tokenizer(), 0)  # type: ignore[return-value]

    file = rf"{name.upper()}/train\.tsv"
    columns = len(SHAPES[f"{name.upper()}/train.tsv"][0].split())
    publish(tmp_path, name, task.labels, {3: "7\tthis question ends"})
    with pytest.raises(UserError, match=rf"{file}, line 3: malformed row: 2 .* header has {columns}"):
        build(num_examples=len(task.labels))
    publish(tmp_path, name, [*task.labels, "-"])
    with pytest.raises(
        UserError, match=rf"{file}, line {len(task.labels) + 2}: the label in column .* is none of the"
    ):
        build(num_examples=len(task.labels) + 1)
    path = tmp_path / name.upper() / "train.tsv"
    path.write_text(path.read_text().replace(task.label, "judgement"))
    with pytest.raises(UserError, match=rf"{file}: no column {task.label}; the columns are"):
        build()


def test_malformed_rows_of_qqp_are_counted_where_asked_and_n_stays_declared(
    tmp_path: Path, data: Data
) -> None:
    task = configured("qqp", "task.malformed=skip")
    publish(tmp_path, "qqp", ["0", "1", "1"], {3: "7\t1\t2\thow", 4: "is it ?\twhy ?\t1"})
    with pytest.raises(UserError, match=r"5 examples are declared, and .* has 3"):
        build_task(task, data(root=str(tmp_path), num_examples=5), "paper", demo_tokenizer(), 0)
    built = build_task(task, data(root=str(tmp_path), num_examples=3), "paper", demo_tokenizer(), 0)
    assert built.num_examples == 3
    assert built.data.notes == [
        "train: 2 malformed rows of the file were left out (counted without noise on private data)"
    ]


# Real rows


def test_forty_real_rows_of_qnli_in_both_ways(
    tmp_path: Path, real_data: Path, data: Data, tiny: Tiny
) -> None:
    (tmp_path / "qnli").mkdir()
    for split in ("train", "dev"):  # there is no training file to be had here
        text = head(real_data / "qnli" / "dev.tsv.xz", 41)
        (tmp_path / "qnli" / f"{split}.tsv").write_text(text, encoding="utf-8", newline="")
    check_forty("qnli", tmp_path, data, tiny)


def test_forty_real_rows_of_sst2_as_infilling(
    tmp_path: Path, real_data: Path, data: Data, tiny: Tiny
) -> None:
    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev"):
        text = head(real_data / "sst2" / f"{split}.tsv.xz", 41)
        (tmp_path / "sst2" / f"{split}.tsv").write_text(text, encoding="utf-8", newline="")
    check_forty("sst2", tmp_path, data, tiny)


def check_forty(name: str, root: Path, data: Data, tiny: Tiny) -> None:
    for asked in (name, f"{name}_infilling"):
        own = data(root=str(root), num_examples=40, max_length=48)
        built = build_task(configured(asked), own, "paper", demo_tokenizer(), 0)
        assert max(built.length(i) for i in range(40)) <= 48
        assert any("of 40 rows were cut to 48 tokens" in note for note in built.data.notes)
        model = tiny(head=built.head).model
        batch = built.collate(list(built.train))
        losses = built.losses(model, batch)
        assert losses.shape == (40,)
        assert losses.isfinite().all()
        if built.head == "masked_lm":
            mask = demo_tokenizer().mask_token_id
            assert (batch["input_ids"] == mask).sum(1).tolist() == [1] * 40
            rows = torch.arange(40)
            assert (batch["input_ids"][rows, batch["mask_positions"]] == mask).all()
        assert 0 <= built.evaluate(model, torch.device("cpu"), 16)["accuracy"] <= 1


def test_the_real_subset_of_qqp_is_named_as_one(real_data: Path, data: Data) -> None:
    tables = find_tables(configured("qqp_subset"), data(root=str(real_data), source="files"), "paper").splits
    assert {split: len(table) for split, table in tables.items()} == {"train": 21496, "dev": 2000}
    assert tables["train"].skipped == 1
    assert tables["train"].lines[0] == 2  # the first line lacks a tab
    assert tables["dev"].part == "rows 21497 to 23496"
    assert (
        set(tables["train"].columns["is_duplicate"])
        == set(tables["dev"].columns["is_duplicate"])
        == {"0", "1"}
    )


def test_forty_real_pairs_of_the_subset_of_qqp(
    tmp_path: Path, real_data: Path, data: Data, tiny: Tiny
) -> None:
    (tmp_path / "qqp_subset").mkdir()
    text = head(real_data / "qqp_subset" / "new_dev.tsv.xz", 41)
    (tmp_path / "qqp_subset" / "new_dev.tsv").write_text(text, encoding="utf-8", newline="")
    task = configured("qqp_subset", "task.held_out=10")
    built = build_task(task, data(root=str(tmp_path), num_examples=30), "paper", demo_tokenizer(), 0)
    assert (len(built.train), len(built.dev)) == (30, 10)
    assert built.data.name == "qqp_subset/new_dev.tsv"
    assert any("1 malformed rows of the file" in note for note in built.data.notes)
    assert "dev is rows 31 to 40 of its file, not all of it" in built.data.notes
    held = {tuple(example.tokens.tolist()) for example in built.dev}
    assert held.isdisjoint(tuple(example.tokens.tolist()) for example in built.train), (
        "not one set of tokens twice"
    )
    assert built.losses(tiny().model, built.collate(list(built.train))).isfinite().all()
    with pytest.raises(UserError, match=r"new_dev\.tsv, line 1: malformed row: 5 .* task\.columns names 6"):
        build_task(
            configured("qqp_subset", "task.malformed=error"),
            data(root=str(tmp_path)),
            "paper",
            demo_tokenizer(),
            0,
        )


# A whole run


def test_own_data_without_a_dev_set_trains_all_the_same(tmp_path: Path) -> None:
    from dpexp.train import train

    (tmp_path / "mine.csv").write_text("mail,kind\nhello film,ham\nthe plot is dull,spam\na fine cast,ham\n")
    run = compose(
        [
            "task=text_infilling", "clip=flat", "scale=demo", "runtime=cpu", f"runtime.runs_dir={tmp_path}",
            f"data.train={tmp_path}/mine.csv", "data.text=mail", "data.label=kind", "data.cache=null",
            "task.template='<S1> It was [MASK] .'", "task.label_words={ham: great, spam: no}",
            "privacy=noise", "privacy.noise_multiplier=1.0", "optim.batch_size=2", "data.num_examples=3", "optim.epochs=1",
            "engine.choice=rule", "model.config.hidden_size=8",
        ]
    )  # fmt: skip
    folder = run_folder(run)
    folder.mkdir(parents=True)
    summary = train(run, folder, Console(quiet=True))
    assert summary["status"] == "finished"
    assert summary["metrics"] == {}
    assert any("no dev set" in note for note in summary["details"]["data_notes"])
