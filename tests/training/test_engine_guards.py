"""`PrivacyEngine`: mistakes in the loop are noticed, and nothing of them is released."""

import copy
import os
import random
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dpexp.errors import UserError
from dpexp.training import generators
from dpexp.training.refusals import goes_together
from dpexp.training.sums import Sums
from tests.training.own_loop import (
    TASK,
    adam_of,
    first_batch,
    flat,
    losses_of,
    make,
    network,
    train,
)
from tests.training.tiny import NUM_EXAMPLES, run_to_end, tiny_run


def test_leaving_the_loop_releases_nothing_and_the_step_begins_again(tmp_path):
    engine = make(tmp_path / "left")
    for number, batch in enumerate(engine.batches(physical_batch_size=4)):
        if number == 2:
            break
        engine.step(losses_of(engine, batch))
    assert engine.steps_taken == engine.ledger.steps_charged == 0
    assert all(p.grad is None for p in engine.model.parameters())
    with pytest.raises(ZeroDivisionError):
        train(engine, 4, losses=lambda engine, batch: losses_of(engine, batch) * (1 / 0))
    assert np.array_equal(flat(train(engine)), flat(train(make(tmp_path / "whole"))))


def test_a_batch_without_a_step_is_noticed(tmp_path):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="was not called for the last batch"):
        for _ in engine.batches():
            pass


def test_a_step_without_a_batch_is_noticed(tmp_path):
    engine = make(tmp_path)
    batch, loop = first_batch(engine)
    engine.step(losses_of(engine, batch))
    with pytest.raises(
        UserError, match=r"called again for the same batch.*engine.step\(first_losses \+ second_losses\)"
    ):
        engine.step(losses_of(engine, batch))
    loop.close()
    with pytest.raises(UserError, match="no batch to go with"):
        make(tmp_path / "other").step(losses_of(engine, batch))


def test_a_checkpoint_that_is_loaded_in_the_middle_of_a_batch_begins_the_step_again(tmp_path):
    engine, loaded = make(tmp_path / "loaded"), 0
    for batch in engine.batches(physical_batch_size=4):
        losses = losses_of(engine, batch)
        if loaded < 2 and engine.steps_taken == 3:
            # the checkpoint is of step 2; once before a step and once behind one
            loaded += 1
            if loaded == 2:
                engine.step(losses)
            engine.load()
            assert engine.steps_taken == 2
            if loaded == 1:
                with pytest.raises(UserError, match=r"After engine.load\(\) the next batch"):
                    engine.step(losses)
        else:
            engine.step(losses)
    assert loaded == 2
    assert engine.ledger.steps_charged == engine.steps
    assert np.array_equal(flat(engine), flat(train(make(tmp_path / "whole"), 4)))


def test_a_copy_of_the_model_may_be_made_at_any_place_of_the_loop(tmp_path):
    engine = make(tmp_path / "copied")
    for batch in engine.batches(physical_batch_size=8):
        copies = [copy.deepcopy(engine.model)]
        losses = losses_of(engine, batch)
        copies += [copy.deepcopy(engine.model, made := {})]
        # neither the run's key nor its data go with it
        assert not [
            one
            for one in made.values()
            if type(one).__module__.startswith(("dpexp.training", "dpexp.privacy"))
        ]
        engine.step(losses)
        assert torch.equal(*(twin(batch[0]) for twin in copies))
    assert np.array_equal(flat(engine), flat(train(make(tmp_path / "whole"))))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("what", ["folder", "ledger"])
def test_nothing_is_charged_or_released_in_a_folder_that_is_gone(tmp_path, what, steps):
    engine = make(tmp_path / "run")
    if steps:
        train(engine, steps=steps)
    before = flat(engine)
    if what == "ledger":
        engine.ledger.path.unlink(missing_ok=True)
    else:
        shutil.move(engine.folder, tmp_path / "elsewhere")
    if what == "ledger" and not steps:
        # as it was
        assert train(engine).finished
        return
    with pytest.raises(UserError, match="deleted or moved while its run was going on"):
        train(engine)
    assert np.array_equal(flat(engine), before)
    assert engine.ledger.steps_charged == steps
    assert engine.folder.exists() == (what != "folder")


def test_noise_that_cannot_be_added_is_refused_before_it_is_charged(tmp_path):
    engine = make(tmp_path, noise_multiplier=1e-300)
    with pytest.raises(UserError, match="choose another noise multiplier"):
        train(engine)
    assert engine.ledger.steps_charged == 0


