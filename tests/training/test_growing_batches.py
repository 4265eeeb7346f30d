"""Batches that grow: sampling, division, noise and charge of each step, and what is refused."""

import json

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.caveats import caveats
from dpexp.privacy.plan import Plan, make_plan
from dpexp.privacy.sampling import PoissonSampler
from dpexp.training.steps import Steps
from tests.training.tiny import cut_short, make_trainer, run_to_end, tiny_run, train, weights

GROWTH = {"name": "step", "decay_rate": 0.5, "period": 1}  # doubled after each epoch of 1/q first batches
SMALL = {"num_examples": 1000, "expected_batch_size": 50, "delta": 1e-5, "steps": 60}  # an epoch is 20 steps


def test_the_event_is_that_of_the_steps_one_by_one_under_every_accountant():
    plan = make_plan(
        **SMALL, noise_multiplier=2.0, batches=GROWTH, schedule={"name": "time", "decay_rate": 0.5}
    )
    assert [plan.rate(step) for step in (0, 19, 20, 40)] == [0.05, 0.05, 0.1, 0.2]
    by_hand = ComposedDpEvent([plan.step_event(step) for step in range(60)])
    assert {event.sampling_probability for event in by_hand.events} == {0.05, 0.1, 0.2}
    for accountant in ("rdp", "gdp", "prv", "pld"):
        assert plan.epsilon(accountant=accountant) == pytest.approx(
            epsilon(by_hand, 1e-5, accountant), rel=1e-9
        )
    assert Plan(**json.loads(json.dumps(plan.to_dict()))) == plan
    calibrated = make_plan(**SMALL, epsilon=2.0, batches=GROWTH)
    assert 0.998 * 2 < calibrated.epsilon() <= 2.0
    assert calibrated.noise_multiplier > make_plan(**SMALL, epsilon=2.0).noise_multiplier
    assert "batches" not in make_plan(**SMALL, epsilon=2.0).to_dict()
    (said,) = caveats(calibrated)
    assert "to a rate of 0.2 in the last one" in said
    assert not caveats(make_plan(**SMALL, epsilon=2.0))


def test_the_sampler_draws_at_the_rate_of_the_step():
    sampler = PoissonSampler(2000, 0.05, b"k" * 32, lambda step: 0.05 * 2**step)
    sizes = [np.mean([len(sampler.draw(step, attempt)) for attempt in range(50)]) for step in range(4)]
    assert sizes == pytest.approx([100, 200, 400, 800], rel=0.05)  # of a fixed key


def growing_run():
    run = tiny_run(steps=6, batch_size=12.0, adaptive=False)  # an epoch is five steps
    run.optim.batch_growth = GROWTH
    return run


def test_training_divides_by_the_batch_of_the_step_and_goes_on_after_a_kill(tmp_path, monkeypatch):
    batches, take = [], Steps._take

    def watched(self):
        batches.append(self.expected_batch)
        return take(self)

    monkeypatch.setattr(Steps, "_take", watched)
    whole = run_to_end(tmp_path / "whole", growing_run())
    assert batches == pytest.approx([12.0] * 5 + [24.0])
    events = [
        json.loads(line)["event"] for line in (tmp_path / "whole" / "ledger.jsonl").read_text().splitlines()
    ]
    assert [event["sampling_probability"] for event in events] == pytest.approx([0.2] * 5 + [0.4])
    again = cut_short(tmp_path / "killed", growing_run(), steps=3)
    train(again)
    np.testing.assert_array_equal(weights(again), weights(whole))


def test_what_the_outputs_told_is_counted_at_the_rate_of_each_step(tmp_path):
    """An example that fills its threshold in every step has told as much as its plan says."""
    run = growing_run()
    run.clip.clip_norm, run.analysis.output_specific_every, run.analysis.rounding = 1e-4, 1, 1.0
    trainer = run_to_end(tmp_path, run)
    found = trainer.analysis.specific.epsilons(1e-3)
    assert found == pytest.approx(np.full(60, trainer.plan.epsilon()), rel=0.05)


def test_a_sampler_of_one_rate_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, growing_run(), sampler=PoissonSampler(60, 0.2, b"k" * 32))
    with pytest.raises(UserError, match="rate follows the plan"):
        trainer.stepper.begin(0, 0, 8, None)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.batch_growth={name: stp}"], "is no schedule"),
        (["optim.batch_growth={name: time}"], "not given: schedule.decay_rate"),
        (["optim.batch_growth={name: time, rate: 1}"], "is no schedule"),
        (["optim.batch_growth={name: time, decay_rate: 1}", "clip=adaclip"], "batches of one size"),
        (["optim.batch_growth={name: time, decay_rate: 1}", "schedule=validation"], "fixed beforehand"),
    ],
)
def test_bad_settings_get_one_sentence(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        compose(["task=sst2", "scale=demo", *overrides])
    assert "\n" not in str(caught.value)
    hump = {"name": "influence", "influences": [1.0, 1e6, 1.0]}
    for batches, steps in ((GROWTH, 200), (hump, 60)):
        with pytest.raises(UserError, match="times the data"):
            make_plan(**SMALL | {"steps": steps}, noise_multiplier=1.0, batches=batches)
    with pytest.raises(UserError, match="more than a million times the first one") as caught:
        make_plan(**SMALL, noise_multiplier=1.0, batches={"name": "exponential", "decay_rate": 20.0})
    assert "noise" not in str(caught.value)
