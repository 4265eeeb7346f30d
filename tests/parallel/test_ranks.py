"""What processes tell each other."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dpexp.errors import UserError
from dpexp.parallel import ALONE, Ranks, joined
from dpexp.parallel.meeting import fresh
from dpexp.parallel.ranks import ToldElsewhere, _buckets
from tests.parallel.pool import run_ranks


def refusal(call, kind=UserError):
    try:
        call()
    except kind as error:
        return type(error), str(error)
    return None


def fail():
    raise UserError("the disk is full")


def talk(ranks: Ranks):
    mine = float(ranks.rank + 1)
    sums = [torch.full((3, 2), mine), torch.full((4,), mine, dtype=torch.float64), torch.full((2, 5), mine).T]
    # messages of their own, between those that share one
    large = [torch.full((512, 1024), mine), torch.full((512, 1024), 2 * mine).T]
    ranks.sum_([sums[0], large[0], sums[1], large[1], sums[2]])
    copied = torch.full((2, 3), mine).T
    odd = [torch.full((2,), mine + 1j), torch.full((), mine, dtype=torch.int16), torch.zeros(0)]
    odd.append(torch.full((3,), mine).to(torch.float8_e4m3fn))
    ranks.copy_([copied, *odd])
    return {
        "rank": ranks.rank,
        "writes": ranks.writes,
        "broadcast": ranks.broadcast({"from": ranks.rank}),
        "gather": ranks.gather(ranks.rank),
        "once": ranks.once(lambda: f"done by {ranks.rank}"),
        "failed": refusal(lambda: ranks.once(fail)),
        "agree": refusal(lambda: ranks.agree("the data", "abc")),
        "differ": refusal(lambda: ranks.agree("the data", f"{ranks.rank} of it")),
        "nested": refusal(lambda: ranks.agree("settings", {"seed": 1, "optim": {"lr": 0.1 + ranks.rank}})),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
        "sums": [tensor.tolist() for tensor in sums],
        "large": [tensor.unique().tolist() for tensor in large],
        "copied": copied.unique().tolist(),
        "odd": [tensor.to(torch.complex64).tolist() for tensor in odd],
        "first": ranks.first(lambda: f"done by {ranks.rank}"),
        "failed first": refusal(lambda: ranks.first(fail)),
    }


def test_what_ranks_tell_each_other(tmp_path: Path):
    first, second = run_ranks(2, tmp_path, talk)
    assert [first["rank"], second["rank"]] == [0, 1]
    assert [first["writes"], second["writes"]] == [True, False]
    assert first["failed"] == (UserError, "the disk is full")
    assert second["failed"] == (ToldElsewhere, "rank 0: the disk is full")
    assert first["failed first"] == first["failed"]
    assert second["failed first"] == second["failed"]
    assert [first["first"], second["first"]] == ["done by 0", "done by 1"]
    # one of them prints it
    assert [first["differ"][0], second["differ"][0]] == [UserError, ToldElsewhere]
    for found in (first, second):
        assert found["broadcast"] == {"from": 0}
        assert found["gather"] == [0, 1]
        assert found["once"] == "done by 0"
        assert found["agree"] is None
        assert "the data of rank 1 differs from that of rank 0" in found["differ"][1]
        assert (
            "settings (optim.lr) of rank 1 differs from that of rank 0: 1.1, and not 0.1."
            in found["nested"][1]
        )
        assert found["any"] == [True, False]
        assert found["sums"] == [[[3.0, 3.0]] * 3, [3.0] * 4, [[3.0, 3.0]] * 5]
        assert found["large"] == [[3.0], [6.0]]
        assert found["copied"] == [1.0]
        assert found["odd"] == [[1 + 1j] * 2, 1, [], [1] * 3]


def left_alone(ranks: Ranks):
    """Rank 1 ends; rank 0 waits for it as FSDP2 and the stages of a pipeline do, in a message of torch's own."""
    if not ranks.writes:
        dist.destroy_process_group()
        return None

    def wait() -> None:
        with joined():
            dist.all_reduce(torch.zeros(1))

    return refusal(wait)


def test_who_is_gone_is_told_in_words_also_by_messages_of_torch(tmp_path: Path):
    told, _ = run_ranks(2, tmp_path, left_alone)
    assert "another process of this run has ended" in told[1]


def test_a_store_is_shared_by_the_living_alone():
    """Of a first life rank 1 dies before, and after, it has met rank 0; the second life finds what they left behind."""
    store, long = dist.HashStore(), timedelta(seconds=60)
    for numbers in ([0], [0, 1]):
        with ThreadPoolExecutor() as pool:
            brief = long if len(numbers) == 2 else timedelta(seconds=0.2)
            store.set_timeout(brief)
            lives = [pool.submit(fresh, store, rank, 2, brief) for rank in numbers]
            if len(numbers) == 2:
                for rank, life in enumerate(lives):
                    life.result().set(f"address of {rank}", "dead")
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda rank: fresh(store, rank, 2, long), range(2))
    assert not first.check(["address of 0"])
    first.set("address of 0", "alive")
    assert second.get("address of 0") == b"alive"


def test_alone_nothing_is_sent():
    tensor = torch.ones(2)
    ALONE.sum_([tensor])
    ALONE.copy_([tensor])
    ALONE.agree("anything", object())
    assert tensor.tolist() == [1.0, 1.0]
    assert (ALONE.gather(3), ALONE.broadcast(4), ALONE.once(lambda: 5)) == ([3], 4, 5)
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.writes
    assert not ALONE.several


def test_large_sums_travel_alone_and_small_ones_share_a_bucket():
    tensors = [torch.zeros(n) for n in (10, 7 << 20, 5, 1 << 18, 3)]
    buckets = _buckets(tensors)
    assert [[len(t) for t in bucket] for bucket in buckets] == [[7 << 20], [1 << 18], [10, 5, 3]]