def test_outputs_of_an_earlier_batch_do_not_count_again(tmp_path):
    """The examples of that batch would be in the sum twice, each time with a clipped gradient."""
    engine = make(tmp_path)
    loop = engine.batches(physical_batch_size=4)
    first = next(loop)
    kept = engine.model(first[0])
    engine.step(losses_of(engine, first))
    second = next(loop)
    engine.model(second[0])
    with pytest.raises(UserError, match="from a forward of an earlier batch"):
        engine.step(nn.functional.cross_entropy(kept, first[1], reduction="none"))
    loop.close()
    assert engine.ledger.steps_charged == 0


def test_two_loops_at_once_are_noticed(tmp_path):
    engine = make(tmp_path)
    _, one = first_batch(engine)
    batch, _other = first_batch(engine)
    engine.step(losses_of(engine, batch))
    with pytest.raises(UserError, match="another loop"):
        next(one)


def test_the_optimizer_moves_for_the_engine_alone(tmp_path):
    engine = make(tmp_path)
    optimizer, before = engine._run.optimizer.optimizer, flat(engine)
    batch, loop = first_batch(engine)
    engine.step(losses_of(engine, batch))
    with pytest.raises(UserError, match="no noise yet"):
        optimizer.step()
    assert np.array_equal(flat(engine), before)
    loop.close()
    engine.close()
    optimizer.step()  # it is the loop's again


def test_a_gradient_scaler_is_refused(tmp_path):
    engine = make(tmp_path)
    scaler = torch.amp.GradScaler("cpu")
    batch, _loop = first_batch(engine)
    losses = losses_of(engine, batch)
    # of something else, which the engine does not train
    assert scaler.scale(losses.detach().mean()) > 0
    with pytest.raises(UserError, match="a GradScaler has scaled the losses"):
        engine.step(scaler.scale(losses))
    with pytest.raises(UserError, match="a GradScaler has scaled the losses"):
        scaler.scale([losses])
    engine.step(losses)
    with pytest.raises(UserError, match="GradScaler"):
        scaler.step(engine._run.optimizer.optimizer)


def doubled_as_data(engine):
    # without a trace in the gradient's version
    for parameter in engine.model.parameters():
        parameter.grad.data.mul_(2.0)


