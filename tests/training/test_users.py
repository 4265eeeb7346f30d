"""Users as the unit of privacy: whole users are drawn, and what all rows of one do together is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from dp_accounting import GaussianDpEvent
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpexp import PrivacyEngine
from dpexp.auditing.canaries import Without, flip_coins
from dpexp.auditing.estimates import estimates
from dpexp.auditing.white_box import Observer, WithCanaryTable, WithGradientCanaries
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.privacy.keys import LEDGER
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.plan import make_plan
from dpexp.privacy.sampling import stream
from dpexp.privacy.users import Users, of_users
from dpexp.schemas import UnitConfig
from dpexp.tasks.users import ByUser, by_user
from dpexp.train import summarise
from dpexp.training import release
from dpexp.training.identity import refuse_other_data
from tests.training.tiny import TinyTask, counted_noise, make_trainer, run_to_end, tiny_run

# 60 rows: one user with 20, some with three, many with one
NAMES = ["heavy"] * 20 + [f"three {i // 3}" for i in range(15)] + [f"one {i}" for i in range(25)]
MOST = 4
NOBODY = -1


def plain_model() -> nn.Module:
    """Without dropout, so that a sum can be computed again."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 3))


def noiseless(steps: int = 1, batch: float = 20.0, **clip: object):
    run = tiny_run(steps=steps, batch_size=batch, adaptive=False)
    run.clip.groups, run.engine.name, run.privacy.noise_multiplier = "flat", "auto", 0.0
    run.optim.name, run.optim.lr = "sgd", 1.0
    run.unit = UnitConfig("user", file="somewhere", rows=MOST)
    for name, value in clip.items():
        setattr(run.clip, name, value)
    return run


def moved(before: nn.Module, after: nn.Module) -> Tensor:
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return torch.cat([(a.detach() - b.detach()).double().reshape(-1) for a, b in pairs])


