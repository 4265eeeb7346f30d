"""Averages of the weights: the numbers, what is evaluated and exported, and that a killed run ends with the same ones."""

import numpy as np
import pytest
import torch

from dpexp.errors import UserError
from dpexp.training.optimizers.averaging import Averages, decay_at
from dpexp.training.optimizers.choice import learning_rate
from tests.training.tiny import TinyTask, crash_in_step, make_trainer, run_to_end, tiny_run, train, weights


def averaged_run(decay: float = 0.8, **settings):
    run = tiny_run(**settings)
    run.optim.ema_decay = decay
    return run


def averages_of(trainer) -> np.ndarray:
    return torch.cat([value.reshape(-1) for value in trainer.averages.values]).numpy()


def test_the_average_is_the_recursion_written_out():
    weight = torch.zeros(3)
    averages = Averages([weight], 0.9)
    expected = np.zeros(3)
    for step in range(120):
        weight.copy_(torch.tensor([step, 1.0, -2.0 * step]))
        averages.update(step)
        share = min(0.9, (1 + step) / (10 + step))
        expected = share * expected + (1 - share) * weight.double().numpy()
    np.testing.assert_allclose(averages.values[0], expected, rtol=1e-5)
    assert decay_at(0, 0.9999) == 0.1
    assert decay_at(10**6, 0.9999) == 0.9999


def test_inside_the_weights_are_their_averages_and_afterwards_themselves_to_the_last_bit():
    weight = torch.nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)))
    averages = Averages([weight], 0.5)
    with torch.no_grad():
        weight.mul_(3)
    averages.update(5)
    before, (average,) = weight.detach().clone(), averages.values
    assert not torch.equal(before, average)
    with averages.in_place():
        assert torch.equal(weight, average)
    assert torch.equal(weight, before)
    averages.apply()
    assert torch.equal(weight, average)


class SpyingTask(TinyTask):
    """Notes the weights that it is measured with."""

    def __init__(self):
        super().__init__()
        self.measured = []

    def evaluate(self, model, device, batch_size, progress=None):
        self.measured.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy())
        return super().evaluate(model, device, batch_size, progress)


def test_averages_are_measured_and_given_back_and_training_does_not_see_them(tmp_path):
    task = SpyingTask()
    run, plain = averaged_run(), tiny_run()
    run.runtime.eval_every = plain.runtime.eval_every = 2
    trainer = run_to_end(tmp_path / "averaged", run, task=task)
    assert np.array_equal(weights(trainer), weights(run_to_end(tmp_path / "plain", plain)))
    assert len(task.measured) == 3
    assert np.array_equal(task.measured[-1], averages_of(trainer))
    assert not np.array_equal(task.measured[-1], weights(trainer))
    trainer.detach()
    assert np.array_equal(weights(trainer), task.measured[-1])


def test_the_privacy_of_an_averaged_run_is_that_of_the_plain_one(tmp_path):
    averaged = run_to_end(tmp_path / "averaged", averaged_run())
    plain = run_to_end(tmp_path / "plain", tiny_run())
    assert averaged.ledger.epsilons(1e-3) == plain.ledger.epsilons(1e-3)


@pytest.mark.parametrize("step", [1, 4])
def test_killed_a_run_ends_with_the_same_averages_bit_for_bit(tmp_path, monkeypatch, step):
    crash_in_step(monkeypatch, make_trainer(tmp_path / "cut", averaged_run()), step)
    resumed = make_trainer(tmp_path / "cut", averaged_run())
    assert resumed.step == step - step % 2
    train(resumed)
    whole = run_to_end(tmp_path / "whole", averaged_run())
    assert np.array_equal(averages_of(resumed), averages_of(whole))
    assert np.array_equal(weights(resumed), weights(whole))
    assert resumed.ledger.steps_charged == 6


def test_averages_of_another_model_are_refused():
    averages = Averages([torch.zeros(3)], 0.5)
    with pytest.raises(UserError, match="do not fit the model"):
        averages.load_state_dict([])
    with pytest.raises(UserError, match="do not fit the model"):
        averages.load_state_dict([torch.zeros(4)])


def test_the_cosine_falls_from_the_peak_to_zero():
    rates = [learning_rate(step, 12, 2.0, "cosine", 1 / 6) for step in range(12)]
    assert rates[:3] == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert rates[7] == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.06
    assert rates[2:] == sorted(rates[2:], reverse=True)
