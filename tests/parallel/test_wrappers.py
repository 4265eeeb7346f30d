"""What people put around a model, and what one process does alone: the same sums, or a refusal, and nobody waits for ever."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dpexp import PrivacyEngine
from dpexp.clipping import attach
from dpexp.errors import UserError
from dpexp.parallel import Ranks
from dpexp.parallel.sharded import shard
from tests.parallel.cases import Case, check_same, dataset, losses, made, run, whole
from tests.parallel.pool import run_ranks
from tests.versions import needs_torch

CASE = Case("mlp", pieces=3)


class Holder(nn.Module):
    """As a model around a wrapped one; its buffer is what DistributedDataParallel copies in every forward."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        inner.register_buffer("unit", torch.ones(1))
        self.inner = DistributedDataParallel(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def summed(ranks: Ranks, wrap: Callable[[nn.Module], nn.Module], own: bool = False) -> dict[str, Tensor]:
    """Three passes; the first two, or all where a rank adds up by its `own`, without a reduction."""
    model = made(CASE)
    wrapped = wrap(model) if ranks.several else model
    clipper = attach(wrapped, clip_norm=0.5)
    for number in range(3):
        rows = list(range(4 * number, 4 * number + 4))[ranks.rank :: ranks.size]
        apart = ranks.several and (own or (number < 2 and isinstance(wrapped, DistributedDataParallel)))
        with wrapped.no_sync() if apart else nullcontext():
            clipper.backward(losses(CASE, wrapped, list(dataset("mlp")[rows])))
    if own:
        ranks.sum_([p.grad for p in model.parameters()])
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def all_summed(ranks: Ranks) -> list[dict[str, Tensor]]:
    return [
        summed(ranks, DistributedDataParallel),
        summed(ranks, DistributedDataParallel, own=True),
        summed(ranks, Holder),
    ]


def test_parts_add_up_whoever_adds_them_and_wherever_the_wrapper_is(tmp_path: Path) -> None:
    expected = summed(Ranks(), nn.Identity)
    for found in run_ranks(2, tmp_path, all_summed):
        for sums in found:
            for name, value in expected.items():
                torch.testing.assert_close(sums[name], value, msg=lambda m, name=name: f"{name}: {m}")


def unready(ranks: Ranks) -> list[dict[str, Tensor]]:
    """Sums of passes whose forwards have not made the wrapper ready: its module's own, and one under ``no_sync()``."""
    found = []
    for direct in (True, False):
        model = made(CASE)
        wrapped = DistributedDataParallel(model) if ranks.several else model
        clipper = attach(wrapped, clip_norm=0.5)
        for number in range(3):
            rows = list(range(4 * number, 4 * number + 4))[ranks.rank :: ranks.size]
            with nullcontext() if direct or not ranks.several else wrapped.no_sync():
                lost = losses(CASE, model if direct else wrapped, list(dataset("mlp")[rows]))
            clipper.backward(lost)
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def test_sums_are_added_up_whether_a_forward_has_made_the_wrapper_ready_or_not(tmp_path: Path) -> None:
    expected = unready(Ranks())
    for found in run_ranks(2, tmp_path, unready):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


class MeanBack(torch.autograd.Function):
    """The identity; a gradient is multiplied by a mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 10 * ctx.saved_tensors[0].mean().abs())


class Mixing(nn.Module):
    """Examples meet in its backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(MeanBack.apply(self.first(x)))


def mixed_behind(ranks: Ranks) -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(Mixing())
    clipper = attach(model)
    return told_by(lambda: clipper.backward(losses(CASE, model, list(dataset("mlp")[:4]))))


def test_what_goes_back_within_a_wrapper_is_looked_at(tmp_path: Path) -> None:
    for told in run_ranks(2, tmp_path, mixed_behind):
        assert "the gradient of what one example gets out of the model changes" in told


# of each rank in each pass
TURNS = ((4, 0), (0, 3), (0, 0), (2, 2), (0, 4))


def by_turns(
    ranks: Ranks, wrap: Callable[[nn.Module], nn.Module], late: bool = False
) -> list[dict[str, Tensor]]:
    """The sums of passes in which some ranks have no examples, and do not go through the model."""
    model = made(CASE)
    clipper = attach(model, clip_norm=0.5) if late else None
    wrapped = wrap(model) if ranks.several else model
    clipper, found, start = clipper or attach(wrapped, clip_norm=0.5), [], 0
    for turn in TURNS:
        sizes = turn if ranks.several else (sum(turn),)
        rows = list(range(start, start + sum(turn)))[sum(sizes[: ranks.rank]) :][: sizes[ranks.rank]]
        start += sum(turn)
        model.zero_grad()
        clipper.backward(losses(CASE, wrapped, list(dataset("mlp")[rows])) if rows else torch.zeros(0))
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def with_buffer(model: nn.Module) -> nn.Module:
    model.register_buffer("unit", torch.ones(1))
    return DistributedDataParallel(model)


def all_by_turns(ranks: Ranks) -> list[list[dict[str, Tensor]]]:
    wraps = (DistributedDataParallel, with_buffer, Holder)
    return [by_turns(ranks, wrap) for wrap in wraps] + [by_turns(ranks, with_buffer, late=True)]


def test_a_rank_without_examples_takes_part_in_its_own_sum_and_not_in_the_next_one(tmp_path: Path) -> None:
    expected = by_turns(Ranks(), nn.Identity)
    for of_rank in run_ranks(2, tmp_path, all_by_turns):
        for found in of_rank:
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs)