@pytest.mark.parametrize(
    "touch",
    [
        lambda engine: engine._run.optimizer.optimizer.zero_grad(),
        lambda engine: nn.utils.clip_grad_norm_(engine.model.parameters(), 1e-3),
        lambda engine: next(engine.model.parameters()).grad.add_(1.0),
        doubled_as_data,
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_gradients_are_the_engines_while_a_batch_is_summed(tmp_path, touch, before):
    engine = make(tmp_path)
    loop = engine.batches(physical_batch_size=4)
    engine.step(losses_of(engine, next(loop)))

    def goes_on():
        if before:
            touch(engine)
        losses = losses_of(engine, next(loop))
        if not before:
            touch(engine)
        engine.step(losses)

    with pytest.raises(UserError, match="in the middle of a batch"):
        goes_on()


def decayed(engine):
    for parameter in engine.model.parameters():
        # as data, which changes no version
        parameter.data.mul_(0.9)


def rated(engine):
    engine._run.optimizer.optimizer.param_groups[0]["lr"] *= 0.9


def there_and_back(engine):
    kept = copy.deepcopy(engine.model.state_dict())
    decayed(engine)
    engine.model.load_state_dict(kept)


@pytest.mark.parametrize(
    ("change", "words"), [(decayed, "the weights were changed"), (rated, "lr of the optimizer")]
)
def test_nothing_that_moves_the_weights_goes_by_the_number_of_pieces(tmp_path, change, words):
    """Which follows from how many examples were drawn: a decay after every piece would tell it without noise."""
    engine = make(tmp_path)
    loop = engine.batches(physical_batch_size=4)
    engine.step(losses_of(engine, next(loop)))
    change(engine)
    losses = losses_of(engine, next(loop))
    with pytest.raises(UserError, match=f"{words}.*in the middle of a batch"):
        engine.step(losses)
    assert engine.steps_taken == engine.ledger.steps_charged == 0


class Annealed(nn.Module):
    """Lets less and less through, by the number of its forwards."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / self.calls


class Following(nn.Linear):
    """A layer beside a teacher, which follows it a little in every forward."""

    def __init__(self, features):
        super().__init__(features, features)
        self.teacher = nn.Parameter(torch.zeros(features, features), requires_grad=False)

    def forward(self, x):
        self.teacher.data.lerp_(self.weight.data, 0.1)
        return super().forward(x) - nn.functional.linear(x, self.teacher)


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(10, 10), n_power_iterations=1)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Annealed, "what .* returns"),
        (lambda: Following(10), "'teacher'"),
        (spectral, "'_u'"),
    ],
    ids=["annealed", "teacher", "spectral norm"],
)
def test_nothing_of_the_model_goes_by_the_number_of_pieces(tmp_path, part, words):
    """As above: an example more is a piece more, after which all others meet another model."""
    torch.manual_seed(0)
    engine = make(tmp_path, nn.Sequential(part(), network()))
    with pytest.raises(UserError, match=f"{words}.* goes by how often the model was called"):
        train(engine)
    assert engine.steps_taken == engine.ledger.steps_charged == 0


def test_what_the_model_keeps_may_move_on_where_the_step_is_taken(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(spectral(), network())
    norm, engine = model[0].parametrizations.weight[0], make(tmp_path, model)
    with pytest.raises(UserError, match="how often the model was called"):
        train(engine)
    norm.eval()
    before = norm._u.clone()
    for batch in engine.batches(physical_batch_size=8):
        if engine.step(losses_of(engine, batch)):
            norm.train()(model[0].parametrizations.weight.original.detach())
            norm.eval()
    assert engine.finished
    assert not torch.equal(norm._u, before)


class Taught(nn.Module):
    """A network with a frozen teacher, and a counter that is saved."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network().requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return self.student(x) + self.teacher(x)


def followed(engine):
    for old, new in zip(engine.model.teacher.parameters(), engine.model.student.parameters(), strict=True):
        old.data.lerp_(new.data + 1, 0.1)


def counted(engine):
    engine.model.seen = engine.model.seen + 1


@pytest.mark.parametrize("change", [followed, counted])
def test_a_teacher_or_a_saved_number_does_not_move_with_each_piece(tmp_path, change):
    """As above: how often it has moved tells how many were drawn."""
    engine = make(tmp_path, Taught())
    with pytest.raises(UserError, match="in the middle of a batch"):
        train(engine, 4, after=lambda batch: change(engine))
    assert engine.ledger.steps_charged == 0


class Holding(nn.Module):
    """A network with a saved buffer."""

    def __init__(self, held):
        super().__init__()
        self.inner = network()
        self.register_buffer("held", held)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    "held",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr(2),
        lambda: torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=torch.jagged),
        lambda: torch.ones(4).to(torch.float8_e4m3fn),
        lambda: torch.ones(4, device="meta"),
    ],
    ids=["coo", "csr", "csc", "bsr", "jagged", "float8", "meta"],
)
def test_a_saved_buffer_may_be_of_any_kind(tmp_path, held):
    assert train(make(tmp_path, Holding(held())), 4, steps=2).steps_taken == 2


@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_buffer_does_not_move_with_each_piece(tmp_path, kind):
    part = Holding(kind(torch.eye(4)))
    engine = make(tmp_path, nn.Sequential(part))
    with pytest.raises(
        UserError, match=r"saved buffer 0\.held was changed in the middle of a batch.*persistent=False"
    ):
        train(engine, 4, after=lambda batch: setattr(part, "held", part.held * 2))


@pytest.mark.parametrize("change", [decayed, rated, followed, counted])
def test_weights_and_learning_rate_may_be_changed_between_two_steps(tmp_path, change):
    engine = make(tmp_path, Taught())
    for batch in engine.batches(physical_batch_size=4):
        if engine.step(losses_of(engine, batch)):
            change(engine)
    assert engine.finished


def test_other_weights_may_be_looked_at_in_the_middle_of_a_batch(tmp_path):
    engine = make(tmp_path)
    for batch in engine.batches(physical_batch_size=4):
        engine.step(losses_of(engine, batch))
        there_and_back(engine)
    assert engine.finished


