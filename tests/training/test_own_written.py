"""What a person's own loop writes or trains without noise: buffers and weights of the model, and parts beside it."""

import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from tests.training.own_loop import first_batch, losses_of, make, network, train

cross_entropy = nn.functional.cross_entropy


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x):
        return self.body(x) - self.centre


def test_a_constant_that_is_put_where_the_batch_is_holds_nothing_of_it(tmp_path):
    """Which gives the constant itself, where it is there already."""
    levels, model = torch.tensor([0.1, 0.5, 0.9]), Centred()

    def losses(engine, batch):
        errors = batch[0][:, :1] - model(batch[0]) / model.centre.mean().exp().to(batch[0])
        return torch.maximum(levels.to(errors) * errors, (levels.type_as(errors) - 1) * errors).mean(1)

    assert train(make(tmp_path, model), losses=losses).finished


@pytest.mark.parametrize("how", ["in place", "anew", "data", "a weight"])
def test_values_of_a_batch_that_are_written_to_the_model_are_refused(tmp_path, how):
    model = Centred()

    def write(batch):
        mean = model(batch[0]).detach().mean(0)
        if how == "in place":
            model.centre.lerp_(mean, 0.1)
        elif how == "anew":
            model.centre = 0.9 * model.centre + 0.1 * mean
        elif how == "data":
            model.centre.data = 0.9 * model.centre.data + 0.1 * mean
        else:
            model.body[3].bias.data += 0.1 * mean

    def losses(engine, batch):
        with torch.no_grad():
            write(batch)
        return losses_of(engine, batch)

    refusal = r"writes values of its batch to (centre|body\.3\.bias) of the model"
    engine = make(tmp_path, model)
    with pytest.raises(UserError, match=refusal):
        train(engine, losses=losses)
    # when the step is taken
    with pytest.raises(UserError, match=refusal), torch.no_grad():
        train(engine, losses=torch.enable_grad()(losses_of), after=write)
    assert engine.ledger.steps_charged == 0


def test_a_weight_that_is_kept_in_bounds_is_the_loops_own(tmp_path):
    model = network()

    def losses(engine, batch):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    assert train(make(tmp_path, model), losses=losses).finished


def test_a_part_beside_the_model_is_not_trained_on_private_examples(tmp_path):
    engine, probe, public = make(tmp_path), nn.Linear(3, 3), nn.Linear(3, 3)
    own, others = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (probe, public))
    for batch in engine.batches():
        outputs = engine.model(batch[0])
        loss = cross_entropy(probe(outputs.detach()), batch[1])
        loss.backward(inputs=list(probe.parameters()))
        with torch.no_grad():
            public(outputs)
        others.step()
        with pytest.raises(UserError, match="went through a parameter of shape"):
            own.step()
        engine.step(cross_entropy(outputs, batch[1], reduction="none"))
    assert engine.finished
    engine.close()
    own.step()


def beside(batch, outputs, weight, generator):
    return cross_entropy(outputs @ nn.functional.normalize(weight).t(), batch[1])


def transposed(batch, outputs, weight, generator):
    return torch.cdist(outputs, weight.t()).mean()


def matched(batch, outputs, weight, generator):
    return (generator(torch.randn(9, 4)).mean(0) - batch[0].mean(0)).square().sum()


@pytest.mark.parametrize("loss", [beside, transposed, matched])
def test_what_is_made_of_a_part_beside_the_model_trains_it_too(tmp_path, loss):
    engine, weight, generator = make(tmp_path), torch.randn(3, 3, requires_grad=True), nn.Linear(4, 10)
    optimizer = torch.optim.SGD([weight, *generator.parameters()], lr=0.1)
    for batch in engine.batches():
        engine.step(losses_of(engine, batch))
        with torch.no_grad():
            outputs = engine.model(batch[0])
        loss(batch, outputs, weight, generator).backward()
        with pytest.raises(UserError, match="went through a parameter of shape"):
            optimizer.step()
    assert engine.finished


@pytest.mark.parametrize("first", [True, False])
def test_a_generator_learns_from_what_the_model_says_of_its_own_pictures(tmp_path, first):
    engine, generator = make(tmp_path), nn.Linear(4, 10)
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)

    def learn(batch):
        optimizer.zero_grad()
        pictures = generator(torch.randn(len(batch[0]), 4))
        loss = nn.functional.softplus(-engine.model(pictures)).mean()
        pictures.backward(torch.autograd.grad(loss, pictures))
        optimizer.step()

    def losses(engine, batch):
        if first:
            learn(batch)
        return losses_of(engine, batch)

    assert train(engine, losses=losses, after=lambda batch: None if first else learn(batch)).finished


@pytest.mark.parametrize("start", [torch.zeros_like, lambda x: torch.zeros(x.shape)])
def test_what_is_added_to_inputs_is_looked_for_by_an_optimizer(tmp_path, start):
    def losses(engine, batch):
        moved = start(batch[0]).requires_grad_()
        optimizer = torch.optim.SGD([moved], lr=0.1)
        cross_entropy(engine.model(batch[0] + moved), batch[1]).backward(inputs=[moved])
        optimizer.step()
        return cross_entropy(engine.model(batch[0] + moved.detach()), batch[1], reduction="none")

    assert train(make(tmp_path), losses=losses).finished


def test_the_optimizer_is_given_no_more_to_move_on_the_way(tmp_path):
    engine, late = make(tmp_path), nn.Linear(3, 3)
    batch, _loop = first_batch(engine)
    engine._run.optimizer.optimizer.add_param_group({"params": list(late.parameters())})
    with pytest.raises(UserError, match="holds other parameters than when the engine was made"):
        engine.step(losses_of(engine, batch))
    assert engine.ledger.steps_charged == 0
