"""The step against Algorithm 1 written out by hand, and the loop around it."""

import json
import math
import os
import signal
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.privacy import sensitivity
from dpexp.training import release
from dpexp.training.batching import ShuffleSampler
from tests.training.tiny import TinyTask, make_trainer, run_to_end, tiny_model, tiny_run, train, weights


class Draws:
    """A sampler that gives what it is told."""

    def __init__(self, *batches):
        self.batches = [np.array(batch, dtype=np.int64) for batch in batches]

    def draw(self, step, attempt=0):
        return self.batches[step]


def sgd(**settings):
    run = tiny_run(**settings)
    run.optim.name, run.optim.lr = "sgd", 1.0
    return run


def linear(width=10):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 3))


def metric_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def silence(monkeypatch):
    """No noise; returns the list of (shapes, stds) that were asked for."""
    asked = []

    def record(tensors, std, generator=None):
        asked.append(([tuple(t.shape) for t in tensors], std))

    monkeypatch.setattr(release, "add_gaussian_", record)
    return asked


def naive_clipped_sum(model, task, indices, thresholds):
    """Σ_i of the per-example gradients, each layer of two parameters clipped to its threshold; and the norms [K, B]."""
    names = [name for name, _ in model.named_parameters()]
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    norms = torch.zeros(len(thresholds), len(indices))
    for position, i in enumerate(indices):
        loss = task.losses(model, task.collate([task.train[i]])).sum()
        grads = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        for k, layer in enumerate(("0", "2")):
            mine = [f"{layer}.weight", f"{layer}.bias"]
            norm = torch.sqrt(sum(grads[name].square().sum() for name in mine))
            norms[k, position] = norm
            for name in mine:
                total[name] += grads[name] * min(1.0, float(thresholds[k] / norm))
    return total, norms


def test_one_step_is_algorithm_1_with_centred_counts_and_the_expected_batch(tmp_path, monkeypatch):
    asked = silence(monkeypatch)
    run, task, model = sgd(steps=1, batch_size=20.0), TinyTask(), linear()
    run.clip.clip_norm, run.clip.rescale, run.clip.init_threshold = 0.7, True, 1.2
    run.clip.allocation, run.clip.target_quantile = "weighted", 0.6
    drawn = [3, 14, 15, 9, 26, 5, 35, 8, 58, 7, 0]  # eleven, although twenty are expected
    estimates = [1.2, 1.2]
    thresholds = torch.full((2,), 0.7 / math.sqrt(2))  # equal estimates, rescaled to C = 0.7
    total, norms = naive_clipped_sum(model, task, drawn, thresholds)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    trainer = run_to_end(tmp_path, run, task=task, model=model, sampler=Draws(drawn))

    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - total[name] / 20.0)
    below = (norms <= 1.2).sum(1)  # against the estimate, not against the rescaled threshold
    assert 0 < below.min() < len(drawn)
    fraction = (below - len(drawn) / 2) / 20.0 + 0.5
    expected = torch.tensor(estimates) * torch.exp(-0.3 * (fraction - 0.6))
    torch.testing.assert_close(trainer.policy.estimates.float(), expected)
    torch.testing.assert_close(trainer.policy.values.norm().item(), 0.7)

    (_, stds), (counts_shape, count_std) = asked
    sizes = [66, 21]
    weighted = sensitivity.noise_stds(thresholds, sizes, trainer.plan.sigma_new(0), "weighted").tolist()
    assert stds == pytest.approx([weighted[0]] * 2 + [weighted[1]] * 2)
    assert counts_shape == [(2,)]
    assert count_std == pytest.approx(trainer.plan.sigma_b(0, 2))


def test_the_adaptive_split_costs_what_the_plain_run_costs(tmp_path, monkeypatch):
    """1/σ² = 1/σ_new² + K·(1/2)²/σ_b²: what was really added, against the noise multiplier asked for."""
    asked = silence(monkeypatch)
    trainer = run_to_end(tmp_path, sgd(steps=1), model=linear())
    (_, stds), (_, count_std) = asked
    thresholds = [1.0 / math.sqrt(2)] * 2
    gradients = sum(c**2 / std**2 for c, std in zip(thresholds, [stds[0], stds[2]], strict=True))
    assert gradients + 2 * 0.25 / count_std**2 == pytest.approx(trainer.plan.noise_multiplier**-2)