def test_zero_grad_before_every_batch_of_one_piece_does_no_harm(tmp_path):
    engine = make(tmp_path)
    for batch in engine.batches(physical_batch_size=64):
        engine._run.optimizer.optimizer.zero_grad()
        engine.step(losses_of(engine, batch))
    assert engine.finished


def test_gradients_that_are_released_may_be_written_to(tmp_path):
    engine = make(tmp_path)
    for batch in engine.batches(physical_batch_size=64):
        assert engine.step(losses_of(engine, batch))
        engine._run.optimizer.optimizer.zero_grad(set_to_none=False)
    assert engine.finished


def test_a_batch_whose_step_was_cut_off_is_not_added_a_second_time(tmp_path, monkeypatch):
    """By Ctrl-C or for lack of memory: who runs the cell again would count each of its examples twice."""
    engine, real, cut = make(tmp_path / "cut"), Sums.add, [4]

    def add(*arguments):
        cut[0] -= 1
        if not cut[0]:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(Sums, "add", add)
    loop = engine.batches(physical_batch_size=4)
    for _ in range(3):
        batch = next(loop)
        engine.step(losses_of(engine, batch))
    batch = next(loop)
    losses = losses_of(engine, batch)
    with pytest.raises(KeyboardInterrupt):
        engine.step(losses)
    with pytest.raises(UserError, match="begin a new loop"):
        engine.step(losses_of(engine, batch))
    assert np.array_equal(flat(train(engine, 4)), flat(train(make(tmp_path / "whole"), 4)))


def test_thresholds_are_the_policys(tmp_path):
    engine = make(tmp_path)
    batch, _loop = first_batch(engine, 64)
    engine.clipper.thresholds = [100.0]
    with pytest.raises(UserError, match="thresholds were changed in the middle of a step"):
        engine.step(losses_of(engine, batch))
    assert engine.ledger.steps_charged == 0


def test_each_group_has_noise_for_the_threshold_that_it_was_clipped_to(tmp_path):
    """Two thresholds with the same norm as before, one of them smaller: noise that is shared out by them would be, too."""
    engine = make(tmp_path, groups="layer", clip_norm=2**0.5, allocation="equal_budget")
    batch, _loop = first_batch(engine, 64)
    losses = losses_of(engine, batch)
    engine.policy.estimates = torch.tensor([1.414, 0.11])
    with pytest.raises(UserError, match="leave the thresholds to the policy"):
        engine.step(losses)
    assert engine.ledger.steps_charged == 0


def test_frozen_weights_do_not_move_by_a_gradient_that_was_left_on_them(tmp_path):
    """A backward before the engine, to see whether it fits, and then the layer was frozen: the optimizer holds all weights."""
    model = network()
    nn.functional.cross_entropy(
        model(torch.stack([x for x, _ in TASK.train])), torch.zeros(NUM_EXAMPLES).long()
    ).backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    train(make(tmp_path, model), 64)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    "normed", [lambda losses: losses / losses.mean(), lambda losses: losses * losses.softmax(0)]
)
def test_losses_that_mix_examples_are_noticed(tmp_path, normed):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="mixes examples"):
        train(engine, losses=lambda engine, batch: normed(losses_of(engine, batch)))
    assert engine.ledger.steps_charged == 0


def test_a_backward_of_the_loops_own_is_noticed(tmp_path):
    engine = make(tmp_path)
    losses = losses_of(engine, first_batch(engine)[0])
    with pytest.raises(RuntimeError, match=r"loss.backward\(\) reached a model"):
        losses.mean().backward()


@pytest.mark.parametrize(
    "spoil",
    [
        torch.mean,
        lambda losses: losses[1:],
        lambda losses: losses[:, None],
        lambda losses: losses.tolist(),
        lambda losses: None,
    ],
)
def test_one_loss_per_example_is_needed(tmp_path, spoil):
    engine = make(tmp_path)
    losses = losses_of(engine, first_batch(engine)[0])
    with pytest.raises(UserError, match=r"one loss per example|losses"):
        engine.step(spoil(losses))


def test_another_optimizer_may_not_move_the_weights_between_two_batches(tmp_path):
    engine = make(tmp_path)
    own, others = adam_of(*engine.model.parameters()), adam_of(nn.Parameter(torch.zeros(1)))
    for batch in engine.batches(physical_batch_size=3):
        engine.step(losses_of(engine, batch))
        others.step()
        with pytest.raises(UserError, match="hold no noise yet"):
            own.step()
        break
    engine.close()
    own.step()


