"""What an older torch cannot do exactly is refused, in one sentence that says which one can."""

import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine, torch_versions
from dpexp.clipping import attach
from dpexp.clipping.gradients import numerics
from dpexp.errors import UserError
from dpexp.parallel.sharded import shard
from dpexp.pipeline.runner import check_schedule

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def test_an_older_torch_is_refused_with_one_sentence():
    dependencies = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    assert "torch>=" + ".".join(map(str, torch_versions.LOWEST_TORCH)) in dependencies
    for version in ("2.8.0", "2.15.0+cu130", "2.12.0a0+git1234567", "3.0.0"):
        torch_versions.refuse_untested(version)
    with pytest.raises(ImportError, match=r"this is torch 2\.7\.1\+cu128: pip install 'torch>=2\.8'"):
        torch_versions.refuse_untested("2.7.1+cu128")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_refused_where_gradients_cannot_be_wider(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(torch_versions, "WIDE_GRADIENTS", False)
    model = nn.Linear(3, 1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(
        UserError, match=rf"trained weights of {dtype} need torch 2\.10 or newer, and this is"
    ):
        PrivacyEngine(
            model, optimizer, TensorDataset(torch.ones(9, 3)), folder=tmp_path,
            batch_size=3, steps=1, noise_multiplier=1.0, delta=1e-3,
        )  # fmt: skip


def test_a_wider_gradient_that_torch_would_not_keep_is_refused(monkeypatch):
    monkeypatch.setattr(torch_versions, "WIDE_GRADIENTS", False)
    model = nn.Linear(3, 1).bfloat16()
    model.weight.grad_dtype = torch.float32
    losses = model(torch.ones(2, 3, dtype=torch.bfloat16))[:, 0]
    with pytest.raises(UserError, match=r"grad_dtype=torch\.float32 .* needs torch 2\.10"):
        attach(model).backward(losses)


def test_fully_shard_is_refused_where_it_cannot_wait_for_clipped_sums(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    monkeypatch.delattr(FSDPModule, "set_manual_backward_finalization", raising=False)
    with pytest.raises(UserError, match=r"fully_shard .* needs torch 2\.15 or newer"):
        shard(nn.Linear(3, 1))


def test_pipelines_are_refused_where_schedules_cut_the_batch_themselves(monkeypatch):
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    def step(self, *args, target=None, losses=None, **kwargs):
        """The one of torch 2.8."""

    monkeypatch.setattr(PipelineScheduleSingle, "step", step)
    with pytest.raises(UserError, match=r"runtime=pipeline needs torch 2\.14 or newer"):
        check_schedule("1f1b")


def settings() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_full_float32_under_the_settings_of_torch_2_8(monkeypatch, precision, tf32):
    """A convolution too: that of one example is a matrix product, and follows its setting."""
    before = settings()
    monkeypatch.setattr(numerics, "_PRECISION", torch_versions._settings_of_torch_2_8())
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        for operation, device, inside in (
            ("matmul", "cpu", ("highest", tf32)),
            ("conv", "cpu", ("highest", tf32)),
            ("matmul", "cuda", ("highest", tf32)),
            ("conv", "cuda", (precision, False)),
        ):
            with numerics.full_precision(operation, torch.device(device)):
                assert settings() == inside
            assert settings() == (precision, tf32)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
