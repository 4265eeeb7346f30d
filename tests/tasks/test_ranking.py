"""hits@1: the right reply among candidates, by likelihood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import ModelBundle
from dpexp.tasks.files import Table
from dpexp.tasks.formats import FORMATS
from dpexp.tasks.generation import Generation
from dpexp.tasks.ranking import candidates_of, hits_at_1
from tests.tasks.text_tasks import bundle, make, network

__all__ = ["bundle", "make", "network"]  # fixtures

PARLAI = """1 your persona: i like to ski.
2 hello , how are you ?\tgood . and you ?\t\tno .|good . and you ?|i ski .|yes .
3 fine .\tgreat .\t\tgreat .|hi .|bye .|ok .
"""


def test_the_candidates_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "valid_self_original.txt"
    path.write_text(PARLAI)
    table = FORMATS["personachat"].read([path])
    assert candidates_of(table, 0, 20) == ["good . and you ?", "no .", "i ski .", "yes ."]
    assert candidates_of(table, 1, 3) == ["great .", "hi .", "bye ."]
    path.write_text("\n".join(line.rpartition("\t\t")[0] or line for line in PARLAI.splitlines()) + "\n")
    assert "candidates" not in FORMATS["personachat"].read([path]).columns


def test_candidates_are_drawn_by_the_number_of_the_row_alone() -> None:
    texts = [f"reply {i % 30}" for i in range(60)]
    table = Table("here", {"source": texts, "target": texts, "group": texts}, range(60), "")
    for row in (0, 17):
        drawn = candidates_of(table, row, 20)
        assert drawn[0] == texts[row]
        assert len(set(drawn)) == len(drawn) == 20
        assert drawn == candidates_of(table, row, 20)
    assert candidates_of(table, 1, 20)[1:] != candidates_of(table, 2, 20)[1:]
    assert len(candidates_of(table, 0, 50)) == 30


def test_a_hit_is_the_likeliest_of_all_when_each_is_scored_alone(
    make: Callable[..., Generation], bundle: ModelBundle
) -> None:
    task = make()
    model = bundle.model.eval()
    task.settings = replace(task.settings, candidates=5, examples=6)
    rows, wanted = [group[0] for group in task._groups("dev")], []
    for row in rows:
        scores = []
        for text in candidates_of(task.tables["dev"], row, 5):
            ids = task.tokenizer(" " + text, add_special_tokens=False)["input_ids"]
            ids += task.splits["dev"].frame.ending.tolist()
            ids = ids[: task.settings.max_target]
            prompt = task.splits["dev"].prompt(row).tolist()
            labels = torch.tensor([[-100] * len(prompt) + ids])
            with torch.no_grad():
                scores.append(-float(model(input_ids=torch.tensor([prompt + ids]), labels=labels).loss))
        wanted.append(scores[0] > max(scores[1:]))
    for batch_size in (2, 64):
        found = hits_at_1(model, task, "dev", rows, 5, torch.device("cpu"), batch_size)
        assert found == pytest.approx(sum(wanted) / len(rows))
    assert task.evaluate_at_end(model, torch.device("cpu"), 16)["hits1"] == pytest.approx(sum(wanted) / 6)


def test_one_candidate_is_no_choice() -> None:
    with pytest.raises(UserError, match="candidates=1 leaves nothing to choose from"):
        compose(["task=personachat", "clip=flat", "scale=demo", "task.generation.candidates=1"])
