"""Canaries: nothing but their own slots changes, and what an attack finds is what the training did."""

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.auditing import canaries
from dpexp.auditing.canaries import Planted, Without
from dpexp.auditing.one_run import attempts
from dpexp.auditing.white_box import WithGradientCanaries
from dpexp.errors import UserError
from dpexp.metrics import exposure
from dpexp.privacy.keys import Keys
from dpexp.privacy.sampling import PoissonSampler
from dpexp.privacy.users import Users
from dpexp.tasks import classification, images, sequences
from dpexp.tasks.base import Task
from dpexp.tasks.users import ByUser
from dpexp.training import release
from tests.training.tiny import TinyTask, counted_noise, make_trainer, tiny_run, train

KEY = b"k" * 32


class Points(TinyTask):
    """Unit vectors, one class or the other: a linear model learns each by itself, so that a canary is easily found."""

    def __init__(self, number):
        super().__init__(number)
        self.width = number
        self.train = [(torch.eye(number)[i], torch.tensor(i % 2)) for i in range(number)]
        self.dev = self.train[:4]

    def collate(self, examples):
        if not examples:
            return {"x": torch.zeros(0, self.width), "y": torch.zeros(0, dtype=torch.long)}
        return super().collate(examples)


def linear(width):
    model = nn.Sequential(nn.Linear(width, 2, bias=False))
    nn.init.zeros_(model[0].weight)
    return model


def audited(folder):
    """The bound on epsilon and the claim, of a training on 200 slots that are all canaries."""
    task = Points(200)
    slots = canaries.choose_slots(200, 200, KEY)
    included = canaries.flip_coins(200, KEY)
    made = [task.train[i] for i in slots]
    planted = Planted(task, dict(zip(slots.tolist(), made, strict=True)), {})
    run = tiny_run(steps=8, batch_size=100.0, adaptive=False)
    run.clip.groups, run.clip.clip_norm, run.privacy.noise_multiplier = "flat", 0.5, 4.0
    run.runtime.physical_batch_size, run.optim.name, run.optim.lr = "256", "sgd", 20.0
    model = linear(200)
    before = canaries.canary_losses(planted, model, made, torch.device("cpu"))
    sampler = Without(PoissonSampler(200, 0.5, KEY), slots[~included])
    trainer = make_trainer(folder, run, task=planted, model=model, sampler=sampler, keys=Keys(KEY, KEY))
    train(trainer)
    trainer.detach()
    after = canaries.canary_losses(planted, trainer.model, made, torch.device("cpu"))
    claimed = trainer.ledger.epsilon(trainer.plan.delta, "rdp")
    found = attempts(before - after, included, [1.0, 0.3], trainer.plan.delta)
    return max(attempt.epsilon_lower for attempt in found), claimed


def test_right_noise_is_not_refuted(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "add_gaussian_", counted_noise())
    lower, claimed = audited(tmp_path)
    assert 0 < claimed < 3
    assert lower <= claimed


def test_noise_that_is_too_small_is_refuted(tmp_path, monkeypatch):
    right = release.noise_stds
    monkeypatch.setattr(release, "noise_stds", lambda *arguments: right(*arguments) / 30)
    lower, claimed = audited(tmp_path)
    assert lower > claimed


def test_the_draws_of_two_neighbours_differ_in_one_slot_alone():
    whole = PoissonSampler(50, 0.4, KEY)
    slots = canaries.choose_slots(50, 20, KEY)
    included = canaries.flip_coins(20, KEY)
    flipped = included.copy()
    flipped[7] = not flipped[7]
    differed = 0
    for step in range(20):
        one, other = (Without(whole, slots[~coins]).draw(step) for coins in (included, flipped))
        assert set(one) ^ set(other) <= {slots[7]}
        assert set(whole.draw(step)) - set(one) <= set(slots[~included])
        differed += set(one) != set(other)
    assert 0 < differed < 20


def test_slots_are_distinct_and_coins_are_fair():
    assert len(set(canaries.choose_slots(30, 30, KEY).tolist())) == 30
    assert not np.array_equal(canaries.choose_slots(30, 30, KEY), canaries.choose_slots(30, 30, b"o" * 32))
    assert abs(canaries.flip_coins(10_000, KEY).mean() - 0.5) < 0.02
    with pytest.raises(UserError, match="31 canaries in 30"):
        canaries.choose_slots(30, 31, KEY)


def test_a_planted_task_is_the_task_but_for_its_canaries():
    task = TinyTask()
    planted = Planted(task, {3: task.train[9]}, {3: 5})
    assert len(planted.train) == planted.num_examples == task.num_examples
    assert planted.train[3] is task.train[9]
    assert planted.train[4] is task.train[4]
    assert (planted.length(3), planted.length(4)) == (5, task.length(4))
    assert planted.data is task.data


def wrapped_tasks(task):
    """The task in all the ways in which another one stands around it."""
    users = Users([f"user {i // 2}" for i in range(len(task.train))], 2)
    return [Planted(task, {}, {}), WithGradientCanaries(task, np.array([3]), 1.0), ByUser(task, users)]


@pytest.mark.parametrize("place", range(3), ids=["planted", "gradient canaries", "by user"])
def test_a_wrapped_task_keeps_all_that_the_network_is_built_from(place):
    task = TinyTask()
    task.pad_to, task.head, task.image_shape = 9, "masked_lm", (1, 4, 4)
    made = wrapped_tasks(task)[place]
    assert (made.pad_to, made.head, made.image_shape) == (9, "masked_lm", (1, 4, 4))
    assert (made.name, made.labels, len(made.dev)) == ("tiny", task.labels, len(task.dev))
    assert all(hasattr(made, name) for name in Task.__annotations__)


