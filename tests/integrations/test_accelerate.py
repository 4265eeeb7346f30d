"""A loop of one's own whose model, optimiser and scheduler Accelerate has prepared."""

from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from dpexp import PrivacyEngine
from dpexp.errors import UserError


@pytest.fixture(autouse=True)
def alone():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def trained(folder: Path, prepared: bool) -> tuple[list[torch.Tensor], float]:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(30, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    given = model, optimizer, scheduler
    used, optimizer, scheduler = accelerator.prepare(*given) if prepared else given
    with PrivacyEngine(
        used, optimizer, torch.utils.data.TensorDataset(x), folder=folder, batch_size=8, steps=3, noise_multiplier=1.0,
        delta=1e-3, noise_seed=1, scheduler=scheduler,
    ) as engine:  # fmt: skip
        for (batch,) in engine.batches(physical_batch_size=4):
            # left in from before
            with accelerator.accumulate(used):
                engine.step(used(batch).square().sum(1))
    return [p.detach() for p in model.parameters()], optimizer.param_groups[0]["lr"]


def test_no_step_is_left_out_while_accelerate_accumulates(tmp_path):
    plain, prepared = trained(tmp_path / "plain", False), trained(tmp_path / "prepared", True)
    assert all(torch.equal(*pair) for pair in zip(plain[0], prepared[0], strict=True))
    assert plain[1] == prepared[1] == pytest.approx(0.1)


def test_a_scaler_is_refused(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UserError, match="mixed_precision='bf16'"):
        PrivacyEngine(
            model, optimizer, torch.utils.data.TensorDataset(torch.zeros(8, 4)), folder=tmp_path, batch_size=4, steps=1,
            noise_multiplier=1.0,
        )  # fmt: skip
