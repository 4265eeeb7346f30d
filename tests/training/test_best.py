"""The best weights on dev: chosen, resumed and reported; what they cost."""

import math

import numpy as np
import pytest
import torch

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.training.best import Best

from .tiny import TinyTask, crash_in_step, make_trainer, run_to_end, tiny_run, train, weights


class SpyingTask(TinyTask):
    """Its score is what the test says; it keeps the weights that it was shown."""

    def __init__(self, scores):
        super().__init__()
        self.scores, self.measured = iter(scores), []

    def evaluate(self, model, device, batch_size, progress=None):
        self.measured.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy())
        return {"accuracy": next(self.scores), "loss": 1.0}


def best_run(every=2, **settings):
    run = tiny_run(**settings)
    run.optim.keep_best_every = every
    return run


def test_the_first_of_the_best_weights_is_what_is_measured_and_kept(tmp_path):
    task = SpyingTask([0.5, 0.9, 0.9, 0.9])
    trainer = run_to_end(tmp_path / "best", best_run(), task=task)
    assert len(task.measured) == 4, "after steps 2, 4 and 6, and the end"
    assert np.array_equal(task.measured[3], task.measured[1])
    assert np.array_equal(weights(trainer), task.measured[1])
    assert not np.array_equal(task.measured[1], task.measured[2])
    assert trainer.details()["kept_step"] == 4
    plain = run_to_end(tmp_path / "plain", tiny_run())
    assert np.array_equal(task.measured[2], weights(plain)), "training does not know of the choice"
    assert trainer.ledger.epsilons(1e-3) == plain.ledger.epsilons(1e-3), "all steps are charged"
    assert "kept_step" not in plain.details()


def test_the_last_weights_are_a_candidate_wherever_the_run_ends(tmp_path):
    task = SpyingTask([0.5, 0.4, 0.6, 0.6])
    trainer = run_to_end(tmp_path, best_run(every=4, steps=6), task=task)
    assert len(task.measured) == 3, "after steps 4 and 6, and the end"
    assert trainer.best.step == 4
    trainer = run_to_end(tmp_path / "other", best_run(every=4, steps=6), task=SpyingTask([0.5, 0.6, 0.6]))
    assert trainer.best.step == 6


def test_an_average_is_what_is_kept_where_averages_are_measured(tmp_path):
    run = best_run()
    run.optim.ema_decay = 0.9
    task = SpyingTask([0.5, 0.9, 0.1, 0.9])
    trainer = run_to_end(tmp_path, run, task=task)
    assert np.array_equal(task.measured[3], task.measured[1])
    trainer.detach()
    assert np.array_equal(weights(trainer), task.measured[1])


def test_killed_a_run_keeps_the_same_weights_bit_for_bit(tmp_path, monkeypatch):
    crash_in_step(monkeypatch, make_trainer(tmp_path / "cut", best_run(), task=SpyingTask([0.9, 0.5])), 4)
    resumed = make_trainer(tmp_path / "cut", best_run(), task=SpyingTask([0.4, 0.9]))
    assert (resumed.step, resumed.best.step, resumed.best.score) == (4, 2, 0.9)
    train(resumed)
    whole = run_to_end(tmp_path / "whole", best_run(), task=SpyingTask([0.9, 0.5, 0.4, 0.9]))
    assert resumed.best.step == 2
    assert np.array_equal(weights(resumed), weights(whole))


def test_without_its_metric_the_smallest_loss_counts_and_nan_never():
    tensor = torch.zeros(2)
    best = Best([tensor], "bleu")
    for step, loss in ((1, 2.0), (2, math.nan), (3, 1.0), (4, 1.5)):
        tensor.fill_(step)
        best.offer(step, {"loss": loss})
    best.put_back()
    assert (best.step, best.score) == (3, -1.0)
    assert tensor.tolist() == [3.0, 3.0]
    with pytest.raises(UserError, match="this task has none: set it to 0"):
        best.offer(5, {})
    with pytest.raises(UserError, match="best weights do not fit the model"):
        Best([torch.zeros(3)], "bleu").load_state_dict(best.state_dict())


def test_the_record_says_what_the_choice_costs():
    from dpexp.statement import privacy_notes
    from dpexp.training.planning import build_plan

    run = compose(["task=sst2", "scale=demo", "clip=flat", "optim.keep_best_every=10"])
    plan = build_plan(run, 16000, 30)
    note = next(n for n in privacy_notes(run, plan, {}, 0) if "keep_best_every" in n)
    assert "the choice costs nothing as long as dev is public" in note
    assert "a little optimistic" in note
    with pytest.raises(UserError, match=r"fsdp and optim\.keep_best_every"):
        compose(["task=sst2", "scale=demo", "clip=flat", "optim.keep_best_every=10", "runtime=fsdp"])
