"""Random models: 200 of them against our engines, and a shrinker that leaves what matters."""

import json

import pytest
import torch
from rich.console import Console

from dpexp.conform.adapters import adapters, ours
from dpexp.conform.generator import COUPLINGS, LATER, MENU, random_spec, shrink
from dpexp.conform.judge import Adapter
from dpexp.conform.randomly import judged, random_suite, smallest


def test_a_seed_is_a_model():
    assert random_spec(5) == random_spec(5)
    assert random_spec(5).source != random_spec(6).source
    kinds = {kind for seed in range(800) for kind, _, _ in random_spec(seed).statements}
    assert kinds == {*MENU, *LATER, "coupling"}


def test_every_statement_builds_a_model_that_trains():
    for kind, lines in MENU.items():
        spec = random_spec(0)
        statement = (kind, *(line.format(i=0) for line in lines))
        case = type(spec)((statement,), 3, 4, 0).case()
        case.losses(case.model, case.batch).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_models_are_exact_or_refused(part):
    """Without couplings through values, which are asked for in the nightly run and in the table of traps."""
    ours_alone = [adapter for adapter in adapters("dpexp") if not adapter.name.startswith("opacus ")]
    for seed in range(50 * part, 50 * part + 50):
        spec = random_spec(seed, coupled=0.0)
        verdict = judged(spec, ours_alone[seed % len(ours_alone)])
        assert verdict.verdict in ("exact", "refused"), (seed, verdict.message, spec.source)


def test_a_failure_is_made_small():
    spec = next(
        s
        for s in map(random_spec, range(200))
        if len(s.statements) > 3 and "scale" in {k for k, _, _ in s.statements}
    )
    small = shrink(spec, lambda s: any(kind == "scale" for kind, _, _ in s.statements))
    assert [kind for kind, _, _ in small.statements] == ["scale"]
    assert (small.examples, small.length) == (2, 2)


def test_a_wrong_library_is_reported_as_a_program_that_runs(tmp_path):
    right = ours("loop", "flat")

    def doubles(model, loss_fn, clip_norm):
        step = right.make_step(model, loss_fn, clip_norm)
        wrong = any(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
        return lambda *pieces: {name: (1 + wrong) * g for name, g in step(*pieces).items()}

    adapter = Adapter("loop flat", doubles, refusals=right.refusals)
    seed = next(s for s in range(200) if {"layer norm"} < {k for k, _, _ in random_spec(s, 0.0).statements})
    assert [k for k, _, _ in smallest(random_spec(seed), adapter, "wrong").statements] == ["layer norm"]
    assert random_suite([adapter], 1, seed, tmp_path, Console(quiet=True)) == 1
    (failure,) = json.loads((tmp_path / f"random_{seed}.json").read_text())["failures"]
    assert failure["verdict"] == "wrong"
    exec(failure["program"], {})


def test_couplings_are_couplings():
    for step in COUPLINGS:
        x = torch.randn(3, 4, 4) * torch.tensor([1.0, 1.0, 9.0])[:, None, None]
        space = {"torch": torch, "x": x.clone()}
        exec(step, space)
        alone = {"torch": torch, "x": x[:1].clone()}
        exec(step, alone)
        assert not torch.allclose(space["x"][:1], alone["x"]), step
