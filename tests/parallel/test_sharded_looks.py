"""Models in shards are looked at like others: what mixes examples is refused, and so are other ways of sharding."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dpexp import PrivacyEngine
from dpexp.clipping import attach
from dpexp.errors import UserError
from dpexp.parallel import Ranks
from dpexp.parallel.sharded import shard
from tests.parallel.cases import EXAMPLES, Case, dataset, losses, made, run
from tests.parallel.pool import run_ranks
from tests.training.mixing_tasks import Balanced
from tests.training.tiny import make_trainer, tiny_run
from tests.versions import needs_torch

pytestmark = needs_torch(2, 15)


class Centred(nn.Linear):
    """Less the mean over one dimension, under no_grad."""

    def __init__(self, dim: int):
        super().__init__(6, 6)
        self.dim = dim

    def forward(self, x):
        h = super().forward(x)
        return (h - h.mean(self.dim, keepdim=True).detach()).flatten(0, 1)


def centred(ranks: Ranks):
    """Tokens in the first dimension, examples in the second; on one rank there are as many of the one as of the other."""
    from torch.distributed.fsdp import fully_shard

    told = []
    for dim in (0, 1):
        torch.manual_seed(0)
        clipper = attach(fully_shard(Centred(dim)))
        outputs = clipper.model(x := torch.randn(4, 4 - ranks.rank, 6)).view(x.shape)
        try:
            clipper.backward(outputs.square().transpose(0, 1).flatten(1).sum(1))
            told.append("taken")
        except UserError as error:
            told.append(str(error))
    return told


def test_with_as_many_tokens_as_examples_shards_are_looked_at_too(tmp_path: Path):
    (own, mixed), _ = run_ranks(2, tmp_path, centred)
    assert own == "taken"
    assert "mixes examples" in mixed


class MeanBack(torch.autograd.Function):
    """The identity; a gradient is multiplied by a mean over the batch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 10 * ctx.saved_tensors[0].mean().abs())


class Meeting(nn.Linear):
    """Examples meet in its backward alone."""

    def forward(self, x):
        return MeanBack.apply(super().forward(x))


def meeting(ranks: Ranks) -> str:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    clipper = attach(fully_shard(nn.Sequential(fully_shard(nn.Linear(6, 6)), fully_shard(Meeting(6, 6)))))
    with pytest.raises(UserError) as caught:
        clipper.backward(clipper.model(torch.randn(5 + ranks.rank, 6)).square().sum(1))
    return str(caught.value)


def test_what_goes_back_through_shards_is_looked_at(tmp_path: Path):
    for told in run_ranks(2, tmp_path, meeting):
        assert "the gradient of what one example gets out of the model changes" in told


def given_back(ranks: Ranks):
    from torch.distributed.fsdp import fully_shard

    def sharded() -> nn.Module:
        torch.manual_seed(0)
        return fully_shard(
            nn.Sequential(fully_shard(nn.Linear(4, 8)), nn.Tanh(), fully_shard(nn.Linear(8, 3)))
        )

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        for p in model.parameters():
            p.grad = None
        model(x).square().sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    x, model = torch.randn(5, 4, generator=torch.Generator().manual_seed(ranks.rank)), sharded()
    clipper = attach(model)
    clipper.backward(model(x).square().sum(1))
    clipper.detach()
    refused = attach(other := sharded())
    with pytest.raises(UserError, match="mixes examples"):
        refused.backward((losses := other(x).square().sum(1)) / losses.mean())
    # what is raised is why, and no error of a clean-up
    refused.detach()
    return gradients(model), gradients(sharded())


def test_a_detached_clipper_gives_a_sharded_model_back_as_it_was(tmp_path: Path):
    for found, expected in run_ranks(2, tmp_path, given_back):
        torch.testing.assert_close(found, expected)


def mirrored(examples):
    x, y = default_collate(examples)
    return [(x + x.flip(0)) / 2, y]


def shortest_first(examples):
    return default_collate(sorted(examples, key=lambda example: float(example[0].norm())))