def test_a_plateau_scheduler_is_refused(tmp_path):
    model = network()
    optimizer = adam_of(*model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UserError, match="ReduceLROnPlateau"):
        make(tmp_path, model, optimizer, scheduler=scheduler)


def test_a_scheduler_that_the_loop_steps_too_is_refused(tmp_path):
    model = network()
    optimizer = adam_of(*model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = make(tmp_path, model, optimizer, scheduler=scheduler)
    train(engine, steps=1)
    scheduler.step()
    with pytest.raises(UserError, match="called by the loop"):
        train(engine)
    assert engine.steps_taken == engine.ledger.steps_charged == 1


def test_several_processes_that_do_not_share_a_batch_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="2 processes"):
        run_to_end(tmp_path / "loop", tiny_run())


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, weights: torch.autograd.grad(loss, weights),
        lambda loss, weights: torch.autograd.grad(loss, weights, allow_unused=True),
        lambda loss, weights: loss.backward(inputs=weights),
        pytest.param(
            lambda loss, weights: torch.autograd.backward([loss], inputs=weights),
            marks=pytest.mark.skipif(
                not hasattr(torch.autograd, "handle_torch_function")
                or "has_torch_function" not in torch.autograd.backward.__code__.co_names,
                reason="this torch shows the call to nobody",
            ),
        ),
    ],
)
def test_gradients_of_the_weights_are_not_the_loops(tmp_path, ask):
    """Autograd would find none behind a tap, and say so in other words, or not at all."""
    engine = make(tmp_path)
    batch, _loop = first_batch(engine)
    loss = losses_of(engine, batch).mean()
    with pytest.raises(UserError, match=r"asks autograd for the gradient of 0\.weight"):
        ask(loss, list(engine.model.parameters()))


def test_gradients_of_the_weights_alone_are_the_loops(tmp_path):
    """They depend on no example."""
    engine = make(tmp_path)
    _batch, _loop = first_batch(engine)
    weight = engine.model[0].weight
    (gradient,) = torch.autograd.grad(weight.square().sum(), weight)
    torch.testing.assert_close(gradient, 2 * weight.detach())


def in_another_thread(action):
    """Returns what is said of it there."""
    said = []

    def act():
        try:
            action()
        except Exception as error:
            said.append(str(error))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return said


def test_two_threads_do_not_take_one_step(tmp_path):
    """Both would add the same examples."""
    engine, said = make(tmp_path), []
    batch, _loop = first_batch(engine)
    losses, others = losses_of(engine, batch), losses_of(engine, batch)

    def meanwhile(gradient):
        if not said:
            said.extend(in_another_thread(lambda: engine.step(others)))

    losses.register_hook(meanwhile)
    engine.step(losses)
    assert "two threads" in said[0]


def test_two_threads_do_not_take_one_batch(tmp_path):
    engine, said = make(tmp_path), []

    def collate(rows):
        said.extend(in_another_thread(lambda: next(loop)))
        return default_collate(rows)

    loop = engine.batches(collate)
    engine.step(losses_of(engine, next(loop)))
    assert "two threads" in said[0]