def test_a_made_up_example_is_one_of_the_task_and_none_of_a_user():
    class WithBlank(TinyTask):
        def blank(self):
            return self.train[0]

    task = WithBlank()
    planted, watched, by_user = wrapped_tasks(task)
    assert planted.blank() is watched.blank() is task.train[0]
    assert by_user.blank() is None


class Words:
    """Enough of a tokenizer: thirty words, three special tokens."""

    all_special_ids = (0, 1, 2)

    def get_vocab(self):
        return {f"w{i}": i for i in range(30)}


class Rows:
    name, labels = "rows", ["a", "b", "c"]

    def __init__(self, example):
        self.train = [example] * 40


SLOTS = np.arange(40)


def test_random_texts_keep_special_tokens_and_take_random_labels():
    row = classification.Example(np.array([1, 9, 9, 9, 2, 0], np.int32), None, 1)
    made = canaries.make_canaries(Rows(row), Words(), SLOTS, "random", KEY)
    tokens = np.stack([canary.tokens for canary in made])
    assert tokens.dtype == np.int32
    assert (tokens[:, [0, 4, 5]] == [1, 2, 0]).all()
    assert tokens[:, 1:4].min() >= 3
    assert len({tuple(canary.tokens) for canary in made}) > 35
    assert {canary.label for canary in made} == {0, 1, 2}
    assert row.tokens.tolist() == [1, 9, 9, 9, 2, 0]


def test_mislabelled_examples_have_another_label():
    row = classification.Example(np.array([1, 9, 2], np.int32), None, 1)
    made = canaries.make_canaries(Rows(row), Words(), SLOTS, "mislabelled", KEY)
    assert {canary.label for canary in made} == {0, 2}
    assert all(canary.tokens is row.tokens for canary in made)


def test_images_and_targets():
    picture = images.Example(np.zeros((1, 4, 4), np.uint8), 2)
    made = canaries.make_canaries(Rows(picture), None, SLOTS, "random", KEY)
    assert len({canary.pixels.tobytes() for canary in made}) == 40
    text = sequences.Example(np.array([5, 6], np.int32), np.array([7, 8, 1], np.int32))
    made = canaries.make_canaries(Rows(text), Words(), SLOTS, "random", KEY)
    assert all(canary.prompt is text.prompt and canary.target[2] == 1 for canary in made)
    assert len({tuple(canary.target) for canary in made}) > 30
    with pytest.raises(UserError, match="content=random"):
        canaries.make_canaries(Rows(text), Words(), SLOTS, "mislabelled", KEY)
    with pytest.raises(UserError, match="no canaries for this kind"):
        canaries.make_canaries(Rows((1, 2)), Words(), SLOTS, "random", KEY)


@pytest.fixture(scope="module")
def generation():
    """A tiny GPT-2 and E2E's demo data."""
    from dpexp.schemas import DataConfig, GenerationConfig, TaskConfig
    from dpexp.tasks import build_task
    from tests.tasks.text_tasks import network

    bundle = network()
    files = {"train": "train.csv", "dev": "dev.csv", "test": "test.csv"}
    config = TaskConfig(
        name="e2e", kind="generation", format="e2e", metric="e2e", files=files, num_examples={"demo": 20},
        max_length=100, generation=GenerationConfig(max_target=40, when="never"),
    )  # fmt: skip
    return build_task(config, DataConfig(), "demo", bundle.tokenizer, 0), bundle.model


def test_secrets_are_what_li_et_al_describe(generation):
    task, _ = generation
    secrets = canaries.make_secrets(task, [1, 10], 3, KEY)
    assert [secret.repetitions for secret in secrets] == [1, 1, 1, 10, 10, 10]
    assert len({secret.number for secret in secrets}) == 6
    for secret in secrets:
        assert len(set(secret.words.tolist())) == 10
        assert secret.space == 10**5
        prompt = task.tokenizer.decode(secret.prompt)
        assert all(f"{field} :" in prompt for field in ("name", "type", "area"))
        assert secret.example.target[-1] == task.tokenizer.eos_token_id
        assert set(secret.example.target[:-1].tolist()) <= set(secret.words.tolist())
    first = secrets[0]
    assert len({tuple(first.text(number)) for number in range(2000)}) == 2000
    with pytest.raises(UserError, match="writes text"):
        canaries.make_secrets(TinyTask(), [1], 1, KEY)
    with pytest.raises(UserError, match="repetitions"):
        canaries.make_secrets(task, [0], 1, KEY)


def test_a_secret_that_was_learnt_by_heart_is_exposed(generation):
    task, model = generation
    secret = canaries.make_secrets(task, [1], 1, KEY)[0]
    device = torch.device("cpu")
    blank, others = canaries.secret_losses(task, model, secret, 100, device, KEY)
    assert others.shape == (100,)
    batch = task.collate([secret.example])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(15):
        optimizer.zero_grad()
        task.losses(model, batch).sum().backward()
        optimizer.step()
    learnt, others = canaries.secret_losses(task, model, secret, 100, device, KEY)
    assert learnt < blank
    assert exposure.rank(learnt, others) == 1