def user_gradient(task: TinyTask, users: Users, user: int, seed: int, step: int) -> Tensor:
    """Of the mean loss of the rows that the step takes, in float64."""
    model = plain_model().double()
    rows, weights = users.rows(user, seed, step)
    rows = rows[weights > 0]
    x = torch.stack([task.train[int(r)][0] for r in rows]).double()
    y = torch.stack([task.train[int(r)][1] for r in rows])
    nn.functional.cross_entropy(model(x), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_a_step_takes_some_rows_of_a_user_and_of_nobody_else():
    users = Users(NAMES, MOST)
    assert len(users) == 1 + 5 + 25
    assert [len(rows) for rows in users.members[:7]] == [20, 3, 3, 3, 3, 3, 1]
    seen: set[int] = set()
    for step in range(60):
        rows, weights = users.rows(0, 7, step)
        assert len(set(rows.tolist())) == MOST
        assert np.allclose(weights, 1 / MOST)
        seen |= set(rows.tolist())
    assert seen == set(range(20)), "a heavy user's rows are all seen in time"
    rows, weights = users.rows(1, 7, 0)
    assert rows.tolist() == [20, 21, 22, 20]
    assert np.allclose(weights, [1 / 3, 1 / 3, 1 / 3, 0])
    again = Users(NAMES, MOST)
    assert all((users.rows(0, 7, s)[0] == again.rows(0, 7, s)[0]).all() for s in range(5))
    assert users.sha256() == again.sha256() != Users(NAMES[1:] + NAMES[:1], MOST).sha256()


def test_the_sum_is_that_of_users_clipped_one_by_one(tmp_path: Path):
    task, users = TinyTask(), Users(NAMES, MOST)
    run = noiseless(clip_norm=0.3)
    trainer = make_trainer(tmp_path / "run", run, task=ByUser(task, users), model=plain_model())
    drawn = trainer.stepper.sampler.draw(0, 0)
    assert 5 < len(drawn) < len(users)
    wanted = torch.zeros(sum(p.numel() for p in trainer.model.parameters()), dtype=torch.float64)
    norms = []
    for user in drawn:
        gradient = user_gradient(task, users, int(user), run.seed, 0)
        norms.append(float(gradient.norm()))
        wanted += gradient * min(1.0, 0.3 / norms[-1])
    assert min(norms) < 0.3 < max(norms) or max(norms) > 0.3
    run_to_end(tmp_path / "run", run, task=ByUser(task, users), model=(model := plain_model()))
    assert torch.allclose(moved(plain_model(), model) * 20.0, wanted, atol=2e-6)


def test_the_plan_counts_users_and_the_record_says_so(tmp_path: Path):
    users = Users(NAMES, MOST)
    run = tiny_run(steps=3, batch_size=6.0, adaptive=False)
    run.unit = UnitConfig("user", file="somewhere", rows=MOST)
    trainer = run_to_end(tmp_path / "run", run, task=ByUser(TinyTask(), users))
    plan = trainer.plan
    assert plan is not None
    assert trainer.ledger is not None
    assert (plan.num_examples, plan.sample_rate) == (31, 6 / 31)
    alone = make_plan(num_examples=31, expected_batch_size=6, steps=3, delta="1e-3", noise_multiplier=1.0)
    assert trainer.ledger.epsilons(1e-3) == alone.epsilons()
    assert alone.event() == plan.event()
    outcome = type("Outcome", (), {"metrics": {}, "performance": {}, "wall_s": 0.0, "status": "finished"})
    summary = summarise(run, trainer, outcome, type("Bundle", (), {"source": ""}))
    assert summary["privacy"]["unit"] == "user"
    assert summary["privacy"]["neighbouring"].startswith("add or remove one user with all examples of theirs")
    assert "so the user is zeroed out" in summary["privacy"]["neighbouring"]
    said = " ".join(summary["privacy"]["notes"])
    assert "the unit of privacy is one user" in said
    assert "at most 4 rows of a user" in said
    assert summary["data"]["sha256"]["users"] == users.sha256()
    run.privacy.release = "strict"
    strict = summarise(run, trainer, outcome, type("Bundle", (), {"source": ""}))
    assert strict["data"]["sha256"]["users"] is None, "who gave how many rows is private"
    assert "unit" not in alone.to_dict()
    assert plan.fingerprint() != alone.fingerprint()


@pytest.mark.parametrize("method", ["flat", "layer", "fedavg"])
def test_a_user_with_enormous_rows_moves_the_sum_by_no_more_than_the_threshold(tmp_path: Path, method: str):
    """Leave one user out, in every place: all rows of the heavy one are outliers."""
    task, users = TinyTask(), Users(NAMES, MOST)
    for row in range(20):
        task.train[row][0].mul_(1e3)
    clip = (
        {"method": "fedavg", "local_lr": 0.5, "groups": "layer"} if method == "fedavg" else {"groups": method}
    )
    run = noiseless(batch=31.0, clip_norm=0.25, **clip)
    sums = {}
    for out in (NOBODY, 0, 3, 17):
        trainer = make_trainer(tmp_path / f"{out}", run, task=ByUser(task, users), model=plain_model())
        trainer.stepper.sampler = Without(trainer.stepper.sampler, np.array([out]))
        before = plain_model()
        trainer.take_step(type("I", (), {"requested": False})())
        sums[out] = moved(before, trainer.model) * 31.0
    difference = [float((sums[NOBODY] - sums[out]).norm()) for out in (0, 3, 17)]
    # the weights, which are read here, have less digits than the sums
    assert max(difference) <= 0.25 * (1 + 2e-5)
    # of two layers the rows saturate one
    assert difference[0] >= (0.24 if method == "flat" else 0.17)


def test_an_engine_of_ones_own_loop_takes_users(tmp_path: Path):
    task, users = TinyTask(), Users(NAMES, MOST)
    data = [(x, y) for x, y in task.train]

    def engine(folder: Path, names: list[str]) -> PrivacyEngine:
        model = plain_model()
        return PrivacyEngine(
            model, torch.optim.SGD(model.parameters(), lr=1.0), data, folder=folder, users=names, rows_per_example=MOST,
            batch_size=31, steps=1, noise_multiplier=0.0, delta=1e-3, clip_norm=0.3, noise_seed=1,
        )  # fmt: skip

    one = engine(tmp_path / "one", NAMES)
    assert one.plan.unit == "user"
    assert one.plan.num_examples == 31
    for x, y in one.batches(physical_batch_size=8):
        assert len(x) <= 8 * MOST
        with pytest.raises(UserError, match=r"32 examples: one loss per|28 examples: one loss per"):
            one.step(torch.zeros(5, requires_grad=True))
        one.step(nn.functional.cross_entropy(one.model(x), y, reduction="none"))
    wanted = sum(
        gradient * min(1.0, 0.3 / float(gradient.norm()))
        for gradient in (
            user_gradient(task, users, user, stream(one._steps.key, "rows of users", 0), 0)
            for user in range(31)
        )
    )
    assert torch.allclose(moved(plain_model(), one.model) * 31.0, wanted, atol=5e-6)
    one.write_card(tmp_path)
    assert "one user with all examples of theirs" in (tmp_path / "PRIVACY.md").read_text()
    one.close()
    with pytest.raises(UserError, match="the data differ"):
        engine(tmp_path / "one", NAMES[1:] + NAMES[:1])
    with pytest.raises(UserError, match="users names 59 users for 60 examples"):
        engine(tmp_path / "two", NAMES[1:])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_inputs_and_targets_of_two_users_are_no_list_of_what_each_has(tmp_path: Path, size: int):
    data, model = [(x, y) for x, y in TinyTask().train], plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with PrivacyEngine(
        model, optimizer, data, folder=tmp_path / "run", users=NAMES, rows_per_example=2, batch_size=6, steps=3,
        noise_multiplier=1.0, delta=1e-3,
    ) as engine:  # fmt: skip
        for x, y in engine.batches(physical_batch_size=size):
            engine.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
        assert engine.steps_taken == 3


@pytest.mark.parametrize(
    ("order", "refused"), [(lambda row: -float(row[0][0]), True), (lambda row: 0, False)]
)
def test_a_collate_function_that_sorts_is_refused_where_users_are_protected(
    tmp_path: Path, order: Any, refused: bool
):
    def collate(rows: list[Any]) -> list[torch.Tensor]:
        return default_collate(sorted(rows, key=order))

    model = plain_model()
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), [(x, y) for x, y in TinyTask().train], folder=tmp_path, users=NAMES,
        rows_per_example=MOST, batch_size=31, steps=1, noise_multiplier=1.0, delta=1e-3, clip_norm=0.3, noise_seed=1,
    )  # fmt: skip
    told = pytest.raises(UserError, match="an order of its own") if refused else nullcontext()
    with told:
        for x, y in engine.batches(collate, physical_batch_size=8):
            engine.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
    assert engine.finished is not refused