def test_a_forked_process_takes_no_step(tmp_path):
    """Both would take the same; of several, the others do not hear it."""
    loop = make(tmp_path).batches()
    if not (child := os.fork()):
        said = ""
        try:
            next(loop)
        except UserError as error:
            said = str(error)
        os._exit(0 if "was forked after PrivacyEngine" in said else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_lies_where_a_gradient_was_is_none(tmp_path):
    """A loop that was left in the middle, as after an error in a notebook, still watches; its memory may be another engine's."""
    engine = make(tmp_path)
    batch, _loop = first_batch(engine, size=2)
    engine.step(losses_of(engine, batch))
    weight = engine.model[0].weight
    gradient = weight.grad
    with pytest.raises(UserError, match="was written to"):
        gradient.add_(1)
    weight.grad = None
    gradient.add_(1)


def seeded_where(engine, place):
    for batch in engine.batches(physical_batch_size=8):
        if place == "before the forward":
            torch.manual_seed(0)
        elif place == "for public rows alone":
            with torch.random.fork_rng():
                torch.manual_seed(0)
                torch.rand(3)
        with torch.random.fork_rng(enabled=place == "around the forward"):
            if place == "around the forward":
                torch.manual_seed(0)
            losses = losses_of(engine, batch)
        if place == "behind the forward":
            torch.manual_seed(0)
        engine.step(losses)
        if place == "behind the step":
            torch.manual_seed(0)
            torch.rand(3)
    return engine


@pytest.mark.parametrize("place", ["before the forward", "around the forward"])
def test_dropout_does_not_draw_from_a_seed_that_others_may_know(tmp_path, place):
    engine = make(tmp_path, network(0.3))
    with pytest.raises(UserError, match=r"torch\.manual_seed\(0\) was called between a batch and its losses"):
        seeded_where(engine, place)
    assert engine.ledger.steps_charged == 0


@pytest.mark.parametrize(
    ("place", "dropout"),
    [
        ("before the forward", 0.0),
        ("behind the forward", 0.3),
        ("behind the step", 0.3),
        ("for public rows alone", 0.3),
    ],
)
def test_a_seed_from_which_no_forward_draws_does_no_harm(tmp_path, place, dropout):
    assert seeded_where(make(tmp_path, network(dropout)), place).finished


class Seeding(torch.utils.data.Dataset):
    """Seeds where a row is read, so that each has one augmentation for ever."""

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, i):
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(0)
        x, y = TASK.train[i]
        return x + 0.01 * torch.randn(10), y


def seeding_collate(rows):
    torch.manual_seed(0)
    return default_collate(rows)


@pytest.mark.parametrize(("dataset", "collate"), [(Seeding(), default_collate), (None, seeding_collate)])
def test_dropout_does_not_draw_from_a_seed_that_making_a_batch_has_left(tmp_path, dataset, collate):
    def drawn(folder, key):
        found = []
        engine = make(tmp_path / folder, dataset=dataset, data_name="rows", noise_seed=key, steps=2)
        for batch in engine.batches(collate, 8):
            found += [torch.rand(1).item(), random.random(), np.random.randn()]
            engine.step(losses_of(engine, batch))
        return found

    one = drawn("one", 11)
    assert len(set(one)) == len(one)
    assert drawn("again", 11) == one
    assert not set(drawn("another key", 12)) & set(one)


def test_where_generators_stand_behind_a_step_gives_no_dropout_away(tmp_path):
    """Many a loop saves their states with a checkpoint, as accelerate's save_state does."""
    engine = make(tmp_path, network(dropout=0.5), steps=2)
    for batch in engine.batches(physical_batch_size=NUM_EXAMPLES):
        losses = losses_of(engine, batch)
        drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert engine.step(losses)
        behind = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert not torch.equal(behind[0], drawn[0])
        assert behind[1] != drawn[1]
        assert behind[2] != drawn[2]


class Jittered(torch.utils.data.Dataset):
    """Draws from generators of its own, of every kind, and of a transform's."""

    def __init__(self, seed):
        self.rows, self.drawn = [x for x, _ in TASK.train], []
        self.own = np.random.default_rng(seed), random.Random(seed)
        transforms = [torch.Generator().manual_seed(seed)], {"old": np.random.RandomState(seed)}
        self.transform = lambda: (
            float(torch.rand(1, generator=transforms[0][0])),
            transforms[1]["old"].rand(),
        )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        drawn = self.own[0].random(), self.own[1].random(), *self.transform()
        self.drawn.append(drawn)
        return self.rows[i] + sum(drawn), TASK.train[i][1]


def test_what_a_data_set_draws_from_generators_of_its_own_follows_from_the_key(tmp_path):
    """Under a seed that others know, an example more would change what is drawn for all that are read after it."""
    found = []
    for number, (seed, key) in enumerate([(0, 11), (1, 11), (0, 12)]):
        engine = make(tmp_path / str(number), dataset=Jittered(seed), data_name="jittered", noise_seed=key)
        found.append(np.asarray(train(engine, steps=2)._run.dataset.drawn))
    assert np.array_equal(found[0], found[1])
    # and each piece, whatever it has been read after, has its own
    assert all(len(np.unique(column)) == len(column) for column in np.concatenate([found[0], found[2]]).T)


class OwnMasks(nn.Module):
    """Masks that are drawn from a generator of the module's own."""

    def __init__(self, seed):
        super().__init__()
        self.generator, self.drawn = torch.Generator().manual_seed(seed), []

    def forward(self, x):
        mask = torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)
        self.drawn.append(mask)
        return x * mask


