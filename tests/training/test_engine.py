"""`PrivacyEngine`: the same steps as `dpexp.train`, in a loop of one's own, and what it says of them."""

import contextlib
import json
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.privacy.shown import upwards
from dpexp.privacy.tuning import tuned_epsilons
from dpexp.training import release
from dpexp.training.watching.collating import padding_token
from tests.training.own_loop import (
    adam_of,
    data,
    flat,
    losses_of,
    make,
    network,
    noise_by_number,
    train,
)
from tests.training.tiny import run_to_end, tiny_run, weights


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("rescale", [None, True, False], ids=["fixed", "rescaled", "adaptive"])
def test_it_takes_the_steps_of_the_training_loop(tmp_path, monkeypatch, size, rescale):
    again = noise_by_number(monkeypatch)
    run = tiny_run(steps=20, adaptive=rescale is not None)
    run.optim.name, run.optim.lr = "sgd", 0.5
    settings = {}
    run.clip.groups = "flat"
    if rescale is not None:
        run.clip.groups, run.clip.rescale = "layer", rescale
        settings = {"groups": "layer", "target_quantile": 0.5, "rescale": rescale}
    again()
    trainer = run_to_end(tmp_path / "loop", run, model=network())
    again()
    engine = train(make(tmp_path / "engine", steps=20, **settings), size)
    np.testing.assert_allclose(flat(engine), weights(trainer), rtol=0, atol=1e-6)
    torch.testing.assert_close(engine.policy.values, trainer.policy.values)
    for accountant in ("rdp", "pld"):
        assert engine.epsilon(accountant) == trainer.ledger.epsilon(1e-3, accountant)
    assert engine.plan.to_dict() == trainer.plan.to_dict()


def test_epsilon_is_that_of_the_steps_taken_and_never_above_the_target(tmp_path):
    engine = make(tmp_path, noise_multiplier=None, epsilon=2.0)
    assert engine.epsilon() == 0
    train(engine, steps=3)
    assert engine.steps_taken == 3
    assert engine.epsilon() == engine.plan.epsilon(3) < 2.0
    train(engine)
    assert engine.finished
    assert 1.9 < engine.epsilon() <= 2.0


def test_epochs_are_steps_of_the_expected_size(tmp_path):
    assert make(tmp_path, steps=None, epochs=2).steps == 6


