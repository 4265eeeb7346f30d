"""Models that `fully_shard` has cut: sums, weights, noise and checkpoints are those of one process."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dpexp import PrivacyEngine
from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from dpexp.errors import UserError
from dpexp.parallel import ALONE, Ranks
from dpexp.parallel.sharded import blocks_of, filled, held_whole, shard, skeleton_of
from dpexp.parallel.sharing import sharing
from dpexp.privacy.correlated import CorrelatedNoise
from dpexp.privacy.fingerprint import checksum
from dpexp.privacy.noise import KeyedGenerator, add_gaussian_
from dpexp.privacy.sampling import PoissonSampler
from dpexp.schemas import GenerationConfig
from dpexp.tasks.decoding import Context, Written, decode
from dpexp.tasks.target_loss import example_losses
from tests.parallel.cases import EXAMPLES, MODELS, Case, check_same, dataset, losses, made, run, whole
from tests.parallel.pool import run_ranks
from tests.pipeline.models import batch_of, language_model
from tests.training.mixing_tasks import Balanced
from tests.training.tiny import make_trainer, tiny_run, train
from tests.versions import needs_torch

pytestmark = needs_torch(2, 15)

CASES = [
    Case("mlp", "flat"),
    Case("mlp", "adaptive", pieces=3),
    Case("mlp", "layer", batch_size=1.0),  # most shares are empty, and some batches
    Case("gpt2", "flat", pieces=3),
    Case("gpt2", "adaptive", precision="bf16"),
    Case("vit", "layer", engine="ghost"),
    Case("llama", "flat", "lora", pieces=3),
    Case("llama", "layer", checkpointing=True),
    Case("llama", "device", pieces=3),
]  # fmt: skip


def found_by(ranks: Ranks, folder: Path, cases: list[Case]):
    return [run(case, folder / f"sharded-{case}", shard, ranks=ranks.size) for case in cases]


def test_two_processes_with_shards_are_one(tmp_path: Path):
    alone = [run(case, tmp_path / f"alone-{case}") for case in CASES]
    for results in run_ranks(2, tmp_path, found_by, tmp_path, CASES):
        for case, found, expected in zip(CASES, results, alone, strict=True):
            check_same(found, expected, case)


def beside_a_gpu(ranks: Ranks) -> set[str]:
    """Kinds of devices over which a model on the CPU is cut, on a machine that has a GPU."""
    torch._C._get_accelerator = lambda *arguments: torch.device("cuda")
    return {p.device_mesh.device_type for p in shard(made(Case("gpt2"))).parameters()}


def test_a_model_is_cut_where_it_lies(tmp_path: Path):
    assert run_ranks(2, tmp_path, beside_a_gpu) == [{"cpu"}, {"cpu"}]


def cut(model: nn.Module, **options) -> nn.Module:
    """As somebody shards a model by hand."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def by_hand(ranks: Ranks, folder: Path, case: Case, shapes: list[tuple[int, int]]):
    """HSDP on meshes of replicas × shards, and parameters that stay on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy

    ways = {
        f"{shape}": {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))}
        for shape in shapes
    }
    ways["offload"] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    return [
        run(case, folder / name, lambda model, way=way: cut(model, **way), ranks=ranks.size)
        for name, way in ways.items()
    ]


def test_replicas_of_shards_and_offloaded_shards_are_one_process(tmp_path: Path):
    case = Case("gpt2", "adaptive", pieces=2)
    expected = run(case, tmp_path / "alone")
    for results in run_ranks(2, tmp_path, by_hand, tmp_path, case, [(2, 1), (1, 2)]):
        for found in results:
            check_same(found, expected, case)


@pytest.mark.skipif(not os.environ.get("DPEXP_ALL_RANKS"), reason="four processes: make test-ranks")
def test_two_replicas_of_two_shards_are_one_process(tmp_path: Path):
    case = Case("gpt2", "adaptive", pieces=2)
    expected = run(case, tmp_path / "alone")
    for results in run_ranks(4, tmp_path, by_hand, tmp_path, case, [(2, 2)]):
        for found in results:
            check_same(found, expected, case)


def summed_in_bf16(ranks: Ranks, case: Case):
    """What several passes leave in the gradients, with weights in bfloat16 and sums reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = cut(made(case), mp_policy=policy) if ranks.several else made(case).to(torch.bfloat16)
    clipper = attach(model, "layer", 0.05)
    rows = list(range(12))[ranks.rank :: ranks.size]
    for _ in range(3):
        model.zero_grad()
        batch = [values[rows] for values in dataset(case.model).tensors]
        # FSDP casts what enters a module to the weights' type
        batch = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in batch]
        clipper.backward(losses(case, model, batch))
    types = {p.grad.dtype for p in model.parameters()}
    return types, {name: whole(p.grad).float() for name, p in model.named_parameters()}


