"""What PATE asks about texts (SeqPATE): questions are public, an answer moves the sums by √2 at most, the student learns."""

import copy
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.optimize import minimize

import dpexp.pate
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import build_model, build_tokenizer
from dpexp.pate import PateConfig, check, pate
from dpexp.schemas import PeftConfig
from dpexp.tasks import build_task
from dpexp.training.pate.questions import NextTokens, on_the_simplex

DEVICE = torch.device("cpu")
# E2E, whose texts are asked about, has metrics of text
pytest.importorskip("sacrebleu")


def settings(tmp_path, *more):
    asked = [
        "task=e2e", "model=gpt2_tiny", "scale=demo", "runtime=cpu", f"data.cache={tmp_path}", "pate.texts=4",
        "pate.queries=7", "pate.candidates=5", "pate.teachers=3", "pate.teacher_epochs=1", "pate.student_epochs=1",
        "task.generation.max_target=12", *more,
    ]  # fmt: skip
    return compose(asked, "pate", PateConfig)


def task_and_model(run, seed=0):
    tokenizer = build_tokenizer(run.model, scale="demo")
    task = build_task(run.task, run.data, "demo", tokenizer, run.seed)
    made = build_model(
        run.model, PeftConfig(), head=task.head, num_labels=0, scale="demo", seed=seed, tokenizer=tokenizer
    )
    return task, made.model


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    run = settings(tmp_path_factory.mktemp("cache"))
    task, model = task_and_model(run)
    return run, task, model, NextTokens(task, run.pate, model, DEVICE)


def test_a_row_goes_to_the_nearest_distribution():
    rows = np.random.default_rng(0).normal(0.3, 1.0, (20, 4))
    found = on_the_simplex(rows)
    assert found.min() >= 0
    assert found.sum(1) == pytest.approx(1)
    for row, ours in zip(rows, found, strict=True):
        best = minimize(
            lambda q, row=row: ((q - row) ** 2).sum(), np.full(4, 0.25), bounds=[(0, 1)] * 4,
            constraints={"type": "eq", "fun": lambda q: q.sum() - 1}, tol=1e-12,
        )  # fmt: skip
        assert ours == pytest.approx(best.x, abs=1e-4)
    assert on_the_simplex(found) == pytest.approx(found)


def test_it_asks_where_the_public_model_gives_its_own_word_the_least(asked):
    """Recomputed text by text, without padding."""
    run, _task, model, questions = asked
    own = {}
    for number, (prompt, target) in enumerate(questions.texts):
        tokens = torch.from_numpy(np.concatenate([prompt, target[:-1]]).astype(np.int64))[None]
        with torch.no_grad():
            told = model.eval()(input_ids=tokens).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
        for place, word in enumerate(target.tolist()):
            own[number, place] = float(told[place, word])
    places = list(zip(questions.text.tolist(), questions.place.tolist(), strict=True))
    assert len(set(places)) == run.pate.queries
    assert (
        max(own[place] for place in places)
        <= min(x for place, x in own.items() if place not in places) + 1e-6
    )
    assert questions.candidates.shape == (7, 5)


def test_an_answer_is_the_distribution_over_the_candidates(asked):
    _run, _task, model, questions = asked
    answers = questions.answers(model)
    for number, (text, place) in enumerate(zip(questions.text, questions.place, strict=True)):
        prompt, target = questions.texts[int(text)]
        tokens = np.concatenate([prompt, target[: int(place)]]).astype(np.int64)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0, -1].double()
        expected = logits[questions.candidates[number]].softmax(-1)
        assert answers[number] == pytest.approx(expected.numpy(), abs=1e-6)