def test_each_step_is_seen_once_and_what_stands_in_an_empty_batch_adds_nothing(tmp_path, monkeypatch):
    """How often a loop has moved a teacher, say, would tell how many samples were empty."""
    sums, add = [], release.add_gaussian_

    def added(tensors, *others, **named):
        sums.append(sum(float(tensor.abs().sum()) for tensor in tensors))
        add(tensors, *others, **named)

    monkeypatch.setattr(release, "add_gaussian_", added)
    model, rows = network(), data()
    rows.tensors[0][0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = make(tmp_path, model, optimizer, rows, batch_size=0.2, steps=20, scheduler=scheduler)
    before = flat(engine)
    assert [engine.step(losses_of(engine, batch)) for batch in engine.batches()] == [True] * 20
    assert 0 < sums.count(0.0) < 20
    assert engine.ledger.steps_charged == engine.steps_taken == scheduler.last_epoch == 20
    assert np.isfinite(flat(engine)).all()
    assert not np.array_equal(flat(engine), before)


def test_a_schedule_of_the_learning_rate_is_none_of_the_noise(tmp_path):
    scheduler = torch.optim.lr_scheduler.StepLR(adam_of(nn.Parameter(torch.zeros(1))), 1)
    for wrong in (scheduler, {"name": "exponential", "gamma": 0.1}):
        with pytest.raises(UserError, match="is of the noise, a name or its settings"):
            make(tmp_path, schedule=wrong)


def test_what_a_collate_function_draws_is_secret_and_repeatable(tmp_path):
    def drawn(folder, noise_seed=11, seed=0):
        torch.manual_seed(seed)
        np.random.seed(seed)
        found = []

        def masking(examples):
            numbers = torch.rand(1).item(), np.random.rand(), __import__("random").random()
            return torch.utils.data.default_collate(examples), numbers

        engine = make(tmp_path / folder, noise_seed=noise_seed)
        for batch, numbers in engine.batches(masking, 8):
            found.append(numbers)
            engine.step(losses_of(engine, batch))
        return found

    one = drawn("one")
    assert len(set(one)) == len(one)
    assert drawn("other public seed", seed=1) == one
    assert not set(drawn("other key", noise_seed=12)) & set(one)


def test_the_card_says_what_is_guaranteed(tmp_path):
    engine = train(make(tmp_path / "run", delta=0.0012345))
    engine.write_card(tmp_path / "model")
    card = (tmp_path / "model/PRIVACY.md").read_text()
    (epsilon,) = re.findall(r"\(([\d.]+), 0\.0012345\)-differential privacy", card)
    # never rounded down
    assert engine.epsilon() <= float(epsilon) < engine.epsilon() + 1e-4
    assert "fixed seed" in card
    assert "somebody who gave several examples is protected less" in card
    assert json.loads((tmp_path / "run/run.json").read_text())["data"] not in card


def test_a_card_of_a_run_that_was_cut_short_names_the_whole_plan(tmp_path):
    """A number of steps that followed from the weights makes a composition of random length."""
    engine = make(tmp_path / "run")
    train(engine, steps=1).write_card(tmp_path / "early")
    planned = engine.plan.epsilon()
    assert engine.epsilon() < planned
    card = (tmp_path / "early/PRIVACY.md").read_text()
    assert f"after 1 of {engine.steps} planned steps" in card
    assert f"that of the whole plan: ε = {upwards(planned)}" in card
    train(engine).write_card(tmp_path / "whole")
    assert "planned steps" not in (tmp_path / "whole/PRIVACY.md").read_text()


def test_the_card_prices_the_choice_among_declared_trials_by_the_whole_plan(tmp_path):
    """That of each trial, whether it was left early or not; and the number may be told when the run is finished."""
    train(make(tmp_path / "run", trials=5), steps=1).write_card(tmp_path / "early")
    train(make(tmp_path / "run")).write_card(tmp_path / "alone")
    engine = make(tmp_path / "run", trials=5)
    assert engine.finished
    engine.write_card(tmp_path / "chosen")
    five = tuned_epsilons(engine.plan.event(), engine.plan.delta, 5)["rdp"]
    assert five > engine.epsilon()
    row = f"| ε with the choice among 5 trials, by RDP | {upwards(five)} |"
    assert row in (tmp_path / "early/PRIVACY.md").read_text()
    assert row in (tmp_path / "chosen/PRIVACY.md").read_text()
    assert "with the choice" not in (tmp_path / "alone/PRIVACY.md").read_text()


@pytest.mark.parametrize("fixed", [True, False])
def test_the_promise_of_one_length_is_kept_or_refused(tmp_path, fixed):
    texts = [torch.arange(1, 3 + i % 2) for i in range(60)]  # of 2 or 3 tokens

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 3, padding_idx=0)

        def forward(self, input_ids):
            return self.embedding(input_ids).sum(1)

    engine = make(tmp_path, Mean(), dataset=list(texts), fixed_length=fixed)

    def run():
        longest_of = nn.utils.rnn.pad_sequence
        for batch in engine.batches(lambda rows: longest_of(rows, True), 1, length=lambda i: len(texts[i])):
            engine.step(engine.model(batch).square().sum(1))

    if fixed:
        with pytest.raises(UserError, match="fixed_length=True promises batches of one length"):
            run()
    else:
        run()
        assert engine.finished


TEXTS = [(torch.arange(1, 2 + i % 7), torch.tensor(i % 3)) for i in range(60)]


def padded(rows):
    return nn.utils.rnn.pad_sequence([text for text, _ in rows], batch_first=True), torch.stack(
        [y for _, y in rows]
    )


