"""The metrics as `evaluate` modules."""

import evaluate
import pytest

from dpexp.errors import UserError
from dpexp.metrics import modules, mteval

PREDICTIONS = ["The Mill is cheap.", "Zizzi, by the river"]
REFERENCES = [["The Mill is a cheap pub."], ["Zizzi by a river", "By the river is Zizzi."]]
TEXT = [modules.Bleu, modules.Nist, modules.CocoRougeL, modules.Cider, modules.Rouge, modules.TokenF1]


pytestmark = pytest.mark.usefixtures("no_java")


@pytest.mark.parametrize("made", [*TEXT, modules.Meteor])
def test_compute_and_documentation(made):
    metric = made()
    assert isinstance(metric, evaluate.EvaluationModule)
    assert metric.description
    assert metric.citation
    assert "N lists of one or more texts" in metric.inputs_description
    scores = metric.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert scores
    assert all(isinstance(value, float) and value > 0 for value in scores.values())


def test_batches_add_up_to_the_whole():
    metric = modules.Nist()
    for prediction, texts in zip(PREDICTIONS, REFERENCES, strict=True):
        metric.add_batch(predictions=[prediction], references=[texts])
    assert metric.compute() == {"nist": mteval.nist(PREDICTIONS, REFERENCES)}
    metric.add(prediction=PREDICTIONS[0], reference=REFERENCES[0])
    assert metric.compute() == {"nist": mteval.nist(PREDICTIONS[:1], REFERENCES[:1])}


def test_modules_combine():
    both = evaluate.combine([modules.Bleu(), modules.TokenF1()])
    scores = both.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert set(scores) == {"bleu", "f1"}
    # Where two measures share a name, the module's goes before it.
    two = evaluate.combine([modules.CocoRougeL(), modules.Rouge()])
    named = two.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert {"coco_rouge_l_rougeL", "rouge_rougeL"} <= set(named)
    assert named["coco_rouge_l_rougeL"] != named["rouge_rougeL"]


def test_nothing_is_written(tmp_path):
    metric = modules.Bleu(cache_dir=str(tmp_path / "cache"))
    metric.compute(predictions=PREDICTIONS, references=REFERENCES)
    assert not (tmp_path / "cache").exists()


def test_the_order_of_random_numbers_is_left_alone():
    import numpy as np

    np.random.seed(0)
    expected = np.random.random(2)
    np.random.seed(0)
    first = np.random.random()
    modules.Bleu().compute(predictions=PREDICTIONS, references=REFERENCES)
    assert [first, np.random.random()] == list(expected)


def test_options_of_rouge():
    scores = modules.Rouge().compute(predictions=PREDICTIONS, references=REFERENCES, names=["rouge2"])
    assert list(scores) == ["rouge2"]


def test_classes():
    assert modules.Accuracy().compute(predictions=[1, 1, 0], references=[1, 0, 0]) == {
        "accuracy": pytest.approx(2 / 3)
    }
    assert modules.F1().compute(predictions=[1, 1, 0], references=[1, 0, 0]) == {"f1": pytest.approx(2 / 3)}
    both = evaluate.combine([modules.Accuracy(), modules.F1()])
    assert set(both.compute(predictions=[1, 0], references=[1, 1])) == {"accuracy", "f1"}


def test_bad_input_is_one_clear_error():
    with pytest.raises(UserError, match="prediction 0 has no reference"):
        modules.Bleu().compute(predictions=["a"], references=[[""]])
    with pytest.raises(UserError, match=r"bleurt-base-128 is not on this machine; give model=FOLDER"):
        modules.Bleurt().compute(predictions=["a"], references=[["a"]])