def test_a_mixed_precision_policy_clips_what_bfloat16_weights_give(tmp_path: Path):
    for case in (Case("mlp"), Case("gpt2")):
        _, expected = summed_in_bf16(Ranks(), case)
        for types, found in run_ranks(2, tmp_path, summed_in_bf16, case):
            assert types == {torch.float32}
            for name, value in expected.items():
                assert float((found[name] - value).norm()) <= 1e-2 * float(value.norm()) + 1e-4, name


def summed_by(ranks: Ranks, name: str, groups: str):
    """Parameters that go through the loop over examples, and the gradients of the last of some passes."""
    case = Case(name)
    model = shard(made(case)) if ranks.several else made(case)
    clipper = attach(model, groups, 0.05)
    rows = list(range(12))[ranks.rank :: ranks.size]
    for _ in range(4):
        model.zero_grad()
        clipper.backward(losses(case, model, [values[rows] for values in dataset(name).tensors]))
    looped = [parameter for parameter, how in clipper.choices.items() if how == LOOPED]
    return looped, {name: whole(p.grad) for name, p in model.named_parameters()}


def all_summed_by(ranks: Ranks):
    return [summed_by(ranks, name, groups) for name in MODELS for groups in ("layer", "flat")]


def test_no_parameter_of_a_known_model_goes_through_the_loop(tmp_path: Path):
    """Also where positions are looked up, classes are copied to the rows, or weights are computed from parameters."""
    expected = all_summed_by(Ranks())
    for found in run_ranks(2, tmp_path, all_summed_by):
        for (looped, ours), (alone, theirs) in zip(found, expected, strict=True):
            assert looped == alone == []
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7)


# where their blocks lie
BLOCKS = {"llama": ".layers.", "gpt2": ".h."}


def formed_in_time(ranks: Ranks, name: str, groups: str):
    """Which parameters' sums wait for the end of the back-propagation, pass by pass, and the gradients of the last one."""
    case, waiting = Case(name), []
    model = shard(made(case))
    clipper = attach(model, groups, 0.05, choice="rule")
    deliver = clipper._shards.deliver
    clipper._shards.deliver = lambda params, sums: (waiting.append(sorted(sums)), deliver(params, sums))
    rows = list(range(12))[ranks.rank :: ranks.size]
    for _ in range(5):
        model.zero_grad()
        clipper.backward(losses(case, model, [values[rows] for values in dataset(name).tensors]))
    return waiting, {name: whole(p.grad) for name, p in model.named_parameters()}


def all_formed_in_time(ranks: Ranks):
    return {
        (name, groups): formed_in_time(ranks, name, groups) for name in BLOCKS for groups in ("layer", "flat")
    }


def test_sums_of_a_block_are_reduced_when_its_back_propagation_ends(tmp_path: Path):
    """Per-layer clipping holds one block's sums at a time, not the model's; flat clipping knows none before the end."""
    for of_cases in run_ranks(2, tmp_path, all_formed_in_time):
        for (name, groups), (waiting, found) in of_cases.items():
            case, alone = Case(name), made(Case(name))
            attach(alone, groups, 0.05).backward(
                losses(case, alone, [values[:12] for values in dataset(name).tensors])
            )
            blocks = [parameter for parameter in found if BLOCKS[name] in parameter]
            assert set(waiting[0]) >= set(blocks)
            # what lies outside of the blocks is last, and in time
            assert waiting[-1] == ([] if groups == "layer" else sorted(blocks))
            for parameter, p in alone.named_parameters():
                torch.testing.assert_close(found[parameter], p.grad, rtol=1e-5, atol=1e-7)