NUMBERS = [0, 0, 1, 2, 1]


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor])
def test_users_are_told_by_their_names_in_whatever_container_they_come(container: Callable[[Any], Any]):
    """The elements of a tensor are objects of their own, and each row would be a user: ε would be that of a row."""
    assert [rows.tolist() for rows in Users(container(NUMBERS), 2).members] == [[0, 1], [2, 4], [3]]
    names = [f"user {number}" for number in NUMBERS]
    assert [rows.tolist() for rows in Users(np.array(names, object), 2).members] == [[0, 1], [2, 4], [3]]
    assert [rows.tolist() for rows in Users(["Jos\u00e9", "Jose\u0301 ", "Jose"], 2).members] == [[0, 1], [2]]


class Anonymous:
    """Equal to itself alone."""


@pytest.mark.parametrize(
    "odd",
    [None, math.nan, torch.tensor(1), Anonymous(), ["a", "list"], " ", "nan", " NA"],
    ids=["None", "NaN", "tensor", "object", "list", "blank", "text of NaN", "text of NA"],
)
def test_a_name_that_no_other_row_can_share_is_refused(odd: Any):
    with pytest.raises(UserError, match=r"the user of row 2 is .* cannot be told"):
        Users(["a", "a", odd, "b"], 2)


@pytest.mark.parametrize("names", [pd.Categorical(["a", None, "b", None]).codes, ["0", "-1", "1", "-1"]])
def test_rows_without_a_name_are_not_one_user(names: Any):
    """Each of those people would move the sum by twice the threshold: their common gradient is replaced, not taken away."""
    with pytest.raises(UserError, match=r"2 rows have the user -1 \(row 1, say\)"):
        Users(names, 2)
    assert len(Users([-1, 0, 1], 2)) == 3


