"""Several processes that hold the whole model: the same sample, sums, thresholds, ε and weights as one process."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from dpexp import PrivacyEngine, provenance, record
from dpexp.clipping import attach
from dpexp.errors import UserError
from dpexp.parallel import Ranks
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.sampling import PoissonSampler
from dpexp.training import release
from dpexp.training.batching import physical_batches
from tests.parallel import everything
from tests.parallel.cases import EXAMPLES, Case, NumberedNoise, check_same, dataset, losses, made, run
from tests.parallel.pool import run_ranks
from tests.training.tiny import make_trainer, tiny_run, train, weights

CASES = [
    Case("mlp", "flat"),
    Case("mlp", "adaptive", pieces=3),
    Case("mlp", "layer", batch_size=1.0),  # most shares are empty, and some batches
    Case("mlp", "flat", engine="opacus"),
    Case("gpt2", "flat", pieces=3),
    Case("gpt2", "adaptive", precision="bf16"),
    Case("vit", "layer", engine="ghost"),
    Case("llama", "adaptive", "lora", pieces=3),
    Case("vit", "device", pieces=3),
]  # fmt: skip


def test_every_case_of_the_long_test_can_be_made():
    """Names of layers change with the versions of transformers."""
    for case in {Case(c.model, peft=c.peft) for c in everything.cases()}:
        assert any(p.requires_grad for p in made(case).parameters()), case


def wrapped(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def moved_with_each_step(ranks: Ranks, folder: Path) -> tuple[int, list[float]]:
    case = Case("mlp")
    model = made(case)
    teacher = made(case).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    settings = dict(batch_size=1, steps=8, noise_multiplier=1.0, delta=1e-3, noise_seed=11)
    seen = 0
    with PrivacyEngine(model, optimizer, dataset("mlp"), folder=folder, **settings) as engine:
        for batch in engine.batches():
            if engine.step(losses(case, model, batch)):
                seen += 1
                schedule.step()
                for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                    old.data.lerp_(new.data, 0.1)
    return seen, [float(p.norm()) for p in teacher.parameters()]


def test_a_rank_without_examples_sees_the_step_too(tmp_path: Path):
    """Else what a loop does with each step would be done less often there: how often follows from who was drawn."""
    first, second = run_ranks(2, tmp_path, moved_with_each_step, tmp_path / "run")
    assert first == second
    assert first[0] == 8


def found_by(ranks: Ranks, folder: Path, cases: list[Case]):
    results = []
    for number, case in enumerate(cases):
        wrap = wrapped if number % 2 else None
        results.append(run(case, folder / f"together-{case}", wrap, ranks=ranks.size))
    return results


def test_two_processes_are_one(tmp_path: Path):
    alone = [run(case, tmp_path / f"alone-{case}") for case in CASES]
    for results in run_ranks(2, tmp_path, found_by, tmp_path, CASES):
        for case, found, expected in zip(CASES, results, alone, strict=True):
            check_same(found, expected, case)


def summed(ranks: Ranks, share: bool) -> list[torch.Tensor]:
    case = Case("mlp")
    model = made(case)
    clipper = attach(model, clip_norm=0.5)
    rows = torch.arange(12)[ranks.rank :: ranks.size] if share else torch.arange(12)
    clipper.backward(losses(case, model, list(dataset("mlp")[rows])))
    gradients = [p.grad for p in model.parameters()]
    ranks.sum_(gradients)
    return gradients


def test_a_batch_that_every_process_computes_counts_double(tmp_path: Path):
    """What happens where the loop knows nothing of the other processes, and why such a loop is refused."""
    expected = summed(Ranks(), share=False)
    for doubled in run_ranks(2, tmp_path, summed, False):
        torch.testing.assert_close(doubled, [2 * g for g in expected])
    for shared in run_ranks(2, tmp_path, summed, True):
        torch.testing.assert_close(shared, expected)


def test_shares_hold_every_example_once_and_are_of_one_size():
    rng = torch.Generator().manual_seed(0)
    for ranks in (1, 2, 3, 4):
        for n in (0, 1, 2, 5, 11):
            drawn = torch.randperm(50, generator=rng)[:n].numpy()
            shares = [physical_batches(drawn, lambda i: i % 7, 2, rank, ranks) for rank in range(ranks)]
            together = [int(i) for share in shares for piece in share for i in piece]
            assert sorted(together) == sorted(drawn.tolist())
            sizes = [sum(map(len, share)) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            lengths = [[int(i) % 7 for piece in share for i in piece] for share in shares]
            assert all(found == sorted(found, reverse=True) for found in lengths)


def test_no_example_is_in_two_shares_where_processes_do_not_agree_on_lengths():
    """Lengths of texts that are made anew whenever they are asked for."""
    for n in (1, 2, 5, 11):
        drawn = np.arange(n)
        shares = [
            physical_batches(drawn, np.random.default_rng(rank).permutation(n).item, 2, rank, 3)
            for rank in range(3)
        ]
        assert sorted(int(i) for share in shares for piece in share for i in piece) == drawn.tolist()


class Shuffled(Dataset):
    """Examples that are made when they are asked for, in an order that each process has drawn for itself."""

    def __init__(self, rank: int):
        self.order = np.random.default_rng(rank).permutation(EXAMPLES)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return dataset("mlp")[int(self.order[i])]


class Parts(nn.Module):
    """As made by walking through a set of names, of which each process has an order of its own."""

    def __init__(self, names: str):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(10, 3) for name in names})


def unlike(ranks: Ranks, folder: Path):
    """What two processes have made in two ways; without privacy it would be trained without a word."""

    def told(model, optimizer=None, data=None, **named):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
        settings = dict(batch_size=9, steps=3, noise_multiplier=1.0, delta=1e-3) | named
        with pytest.raises(UserError) as caught:
            PrivacyEngine(
                model, optimizer, data or dataset("mlp"), folder=folder / str(len(named)), **settings
            )
        return str(caught.value)

    def adam(model, steps):
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01 * (1 + ranks.rank))
        for _ in range(steps):
            optimizer.step()
        optimizer.zero_grad()
        return optimizer

    groups, one, two = (made(Case()) for _ in range(3))
    parts = [list(groups[:4].parameters()), list(groups[4].parameters())]
    by_group = [
        {"params": part, "lr": lr} for part, lr in zip(parts[:: 1 - 2 * ranks.rank], (1.0, 0.1), strict=True)
    ]
    return [
        told(made(Case()), data=Shuffled(ranks.rank), data_name="rows 1.0"),
        told(Parts("ab" if ranks.writes else "ba")),
        told(groups, torch.optim.SGD(by_group)),
        told(one, adam(one, ranks.rank)),
        told(two, adam(two, 1)),
    ]


def test_what_two_processes_have_made_in_two_ways_is_refused(tmp_path: Path):
    (tmp_path / "ranks").mkdir()
    for found in run_ranks(2, tmp_path / "ranks", unlike, tmp_path):
        data, model, groups, state, moments = found
        assert "the data (some examples, by their places) of rank 1 differs" in data
        assert (
            "the model (parts.a.weight) of rank 1 differs from that of rank 0: [3, 10] torch.float32 in place 2"
            in model
        )
        assert "the optimizer (groups) of rank 1 differs" in groups
        assert "the optimizer (state) of rank 1 differs" in state
        assert "the optimizer's state of rank 1 differs" in moments


def refusals(ranks: Ranks, folder: Path):
    told = []
    changes = [{"clip_norm": 0.5 + ranks.rank}, {"data_name": f"data {ranks.rank}"}]
    for number, change in enumerate(changes):
        with pytest.raises(UserError) as caught:
            run(Case(), folder / f"refused-{number}", **change)
        told.append(str(caught.value))
    # a rank that has another version, or another numpy, which draws the samples
    others = (
        (provenance, "code_hash", lambda: f"version {ranks.rank}"),
        (np, "__version__", f"{ranks.rank}.0"),
    )
    for where, name, other in others:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, other)
            with pytest.raises(UserError) as caught:
                run(Case(), folder / name)
        told.append(str(caught.value))

    def opened(name):
        model = made(Case())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return PrivacyEngine(
            model, optimizer, dataset("mlp"), folder=folder / name, batch_size=9, steps=3, noise_multiplier=1.0, delta=1e-3
        )  # fmt: skip

    # a learning rate that follows what a rank alone knows
    with opened("apart") as engine:
        try:
            for batch in engine.batches():
                engine.step(losses(Case(), engine.model, batch))
                engine._run.optimizer.optimizer.param_groups[0]["lr"] /= 1 + ranks.rank
        except UserError as error:
            told.append(str(error))
    # one folder is one run, also of several processes
    with opened("held"), pytest.raises(UserError, match="in use"):
        opened("held")
    return told


def test_processes_that_differ_are_refused(tmp_path: Path):
    for rank, (clip_norm, data, code, numpy, rate) in enumerate(run_ranks(2, tmp_path, refusals, tmp_path)):
        assert "the program (numpy) of rank 1 differs from that of rank 0: 1.0, and not 0.0" in numpy
        assert (
            "what is trained on what (clip_norm) of rank 1 differs from that of rank 0: 1.5, and not 0.5"
            in clip_norm
        )
        assert "what is trained on what (data) of rank 1 differs" in data, rank
        assert "step 1 (lr of group 0 of the optimizer) of rank 1 differs" in rate
        assert (
            "the program (code) of rank 1 differs from that of rank 0: version 1, and not version 0" in code
        )
    for folder, charged in (("apart", 1), ("older", 0), ("numpy", 0)):
        ledger = tmp_path / folder / "ledger.jsonl"
        assert len(ledger.read_text().splitlines() if ledger.exists() else []) == charged


def moved_alone(ranks: Ranks, folder: Path, every: int) -> tuple[str, int]:
    """Of a loop that writes to the weights of rank 1 behind the second step: what is said, and after how many steps."""
    model = made(Case())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = PrivacyEngine(
        model, optimizer, dataset("mlp"), folder=folder, batch_size=9, steps=20, noise_multiplier=1.0, delta=1e-3,
        checkpoint_every=every,
    )  # fmt: skip

    def loop() -> None:
        for batch in engine.batches():
            if engine.step(losses(Case(), model, batch)) and engine.steps_taken == 2 and not ranks.writes:
                with torch.no_grad():
                    next(model.parameters()).add_(1.0)

    with engine, pytest.raises(UserError) as caught:
        loop()
    return str(caught.value), engine.steps_taken


@pytest.mark.parametrize(("every", "noticed"), [(0, 15), (4, 4)])
def test_weights_that_one_process_has_changed_are_noticed(tmp_path: Path, every: int, noticed: int):
    """Where proofs are due, before anything of that step is charged; and before a checkpoint is written."""
    (tmp_path / "ranks").mkdir()
    folder = tmp_path / "run"
    for said, taken in run_ranks(2, tmp_path / "ranks", moved_alone, folder, every):
        assert f"the checksum of the weights after step {noticed} " in said
        assert "of rank 1 differs from that of rank 0" in said
        assert taken == noticed
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == noticed
    assert json.loads((folder / "checkpoint" / "latest.json").read_text())["step"] == 0


def configured(ranks: Ranks, folder: Path, private: bool):
    folder.mkdir(parents=True, exist_ok=True)
    noise = NumberedNoise()
    before, release.add_gaussian_ = release.add_gaussian_, noise
    code, provenance.code_hash = provenance.code_hash, lambda: "c0de"
    try:
        metrics = record.Metrics(folder / "metrics.jsonl", strict=False, writes=ranks.writes)
        run = tiny_run(private=private)
        trainer = make_trainer(folder, run, model=made(Case("mlp")), ranks=ranks, metrics=metrics)
        outcome = train(trainer)
        return {
            "weights": torch.from_numpy(weights(trainer)),
            "metrics": outcome.metrics,
            "thresholds": trainer.policy.values.tolist(),
            "epsilon": trainer.ledger.epsilon(1e-3) if trainer.ledger is not None else None,
        }
    finally:
        release.add_gaussian_, provenance.code_hash = before, code


def draws_otherwise(ranks: Ranks, folder: Path):
    """Rank 1 draws other examples of the same key, as another version of numpy might."""
    draw = PoissonSampler.draw
    if not ranks.writes:
        PoissonSampler.draw = lambda self, step, attempt=0: np.sort(
            (draw(self, step, attempt) + 1) % EXAMPLES
        )
    with pytest.raises(UserError) as caught:
        run(Case(), folder, ranks=ranks.size)
    return str(caught.value)


def test_ranks_that_draw_several_samples_are_refused_before_anything_is_charged(tmp_path: Path):
    """An example that is in the shares of two ranks would count twice, under noise for one."""
    for told in run_ranks(2, tmp_path, draws_otherwise, tmp_path / "run"):
        assert "step 0 (sample) of rank 1 differs" in told
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def with_files_of_their_own(ranks: Ranks, folder: Path, found: str, elsewhere: str) -> int | str:
    """Read the ledger where rank 0 finds a file, and the machine of rank 1 has another one of that name."""
    path = folder / f"machine {ranks.rank}" / "ledger.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(found if ranks.writes else elsewhere)
    try:
        return Ledger(path, b"k" * 32, ranks).steps_charged
    except UserError as error:
        return str(error)


def told_by_files(ranks: Ranks, folder: Path, cases: list[tuple[str, str]]) -> list[int | str]:
    return [with_files_of_their_own(ranks, folder / str(n), *case) for n, case in enumerate(cases)]


def test_charges_that_rank_0_does_not_see_are_missed_by_the_others(tmp_path: Path):
    """Each machine has a disk of its own, and after a restart rank 0 is another machine: it would begin from nothing."""
    ledger = Ledger(tmp_path / "ledger.jsonl", b"k" * 32)
    for step in range(3):
        ledger.begin_step(step, GaussianDpEvent(1.0), f"sum {step}")
    whole, (first, *_) = ledger.path.read_text(), ledger.path.read_text().splitlines(keepends=True)
    torn, another = first + '{"step": 1, "att', first.replace('"step": 0', '"step": 1')
    rightly = [(whole, ""), (whole, first), (whole, torn), (whole, whole)]
    behind = [("", first), (first, whole), (whole, another)]
    (tmp_path / "ranks").mkdir()
    for rank, told in enumerate(
        run_ranks(2, tmp_path / "ranks", told_by_files, tmp_path, [*rightly, *behind])
    ):
        assert told[: len(rightly)] == [3] * len(rightly)
        for said in told[len(rightly) :]:
            assert "rank 1 finds charges in " in str(said), rank
            assert "that rank 0 does not find there" in str(said)


def first_part(ranks: Ranks, folder: Path, case: Case):
    return run(case, folder, steps=4, ranks=ranks.size, checkpoint_every=2)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, monkeypatch):
    """Begun by one, gone on by two, ended by one; the step that was cut off is charged twice, with a fresh sample."""
    case = Case("mlp", "adaptive")
    expected = run(case, tmp_path / "alone", steps=4)
    folder = tmp_path / "handed on"
    run(case, folder, steps=4, checkpoint_every=1)
    # back to the beginning, as if the first session had been killed after it charged all steps
    charged = (folder / "ledger.jsonl").read_text().splitlines()
    assert len(charged) == 4
    (folder / "checkpoint" / "latest.json").unlink()
    again = run_ranks(2, tmp_path, first_part, folder, case)
    assert [found["charged"] for found in again] == [8, 8]
    assert again[0]["epsilon"] > expected["epsilon"]
    for name, value in again[0]["weights"].items():
        assert torch.equal(value, again[1]["weights"][name])
    last = run(case, folder, steps=4, checkpoint_every=2)
    for name, value in last["weights"].items():
        assert torch.equal(value, again[0]["weights"][name])
    assert os.listdir(folder / "checkpoint")


@pytest.mark.parametrize("private", [True, False])
def test_a_configured_run_is_the_same(tmp_path: Path, private: bool):
    """`Trainer`: weights, thresholds, losses, metrics and files; with dropout off, which each rank draws for itself."""
    expected = configured(Ranks(), tmp_path / "alone", private)
    first, second = run_ranks(2, tmp_path, configured, tmp_path / "together", private)
    for found in (first, second):
        assert found["metrics"] == expected["metrics"]
        assert found["epsilon"] == expected["epsilon"]
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=3e-6)
        assert found["thresholds"] == expected["thresholds"]
    assert torch.equal(first["weights"], second["weights"])
    lines = (tmp_path / "together" / "metrics.jsonl").read_text().splitlines()
    before = (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(before)  # one record, not one of each process
    for ours, theirs in zip(map(json.loads, lines), map(json.loads, before), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours.get("drawn") == theirs.get("drawn")
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
