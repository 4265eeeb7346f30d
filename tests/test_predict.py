"""Predictions of new rows: what the run measured on its dev set, from the exported files and unlabelled rows alone."""

import csv
import json
from pathlib import Path

import pytest
from rich.console import Console

from dpexp.config import compose, run_folder
from dpexp.errors import UserError
from dpexp.predict import PredictArguments, predict
from dpexp.train import train
from tests.tasks import image_data

SHORT = [
    "scale=demo", "clip=flat", "optim.epochs=null", "optim.steps=3", "optim.batch_size=20", "runtime=cpu", "data.num_examples=40",
    "optim.lr=0.05",
]  # fmt: skip
LABELS = ["bad", "good"]
WORDS = {"bad": "a poor and empty", "good": "a fine and happy"}


def table(path, count, first):
    rows = ["review\tother\tstars"]
    for i in range(first, first + count):
        label = LABELS[i % 3 % 2]
        rows.append(f"{WORDS[label]} film number {i}{' indeed' * (i % 5)}\tnumber {i % 7}\t{label}")
    path.write_text("\n".join(rows) + "\n")
    return path


def finished(tmp_path, *overrides):
    run = compose([*SHORT, f"data.cache={tmp_path}/cache", f"runtime.runs_dir={tmp_path}/runs", *overrides])
    folder = run_folder(run)
    folder.mkdir(parents=True)
    return train(run, folder, Console(quiet=True))["metrics"], folder


def predicted(folder, data, **others):
    out = folder.parent / "predictions.csv"
    out.unlink(missing_ok=True)
    assert predict(PredictArguments(run=str(folder), data=str(data), device="cpu", **others), out) > 0
    return list(csv.DictReader(out.open()))


@pytest.mark.parametrize(
    "chosen",
    [
        ["model.pooling=own"],
        ["model.pooling=mean", "model.trainable=head", "model.frozen_features=true"],
        ["peft=lora"],
        ["peft=adapters"],
        ["peft=rgp"],
        ["data.text_pair=other"],
        [
            "task=text_infilling",
            "task.template='<S1> It was [MASK] .'",
            "task.label_words={bad: the, good: and}",
        ],
    ],
    ids=["full", "pooled", "lora", "adapters", "rgp", "pairs", "infilling"],
)
def test_texts_are_classified_as_dev_was(tmp_path, chosen):
    train_rows, dev = table(tmp_path / "train.tsv", 40, 0), table(tmp_path / "dev.tsv", 30, 100)
    asked = [
        f"data.train={train_rows}",
        f"data.dev={dev}",
        "data.text=review",
        "data.label=stars",
        "task.labels=[bad,good]",
    ]
    metrics, folder = finished(tmp_path, "task=text_classification", *asked, *chosen)
    # no label, and another order of columns
    rows = list(csv.DictReader(dev.open(), delimiter="\t"))
    new = tmp_path / "new.jsonl"
    new.write_text(
        "".join(json.dumps({"other": row["other"], "review": row["review"]}) + "\n" for row in rows)
    )
    found = predicted(folder, new, batch_size=7, keep=["other"])
    assert [row["other"] for row in found] == [row["other"] for row in rows]
    assert [row["review"] for row in found] == [row["review"] for row in rows]
    right = sum(one["prediction"] == other["stars"] for one, other in zip(found, rows, strict=True))
    assert right / len(rows) == metrics["accuracy"]
    for row in found:
        shares = {label: float(row[f"P({label})"]) for label in LABELS}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == max(shares, key=shares.__getitem__)