@pytest.mark.parametrize("allocation", ["global", "equal_budget", "weighted"])
def test_the_noise_that_reaches_the_weights_has_the_stated_deviation(tmp_path, allocation):
    """An empty batch leaves noise alone: 40,000 and 6,000 weights, moved by lr·noise/B."""
    run = sgd(steps=1, batch_size=25.0)
    run.clip.allocation, run.clip.rescale, run.clip.init_threshold = allocation, False, 0.5
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(10, 2000), nn.Linear(2000, 20, bias=False), nn.Linear(20, 3))
    before = [p.detach().clone() for p in model.parameters()]
    trainer = run_to_end(tmp_path, run, model=model, sampler=Draws([]))
    sizes = [group.size for group in trainer.clipper.groups]
    expected = (
        sensitivity.noise_stds(torch.full((3,), 0.5), sizes, trainer.plan.sigma_new(0), allocation) / 25.0
    )
    moved = [(p.detach() - old).reshape(-1) for p, old in zip(model.parameters(), before, strict=True)]
    groups = [torch.cat(moved[:2]), moved[2], torch.cat(moved[3:])]
    for values, std, size in zip(groups, expected.tolist(), sizes, strict=True):
        assert values.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * size))
        assert abs(values.mean().item()) < 5 * std / math.sqrt(size)


def test_the_empty_batch_is_charged_and_moves_the_thresholds_by_noise_alone(tmp_path, monkeypatch):
    silence(monkeypatch)
    run, model = sgd(steps=2), linear()
    before = weights_of(model)
    trainer = run_to_end(tmp_path, run, model=model, sampler=Draws([], [1, 2]))
    assert trainer.ledger.steps_charged == 2
    estimates = metric_lines(tmp_path)[0]["thresholds"]
    assert estimates[0] == pytest.approx(estimates[1])  # both saw a share of exactly one half
    assert not np.array_equal(weights_of(model), before)  # from the second step

    run = sgd(steps=1)
    model = linear()
    run_to_end(tmp_path / "empty", run, model=model, sampler=Draws([]))
    assert np.array_equal(weights_of(model), before)


def weights_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def test_a_sum_that_an_example_moves_further_than_its_noise_is_for_is_refused(tmp_path):
    """The clipper says how far; here it would clip examples at twice the thresholds that the plan has paid for."""
    trainer = make_trainer(tmp_path, tiny_run())
    stepper, counts = trainer.stepper, torch.zeros(2, dtype=torch.float64)
    stepper.begin(0, 0, 8)
    stepper.backward(torch.zeros(0))
    clipper = stepper.release.clipper
    assert clipper.sensitivity == pytest.approx(trainer.run.clip.clip_norm)
    clipper.max_clip_scale = 2.0
    with pytest.raises(UserError, match="by 2, and the noise of this step is for 1"):
        stepper.release.charge(0, 0, {}, counts)
    assert not (tmp_path / "ledger.jsonl").exists()
    clipper.max_clip_scale = 1.0
    assert stepper.release.charge(0, 0, {}, counts)


def test_the_ledger_is_written_before_any_noise(tmp_path, monkeypatch):
    lines_at_noise = []
    real = release.add_gaussian_

    def spy(tensors, std, generator=None):
        lines_at_noise.append(len((tmp_path / "ledger.jsonl").read_text().splitlines()))
        real(tensors, std, generator=generator)

    monkeypatch.setattr(release, "add_gaussian_", spy)
    run_to_end(tmp_path, tiny_run(steps=3))
    assert lines_at_noise == [1, 1, 2, 2, 3, 3]  # gradients and counts of each step


def test_the_physical_batch_size_changes_nothing_but_the_rounding(tmp_path, monkeypatch):
    silence(monkeypatch)
    found = []
    for size in ("1", "7", "100"):
        run = tiny_run(steps=3)
        run.runtime.physical_batch_size = size
        found.append(weights(run_to_end(tmp_path / size, run, model=linear())))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("private", [True, False])
