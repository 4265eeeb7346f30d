"""Each method has a record: those outside of the league in one configuration, whose ε is computed here again."""

from __future__ import annotations

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
# choices without a record: groups of blocks or devices, which no small network has
WITHOUT = {"clip": {"perblock", "adaptive_perblock", "adaptive_perdevice"}}


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
    records = load(write(tmp_path, _made("adaclip", 1), _made("adaclip", 2), _made("jl", 3)))
    left = {command for command in methods.commands(records) if "adaclip" in command or "clip=jl" in command}
    assert sorted(command.partition(" seed=")[2] for command in left) == ["1,2 -m", "3"]
    rows = {row["method"]: row for row in methods.document(records).rows}
    assert rows.keys() == {"adaclip", "jl"}
    assert rows["adaclip"]["ours"] == "90.00 ± 0.00"
    assert rows["jl"]["n"] == "1"


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
    assert set(method.runs(load(RESULTS / "methods"))) >= set(method.seeds)


def _by_hand(event: dict, delta: float, accountant: type) -> float:
    """Of a training that released Gaussians alone, with the library's own accountant and its own orders."""
    return accountant().compose(_joined(decode(event))).get_epsilon(delta)


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
    for record in method.runs(load(RESULTS / "methods")).values():
        privacy = record.summary["privacy"]
        # one for each group of examples with a budget
        events = privacy["events"]
        assert events
        if privacy.get("filtered"):
            # the budget, which the course that was taken does not exceed
            assert privacy["epsilon"]["rdp"] <= record.facts["privacy.epsilon"]
            continue
        if "Projected" in json.dumps(events):
            found = projected_epsilon(projected(decode(events[0])), privacy["delta"])
            assert privacy["epsilon"]["pld"] == pytest.approx(found, rel=1e-6)
            continue
        for name, accountant in (("rdp", RdpAccountant), ("pld", PLDAccountant)):
            found = max(_by_hand(event, privacy["delta"], accountant) for event in events)
            assert privacy["epsilon"][name] == pytest.approx(found, rel=0.02), name
