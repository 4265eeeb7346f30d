"""`PrivacyEngine`: gradients, weights and the optimizer are the engine's, whatever else of the loop could write to them."""

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.errors import UserError
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
from tests.training.tiny import NUM_EXAMPLES


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


def test_a_backward_of_the_loops_own_is_noticed(tmp_path):
    engine = make(tmp_path)
    losses = losses_of(engine, first_batch(engine)[0])
    with pytest.raises(RuntimeError, match=r"loss.backward\(\) reached a model"):
        losses.mean().backward()


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