def test_the_same_seeds_give_the_same_run_and_other_noise_another(tmp_path, private):
    first, again = (
        weights(run_to_end(tmp_path / name, tiny_run(private=private))) for name in ("first", "again")
    )
    assert np.array_equal(first, again)
    run = tiny_run(private=private)
    run.privacy.noise_seed = 12
    assert not np.array_equal(first, weights(run_to_end(tmp_path / "other", run)))


@pytest.mark.parametrize(("seed", "moves"), [("seed", False), ("noise_seed", True)])
def test_dropout_is_drawn_in_secret(tmp_path, monkeypatch, seed, moves):
    """By place in the batch: under a public seed one more example would change what the others add to the sum."""
    silence(monkeypatch)
    found = []
    for number in (4, 5):
        run = sgd(steps=1)
        setattr(run if seed == "seed" else run.privacy, seed, number)
        trainer = run_to_end(tmp_path / str(number), run, sampler=Draws(range(20)))
        found.append(weights(trainer))
    assert np.array_equal(*found) != moves


class SeedingTask(TinyTask):
    """Seeds where the batch is made, or where its losses are."""

    def __init__(self, within):
        super().__init__()
        self.within = within

    def collate(self, examples):
        if self.within == "collate":
            torch.manual_seed(0)
        return super().collate(examples)

    def losses(self, model, batch):
        if self.within == "losses":
            torch.manual_seed(0)
        return super().losses(model, batch)


def test_dropout_is_drawn_in_secret_where_a_task_seeds(tmp_path, monkeypatch):
    silence(monkeypatch)
    found = []
    for number in (4, 5):
        run = sgd(steps=1)
        run.privacy.noise_seed = number
        task, sampler = SeedingTask("collate"), Draws(range(20))
        found.append(weights(run_to_end(tmp_path / str(number), run, task=task, sampler=sampler)))
    assert not np.array_equal(*found)
    with pytest.raises(UserError, match=r"torch\.manual_seed\(0\) was called between a batch and its losses"):
        run_to_end(tmp_path / "losses", sgd(steps=1), task=SeedingTask("losses"))


class OwnNoise(TinyTask):
    """Losses of examples with noise from a generator of the task's own."""

    def __init__(self, seed):
        super().__init__()
        self.generator, self.drawn = torch.Generator().manual_seed(seed), []

    def losses(self, model, batch):
        self.drawn.append(torch.rand(batch["x"].shape, generator=self.generator))
        return super().losses(model, batch | {"x": batch["x"] + self.drawn[-1]})


def test_what_a_task_draws_from_a_generator_of_its_own_follows_from_the_key(tmp_path):
    found = []
    for number, (seed, key) in enumerate([(0, 4), (1, 4), (0, 5)]):
        run = sgd(steps=1)
        run.privacy.noise_seed = key
        task = OwnNoise(seed)
        run_to_end(tmp_path / str(number), run, task=task, sampler=Draws(range(8)))
        found.append(task.drawn[-1])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_another_attempt_at_a_step_drops_other_units(tmp_path):
    trainer = make_trainer(tmp_path, tiny_run(), sampler=Draws(range(8)))
    losses = []
    for attempt in (0, 1, 0):
        (piece,) = trainer.stepper.begin(0, attempt, 8)
        trainer.stepper.seeds.begin(0, attempt, 0)
        losses.append(trainer.losses_of(piece).sum().item())
    assert losses[0] == losses[2] != losses[1]


def test_evaluation_changes_neither_the_weights_nor_the_ledger(tmp_path):
    often = tiny_run()
    often.runtime.eval_every = 1
    one, other = run_to_end(tmp_path / "often", often), run_to_end(tmp_path / "end", tiny_run())
    assert np.array_equal(weights(one), weights(other))
    assert (tmp_path / "often/ledger.jsonl").read_text().count("\n") == one.steps == 6
    measured = [line["step"] for line in metric_lines(tmp_path / "often") if "dev" in line]
    assert measured == [1, 2, 3, 4, 5, 6]


