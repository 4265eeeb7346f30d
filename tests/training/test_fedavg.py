"""DP-FedAvg: what is clipped is how far a user's own training moves the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping.methods.local_training import LocalClipper
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.privacy.users import Users, of_users
from dpexp.schemas import UnitConfig
from dpexp.tasks.users import ByUser
from tests.training.tiny import TinyTask, make_trainer, run_to_end, tiny_run, weights

NAMES = [f"user {i % 12}" for i in range(60)]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def users_data() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows, labels and weights of three users, who have four, two and four rows."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for real, scale in ((4, 1.0), (2, 5.0), (4, 0.2)):
        x = torch.randn(4, 4, generator=generator, dtype=torch.float64) * scale
        w = torch.zeros(1, 4, dtype=torch.float64)
        w[0, :real] = 1 / real
        found.append((x, torch.tensor([0, 1, 2, 0]), w))
    return found


def losses_of(model: nn.Module):
    def losses(batch: dict[str, Tensor]) -> Tensor:
        rows = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return of_users(rows, batch["weights"])

    return losses


def clipper_of(model: nn.Module, **settings: object) -> LocalClipper:
    return LocalClipper(model, losses_of(model), **({"epochs": 3, "batch_size": 0, "lr": 0.2} | settings))  # type: ignore[arg-type]


def add(clipper: LocalClipper, user: tuple[Tensor, Tensor, Tensor]):
    x, y, w = user
    return clipper.backward(clipper.see({"x": x, "y": y, "weights": w}))


@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_the_sum_is_that_of_clipped_updates_trained_one_by_one(groups: str) -> None:
    model, clip_norm = network(), 0.15
    before = [p.detach().clone() for p in model.parameters()]
    clipper = clipper_of(model, groups=groups, clip_norm=clip_norm)
    reports = [add(clipper, user) for user in users_data()]
    wanted = [torch.zeros_like(p) for p in before]
    for (x, y, w), report in zip(users_data(), reports, strict=True):
        copy = network()
        optimizer = torch.optim.SGD(copy.parameters(), lr=0.2)
        real = int((w > 0).sum())
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(copy(x[:real]), y[:real]).backward()
            optimizer.step()
        updates = [b - p.detach() for b, p in zip(before, copy.parameters(), strict=True)]
        # layers are a weight with its bias
        kinds = [[0, 1, 2, 3]] if groups == "flat" else [[0, 1], [2, 3]]
        for k, members in enumerate(kinds):
            norm = torch.cat([updates[m].reshape(-1) for m in members]).norm()
            assert report.norms[k, 0] == pytest.approx(float(norm))
            bound = clip_norm / len(kinds) ** 0.5
            for m in members:
                wanted[m] += updates[m] * min(1.0, bound / float(norm))
    for p, b, g in zip(model.parameters(), before, wanted, strict=True):
        assert torch.equal(p, b), "the weights are back where they were"
        assert torch.allclose(p.grad, g, rtol=2e-6)
    assert clipper.sensitivity == pytest.approx(clip_norm)


def test_one_local_step_is_user_level_dp_sgd() -> None:
    """clip(-η·g, C) = -η·clip(g, C/η)."""
    model = network()
    clipper = clipper_of(model, epochs=1, lr=0.2, clip_norm=0.1)
    for user in users_data():
        add(clipper, user)
    wanted = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for x, y, w in users_data():
        loss = losses_of(model)({"x": x, "y": y, "weights": w}).sum()
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        wanted += 0.2 * gradient * min(1.0, (0.1 / 0.2) / float(gradient.norm()))
    assert torch.allclose(torch.cat([p.grad.reshape(-1) for p in model.parameters()]), wanted, rtol=2e-6)


def test_no_user_moves_the_sum_beyond_the_thresholds_whatever_local_training_does() -> None:
    for lr in (0.2, 50.0, 1e200):
        model = network()
        clipper = clipper_of(model, groups="layer", clip_norm=0.3, lr=lr, batch_size=1)
        for user in users_data():
            before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            torch.manual_seed(0)
            report = add(clipper, user)
            moved = torch.cat(
                [(p.grad - b).reshape(-1) for p, b in zip(model.parameters(), before, strict=True)]
            )
            assert float(moved.norm()) <= 0.3
            if not bool(report.norms.isfinite().all()):
                assert not moved.any(), "an update that is no number adds nothing"


def test_local_batches_go_over_real_rows_once_an_epoch() -> None:
    model = network()
    clipper = clipper_of(model, epochs=2, batch_size=3)
    x, y, w = users_data()[1]
    parts = list(clipper._parts({"x": x, "y": y, "weights": w}))
    assert [len(part["x"]) for part in parts] == [2, 2]
    assert all(
        torch.allclose(part["weights"], torch.full((1, 2), 0.5, dtype=torch.float64)) for part in parts
    )
    x, y, w = users_data()[0]
    parts = list(clipper._parts({"x": x, "y": y, "weights": w}))
    assert [len(part["x"]) for part in parts] == [3, 1, 3, 1]
    for epoch in (parts[:2], parts[2:]):
        assert {tuple(row.tolist()) for part in epoch for row in part["x"]} == {tuple(r.tolist()) for r in x}


def test_a_run_charges_users_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    run = tiny_run(steps=4, batch_size=4.0, adaptive=True)
    run.unit = UnitConfig("user", file="somewhere", rows=3)
    run.clip.method, run.clip.local_epochs, run.clip.local_batch = "fedavg", 2, 2
    run.optim.name, run.optim.lr = "sgd", 1.0
    task = ByUser(TinyTask(), Users(NAMES, 3))
    whole = run_to_end(tmp_path / "whole", run, task=task)
    assert whole.plan is not None
    assert whole.ledger is not None
    assert whole.plan.num_examples == 12
    assert whole.ledger.epsilon(1e-3) == pytest.approx(whole.plan.epsilon())
    assert whole.physical_batch_size == 1
    first = make_trainer(tmp_path / "cut", run, task=task)
    for _ in range(2):
        first.take_step(type("I", (), {"requested": False})())
    first.save()
    again = run_to_end(tmp_path / "cut", run, task=task)
    assert (weights(again) == weights(whole)).all()
    assert again.ledger is not None
    assert again.ledger.steps_charged == 4
    assert whole.policy.values.tolist() != first.policy.values.tolist()


def test_what_it_cannot_do_is_refused() -> None:
    run = compose(["task=mnist", "clip=fedavg", "unit=user", "unit.size=10", "optim=sgd", "scale=demo"])
    assert (run.clip.groups, run.clip.local_epochs) == ("layer", 1)
    with pytest.raises(UserError, match=r"clip\.local_epochs=0 must be above 0"):
        compose(
            ["task=mnist", "clip=fedavg", "unit=user", "unit.size=10", "scale=demo", "clip.local_epochs=0"]
        )
    model = network()
    clipper = clipper_of(model)
    with pytest.raises(UserError, match="one at a time"):
        clipper.backward(torch.ones(2))
    with pytest.raises(UserError, match="individual=scaling"):
        clipper.backward(torch.ones(1), torch.ones(1))
    assert clipper.backward(torch.zeros(0)).norms.shape == (1, 0)
    with pytest.raises(UserError, match="bounds nothing here"):
        clipper_of(network(), rule="none")


class Remembers(nn.Module):
    """What its forward leaves behind: in a buffer that nothing uses, or in an attribute that the next forward uses."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3).double(), torch.zeros(4, dtype=torch.float64)
        self.buffer = buffer
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.buffer:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        else:
            x, self.last = x - self.last, x.detach().mean(0)
        return self.layer(x)