def hooked(hook: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


def told_by(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def engine_of(folder: Path, model: nn.Module, **changes: Any) -> PrivacyEngine:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    settings = dict(batch_size=9, steps=4, noise_multiplier=1.0, delta=1e-3, checkpoint_every=0) | changes
    return PrivacyEngine(model, optimizer, dataset("mlp"), folder=folder, **settings)


def trained(engine: PrivacyEngine, model: nn.Module, size: int = 3) -> None:
    for batch in engine.batches(physical_batch_size=size):
        engine.step(losses(CASE, model, batch))


def joined(folder: Path) -> None:
    wrapped = DistributedDataParallel(made(CASE))
    with engine_of(folder, wrapped) as engine, wrapped.join():
        trained(engine, wrapped)


def wrapped_late(folder: Path) -> None:
    model = made(CASE)
    with engine_of(folder, model) as engine:
        trained(engine, DistributedDataParallel(model), size=64)


def ignored() -> None:
    model = made(CASE)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    wrapped = DistributedDataParallel(model)
    attach(wrapped).backward(losses(CASE, wrapped, list(dataset("mlp")[:2])))


def redundant(folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = made(CASE)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    PrivacyEngine(model, optimizer, dataset("mlp"), folder=folder, batch_size=9, steps=4, epsilon=8)


def half_wrapped() -> None:
    model = made(CASE)
    model[0] = DistributedDataParallel(model[0])
    attach(model).backward(losses(CASE, model, list(dataset("mlp")[:2])))


def whole_models(ranks: Ranks, folder: Path) -> tuple[dict[str, str], dict[str, Any], int]:
    def static(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, static_graph=True)

    told = {
        "static_graph": told_by(lambda: summed(ranks, static)),
        "static_graph=True": told_by(lambda: engine_of(folder / "static", static(made(CASE)))),
        "join()": told_by(lambda: joined(folder / "joined")),
        "wrap first": told_by(lambda: wrapped_late(folder / "late")),
        "outside of DistributedDataParallel": told_by(half_wrapped),
        "is ignored by it": told_by(ignored),
        "replicate()": told_by(lambda: attach(replicate(made(CASE)))),
        "bf16_compress_hook": told_by(lambda: summed(ranks, hooked(default_hooks.bf16_compress_hook))),
        "powerSGD_hook": told_by(lambda: summed(ranks, hooked(powerSGD_hook.powerSGD_hook))),
        "ZeroRedundancyOptimizer": told_by(lambda: redundant(folder / "zero")),
        "the model (0.weight) of rank 1 differs": told_by(
            lambda: engine_of(folder / "apart", nn.Sequential(nn.Linear(10, 3 + ranks.rank)))
        ),
    }
    with (wrapped := with_buffer(made(CASE))).no_sync():
        engine = engine_of(folder / "unsynchronised", wrapped)
    with engine:
        trained(engine, wrapped, size=1)
    found = run(CASE, folder / "held", Holder, ranks=ranks.size)
    found["weights"] = {name.replace("inner.module.", ""): w for name, w in found["weights"].items()}
    model = made(CASE)
    with engine_of(folder / "saved", model) as engine:
        for batch in engine.batches(physical_batch_size=3):
            if engine.step(losses(CASE, model, batch)) and ranks.writes:
                engine.save(folder / "copy")
        engine.load(folder / "copy")
        return told, found, engine.steps_taken


def test_a_wrapper_is_kept_silent_or_refused_and_rank_0_may_save_alone(tmp_path: Path) -> None:
    expected = run(CASE, tmp_path / "alone")
    (tmp_path / "ranks").mkdir()
    for told, found, taken in run_ranks(2, tmp_path / "ranks", whole_models, tmp_path):
        for words, text in told.items():
            assert words in text
        check_same(found, expected, CASE)
        assert taken == 4


def divided(ranks: Ranks) -> dict[str, Tensor]:
    """A sum under the factor that somebody has told FSDP to divide by."""
    model = shard(made(CASE))
    clipper = attach(model, clip_norm=0.5)
    model.set_gradient_divide_factor(0.25)
    clipper.backward(losses(CASE, model, list(dataset("mlp")[list(range(12))[ranks.rank :: 2]])))
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@needs_torch(2, 15)
def test_no_divisor_of_fsdp_changes_a_sum(tmp_path: Path) -> None:
    expected = summed(Ranks(), nn.Identity)
    for found in run_ranks(2, tmp_path, divided):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def alone_with_shards(ranks: Ranks, folder: Path) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))["shards"]
    told = {
        "reduce_dtype=torch.float32": told_by(lambda: attach(fully_shard(made(CASE), mp_policy=half))),
        "sharded over 1 of 2 processes": told_by(
            lambda: engine_of(folder / "part", fully_shard(made(CASE), mesh=mesh))
        ),
    }

    model = shard(made(CASE))
    told["leave secure out"] = told_by(lambda: engine_of(folder / "secure", model, secure=True))

    def pieces_of_two_sizes() -> None:
        model = shard(made(CASE))
        with engine_of(folder / "sizes", model) as engine:
            trained(engine, model, size=2 + ranks.rank)

    def saved_alone() -> None:
        model = shard(made(CASE))
        with engine_of(folder / "alone", model) as engine:
            for batch in engine.batches(physical_batch_size=3):
                if engine.step(losses(CASE, model, batch)) and ranks.writes:
                    engine.save()

    def with_each_piece(change: Callable[[nn.Module], None]) -> None:
        model = made(CASE)
        model.register_module("teacher", nn.Linear(10, 3).requires_grad_(False))
        model.forward = lambda x: nn.Sequential.forward(model[:5], x) - model.teacher(x)
        shard(model)
        with engine_of(folder / change.__name__, model) as engine:
            for batch in engine.batches(physical_batch_size=2):
                engine.step(losses(CASE, model, batch))
                change(model)

    @torch.no_grad()
    def follow(model: nn.Module) -> None:
        model.teacher.weight.mul_(0.9)

    @torch.no_grad()
    def enlarge(model: nn.Module) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.to_local().mul_(2)

    told["the weights were changed in the middle of a batch"] = told_by(lambda: with_each_piece(follow))
    told["was written to in the middle of a batch"] = told_by(lambda: with_each_piece(enlarge))

    def evaluated_alone() -> None:
        model = shard(made(CASE))
        with engine_of(folder / "evaluated", model) as engine:
            for batch in engine.batches(physical_batch_size=64):
                if engine.step(losses(CASE, model, batch)) and not ranks.writes:
                    losses(CASE, model, batch)

    told["rank 1 has come to the sharded model, and rank 0 to a step"] = told_by(evaluated_alone)
    told["(physical_batch_size) of rank 1 differs"] = told_by(pieces_of_two_sizes)
    told["rank 1 has come to a step, and rank 0 to save()"] = told_by(saved_alone)
    return told


@needs_torch(2, 15)
def test_with_shards_who_goes_alone_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for told in run_ranks(2, tmp_path / "ranks", alone_with_shards, tmp_path):
        for words, text in told.items():
            assert words in text


def left_alone(ranks: Ranks, folder: Path) -> str:
    model = made(CASE)
    engine = engine_of(folder, model)
    if not ranks.writes:
        return "gone"
    return told_by(lambda: trained(engine, model))


def test_who_waits_for_a_process_that_has_ended_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    waited, gone = run_ranks(2, tmp_path / "ranks", left_alone, tmp_path / "run")
    assert "another process of this run has ended" in waited
    assert gone == "gone"


class Experts(nn.Module):
    """Sends whole examples to one of two layers, and leaves out a layer that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = torch.zeros_like(x), (x[:, 0] > 0).long()
        for number, expert in enumerate(self.inner):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return self.head(out)


def one_clips_otherwise(ranks: Ranks, wrap: Callable[[nn.Module], nn.Module], number: int) -> None:
    """Passes of which one has other thresholds on rank 1."""
    model = wrap(made(CASE))
    clipper = attach(model, clip_norm=0.5, groups="layer")
    for turn in range(number + 1):
        if ranks.rank and turn == number:
            clipper.thresholds = 2 * clipper.thresholds
        clipper.backward(losses(CASE, model, list(dataset("mlp")[[0, 1, 2]])))


def routed(ranks: Ranks, columns: tuple[tuple[float, ...], ...]) -> None:
    """A pass in which the first columns of a rank's examples choose their experts."""
    x = torch.randn(len(columns[ranks.rank]), 10)
    x[:, 0] = torch.tensor(columns[ranks.rank])
    torch.manual_seed(0)
    model = shard(Experts())
    attach(model).backward(
        nn.functional.cross_entropy(model(x), torch.zeros(len(x)).long(), reduction="none")
    )


def sums_that_do_not_fit(ranks: Ranks, sharded: bool) -> dict[str, str]:
    if not sharded:
        return {"thresholds": told_by(lambda: one_clips_otherwise(ranks, DistributedDataParallel, 2))}
    return {
        "thresholds": told_by(lambda: one_clips_otherwise(ranks, shard, 0))
        + told_by(lambda: one_clips_otherwise(ranks, shard, 5)),
        # as many experts on both ranks, of which torch would make one of two halves; and one more on rank 0
        "the same modules in the same order": told_by(lambda: routed(ranks, ((1.0, 1.0), (-1.0, -1.0))))
        + told_by(lambda: routed(ranks, ((1.0, -1.0), (1.0, 1.0)))),
    }


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=needs_torch(2, 15))])
def test_sums_of_ranks_that_clip_otherwise_or_run_other_modules_are_not_added(
    tmp_path: Path, sharded: bool
) -> None:
    for told in run_ranks(2, tmp_path, sums_that_do_not_fit, sharded):
        for words, text in told.items():
            assert words in text


def ended(ranks: Ranks, wrap: Callable[[nn.Module], nn.Module]) -> str:
    model = wrap(made(CASE))
    clipper = attach(model, clip_norm=0.5)
    batch = list(dataset("mlp")[[0, 1, 2]])
    found = losses(CASE, model, batch)
    return told_by(lambda: clipper.backward(found)) if ranks.writes else "gone"


@pytest.mark.parametrize("wrap", [DistributedDataParallel, pytest.param(shard, marks=needs_torch(2, 15))])
def test_a_clipper_says_that_another_rank_has_ended(tmp_path: Path, wrap: Any) -> None:
    assert "another process of this run has ended" in run_ranks(2, tmp_path, ended, wrap)[0]