def test_without_privacy_it_is_plain_training_divided_by_the_expected_batch(tmp_path):
    run, task, model = sgd(steps=1, private=False), TinyTask(), linear()
    drawn = [1, 2, 3, 4, 5]
    task_loss = task.losses(model, task.collate([task.train[i] for i in drawn])).sum()
    grads = torch.autograd.grad(task_loss, list(model.parameters()))
    expected = torch.cat([(p - g / 20.0).reshape(-1) for p, g in zip(model.parameters(), grads, strict=True)])
    trainer = run_to_end(tmp_path, run, task=task, model=model, sampler=Draws(drawn))
    np.testing.assert_allclose(weights(trainer), expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert trainer.ledger is None
    assert not (tmp_path / "ledger.jsonl").exists()


def test_without_privacy_an_empty_batch_changes_nothing(tmp_path):
    model = linear()
    before = weights_of(model)
    run_to_end(tmp_path, sgd(steps=1, private=False), model=model, sampler=Draws([]))
    assert np.array_equal(weights_of(model), before)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("private", [True, False])
def test_lower_precision_takes_about_the_same_step(tmp_path, monkeypatch, precision, private):
    silence(monkeypatch)
    found = {}
    for name in ("fp32", precision):
        run = sgd(steps=1, private=private)
        run.runtime.precision = name
        model = linear()
        before = weights_of(model)
        found[name] = (
            weights(run_to_end(tmp_path / name, run, model=model, sampler=Draws(range(20)))) - before
        )
    assert np.linalg.norm(found["fp32"]) > 0.01
    assert np.linalg.norm(found[precision] - found["fp32"]) < 0.03 * np.linalg.norm(found["fp32"])


def test_one_bad_example_is_bounded_and_does_not_spoil_the_run(tmp_path):
    task = TinyTask()
    task.train[4] = (torch.full((10,), float("nan")), task.train[4][1])
    trainer = run_to_end(tmp_path, tiny_run(steps=2), task=task, sampler=Draws([1, 4, 5], [4]))
    assert np.isfinite(weights(trainer)).all()
    assert torch.isfinite(trainer.policy.estimates).all()


def test_losses_and_norms_are_marked(tmp_path):
    run_to_end(tmp_path, tiny_run(steps=2))
    for line in metric_lines(tmp_path):
        private = {"loss", "drawn", "mean_norms", "clipped_share"} & line.keys()
        assert bool(private) == line.get("not_private", False)
    assert any("loss" in line for line in metric_lines(tmp_path))


def test_a_strict_release_withholds_them_everywhere(tmp_path, capsys):
    seen = []
    run = tiny_run(steps=2)
    run.privacy.release = "strict"
    trainer = make_trainer(tmp_path, run)
    trainer.metrics.tracker = SimpleNamespace(log=lambda values, step: seen.append(values))
    train(trainer)
    written = (tmp_path / "metrics.jsonl").read_text()
    printed = capsys.readouterr().out
    assert seen
    assert "dev" in written
    for text in (written, str(seen), printed):
        assert "loss" not in text
        assert "norm" not in text
        assert "drawn" not in text
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["time"] for line in lines] == [None] * 2
    checkpoint = torch.load(next((tmp_path / "checkpoint").glob("*.pt")), weights_only=True)
    assert checkpoint["wall_s"] == 0
    assert checkpoint["timings"] == {}


def test_an_interruption_drops_the_step_it_falls_into_and_the_run_goes_on_to_the_same_weights(tmp_path):
    uninterrupted = run_to_end(tmp_path / "whole", tiny_run())

    class Interrupting(TinyTask):
        calls = 0

        def losses(self, model, batch):
            self.calls += 1
            if self.calls == 11:
                os.kill(os.getpid(), signal.SIGINT)
            return super().losses(model, batch)

    folder = tmp_path / "cut"
    trainer = make_trainer(folder, tiny_run(), task=Interrupting())
    before = signal.getsignal(signal.SIGINT)
    outcome = train(trainer)
    assert outcome.status == "interrupted"
    assert 0 < outcome.step < 6
    assert trainer.ledger.steps_charged == outcome.step
    assert signal.getsignal(signal.SIGINT) is before

    resumed = make_trainer(folder, tiny_run())
    assert resumed.step == outcome.step
    train(resumed)
    assert np.array_equal(weights(resumed), weights(uninterrupted))
    assert resumed.ledger.steps_charged == 6


