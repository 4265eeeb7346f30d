"""Runs of models in shards: noise, checkpoints, sizes, samples and texts are those of one process, or the run stops in words."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.parallel import ALONE, Ranks
from dpexp.parallel.sharded import filled, held_whole, shard, skeleton_of
from dpexp.parallel.sharing import sharing
from dpexp.privacy.correlated import CorrelatedNoise
from dpexp.privacy.fingerprint import checksum
from dpexp.privacy.noise import KeyedGenerator, add_gaussian_
from dpexp.privacy.sampling import PoissonSampler
from dpexp.schemas import GenerationConfig
from dpexp.tasks.decoding import Context, Written, decode
from dpexp.tasks.target_loss import example_losses
from tests.parallel.cases import EXAMPLES, Case, made, run, whole
from tests.parallel.pool import run_ranks
from tests.pipeline.models import batch_of, language_model
from tests.training.tiny import make_trainer, tiny_run, train
from tests.versions import needs_torch

pytestmark = needs_torch(2, 15)


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