class Mean(nn.Module):
    """The mean of embedded tokens: of all columns, or of those that are no padding."""

    def __init__(self, masked):
        super().__init__()
        self.masked, self.embedding, self.head = masked, nn.Embedding(8, 5), nn.Linear(5, 3)

    def forward(self, ids):
        kept = (ids > 0) if self.masked else torch.ones_like(ids)
        return self.head((self.embedding(ids) * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


@pytest.mark.parametrize("masked", [False, True])
def test_padding_that_moves_an_example_is_seen_where_no_model_says_what_padding_is(tmp_path, masked):
    engine = make(tmp_path, Mean(masked), dataset=TEXTS, batch_size=30, steps=2)
    refused = pytest.raises(UserError, match="when its batch is padded further")
    with contextlib.nullcontext() if masked else refused:
        for ids, labels in engine.batches(padded):
            engine.step(nn.functional.cross_entropy(engine.model(ids), labels, reduction="none"))


SERIES = [(torch.rand(1 + i % 7, 2) + 0.1, i % 3) for i in range(60)]
PACKED = {"batch_first": True, "enforce_sorted": False}


def series(rows, left=False):
    side = "left" if left else "right"
    values = nn.utils.rnn.pad_sequence([own for own, _ in rows], True, padding_side=side)
    return values, torch.tensor([len(own) for own, _ in rows]), torch.tensor([label for _, label in rows])


class OfSeries(nn.Module):
    """The last state of a recurrent layer, or the mean of its states; lengths have a name that says nothing."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer, self.head = kind, nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, values, n):
        if "packed" in self.kind:
            return self.head(self.layer(nn.utils.rnn.pack_padded_sequence(values, n, **PACKED))[1][-1])
        states, last = self.layer(values)
        if "mean" in self.kind:
            own = (
                torch.arange(values.shape[1]) < n[:, None]
                if "own" in self.kind
                else torch.ones_like(values[..., 0])
            )
            return self.head((states * own[..., None]).sum(1) / own.sum(1, keepdim=True))
        return self.head(states[torch.arange(len(n)), n - 1] if "own" in self.kind else last[-1])


def test_a_loop_over_epochs_around_all_steps_is_told(tmp_path):
    model = network()
    with make(tmp_path / "run", model) as engine:
        train(engine, steps=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(engine)
        with pytest.warns(UserWarning, match="all 6 steps of this run are taken: engine.batches"):
            train(engine)
    # whoever runs the script again reads a finished run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(tmp_path / "run") as engine:
            train(engine)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["last", "mean", "own last", "own mean", "packed"])
def test_padding_of_series_that_moves_an_example_is_seen(tmp_path, kind, left):
    """No model says what a series is padded with; the collate function shows it."""

    def run(folder, dataset, **settings):
        settings = {"batch_size": 30, "steps": 2} | settings
        engine = make(tmp_path / folder, OfSeries(kind), dataset=dataset, **settings)
        for values, lengths, labels in engine.batches(lambda rows: series(rows, left)):
            engine.step(nn.functional.cross_entropy(engine.model(values, lengths), labels, reduction="none"))
        return engine

    refused = pytest.raises(
        UserError, match="when its batch is padded further, as one longer example would do"
    )
    with contextlib.nullcontext() if kind.startswith(("own", "packed")) and not left else refused:
        run("padded", SERIES)
    assert run("of one length", [(own[:1].repeat(7, 1), label) for own, label in SERIES]).finished


@pytest.mark.parametrize("masked", [False, True])
def test_padding_of_series_with_their_times_last_is_seen(tmp_path, masked):
    """As spectra come; the lengths have a name that says nothing."""

    class Spectra(nn.Module):
        def __init__(self):
            super().__init__()
            width = SERIES[0][0].shape[1]
            self.convs = nn.ModuleList([nn.Conv1d(width, width, 3, padding=1) for _ in range(2)])
            self.out = nn.Linear(width, 3)

        def forward(self, values, frames):
            inside = (torch.arange(values.shape[2]) < frames[:, None])[:, None].to(values.dtype)
            for conv in self.convs:
                values = torch.tanh(conv(values))
                values = values * inside if masked else values
            return self.out((values * inside).sum(2) / frames[:, None])

    engine = make(tmp_path, Spectra(), dataset=SERIES, batch_size=30, steps=2)
    refused = pytest.raises(UserError, match="when its batch is padded further")
    with contextlib.nullcontext() if masked else refused:
        for values, lengths, labels in engine.batches(series):
            outputs = engine.model(values.mT.contiguous(), lengths)
            engine.step(nn.functional.cross_entropy(outputs, labels, reduction="none"))


def test_the_promise_of_one_length_holds_of_series(tmp_path):
    engine = make(tmp_path, OfSeries("mean"), dataset=SERIES, batch_size=3, steps=9, fixed_length=True)

    def run():
        for values, lengths, labels in engine.batches(series):
            engine.step(nn.functional.cross_entropy(engine.model(values, lengths), labels, reduction="none"))

    with pytest.raises(UserError, match="fixed_length=True promises batches of one length"):
        run()


def test_what_a_collate_function_pads_with():
    rows = [TEXTS[i] for i in (0, 3, 6)]
    before = torch.get_rng_state()

    def found(collate, rows=rows):
        return padding_token(collate, rows, collate(rows))

    assert found(padded) == 0
    nines = lambda rows: nn.utils.rnn.pad_sequence([text for text, _ in rows], True, padding_value=9)  # noqa: E731
    assert found(lambda rows: {"labels": -nines(rows), "input_ids": nines(rows), "n": len(rows)}) == 9
    assert found(padded, [TEXTS[3]] * 3) is None
    assert [found(partial(series, left=left), [SERIES[i] for i in (0, 3, 6)]) for left in (False, True)] == [
        0.0
    ] * 2
    assert padding_token(lambda rows: 1 / 0, rows, padded(rows)) is None
    assert padding_token(lambda rows: 1 / 0, rows, torch.ones(3, 4)) is None

    def drawing(rows):
        torch.rand(1)
        return padded(rows)

    assert padding_token(drawing, rows, padded(rows)) == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_losses_that_are_no_numbers_are_said_once(tmp_path):
    engine = make(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in engine.batches():
            engine.step(losses_of(engine, batch) * torch.tensor(float("nan")))
    assert engine.finished
    assert [str(one.message).startswith("step 1: losses are NaN") for one in said] == [True]