@pytest.mark.parametrize(
    "names",
    [
        [7, "a", "7"],
        ["7.0", "a", 7],
        ["7", "b", "7.0"],
        [b"a", 7, "a"],
        [7.5, 8, "7.5"],
        ["ann@x.org", 1, "Ann@x.org"],
    ],
)
def test_a_name_that_is_written_in_two_ways_is_not_two_users(names: Any):
    """As pandas writes them, which reads a long column in parts: each user of both parts would have been two."""
    with pytest.raises(
        UserError, match="rows 0 and 2, counted from 0, have users whose names read alike and are not equal"
    ):
        Users(names, 2)
    assert len(Users([7, 7.0, np.int64(7), True, "1.0.1", "v1.0.1", "10", "100"], 2)) == 6


@pytest.mark.parametrize(
    "names",
    [dict.fromkeys(range(5), "a"), {"a", "b"}, "aab", pd.DataFrame({"user": ["a", "b"], "age": [1, 2]})],
    ids=["dict", "set", "text", "table"],
)
def test_what_does_not_hold_a_user_for_each_row_is_refused(names: Any):
    """Whose elements are something else: of a dictionary from rows to users each row would be a user."""
    with pytest.raises(UserError, match="does not hold the user of each row"):
        Users(names, 2)


def test_the_weighted_mean_is_that_of_the_rows():
    losses = torch.arange(8.0)
    weights = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert of_users(losses, weights).tolist() == [0.5, 5.5]
    assert of_users(torch.zeros(0), torch.zeros(0, 4)).shape == (0,)


def test_users_come_from_a_file_a_column_or_are_made_up(tmp_path: Path):
    task = TinyTask()
    file = tmp_path / "users.txt"
    # with the mark that some editors put first: it is no part of the first name
    file.write_text("\n".join(NAMES) + "\n", encoding="utf-8-sig")
    run = tiny_run()
    run.unit = UnitConfig("user", file=str(file), num_users=31, rows=2)
    grouped = by_user(run, task)
    assert grouped.num_examples == 31
    assert grouped.rows_per_example == 2
    assert grouped.data.sha256["users"] == Users(NAMES, 2).sha256()
    run.unit = UnitConfig("user", file=str(file), num_users=30)
    with pytest.raises(UserError, match=r"has 31 users and unit\.num_users=30"):
        by_user(run, task)
    file.write_text("\n".join(NAMES[1:]) + "\n")
    with pytest.raises(UserError, match="names 59 users for 60 training rows"):
        by_user(run, task)
    file.write_text("\n".join(["", *NAMES[1:]]) + "\n")
    with pytest.raises(UserError, match="row 1 has no user"):
        by_user(run, task)
    run.unit = UnitConfig("user", file=str(file), num_users=31, rows=2)
    file.write_text("\n".join(name + " " * (row % 2) for row, name in enumerate(NAMES)) + "\n")
    assert by_user(run, task).data.sha256["users"] == Users(NAMES, 2).sha256()
    table = tmp_path / "train.csv"
    table.write_text("text,author\n" + "".join(f"t,{name}\n" for name in NAMES))
    run.unit, run.data.train = UnitConfig("user", column="author", num_users=31), str(table)
    assert by_user(run, task).data.sha256["users"] == Users(NAMES, 1).sha256()
    run.data.dev = str(tmp_path / "dev.csv")
    for text, told in (
        ("text\nt\n", False),
        ("text,author\nt,zoe\n", False),
        (f"text,author\nt,zoe\nt,{NAMES[0]} \n", True),
    ):
        Path(run.data.dev).write_text(text)
        assert (
            any(
                "1 of 2 rows of dev are of users who are trained on" in n
                for n in by_user(run, task).data.notes
            )
            is told
        )
    run.data.dev = None
    with table.open("a") as file:
        file.write("t,nobody else\nt,zoe\n")
    run.task.held_out = 2
    assert by_user(run, task).num_examples == 31
    table.write_text(table.read_text().replace("zoe", f"{NAMES[0]} "))
    with pytest.raises(
        UserError, match=r"measures on 1 rows of users who are trained on, too \(row 62, say\)"
    ):
        by_user(run, task)
    run.unit, run.data.train, run.data.num_examples = UnitConfig("user", size=7), None, 60
    made = by_user(run, task)
    assert made.num_examples == 9
    assert "users were made up" in made.data.notes[-1]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["unit=user"], "nothing says who they are"),
        (["unit=user", "unit.size=5", "unit.file=x"], "unit.file and unit.size are given"),
        (["unit=user", "unit.file=x"], "unit.num_users is not given"),
        (["unit=user", "unit.column=author", "unit.num_users=9000"], "not given: give it, or unit.file=FILE"),
        (["unit.size=5"], "choose unit=user"),
        (["unit=user", "unit.size=100", "optim.batch_size=600"], "more than the 160 users of sst2"),
        (["unit=user", "unit.size=5", "clip=microbatch"], "clips means of several users together"),
        (["unit=user", "unit.size=5", "unit.rows=0"], "unit.rows=0 must be above 0"),
    ],
)
def test_bad_settings_get_one_sentence(settings: list[str], sentence: str):
    with pytest.raises(UserError) as caught:
        compose(["task=sst2", "scale=demo", "clip=flat", *settings])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_users_says_nothing_of_rows_that_are_held_out():
    own = [
        "data.train=mine.csv",
        "data.text=text",
        "data.label=label",
        "data.num_examples=34",
        "task.labels=[a,b]",
    ]
    users = ["unit=user", "unit.file=names.txt", "unit.num_users=9", "optim.batch_size=3", "clip=flat"]
    run = ["task=text_classification", "scale=demo", "model=bert_tiny", *own, *users]
    compose(run)
    with pytest.raises(UserError, match="says nothing of the 6 rows"):
        compose([*run, "task.held_out=6"])


