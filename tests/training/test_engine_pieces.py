"""`PrivacyEngine`: nothing that moves the weights, and nothing of the model, goes by the number of pieces of a batch."""

import copy

import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from tests.training.own_loop import losses_of, make, network, train


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
