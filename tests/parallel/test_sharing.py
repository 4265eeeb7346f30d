"""Work shared out over ranks: the same results in the same order, each computed once."""

from pathlib import Path

from dpexp.parallel import Ranks
from dpexp.parallel.sharing import by_one, shared_out, sharing, writes
from tests.parallel.pool import run_ranks


def work(ranks: Ranks, items: list[int]):
    mine = []

    def square(item: int) -> int:
        mine.append(item)
        return item * item

    with sharing(ranks):
        found = list(shared_out(items, square))
        told, writer = by_one(lambda: ranks.rank), writes()
    return found, mine, told, writer


def test_each_item_is_worked_on_once_and_told_to_all(tmp_path: Path):
    items = [3, 1, 4, 1, 5]
    (ours, first, told, writer), (theirs, second, told_too, writer_too) = run_ranks(2, tmp_path, work, items)
    assert ours == theirs == [(item, item * item) for item in items]
    assert (first, second) == ([3, 4, 5], [1, 1])
    assert (told, told_too, writer, writer_too) == (0, 0, True, False)


def test_alone_everything_is_done_here():
    assert work(Ranks(), [2, 3]) == ([(2, 4), (3, 9)], [2, 3], 0, True)