def test_a_run_that_is_charged_for_some_users_does_not_go_on_with_others(tmp_path: Path):
    """Killed before its first checkpoint, it would: who is two users of then would have paid twice."""
    key, rows = b"k" * 32, {"train": "rows", "users": "two rows each"}
    for users in (rows, rows | {"users": "three rows each"}, rows):
        refuse_other_data(tmp_path, key, users, None)
    Ledger(tmp_path / LEDGER, key).begin_step(0, GaussianDpEvent(1.0), "f")
    refuse_other_data(tmp_path, key, rows, None)
    with pytest.raises(UserError, match="the data differ"):
        refuse_other_data(tmp_path, key, rows | {"users": "three rows each"}, None)


def test_a_run_that_is_charged_for_budgets_by_place_does_not_go_on_with_moved_rows(tmp_path: Path):
    """Who stood in the group of the larger budget, and then in that of the smaller one, would have paid for both."""
    key = b"k" * 32
    refuse_other_data(tmp_path, key, {"train": "rows"}, None, places=True)
    Ledger(tmp_path / LEDGER, key).begin_step(0, GaussianDpEvent(1.0), "f")
    refuse_other_data(tmp_path, key, {"train": "rows"}, None, places=True)
    with pytest.raises(UserError, match="the data differ"):
        refuse_other_data(tmp_path, key, {"train": "the same rows in another order"}, None, places=True)


def test_a_user_is_audited_as_an_example_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gradient canaries in the slots of users: the bound stays below the epsilon of the plan, and comes near it."""
    monkeypatch.setattr(release, "add_gaussian_", counted_noise())
    users = 300
    task = ByUser(TinyTask(2 * users), Users([i // 2 for i in range(2 * users)], 2))
    slots, included = np.arange(users), flip_coins(users, b"k" * 32)
    run = noiseless(steps=2, batch=float(users), clip_norm=0.5)
    run.privacy.noise_multiplier, run.runtime.physical_batch_size = 1.5, "300"
    trainer = make_trainer(
        tmp_path / "run",
        run,
        task=WithGradientCanaries(task, slots, 0.5),
        model=WithCanaryTable(plain_model(), users),
    )
    trainer.stepper.sampler = Without(trainer.stepper.sampler, slots[~included])
    observer = Observer(users, 1.0)
    steps = trainer.stepper.release
    add_noise = steps.add_noise

    def seen(step: int, attempt: int, counts: Tensor) -> Tensor | None:
        noisy = add_noise(step, attempt, counts)
        observer.see(trainer.model.canary_table.weight.grad, 0.5, 0.5 * 1.5)
        return noisy

    steps.add_noise = seen
    for _ in range(2):
        trainer.take_step(type("I", (), {"requested": False})())
    claimed = trainer.ledger.epsilon(1e-3, "pld")
    bounds = [row["epsilon_lower"] for row in estimates(observer.scores, included, [1.0, 0.3], 1e-3, 0.95)]
    assert 0.3 * claimed < max(bounds) <= claimed * (1 - 1e-6)
