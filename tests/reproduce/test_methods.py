"""Each method has a record: those outside of the league in one configuration, whose ε is computed here again."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path

import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpexp.config import compose, conf_dir
from dpexp.pate import PateConfig, check
from dpexp.privacy.events import decode
from dpexp.privacy.projected import projected, projected_epsilon
from dpexp.reproduce import methods
from dpexp.reproduce.records import load
from tests.reproduce.samples import summary, write

RESULTS = Path(__file__).parents[2] / "results"
RECORDS = load(RESULTS / "methods")
# choices without a record: groups of blocks or devices, which no small network has, and what holds a method of a person's own
WITHOUT = {
    "clip": {"perblock", "adaptive_perblock", "adaptive_perdevice"},
    "schedule": {"given"},
    "optim": {"custom"},
}


def _made(name: str, seed: int) -> dict:
    method = next(method for method in methods.methods() if method.name == name)
    run = summary(seed=seed, task="mnist") | {"command": f"{method.command} seed={seed} runtime=cpu"}
    run["privacy"] |= {"released": ["gradients"]}
    return run


@pytest.mark.parametrize("method", methods.methods(), ids=lambda method: method.name)
def test_every_command_of_the_list_can_be_composed(method: methods.Method) -> None:
    _, _, program, *words = shlex.split(method.command)
    if program == "dpexp.pate":
        check(compose(words, "pate", PateConfig))
    else:
        compose(words)


def test_a_method_is_run_with_the_seeds_that_it_lacks(tmp_path: Path) -> None:
    every = methods.commands([])
    assert len(every) == len(methods.methods())
    records = load(write(tmp_path, _made("adaclip", 2), _made("adaclip", 3), _made("jl", 1)))
    left = [command for command in methods.commands(records) if "adaclip" in command or "clip=jl" in command]
    assert [command.partition(" seed=")[2] for command in left] == ["1"]
    rows = {row["method"]: row for row in methods.document(records).rows}
    assert rows.keys() == {"adaclip", "jl"}
    assert rows["adaclip"]["ours"] == "90.00 ± 0.00"
    assert (rows["jl"]["ours"], rows["jl"]["n"]) == ("90.00", "1")


def test_the_budgets_of_the_groups_of_pate_are_what_is_to_be_spent(tmp_path: Path) -> None:
    run = _made("pate_weighting", 1)
    run["details"]["config"] |= {
        "individual": {"name": "none", "epsilons": [2.0, 4.0, 8.0]},
        "privacy": {"epsilon": None},
    }
    (row,) = methods.document(load(write(tmp_path, run))).rows
    assert row["to be spent"] == "ε = 2/4/8"


def test_every_choice_of_a_method_has_a_record() -> None:
    """Clipping, noise over time, searches, optimisers, budgets, whom it protects, accountants: what is offered has been run."""
    seen: dict[str, set[str]] = {}
    for folder in ("runs", "league", "methods"):
        for path in (RESULTS / folder).glob("*.json"):
            config = json.loads(path.read_text(encoding="utf-8"))["details"]["config"]
            for group in ("clip", "schedule", "search", "optim", "individual", "unit", "accountant"):
                seen.setdefault(group, set()).add(config.get(group, {}).get("name", ""))
    for group, found in seen.items():
        # presets of one method have its name
        offered = {path.stem.partition("_case")[0] for path in (conf_dir() / group).glob("*.yaml")}
        assert offered - found == WITHOUT.get(group, set()) - found, group


@pytest.mark.parametrize("method", methods.methods(), ids=lambda method: method.name)
def test_every_method_of_the_list_has_its_records(method: methods.Method) -> None:
    assert set(method.runs(RECORDS)) >= set(method.seeds)


# methods that differ in what they clip have one event
@functools.cache
def _by_hand(event: str, delta: float, accountant: type) -> float:
    """Of a training that released Gaussians alone, with the library's own accountant and its own orders."""
    # a grid of losses ten times as coarse as its own moves epsilon by a millionth, and takes a tenth of the time
    grid = {"value_discretization_interval": 1e-3} if accountant is PLDAccountant else {}
    return accountant(**grid).compose(_joined(decode(json.loads(event)))).get_epsilon(delta)


def _joined(event: DpEvent) -> DpEvent:
    """With one Gaussian in the place of those that see one sample, which the library's PLD accountant does not know."""
    match event:
        case PoissonSampledDpEvent(event=ComposedDpEvent(events=parts)):
            one = GaussianDpEvent(sum(part.noise_multiplier**-2 for part in parts) ** -0.5)
            return PoissonSampledDpEvent(event.sampling_probability, one)
        case SelfComposedDpEvent():
            return SelfComposedDpEvent(_joined(event.event), event.count)
        case ComposedDpEvent():
            return ComposedDpEvent([_joined(part) for part in event.events])
    return event


@pytest.mark.parametrize("method", methods.methods(), ids=lambda method: method.name)
def test_epsilon_of_each_record_is_that_of_its_events(method: methods.Method) -> None:
    # the seeds of one command have one event
    for record in [*method.runs(RECORDS).values()][:1]:
        privacy = record.summary["privacy"]
        # one for each group of examples with a budget
        events = privacy["events"]
        if privacy["released"] == ["model as it was, untrained"]:
            assert not events
            continue
        assert events
        if privacy.get("filtered"):
            # the budget, which the course that was taken does not exceed
            assert privacy["epsilon"]["rdp"] <= record.facts["privacy.epsilon"]
            if "Pure" not in json.dumps(events) and "Range" not in json.dumps(events):
                taken = _by_hand(json.dumps(events[0]), privacy["delta"], RdpAccountant)
                assert taken <= record.facts["privacy.epsilon"] * 1.02
            continue
        if "Projected" in json.dumps(events):
            found = projected_epsilon(projected(decode(events[0])), privacy["delta"])
            assert privacy["epsilon"]["pld"] == pytest.approx(found, rel=1e-6)
            continue
        # noise that changes from step to step takes the second one long
        several = any(len(event.get("events", [])) > 1 for event in events)
        for name, accountant in (("rdp", RdpAccountant), ("pld", PLDAccountant))[: 1 if several else 2]:
            found = max(_by_hand(json.dumps(event), privacy["delta"], accountant) for event in events)
            assert privacy["epsilon"][name] == pytest.approx(found, rel=0.02), name
