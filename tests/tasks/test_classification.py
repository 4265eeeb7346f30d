"""Text classification: N, labels, tokens, padding, the independence of the losses, evaluation."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpexp import record, statement
from dpexp.errors import UserError
from dpexp.models import ModelBundle
from dpexp.schemas import DataConfig, RunConfig, TaskConfig
from dpexp.tasks import build_task
from dpexp.tasks.classification import TextClassification
from dpexp.training.planning import build_plan

Data = Callable[..., DataConfig]
Tiny = Callable[..., ModelBundle]
ROWS = [
    ("the film is superb .", "1"),
    ("the plot is dull and it makes the ending tedious .", "0"),
    ("a witty comedy", "1"),
    ("though the cast is lazy , the music is very moving once again .", "1"),
    ("awful", "0"),
]


@pytest.fixture
def task(own: TaskConfig, own_data: Data, tokenizer: Any) -> TextClassification:
    built = build_task(own, own_data(ROWS, ROWS[:3]), "small", tokenizer, seed=0)
    assert isinstance(built, TextClassification)
    return built


def test_n_is_right_or_counted_and_said_so(own: TaskConfig, own_data: Data, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"4 examples are declared, and .*train\.csv has 5\. N is public"):
        build_task(own, own_data(ROWS, num_examples=4), "small", tokenizer, 0)
    own.held_out = 2
    with pytest.raises(
        UserError,
        match=r"train\.csv has 5 rows, of which task\.held_out takes 2: declare data\.num_examples=3$",
    ):
        build_task(own, own_data(ROWS, num_examples=5), "small", tokenizer, 0)
    assert build_task(own, own_data(ROWS, num_examples=3), "small", tokenizer, 0).num_examples == 3
    own.held_out = 0
    # the N of the embedded data says nothing about a person's own file
    for scale in ("small", "demo"):
        counted = build_task(own, own_data(ROWS, num_examples=None), scale, tokenizer, 0)
        assert counted.num_examples == 5
        assert any("counted in the training file" in note for note in counted.data.notes)
    declared = build_task(own, own_data(ROWS), "small", tokenizer, 0)
    assert not any("counted in the training file" in note for note in declared.data.notes)


def test_own_classes_are_the_sorted_distinct_labels_and_the_record_says_so(
    own: TaskConfig, own_data: Data, tokenizer: Any
) -> None:
    rows = [("a", "spam"), ("b", "ham"), ("c", "spam")]
    built = build_task(own, own_data(rows), "small", tokenizer, 0)
    assert built.labels == ["ham", "spam"]
    assert [example.label for example in built.train] == [1, 0, 1]
    assert any("taken from the private training file" in note for note in built.data.notes)
    assert any("no dev set" in note for note in built.data.notes)
    assert len(built.dev) == 0
    assert built.evaluate(nn.Linear(1, 1), torch.device("cpu"), 8) == {}
    own.labels = ["spam", "ham"]
    declared = build_task(own, own_data(rows, [("d", "ham")]), "small", tokenizer, 0)
    assert [example.label for example in declared.train] == [0, 1, 0]
    assert declared.data.notes == []


@pytest.mark.parametrize("release", ["normal", "strict"])
def test_a_label_that_one_row_alone_has_shows_nowhere(
    own: TaskConfig, own_data: Data, tokenizer: Any, release: str
) -> None:
    """Of two files that differ in the label of one row, everything is the same that is built, planned and written about them."""
    rows = [(f"film {i}", "spam" if i % 2 else "ham") for i in range(8)]
    own.labels = ["ham", "rare", "spam"]
    run = RunConfig(task=own)
    run.privacy.release, run.privacy.noise_multiplier, run.privacy.epsilon = release, 1.0, None
    run.optim.batch_size = 4.0
    written = []
    for last in ("spam", "rare"):
        built = build_task(own, own_data([*rows[:-1], ("film 7", last)]), "small", tokenizer, 0)
        plan = build_plan(run, built.num_examples, 5)
        privacy = statement.privacy_block(run, plan, {"rdp": 1.0}, 1, 5, data=built.data.notes)
        summary = record.summarise(
            run, built, privacy=privacy, metrics={}, performance={}, wall_s=0.0, status="finished", details={}
        )  # fmt: skip
        if release == "normal":
            # It is for who holds the data; a strict release withholds it.
            summary["data"]["sha256"] = {}
        written.append((built.labels, built.num_examples, len(built.labels), summary))
    assert written[0] == written[1]


def test_columns_under_other_names_are_read_anew(own: TaskConfig, tokenizer: Any, tmp_path: Path) -> None:
    """Not the tokens of another column that the cache holds from a run before."""
    file, own.labels = tmp_path / "rows.tsv", ["0", "1"]
    file.write_text("".join(f"name {i}\tfilm {i}\t{i % 2}\n" for i in range(4)))
    data = DataConfig(
        train=str(file), text="text", label="label", num_examples=4, cache=str(tmp_path / "cache")
    )
    found = []
    for own.columns in (["text", "other", "label"], ["other", "text", "label"]):
        built = build_task(own, data, "small", tokenizer, 0)
        found.append(tokenizer.decode(built.train[2].tokens, skip_special_tokens=True))
    assert found == ["name 2", "film 2"]


def test_labels_outside_the_classes(own: TaskConfig, own_data: Data, tokenizer: Any) -> None:
    with pytest.raises(
        UserError, match=r"dev\.csv, line 3: the label in column label is none of the 2 classes 0, 1"
    ):
        build_task(own, own_data(ROWS, [("a", "1"), ("b", "2")]), "small", tokenizer, 0)
    with pytest.raises(UserError, match=r"dev\.csv, line 2: column label holds no label: repair the row"):
        build_task(own, own_data(ROWS, [("a", " "), ("b", "1")]), "small", tokenizer, 0)
    own.labels = ["0", "2"]
    with pytest.raises(
        UserError, match=r"train\.csv, line 2: the label in column label is none of the 2 classes 0, 2"
    ):
        build_task(own, own_data(ROWS), "small", tokenizer, 0)
    own.labels = ["0", "1"]
    for written in ("1.0", " 1", "1 "):
        with pytest.raises(
            UserError, match="but for case, blanks or decimals it is one of them: correct the row"
        ):
            build_task(own, own_data(ROWS, [("a", written)]), "small", tokenizer, 0)


def test_columns_that_can_hold_no_labels(own: TaskConfig, own_data: Data, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="one class alone"):
        build_task(own, own_data([("a", "1"), ("b", "1")]), "small", tokenizer, 0)
    with pytest.raises(UserError, match="1001 distinct values"):
        build_task(own, own_data([("a", str(i)) for i in range(1001)]), "small", tokenizer, 0)
    with pytest.raises(UserError, match="no column lable; the columns are text, label"):
        build_task(own, own_data(ROWS, label="lable"), "small", tokenizer, 0)


def test_an_over_long_row_is_named_where_cutting_is_not_wanted(
    own: TaskConfig, own_data: Data, tokenizer: Any
) -> None:
    own.overlong, own.max_length = "error", 6
    rows = [("the film is dull", "0"), ("a witty cast", "1"), ("the film is so so dull", "0")]
    with pytest.raises(
        UserError, match=r"train\.csv, line 4: more than the 6 tokens .* here 1 of 3, and counts them"
    ):
        build_task(own, own_data(rows), "small", tokenizer, 0)
    own.max_length = 8
    build_task(own, own_data(rows), "small", tokenizer, 0)


def test_f1_of_three_classes_is_refused_before_any_training(
    own: TaskConfig, own_data: Data, tokenizer: Any
) -> None:
    own.metric = "f1"
    for own.labels in ([], ["x", "y", "z"]):  # found in the file, declared
        with pytest.raises(UserError, match=r"task\.metric=f1 is of two classes, and there are 3"):
            build_task(own, own_data([("a", "x"), ("b", "y"), ("c", "z")]), "small", tokenizer, 0)
    own.labels = []
    assert build_task(own, own_data([("a", "x"), ("b", "y")]), "small", tokenizer, 0).labels == ["x", "y"]


def test_unknown_kind_and_metric(own: TaskConfig, data: Data, tokenizer: Any) -> None:
    own.metric = "acuracy"
    with pytest.raises(UserError, match=r"task\.metric=acuracy"):
        build_task(own, data(), "demo", tokenizer, 0)
    own.kind = "poetry"
    with pytest.raises(UserError, match=r"task\.kind=poetry"):
        build_task(own, data(), "demo", tokenizer, 0)


def test_the_demo(sst2: TaskConfig, data: Data, tokenizer: Any) -> None:
    built = build_task(sst2, data(), "demo", tokenizer, 0)
    assert built.num_examples == len(built.train) == built.data.rows["train"] == 2000
    assert built.data.source == "demo"
    assert "synthetic" in built.data.name


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
@pytest.mark.parametrize("pair", [None, "second"])
def test_batches_are_those_of_the_tokenizer(
    architecture: str, pair: str | None, own: TaskConfig, data: Data, tiny: Tiny
) -> None:
    own.text_pair = pair
    tokenizer = tiny(architecture).tokenizer
    built = build_task(own, data(max_length=9), "demo", tokenizer, 0)
    from dpexp.tasks.demo import demo_tables

    columns = demo_tables([], "text", pair, "label")["train"].columns
    texts = [columns["text"][:40], columns["second"][:40]] if pair else [columns["text"][:40]]
    expected = tokenizer(*texts, padding=True, truncation=True, max_length=9, return_tensors="pt")
    batch = built.collate([built.train[i] for i in range(40)])
    for name, tensor in expected.items():
        assert torch.equal(batch[name], tensor), name
    assert batch["labels"].tolist() == [int(label) for label in columns["label"][:40]]
    assert built.length(0) == expected["attention_mask"][0].sum()


def test_rows_without_text_are_counted(own: TaskConfig, own_data: Data, tokenizer: Any) -> None:
    built = build_task(own, own_data([*ROWS, (" ", "1")], ROWS[:2]), "small", tokenizer, 0)
    notes = [note for note in built.data.notes if "have no text" in note]
    assert notes == ["train: 1 of 6 rows have no text in column text (counted without noise on private data)"]


def test_truncation_is_counted(own: TaskConfig, own_data: Data, tokenizer: Any) -> None:
    exactly = ("the film is superb .", "1")  # 5 words and 2 special tokens
    longer = ("the film is so superb .", "0")
    built = build_task(
        own, own_data([exactly, longer, longer], [exactly], max_length=7), "small", tokenizer, 0
    )
    assert (
        "train: 2 of 3 rows were cut to 7 tokens (counted without noise on private data)" in built.data.notes
    )
    assert not any(note.startswith("dev:") for note in built.data.notes)
    assert [built.length(i) for i in range(3)] == [7, 7, 7]
    assert built.train[1].tokens[-1] == tokenizer.sep_token_id


def test_an_empty_text_without_special_tokens_has_a_loss(own: TaskConfig, own_data: Data, tiny: Tiny) -> None:
    bundle = tiny("gpt2")
    bundle.tokenizer.backend_tokenizer.post_processor = None  # as GPT-2's own, which adds nothing
    built = build_task(own, own_data([("", "0"), ("the film is fresh .", "1")]), "small", bundle.tokenizer, 0)
    assert [built.length(i) for i in range(2)] == [1, 5]
    losses = built.losses(bundle.model, built.collate(list(built.train)))
    assert losses.isfinite().all()
    alone = built.losses(bundle.model, built.collate([built.train[0]]))
    torch.testing.assert_close(alone[0], losses[0])


def test_no_input_is_longer_than_the_position_table(own: TaskConfig, own_data: Data, tiny: Tiny) -> None:
    bundle = tiny("roberta")
    built = build_task(
        own, own_data([("film " * 2000, "0"), ("film", "1")], max_length=4096), "small", bundle.tokenizer, 0
    )
    losses = built.losses(bundle.model, built.collate(list(built.train)))
    assert losses.shape == (2,)
    assert any(note.startswith("train: 1 of 2 rows were cut to 511 tokens") for note in built.data.notes)


def test_tokens_are_made_once(
    own: TaskConfig,
    own_data: Data,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    from dpexp.tasks import tokens

    calls = []
    original = tokens.keep_cached
    monkeypatch.setattr(tokens, "keep_cached", lambda *args: calls.append(1) or original(*args))

    def build(**values: Any) -> list[list[int]]:
        calls.clear()
        built = build_task(own, own_data(ROWS, **values), "small", tokenizer, 0)
        return [example.tokens.tolist() for example in built.train]

    first = build()
    assert calls == [1]
    # leaves its settings behind in the tokenizer
    tokenizer(["x"], padding=True, truncation=True, max_length=3)
    assert build() == first
    assert calls == []
    assert build(max_length=5) != first
    assert calls == [1]
    files = sorted((tmp_path / "cache" / "tokens").iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    for file in files:
        file.write_bytes(file.read_bytes()[:50])
    assert build() == first
    assert calls == [1]
    (tmp_path / "file").touch()
    assert build(cache=str(tmp_path / "file")) == first  # a folder can't be made there
    assert "could not be written" in caplog.text
    assert "tokenising" not in caplog.text
    # where it takes a while, a person hears of it
    monkeypatch.setattr(tokens, "CHUNK", 1)
    with caplog.at_level("INFO"):
        build(max_length=6), build(max_length=6)
    assert caplog.text.count(f"tokenising {len(ROWS)} texts once") == 1


def test_other_tokenizers_have_other_hashes(tiny: Tiny) -> None:
    from dpexp.models.tokenizer import demo_tokenizer
    from dpexp.tasks.tokens import tokenizer_hash

    one, other = demo_tokenizer(), demo_tokenizer()
    assert tokenizer_hash(one) == tokenizer_hash(other)
    other.add_tokens(["zebra"])
    assert tokenizer_hash(one) != tokenizer_hash(other)


def test_an_empty_batch(task: TextClassification, tiny: Tiny) -> None:
    batch = task.collate([])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (0, 1),
        "attention_mask": (0, 1),
        "token_type_ids": (0, 1),
        "labels": (0,),
    }
    full = task.collate(list(task.train))
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        name: t.dtype for name, t in full.items()
    }
    losses = task.losses(tiny().model, batch)
    assert losses.shape == (0,)
    assert losses.dtype == torch.float32


def test_losses_are_the_cross_entropy_in_float32(task: TextClassification, tiny: Tiny) -> None:
    model = tiny().model.bfloat16()
    batch = task.collate(list(task.train))
    losses = task.losses(model, batch)
    assert losses.dtype == torch.float32
    logits = model(**{name: t for name, t in batch.items() if name != "labels"}).logits.double()
    expected = torch.logsumexp(logits, 1) - logits[torch.arange(len(logits)), batch["labels"]]
    assert torch.allclose(losses.double(), expected, rtol=1e-6)


def gradients(
    task: TextClassification, model: nn.Module, batch: dict[str, torch.Tensor], i: int
) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    found = torch.autograd.grad(
        task.losses(model, batch)[i], parameters, allow_unused=True, materialize_grads=True
    )
    return list(found)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_padding_changes_neither_losses_nor_gradients(
    architecture: str, task: TextClassification, tiny: Tiny
) -> None:
    model = tiny(architecture).model.double()
    together = task.collate(list(task.train))
    assert (together["attention_mask"] == 0).any()
    losses = task.losses(model, together)
    for i, example in enumerate(task.train):
        alone = task.collate([example])
        assert torch.allclose(task.losses(model, alone)[0], losses[i], rtol=1e-12, atol=0)
        for a, b in zip(gradients(task, model, alone, 0), gradients(task, model, together, i)):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-14)
    # the content of padded places does not count either
    changed = dict(together)
    changed["token_type_ids"] = torch.where(together["attention_mask"] == 0, 1, together["token_type_ids"])
    assert torch.allclose(task.losses(model, changed), losses, rtol=1e-12, atol=0)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_each_loss_depends_on_its_own_example_alone(
    architecture: str, task: TextClassification, tiny: Tiny
) -> None:
    model = tiny(architecture).model.double()
    batch = task.collate(list(task.train))
    embedded: list[torch.Tensor] = []
    table = model.get_input_embeddings()
    hook = table.register_forward_hook(lambda module, args, out: embedded.append(out) or out)
    losses = task.losses(model, batch)
    hook.remove()
    for i in range(len(losses)):
        (gradient,) = torch.autograd.grad(losses[i], embedded, retain_graph=True)
        assert gradient[i].abs().sum() > 0
        assert torch.equal(
            gradient[i][batch["attention_mask"][i] == 0],
            torch.zeros_like(gradient[i][batch["attention_mask"][i] == 0]),
        )
        gradient[i] = 0
        assert torch.count_nonzero(gradient) == 0
    labels = batch["labels"].clone()
    labels[0] = 1 - labels[0]
    assert torch.equal(task.losses(model, {**batch, "labels": labels})[1:], losses[1:])


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_evaluation_equals_one_example_at_a_time(
    batch_size: int, task: TextClassification, tiny: Tiny
) -> None:
    model = tiny().model.double().train()
    model.dropout.p = 0.5  # must be off while measuring
    model.bert.encoder.eval()
    calls: list[tuple[int, int]] = []
    metrics = task.evaluate(
        model, torch.device("cpu"), batch_size, lambda done, total: calls.append((done, total))
    )
    assert model.training
    assert not model.bert.encoder.training
    assert calls[-1] == (3, 3)
    model.eval()
    batches = [task.collate([example]) for example in task.dev]
    losses = [task.losses(model, batch).item() for batch in batches]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert metrics["accuracy"] == np.mean([loss < np.log(2) for loss in losses])


def test_further_dev_sets_are_measured_under_their_names(tmp_path: Path, data: Data, tiny: Tiny) -> None:
    for name in ("train", "dev_matched", "dev_mismatched"):
        (tmp_path / f"{name}.tsv").write_text("a\tb\tgold\nthe film\tis fresh\tyes\nthe film\tis stale\tno\n")
    config = TaskConfig(
        name="mnli",
        labels=["yes", "no"],
        text="a",
        text_pair="b",
        label="gold",
        files={"train": "train.tsv", "dev": "dev_matched.tsv", "dev_mismatched": "dev_mismatched.tsv"},
        num_examples={"paper": 2},
    )
    bundle = tiny()
    built = build_task(config, data(root=str(tmp_path)), "paper", bundle.tokenizer, 0)
    metrics = built.evaluate(bundle.model, torch.device("cpu"), 8)
    assert set(metrics) == {"accuracy", "loss", "accuracy_mismatched", "loss_mismatched"}
    assert metrics["loss"] == metrics["loss_mismatched"]


def test_real_sst2(real_data: Path, sst2: TaskConfig, data: Data) -> None:
    from dpexp.tasks.tables import find_tables

    tables = find_tables(sst2, data(root=str(real_data), source="files"), "paper").splits
    assert {split: len(table) for split, table in tables.items()} == {"train": 67349, "dev": 872}
    assert tables["train"].columns["sentence"][0].strip() == "hide new secretions from the parental units"
    assert set(tables["dev"].columns["label"]) == {"0", "1"}


def test_forty_real_sst2_rows(
    tmp_path: Path, real_data: Path, sst2: TaskConfig, data: Data, tiny: Tiny
) -> None:
    import lzma

    for split in ("train", "dev"):
        with lzma.open(real_data / "sst2" / f"{split}.tsv.xz", "rt", encoding="utf-8", newline="") as file:
            head = [next(file) for _ in range(41)]
        (tmp_path / "SST-2").mkdir(exist_ok=True)
        with lzma.open(tmp_path / "SST-2" / f"{split}.tsv.xz", "wt", encoding="utf-8", newline="") as file:
            file.writelines(head)
    bundle = tiny()
    with pytest.raises(UserError, match=r"67349 examples are declared, and .* has 40"):
        build_task(sst2, data(root=str(tmp_path)), "small", bundle.tokenizer, 0)
    built = build_task(sst2, data(root=str(tmp_path), num_examples=40), "small", bundle.tokenizer, 0)
    assert built.losses(bundle.model, built.collate(list(built.train))).isfinite().all()
    assert 0 <= built.evaluate(bundle.model, torch.device("cpu"), 16)["accuracy"] <= 1


def test_forty_real_qnli_pairs(tmp_path: Path, real_data: Path, data: Data, tiny: Tiny) -> None:
    import lzma

    with lzma.open(real_data / "qnli" / "dev.tsv.xz", "rt", encoding="utf-8", newline="") as file:
        head = "".join(next(file) for _ in range(41))
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text(head, encoding="utf-8", newline="")
    config = TaskConfig(
        name="qnli",
        labels=["entailment", "not_entailment"],
        text="question",
        text_pair="sentence",
        label="label",
        files={"train": "train.tsv", "dev": "dev.tsv"},
        num_examples={"paper": 40},
    )
    bundle = tiny()
    built = build_task(config, data(root=str(tmp_path)), "paper", bundle.tokenizer, 0)
    batch = built.collate(list(built.train))
    assert batch["token_type_ids"].max() == 1
    assert built.losses(bundle.model, batch).shape == (40,)


def test_a_made_up_example_is_as_large_as_any(task: TextClassification) -> None:
    """Where there is no dev set, it tells how many examples fit; an image of 3,000 pixels does not fit sixteen times."""
    batch = task.collate([task.blank()])
    assert (
        batch["input_ids"].shape[1] == task.longest >= max(task.length(i) for i in range(task.num_examples))
    )
    assert batch.keys() == task.collate([task.train[0]]).keys()