def summed_twice(ranks: Ranks):
    """An engine of two back-propagations, whose losses do not go through the outputs of the model."""
    model = language_model("gpt2", lora=True, dtype=torch.float32)
    model = shard(model) if ranks.several else model
    clipper = attach(model, "flat", 0.05, engine="ghost")
    rows = list(range(8))[ranks.rank :: ranks.size]
    for _ in range(4):
        model.zero_grad()
        clipper.backward(example_losses(model, {name: part[rows] for name, part in batch_of(8).items()}))
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def test_what_a_second_back_propagation_needs_is_whole(tmp_path: Path):
    expected = summed_twice(Ranks())
    for found in run_ranks(2, tmp_path, summed_twice):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


def noisy(tensors):
    add_gaussian_(tensors, [0.5] * len(tensors), KeyedGenerator(b"k" * 32))
    return [whole(tensor) for tensor in tensors]


def parts(ranks: Ranks):
    return drawn(shard(made(Case("gpt2"))))


def drawn(model):
    values = [p.detach().clone() for p in model.parameters()]
    before = checksum(values)
    correlated = [torch.zeros_like(value) for value in values]
    noise = CorrelatedNoise(3, 4, lambda step, attempt: KeyedGenerator(bytes([step]) * 32))
    for step in range(4):
        noise.add_(correlated, [0.5] * len(values), step, 0)
    return before, [*noisy(values), *map(whole, correlated)]


def test_shards_have_the_noise_and_the_checksum_of_the_whole(tmp_path: Path):
    expected, after = drawn(made(Case("gpt2")))
    for found, found_after in run_ranks(2, tmp_path, parts):
        assert found == expected
        assert all(torch.equal(a, b) for a, b in zip(found_after, after, strict=True))


def handed_on(ranks: Ranks, folder: Path, case: Case, steps: int):
    def forget(model: nn.Module) -> nn.Module:
        return shard(model)

    found = run(case, folder, forget, steps=steps, ranks=ranks.size, checkpoint_every=1)
    skeleton = skeleton_of(made(case))
    model = shard(made(case))
    gathered = filled(skeleton, model, keep=ranks.writes)
    same = None if gathered is None else {n: p.detach() for n, p in gathered.named_parameters()}
    return found, same


def test_a_run_moves_between_one_process_and_shards(tmp_path: Path):
    """Finished by shards, read by one process: weights are those that were written, and nothing is charged again."""
    case, folder = Case("gpt2", "adaptive"), tmp_path / "run"
    (found, gathered), (_, nothing) = run_ranks(2, tmp_path, handed_on, folder, case, 3)
    assert (folder / "checkpoint" / "state-3.parts" / ".metadata").exists()
    assert not (folder / "checkpoint" / "state-2.parts").exists()
    again = run(case, folder, steps=3, checkpoint_every=1)
    assert again["charged"] == found["charged"] == 3
    for name, value in again["weights"].items():
        assert torch.equal(value, found["weights"][name])
    assert torch.equal(again["thresholds"], found["thresholds"])
    assert nothing is None
    for name, parameter in made(case).named_parameters():
        assert torch.equal(gathered[name], parameter)


def each_to_its_own_disk(ranks: Ranks, folder: Path, wrap):
    place = folder / f"machine {ranks.rank}"
    place.mkdir(parents=True)
    os.chdir(place)
    try:
        return run(Case(), Path("run"), wrap, steps=1)["charged"]
    except UserError as error:
        return str(error)


def test_a_sharded_run_in_a_folder_of_each_machine_is_refused_before_the_first_step(tmp_path: Path):
    """The next rank 0 would not find the parts; a model that is whole is written by rank 0."""
    for told in run_ranks(2, tmp_path, each_to_its_own_disk, tmp_path / "sharded", shard):
        assert "rank 0 cannot see __1_0.distcp of another rank in " in told
        assert f"{Path('sharded', 'machine 0', 'run', 'checkpoint', 'state-0.parts')}" in told
    assert not (tmp_path / "sharded" / "machine 0" / "run" / "ledger.jsonl").exists()
    assert run_ranks(2, tmp_path, each_to_its_own_disk, tmp_path / "whole", None) == [1, 1]


