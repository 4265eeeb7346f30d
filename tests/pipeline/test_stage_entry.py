"""The engine's entry for a stage: outputs and the gradients that come back for them, in place of losses."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import Clipper, attach
from dpexp.clipping.devices import bounds, device_groups
from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError
from dpexp.pipeline.split import keep_stage
from dpexp.tasks.target_loss import example_losses
from tests.pipeline.models import batch_of, language_model, pieces_of

THRESHOLDS = [0.05, 0.07]


def two_forwards(stages: list[nn.Module], clippers: list[Clipper], batch: dict[str, Tensor]) -> list[tuple]:
    """Both microbatches wait for their backward at once, as in any schedule."""
    waiting = []
    for piece in pieces_of(batch, 2):
        hidden = stages[0](input_ids=piece["input_ids"]).logits
        received = hidden.detach().requires_grad_()
        losses = example_losses(stages[1], piece | {"input_ids": received})
        waiting.append((hidden, received, losses, *(c.last_forward() for c in clippers)))
    return waiting


@pytest.mark.parametrize(
    ("kind", "lora"), [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False), ("qwen2", False)]
)
def test_two_stages_in_turn_give_the_sums_and_norms_of_one_process(kind: str, lora: bool) -> None:
    whole, batch = language_model(kind, lora), batch_of(6)
    stages = [keep_stage(copy.deepcopy(whole), k, 2) for k in range(2)]
    names = [{n for n, p in stage.named_parameters() if p.requires_grad} for stage in stages]
    groups = device_groups(whole, 2)
    assert [set(params) for params in groups.values()] == names

    clipper = attach(whole, groups=groups, clip_norm=THRESHOLDS)
    expected = clipper.backward(example_losses(whole, batch))
    clippers = [attach(stage, clip_norm=[c]) for stage, c in zip(stages, THRESHOLDS, strict=True)]
    norms = []
    for hidden, received, losses, first, last in two_forwards(stages, clippers, batch):
        behind = clippers[1].backward_from(Roots.of_losses(losses, inputs=[received], owner=last))
        before = clippers[0].backward_from(Roots.of_outputs([hidden], behind.input_gradients, owner=first))
        norms.append(torch.cat([before.norms, behind.norms]))
    torch.testing.assert_close(torch.cat(norms, 1), expected.norms)
    assert int(expected.clipped.sum()) > 0
    given = dict(whole.named_parameters())
    for stage in stages:
        for name, param in stage.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(param.grad, given[name].grad)


@pytest.mark.parametrize(
    ("engine", "held"), [("auto", "retained"), ("auto", "parked"), ("bk", "again"), ("ghost", "retained")]
)
def test_norms_now_and_sums_later_is_flat_clipping(engine: str, held: str) -> None:
    whole, batch = language_model("gpt2", False), batch_of(6)
    stages = [keep_stage(copy.deepcopy(whole), k, 2) for k in range(2)]
    expected = attach(whole, clip_norm=2.0).backward(example_losses(whole, batch))
    clippers = [attach(stage, clip_norm=2.0, engine=engine) for stage in stages]
    measured = []
    for hidden, received, losses, first, last in two_forwards(stages, clippers, batch):
        behind = clippers[1].measure(Roots.of_losses(losses, inputs=[received], owner=last), held=held)
        roots = Roots.of_outputs([hidden], behind.input_gradients, owner=first)
        measured.append((clippers[0].measure(roots, held=held), behind))
    assert all(p.grad is None for stage in stages for p in stage.parameters())
    reports = []
    for parts in measured:
        total = parts[0].sq_norms + parts[1].sq_norms
        reports.append(parts[0].finish(total))
        parts[1].finish(total)
    torch.testing.assert_close(torch.cat([r.norms for r in reports], 1), expected.norms)
    assert 0 < int(expected.clipped[0]) == sum(int(r.clipped[0]) for r in reports)
    assert all((m.parked_bytes > 0) == (held == "parked") for parts in measured for m in parts)
    given = dict(whole.named_parameters())
    for stage in stages:
        for name, param in stage.named_parameters():
            torch.testing.assert_close(param.grad, given[name].grad)


def test_an_example_that_is_not_finite_adds_nothing_in_any_stage() -> None:
    stages = [nn.Linear(3, 4), nn.Linear(4, 1)]
    for stage in stages:
        nn.init.normal_(stage.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    clippers = [attach(stage, clip_norm=0.1) for stage in stages]
    for rows in (slice(1, None), slice(None)):  # without the bad example, then with it
        for stage in stages:
            stage.zero_grad()
        given = x.clone()
        given[0] = torch.nan
        hidden = stages[0](given[rows])
        received = hidden.detach().requires_grad_()
        losses = stages[1](received).squeeze(1)
        behind = clippers[1].backward_from(Roots.of_losses(losses, inputs=[received]))
        clippers[0].backward_from(Roots.of_outputs([hidden], behind.input_gradients))
        found = [p.grad.clone() for stage in stages for p in stage.parameters()]
        if rows == slice(1, None):
            expected = found
    torch.testing.assert_close(found, expected)


class Mixes(nn.Module):
    """Looks at what enters through a statistic of the batch; its own parameter is used on the rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.detach()) + hidden - hidden.mean(0)


def test_a_stage_whose_input_gradients_mix_examples_is_refused() -> None:
    stage = Mixes()
    clipper = attach(stage)
    received = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = stage(received)
    gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward_from(Roots.of_outputs([out], [gradient], inputs=[received]))
    assert all(p.grad is None for p in stage.parameters())


def test_what_has_no_stages_is_refused_by_name() -> None:
    tied = language_model("gpt2", False)
    tied.lm_head.weight = tied.transformer.wte.weight
    with pytest.raises(UserError, match="tied"):
        device_groups(tied, 2)
    with pytest.raises(UserError, match="4 blocks"):
        device_groups(language_model("gpt2", True), 5)
    frozen = language_model("gpt2", True)
    for name, param in frozen.named_parameters():
        param.requires_grad_(".h.3." in name)
    with pytest.raises(UserError, match="nothing trains on device 0"):
        device_groups(frozen, 2)
    with pytest.raises(UserError, match="not Sequential"):
        keep_stage(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0, 2)
    assert [bounds(12, 5)[k + 1] - bounds(12, 5)[k] for k in range(5)] == [2, 2, 3, 2, 3]