def spread(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    found = losses(Case(), model, batch)
    return found / found.detach().mean()


def standardised(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return losses(Case(), model, [(batch[0] - batch[0].mean(0)) / batch[0].std(0), batch[1]])


def plain(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return losses(Case(), model, batch)


def went_through(engine: PrivacyEngine, collate, loss):
    for batch in engine.batches(collate):
        engine.step(loss(engine.model, batch))


def mixed_by_loops(ranks: Ranks, folder: Path):
    """What a loop may not make of its batches, whoever holds the weights."""
    pairs = {"users": [i // 2 for i in range(EXAMPLES)], "rows_per_example": 2}
    told = []
    for number, (collate, loss, options) in enumerate(
        [(mirrored, plain, {}), (shortest_first, plain, pairs), (None, spread, {}), (None, standardised, {})]
    ):
        model = shard(made(Case()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine = PrivacyEngine(
            model, optimizer, dataset("mlp"), folder=folder / str(number), batch_size=11, steps=3, noise_multiplier=1.0,
            delta=1e-3, noise_seed=11, **options,
        )  # fmt: skip
        with pytest.raises(UserError) as caught:
            went_through(engine, collate or default_collate, loss)
        engine.close()
        told.append((str(caught.value), engine.ledger.steps_charged))
    run = tiny_run()
    run.task.kind, run.runtime.parallel = "custom", "fsdp"
    with pytest.raises(UserError) as caught:
        make_trainer(folder / "task", run, task=Balanced(), ranks=ranks)
    return [*told, (str(caught.value), 0)]


def test_loops_and_tasks_that_mix_examples_are_refused_with_shards_too(tmp_path: Path):
    words = [
        "collate_fn mixes examples",
        "in an order of its own",
        "the loss of one changes",
        "before they enter the model",
    ]
    (tmp_path / "ranks").mkdir()
    for told in run_ranks(2, tmp_path / "ranks", mixed_by_loops, tmp_path):
        for expected, (text, charged) in zip([*words, "Balanced.losses: "], told, strict=True):
            assert expected in text
            assert charged == 0


def refused(ranks: Ranks, folder: Path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    told = {}

    def refuse(name, model, **options):
        with pytest.raises(UserError) as caught:
            attach(model, **options)
        told[name] = str(caught.value)

    mesh = init_device_mesh("cpu", (ranks.size,))
    refuse("tensor parallel", parallelize_module(made(Case()), mesh, {"0": ColwiseParallel()}))
    half = made(Case())
    fully_shard(half[0])
    refuse("in part", half)
    refuse("opacus", shard(made(Case())), engine="opacus")
    late = made(Case())
    clipper = attach(late)
    shard(late)
    with pytest.raises(UserError) as caught:
        clipper.backward(losses(Case(), late, list(dataset("mlp")[:2])))
    told["late"] = str(caught.value)

    class DeepSpeedEngine(nn.Sequential):
        __module__ = "deepspeed.runtime.engine"

    refuse("deepspeed", DeepSpeedEngine(nn.Linear(2, 2)))

    class FullyShardedDataParallel(nn.Sequential):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    refuse("fsdp1", FullyShardedDataParallel(nn.Linear(2, 2)))

    def split(model: nn.Module) -> nn.Module:
        return parallelize_module(model, mesh, {"0": ColwiseParallel()})

    for name, wrap in (("fsdp1", FullyShardedDataParallel), ("tensor parallel", split)):
        with pytest.raises(UserError) as caught:
            run(Case(), folder / "engine", wrap)
        assert str(caught.value) == told[name]
    return told


def test_other_ways_of_sharding_are_refused_by_name(tmp_path: Path):
    told = run_ranks(2, tmp_path, refused, tmp_path)[0]
    assert not (tmp_path / "engine").exists()
    assert "tensor parallelism" in told["tensor parallel"]
    assert "fully_shard(model) on the whole model too" in told["in part"]
    assert "engine='auto'" in told["opacus"]
    assert "sharded after attach" in told["late"]
    assert "DeepSpeed" in told["deepspeed"]
    assert "FSDP1" in told["fsdp1"]
    assert all("fully_shard" in text or name == "opacus" for name, text in told.items())
