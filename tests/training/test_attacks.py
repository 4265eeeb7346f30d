"""Attacks on whole training steps by somebody who knows everything but one example and the key, and sees the weights.

Each is first carried out on noise as it once was, float32 numbers that are scaled and added, where it tells membership in every
step: a test that could not fail would show nothing.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpexp.training import release
from tests.training.tiny import TinyTask, counted_noise, make_trainer, tiny_run, train

WIDTH, STEPS, BATCH = 600, 30, 4.0
CANDIDATE = 4


class Constant(TinyTask):
    """Losses that are linear in the weights: the gradient of an example is the example, whatever the weights are."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.train = [(torch.from_numpy(x), torch.tensor(0)) for x in rng.standard_normal((60, WIDTH), "f4")]

    def collate(self, examples):
        batch = super().collate(examples)
        return batch if examples else batch | {"x": torch.zeros(0, WIDTH)}

    def losses(self, model, batch):
        return model(batch["x"])[:, 0]

    def evaluate(self, model, device, batch_size, progress=None):
        return {}


class Coins:
    """Four examples in every batch, and the candidate where a coin says so; each step starts from the same weights."""

    def __init__(self, model, start, coins):
        self.model, self.start, self.coins = model, start, coins

    def draw(self, step, attempt=0):
        with torch.no_grad():
            self.model.weight.copy_(self.start)
        return np.arange(CANDIDATE + int(self.coins[step]))


def released(folder, start, coins, sigma, secure=False):
    """``[steps, WIDTH]``: the weights after each step of plain gradient descent with a learning rate of 1."""
    run = tiny_run(steps=len(coins), batch_size=BATCH, adaptive=False)
    run.clip.groups, run.clip.clip_norm, run.privacy.noise_multiplier = "flat", 1.0, sigma
    run.privacy.secure, run.optim.name, run.optim.lr, run.runtime.checkpoint_every = secure, "sgd", 1.0, 0
    model = nn.Linear(WIDTH, 1, bias=False)
    trainer = make_trainer(folder, run, Constant(), model, sampler=Coins(model, start, coins))
    seen = []
    trainer.optimizer.register_step_post_hook(lambda *_: seen.append(model.weight.detach().numpy()[0].copy()))
    train(trainer)
    return np.stack(seen)


def old_noise(sums, stds, generator):
    """What was done once: rounded to float32, scaled, added."""
    draw = torch.Generator().manual_seed(int.from_bytes(generator.next_key()[:7], "little"))
    for total, std in zip(sums, stds, strict=True):
        total.add_(torch.randn(total.shape, generator=draw) * std)


def possible(after, start, total, std):
    """Which weights follow from a known sum and std·z for a float32 z: one of few lies near enough."""
    std = np.float32(std)
    fits = (((start - after.astype(np.float64)) * BATCH - total) / float(std)).astype(np.float32)
    found = np.zeros(len(fits), bool)
    for step in range(-3, 4):
        z = (fits.view(np.int32) + step).view(np.float32)
        once = (total + z.astype(np.float64) * float(std)).astype(np.float32)
        for noisy in (once, total + z * std):
            found |= start - noisy / np.float32(BATCH) == after
    return found


def right_guesses(folder, monkeypatch, start, sigma, secure, noise):
    """In how many of the steps the attacker says rightly whether the candidate was there."""
    monkeypatch.setattr(release, "add_gaussian_", lambda *_, **__: None)
    zero = torch.zeros(1, WIDTH)
    sums = [-BATCH * weights for weights in released(folder / "known", zero, [False, True], sigma)]
    monkeypatch.setattr(release, "add_gaussian_", noise)
    coins = np.random.default_rng(1).integers(2, size=STEPS)
    weights = released(folder / "attacked", start, coins, sigma, secure)
    here = start.numpy()[0]
    guesses = []
    for after in weights:
        scores = [possible(after, here, total, sigma).sum() for total in sums]
        guesses.append(len(guesses) % 2 if scores[0] == scores[1] else int(scores[1] > scores[0]))
    return int((np.array(guesses) == coins).sum())


@pytest.fixture(params=["zero", "ordinary"])
def start(request):
    if request.param == "zero":
        return torch.zeros(1, WIDTH)
    return 0.02 * torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("sigma", [1.07, 5.0, 10.0])
@pytest.mark.parametrize("secure", [False, True])
def test_the_weights_after_a_step_tell_no_more_than_epsilon(tmp_path, monkeypatch, start, sigma, secure):
    """Of 30 guesses, at most as many are right as the Gaussian mechanism allows, Φ(1/2σ), and chance adds."""
    right = right_guesses(tmp_path, monkeypatch, start, sigma, secure, counted_noise())
    assert right <= stats.binom.ppf(1 - 1e-4, STEPS, stats.norm.cdf(1 / (2 * sigma)))


@pytest.mark.parametrize("sigma", [1.07, 10.0])
def test_the_attack_works_where_noise_is_rounded_before_it_is_added(tmp_path, monkeypatch, start, sigma):
    assert right_guesses(tmp_path, monkeypatch, start, sigma, False, old_noise) == STEPS


@pytest.mark.parametrize("secure", [False, True])
def test_two_runs_in_one_folder_do_not_cancel_their_noise(tmp_path, monkeypatch, secure):
    """A loop that began again with other data, in the same folder, used to draw the same noise: the difference was bare."""
    zero, folder = torch.zeros(1, WIDTH), tmp_path / "run"
    first = released(folder, zero, [True], 5.0, secure)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (folder / name).unlink()
    for file in (folder / "checkpoint").iterdir():
        file.unlink()
    second = released(folder, zero, [False], 5.0, secure)
    # The example itself is of length 1/4 in them, fresh noise of length 5·√(2·600)/4 in their difference.
    assert np.linalg.norm(first - second) > 30


def test_the_same_noise_seed_in_two_folders_serves_two_sums_with_two_noises(tmp_path):
    zero = torch.zeros(1, WIDTH)
    runs = [released(tmp_path / str(coin), zero, [coin], 5.0)[0] for coin in (True, False)]
    assert np.linalg.norm(runs[0] - runs[1]) > 30