@pytest.mark.parametrize("model", ["cnn_mnist", "scattering"])
def test_images_are_classified_as_dev_was(tmp_path, model):
    for split, first in (("train", 0), ("dev", 50)):
        image_data.folder(tmp_path / split, {"ape": 20, "wolf": 20}, first=first, size=32)
    asked = [f"data.train={tmp_path}/train", f"data.dev={tmp_path}/dev", "task.labels=[ape,wolf]"]
    metrics, folder = finished(tmp_path, "task=images", f"model={model}", *asked)
    found = predicted(folder, tmp_path / "dev")
    assert [Path(row["file"]).parent.name for row in found] == ["ape"] * 20 + ["wolf"] * 20
    assert (
        sum(row["prediction"] == Path(row["file"]).parent.name for row in found) / 40 == metrics["accuracy"]
    )
    (one,) = predicted(folder, found[-1]["file"])
    for name, said in one.items():
        # alone, a product may round in the last digit that is written
        shares = name.startswith("P(")
        assert (
            (float(said) == pytest.approx(float(found[-1][name]), abs=1.1e-6))
            if shares
            else said == found[-1][name]
        )
    (tmp_path / "dev" / "torn.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=f"{tmp_path}/dev/torn.png"):
        predicted(folder, tmp_path / "dev")
    (rows := tmp_path / "rows.csv").write_text("file\na.png\n")
    with pytest.raises(UserError, match=r"rows\.csv: no image there"):
        predicted(folder, rows)


def test_texts_are_written_as_on_dev(tmp_path):
    for split, first in (("train", 0), ("dev", 50)):
        lines = [
            {"source": f"name : Inn {i}", "target": f"Inn {i} is an inn ."} for i in range(first, first + 40)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [f"data.{split}={tmp_path}/{split}.jsonl" for split in ("train", "dev")]
    more = [
        "data.text=source",
        "data.label=target",
        "task.generation.when=end",
        "task.generation.max_target=6",
    ]
    _, folder = finished(tmp_path, "task=text_generation", *asked, *more)
    kept = [json.loads(line) for line in (folder / "predictions" / "dev.jsonl").read_text().splitlines()]
    on_dev = {line["input"]: line["prediction"] for line in kept if "prediction" in line}
    new = tmp_path / "new.csv"
    new.write_text("source\n" + "".join(f"{source}\n" for source in on_dev))
    assert {row["source"]: row["prediction"] for row in predicted(folder, new)} == on_dev


def test_bad_input_is_said_in_a_sentence(tmp_path):
    rows = table(tmp_path / "train.tsv", 40, 0)
    asked = [
        f"data.train={rows}",
        "data.text=review",
        "data.label=stars",
        "clip=nonprivate",
        "privacy=none",
        "data.num_examples=null",
    ]
    _, folder = finished(tmp_path, "task=text_classification", *asked)
    with pytest.raises(UserError, match=r"labels=\[...\]"):
        predicted(folder, rows)
    assert len(predicted(folder, rows, labels=LABELS)) == 40
    with pytest.raises(UserError, match="3 classes, and the model knows 2"):
        predicted(folder, rows, labels=[*LABELS, "poor"])
    with pytest.raises(UserError, match=r"give labels=\['bad', 'good'\]"):
        predicted(folder, rows, labels=LABELS[::-1])
    with pytest.raises(UserError, match="which would be lost"):
        predict(PredictArguments(run=str(folder), data=str(rows), labels=LABELS), rows)
    assert len(rows.read_text().splitlines()) == 41
    with pytest.raises(UserError, match="is a folder: give the name of a file"):
        predict(PredictArguments(run=str(folder), data=str(rows), labels=LABELS), tmp_path)
    (tmp_path / "before.csv").write_text("of yesterday")
    with pytest.raises(UserError, match=r"before\.csv is there already, and would be lost"):
        predict(PredictArguments(run=str(folder), data=str(rows), labels=LABELS), tmp_path / "before.csv")
    assert (tmp_path / "before.csv").read_text() == "of yesterday"
    with pytest.raises(UserError, match=r"out=.*new\.parquet: predictions are written as CSV"):
        predict(PredictArguments(run=str(folder), data=str(rows), labels=LABELS), tmp_path / "new.parquet")
    with pytest.raises(UserError, match="no finished run"):
        predicted(tmp_path, rows)
    with pytest.raises(UserError, match="no such file"):
        predicted(folder, tmp_path / "none.tsv")
    (tmp_path / "other.csv").write_text("text\nfine\n")
    with pytest.raises(UserError, match="review"):
        predicted(folder, tmp_path / "other.csv", labels=LABELS)
    (tmp_path / "none.csv").write_text("review\n")
    with pytest.raises(UserError, match=r"none\.csv"):
        predicted(folder, tmp_path / "none.csv", labels=LABELS)
    with pytest.raises(UserError, match="batch_size=0"):
        predicted(folder, rows, labels=LABELS, batch_size=0)