def without_room(ranks: Ranks, folder: Path) -> str:
    """The disk of rank 1 is full when it writes its part of the first checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not ranks.writes:
        FileSystemWriter.write_data = full
    with pytest.raises(UserError) as caught:
        run(Case(), folder, shard)
    return str(caught.value)


def test_a_part_of_a_checkpoint_that_a_full_disk_does_not_take_is_told_in_words(tmp_path: Path):
    """What torch raises then is no Exception, and would pass by all that speaks to a person."""
    (tmp_path / "ranks").mkdir()
    for told in run_ranks(2, tmp_path / "ranks", without_room, tmp_path / "run"):
        assert told.startswith("rank 1 could not write its part of a checkpoint to")
        assert "No space left on device" in told
    assert not (tmp_path / "run" / "checkpoint" / "latest.json").exists()


def sized(ranks: Ranks, folder: Path) -> int:
    run = tiny_run(steps=2)
    run.runtime.physical_batch_size, run.runtime.parallel = "auto", "fsdp"
    trainer = make_trainer(folder, run, model=made(Case("mlp")), ranks=ranks)
    train(trainer)
    return trainer.physical_batch_size


def test_on_a_cpu_as_many_examples_at_once_are_found_with_shards_too(tmp_path: Path):
    """It was 16, whatever the memory."""
    assert sized(ALONE, tmp_path / "alone") == 32  # no use in more than the logical batch
    assert run_ranks(2, tmp_path, sized, tmp_path / "together") == [32, 32]


def draws_more(ranks: Ranks, folder: Path) -> str:
    """Rank 1 draws all examples, and so has more pieces than rank 0."""
    if not ranks.writes:
        PoissonSampler.draw = lambda self, step, attempt=0: np.arange(EXAMPLES)
    with pytest.raises(UserError) as caught:
        run(Case("mlp", pieces=3), folder, shard, ranks=ranks.size)
    return str(caught.value)


def test_ranks_that_draw_several_samples_do_not_wait_for_each_other(tmp_path: Path):
    for told in run_ranks(2, tmp_path, draws_more, tmp_path / "run"):
        assert "a step (sample) of rank 1 differs" in told
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


class Letters:
    """As much of a tokenizer as decoding asks for."""

    pad_token_id = bos_token_id = eos_token_id = 0

    def batch_decode(self, rows: torch.Tensor, **_: object) -> list[str]:
        return ["".join(chr(97 + token) for token in row if token) for row in rows.tolist()]


def written(ranks: Ranks, wrap=None) -> list[Written]:
    model = made(Case("gpt2")).eval()
    model = wrap(model) if wrap is not None else model
    contexts = [Context("", [], np.array([i + 1], dtype=np.int32)) for i in range(5)]
    settings = GenerationConfig(max_target=4, num_beams=2)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a text waits for those of other processes, which may be shorter")

    held = held_whole(model) if wrap is not None else nullcontext()
    with sharing(ranks), held, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", refuse)
        return decode(model, torch.device("cpu"), Letters(), contexts, settings, rows=2)


def lost_behind_an_evaluation(ranks: Ranks) -> list[float]:
    """Losses whose head is called outside the model, by a model that was held whole before its first pass."""
    model, batch = language_model("gpt2", lora=True), batch_of(4)
    if ranks.several:
        with held_whole(shard(model)), torch.no_grad():
            example_losses(model, batch)
    return example_losses(model, batch).tolist()


def test_a_model_may_be_held_whole_before_its_first_pass(tmp_path: Path):
    """Its outermost part was then cut again behind each forward, and the head found a shard."""
    alone = lost_behind_an_evaluation(ALONE)
    assert run_ranks(2, tmp_path, lost_behind_an_evaluation) == [pytest.approx(alone, rel=1e-5)] * 2


def test_a_sharded_model_writes_what_one_process_writes(tmp_path: Path):
    """Five texts on two ranks: in the last round one rank has nothing to write."""
    alone = written(ALONE)
    assert len({text.text for text in alone}) > 1
    assert run_ranks(2, tmp_path, written, shard) == [alone, alone]


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


def first_weights(ranks: Ranks, folder: Path):
    """Two replicas of one shard, whose processes have drawn their weights by other seeds."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(ranks.rank)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = cut(nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3)), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with PrivacyEngine(
        model,
        optimizer,
        dataset("mlp"),
        folder=folder,
        batch_size=9,
        steps=3,
        noise_multiplier=1.0,
        delta=1e-3,
    ):
        return [p.to_local().clone() for p in model.parameters()]


def test_replicas_of_shards_begin_with_the_same_weights(tmp_path: Path):
    (tmp_path / "ranks").mkdir()
    first, second = run_ranks(2, tmp_path / "ranks", first_weights, tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