@pytest.mark.parametrize("buffer", [True, False])
def test_what_a_user_leaves_in_the_model_is_refused(buffer: bool) -> None:
    """It would lie in every checkpoint and in the exported model, without noise, or reach the next user."""
    model = Remembers(buffer)
    clipper = clipper_of(model)
    with pytest.raises(UserError, match="buffer 'mean'" if buffer else "after another batch"):
        add(clipper, users_data()[0])
    clipper.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_buffer_that_counts_forwards_does_not_count_users() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()
            self.register_buffer("forwards", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            self.replaced = self.replaced + 1
            return self.layer(x)

    model = Counts()
    clipper = clipper_of(model)
    for user in users_data():
        add(clipper, user)
    assert (float(model.forwards), float(model.replaced)) == (0, 0)


class Cools(nn.Module):
    """Has a temperature that falls with each call, in an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.temperature, self.calls = 1.0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.9
        self.calls[0] += 1
        return self.layer(x) / self.temperature * self.calls[0]


def test_the_update_of_a_user_does_not_go_by_how_many_were_drawn_before() -> None:
    def update(model: nn.Module, users: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        clipper = clipper_of(model, clip_norm=1e3)
        for user in users:
            model.zero_grad()
            add(clipper, user)
        return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

    first, *_, last = users_data()
    model, other = Cools(), Cools()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(update(model, [first, last]), update(other, [last]))
    assert (model.temperature, model.calls) == (1.0, [0])


@pytest.mark.parametrize("size", [3e37, 2e38])
def test_an_update_near_overflow_is_clipped_too(size: float) -> None:
    """The factor has few bits below 1e-38, where 32-bit numbers are no longer normal: it was rounded up to 1.8 times itself."""
    model = nn.Linear(40, 1, bias=False)
    clipper = LocalClipper(
        model, lambda batch: model(batch["x"])[:, 0] * size, epochs=1, batch_size=0, lr=1.0, clip_norm=1e-6
    )
    clipper.backward(clipper.see({"x": torch.ones(1, 40)}))
    assert model.weight.grad is not None
    assert float(model.weight.grad.double().norm()) <= 1e-6 * (1 + 1e-5)