def test_what_a_model_draws_from_a_generator_of_its_own_follows_from_the_key(tmp_path):
    """As what a data set draws: an example more would change the masks of all behind it."""
    found = []
    for number, (seed, key) in enumerate([(0, 11), (1, 11), (0, 12)]):
        masks = OwnMasks(seed)
        model = nn.Sequential(nn.Linear(10, 16), masks, nn.Linear(16, 3))
        train(make(tmp_path / str(number), model=model, noise_seed=key), steps=1)
        found.append(masks.drawn[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0][:2], found[2][:2])


@pytest.mark.parametrize(
    ("rows", "place", "told"),
    [
        (None, "loop", True),
        # as many for each batch
        (5, "loop", False),
        (None, "torch", False),
        (None, "data", False),
    ],
)
def test_a_loop_that_draws_for_its_rows_from_a_generator_of_its_own_is_told(tmp_path, rows, place, told):
    own = torch.default_generator if place == "torch" else torch.Generator().manual_seed(0)
    dataset = Jittered(0)
    dataset.generator = own if place == "data" else None

    def losses(engine, batch):
        drawn = torch.rand(rows or len(batch[0]), 1, generator=own)
        return losses_of(engine, (batch[0] + drawn.mean() if rows else batch[0] * drawn, batch[1]))

    # what all of a physical batch share is refused where it is not the whole sample
    size = NUM_EXAMPLES if rows else 8
    engine = train(make(tmp_path, dataset=dataset, data_name="jittered"), size, losses=losses, steps=3)
    assert any("from a random generator of its own" in note for note in engine.clipper.notes) is told


class Lazy(list):
    """Reads its rows when it is asked for them."""

    def __iter__(self):
        raise AssertionError("rows were read")


class Counting(np.random.PCG64):
    """A source of bits that asks for no number."""

    def __init__(self):
        super().__init__(0)


def test_generators_of_any_source_are_found_on_the_shortest_way_and_seeded():
    sources = np.random.RandomState(np.random.PCG64(0)), np.random.Generator(Counting())
    # what is met first on a way that ends there has a short one, too
    deep = SimpleNamespace(a=SimpleNamespace(b=[*sources]))
    data = SimpleNamespace(far=[[[SimpleNamespace(deep=deep)]]], near=deep, rows=Lazy([1]))
    found = generators.of(data)
    assert {id(generator) for generator in found} == {id(source) for source in sources}

    def drawn(number):
        for generator in found:
            generators.seed(generator, number)
        return [source.standard_normal() for source in sources]

    assert drawn(1) == drawn(1) != drawn(2)


class SkipsALayer(nn.Module):
    """LayerDrop: one coin for all that go through it together."""

    def __init__(self):
        super().__init__()
        self.first, self.skipped, self.last = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h if self.training and torch.rand([]) < 0.5 else h + self.skipped(h))


def test_chance_that_a_physical_batch_shares_moves_a_sum_by_more_than_one_example_may(tmp_path):
    # with one example more, others go into the next physical batch, and the sum moves by up to 2C for each of them
    with pytest.raises(UserError, match=r"share what rand draws, 1 number .* physical batch size of 1"):
        train(engine := make(tmp_path / "pieces", SkipsALayer()), 8)
    assert engine.ledger.steps_charged == 0
    for size in (1, NUM_EXAMPLES):
        train(make(tmp_path / f"{size}", SkipsALayer()), size, steps=2)
    model = SkipsALayer()
    model.training = False
    train(make(tmp_path / "off", model), 8, steps=2)


def test_a_physical_batch_that_holds_nearly_every_sample_is_no_piece_of_one():
    assert goes_together(60, 20, 60)
    assert goes_together(90, 20, 10**6)
    assert not goes_together(60, 20, 61)
    assert not goes_together(19, 20, 10**6)


def test_the_usual_attributes_of_modules_are_not_asked_whether_they_are_generators(monkeypatch):
    """For `torch.Generator` each answer runs Python; there are some 25 of them for each module, in every step."""
    asked = []

    class Asking(type):
        def __instancecheck__(cls, value):
            asked.append(value)
            return False

    monkeypatch.setattr(generators, "Generator", Asking("Generator", (), {}))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout())
    model.drawn = random.Random(0)
    generators.of_modules(model)
    assert asked == [model.drawn]
