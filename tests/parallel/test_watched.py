"""A loop of one's own whose processes tell each other what their batches hold."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from dpexp.errors import UserError
from tests.parallel.pool import run_ranks
from tests.training.own_loop import losses_of, make, train


def added(tensor):
    dist.all_reduce(tensor)
    return tensor


def gathered(tensor):
    found = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(found, tensor)
    return torch.stack(found)


def told(found, batch):
    """What a log is told, and what rank 0 decides, holds nothing of other examples in losses."""
    heat = torch.tensor(1.0 + dist.get_rank())
    dist.broadcast(heat, 0)
    print(added(found.detach().mean()).item(), added(torch.tensor(len(found))))
    return found / heat


LOOPS = {
    "rows": lambda found, batch: found / added(torch.tensor(float(len(found)))),
    "rows, as a number": lambda found, batch: found / added(torch.tensor(len(found))).item(),
    "a class": lambda found, batch: found / (1 + added((batch[1] == 1).sum())),
    "classes": lambda found, batch: found / (1 + added(torch.bincount(batch[1], minlength=3)))[batch[1]],
    "the largest": lambda found, batch: found / gathered(found.detach().amax()).amax(),
    "as functions": lambda found, batch: (
        found / functional.all_reduce((batch[1] == 1).sum() + 1, "sum", dist.group.WORLD)
    ),
}


def refusal(ranks, folder, weigh):
    engine = make(folder / "run", batch_size=40)
    try:
        train(engine, 100, losses=lambda engine, batch: weigh(losses_of(engine, batch), batch))
    except UserError as error:
        return str(error)
    return "" if engine.finished else "not finished"


@pytest.mark.parametrize("weigh", LOOPS.values(), ids=LOOPS)
def test_losses_do_not_go_by_what_ranks_have_added_up_or_gathered(tmp_path, weigh):
    for said in run_ranks(2, tmp_path, refusal, tmp_path, weigh):
        assert "a number that the loop has made of its batch" in said or "by a number that goes by" in said


def test_what_ranks_tell_each_other_beside_their_losses_is_not_refused(tmp_path):
    kept = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "allgather")}
    assert run_ranks(2, tmp_path, refusal, tmp_path, told) == ["", ""]
    assert kept.items() <= vars(dist.ProcessGroup).items()