class Hungry(TinyTask):
    """Has memory for this many examples at once."""

    def __init__(self, fits):
        super().__init__()
        self.fits, self.largest = fits, 0

    def losses(self, model, batch):
        if len(batch["y"]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.largest = max(self.largest, len(batch["y"]))
        return super().losses(model, batch)


def test_a_lack_of_memory_releases_nothing_and_names_the_way_out(tmp_path):
    trainer = make_trainer(tmp_path, tiny_run(), task=Hungry(7))
    with pytest.raises(UserError, match="physical_batch_size=4"):
        train(trainer)
    assert trainer.ledger.steps_charged == 0


def test_an_automatic_size_shrinks_and_the_step_begins_again(tmp_path):
    run = tiny_run()
    run.runtime.physical_batch_size = "auto"
    task = Hungry(fits=1000)
    trainer = make_trainer(tmp_path, run, task=task)
    assert trainer.physical_batch_size > 8
    task.fits, task.largest = 7, 0
    train(trainer)
    assert task.largest == 4 == trainer.physical_batch_size
    assert trainer.ledger.steps_charged == 6
    run.runtime.physical_batch_size = "4"
    assert np.array_equal(weights(trainer), weights(run_to_end(tmp_path / "four", run)))


def test_what_did_not_fit_is_let_go_before_the_step_begins_again(tmp_path, monkeypatch):
    run = tiny_run(steps=1)
    run.runtime.physical_batch_size = "auto"
    trainer = make_trainer(tmp_path, run)
    plain, failed, held = trainer.stepper.backward, [], []

    def backward(losses, clip_scales=None):
        held.append(sum(graph() is not None for graph in failed))
        if len(failed) < 2:
            failed.append(weakref.ref(losses))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(losses, clip_scales)

    monkeypatch.setattr(trainer.stepper, "backward", backward)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(sum(g() is not None for g in failed)))
    train(trainer)
    assert len(failed) == 2
    assert not any(held)


def test_the_learning_rate_follows_its_schedule(tmp_path):
    run = tiny_run(steps=4)
    run.optim.lr_schedule, run.optim.warmup_ratio = "linear", 0.0
    run_to_end(tmp_path, run)
    rates = [line["lr"] for line in metric_lines(tmp_path) if "lr" in line]
    assert rates == pytest.approx([0.05, 0.0375, 0.025, 0.0125])


def test_an_automatic_physical_batch_is_found_once_and_kept(tmp_path):
    run = tiny_run(steps=2)
    run.runtime.physical_batch_size = "auto"
    first = run_to_end(tmp_path, run)
    assert first.physical_batch_size == 32  # a tiny model: the power of two above the expected batch
    first.decisions.keep("physical_batch_size", 4)
    assert make_trainer(tmp_path, run).physical_batch_size == 4


def test_shuffling_goes_through_every_example_once_an_epoch():
    sampler = ShuffleSampler(10, 5, b"k" * 32)
    epochs = [np.concatenate([sampler.draw(2 * e), sampler.draw(2 * e + 1)]) for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert not np.array_equal(sampler.draw(0), sampler.draw(2))
    odd = ShuffleSampler(7, 3, b"k" * 32)
    assert all(len(np.unique(odd.draw(step))) == len(odd.draw(step)) <= 3 for step in range(20))


def test_a_model_that_was_trained_comes_back_plain(tmp_path):
    trainer = run_to_end(tmp_path, tiny_run(steps=1), model=(model := tiny_model()))
    trainer.detach()
    assert type(model[0]) is nn.Linear
    assert np.array_equal(weights_of(model), weights(trainer))