def test_one_teacher_moves_the_sums_by_at_most_root_two(asked):
    """Whatever it says: another network, one that is sure of one word, one whose weights are no numbers."""
    run, _task, model, questions = asked
    said = [questions.answers(model), questions.answers(task_and_model(run, seed=5)[1])]
    for scale in (1e6, float("nan")):
        other = task_and_model(run, seed=7)[1]
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(scale)
        said.append(questions.answers(other))
    for rows in said:
        assert rows.min() >= 0
        assert rows.sum(1) == pytest.approx(np.ones(7), abs=1e-12)
    moves = [np.linalg.norm(a - b, axis=1).max() for a in said for b in said]
    assert 0 < max(moves) <= np.sqrt(2) + 1e-12


def test_questions_do_not_look_at_private_data(asked, tmp_path):
    run, task, model, questions = asked
    task, _ = task_and_model(run)
    task.train = task.splits["train"] = None
    again = NextTokens(task, run.pate, model, DEVICE)
    assert torch.equal(again.candidates, questions.candidates)
    assert torch.equal(again.place, questions.place)
    asked_rows = set(range(len(task.dev))) - set(questions.others)
    groups = task.tables["dev"].columns["group"]
    assert {groups[row] for row in asked_rows}.isdisjoint(groups[row] for row in questions.others)


def test_the_student_learns_what_the_teachers_say(asked, tmp_path):
    """All say that the third candidate comes next."""
    _run, _task, _model, questions = asked
    run = settings(tmp_path, "pate.student_epochs=30", "pate.lr=0.01")
    student = task_and_model(run)[1]
    before = questions.answers(student)[:, 2]
    wanted = np.tile(np.eye(5)[2], (7, 1))
    questions = copy.copy(questions)
    questions.votes = run.pate
    metrics = questions.teach(student, wanted, 0)
    assert (questions.answers(student)[:, 2] > np.maximum(0.6, before)).all()
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["nll"]))
    assert metrics["nll_before"] != metrics["nll"]


def test_a_run_that_was_cut_off_behind_its_charge_gives_the_same_answers(tmp_path, monkeypatch):
    run, given, teach = settings(tmp_path, "privacy.epsilon=5"), [], NextTokens.teach

    def watched(self, student, noisy, seed):
        given.append(noisy)
        if len(given) == 1:
            raise KeyboardInterrupt
        return teach(self, student, noisy, seed)

    monkeypatch.setattr(NextTokens, "teach", watched)
    with pytest.raises(KeyboardInterrupt):
        pate(run, tmp_path / "run", Console(quiet=True))
    summary = pate(run, tmp_path / "run", Console(quiet=True))
    assert np.array_equal(*given)
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) == 1
    assert 4.9 < summary["privacy"]["epsilon"]["rdp"] <= 5.0
    assert summary["metrics"].keys() == {"nll", "perplexity", "nll_before", "perplexity_before"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["task"] == "e2e"
    assert NextTokens.note in summary["privacy"]["notes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["pate.method=knn"], "compares images, and task=e2e has none"),
        (["model=cnn_mnist"], "writes no text: take model=gpt2"),
        (["pate.candidates=1"], r"pate\.candidates=1 must be 2 or more"),
        (["data.train=mine.csv"], "given, but task=e2e reads its own files"),
        (
            ["task.generation.shots=2"],
            "pairs of the private training file, as they are, into the public texts",
        ),
    ],
)
def test_bad_settings(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        check(settings(tmp_path, *changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["pate.texts=1000"], "leaves none of the"),
        (["pate.queries=1000"], r"is more than the \d+ words of pate\.texts=4 texts"),
    ],
)
def test_too_many_questions(tmp_path, changes, message):
    run = settings(tmp_path, *changes)
    task, model = task_and_model(run)
    with pytest.raises(UserError, match=message):
        NextTokens(task, run.pate, model, DEVICE)


def test_images_are_asked_about_by_a_network_that_sees_them():
    with pytest.raises(UserError, match="sees no images: take model=cnn_mnist"):
        check(compose(["model=gpt2"], "pate", PateConfig))
    assert dpexp.pate.Classes.note != NextTokens.note
