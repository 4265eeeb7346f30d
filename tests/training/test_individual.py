"""Individual budgets in a run: whose thresholds are scaled, who is drawn how often, and what the record says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dpexp import statement
from dpexp.config import compose, signature
from dpexp.errors import UserError
from dpexp.schemas import IndividualConfig
from tests.training.tiny import cut_short, make_trainer, run_to_end, tiny_run, train, weights

EPSILONS = [1.0, 4.0]


def individual_run(method, adaptive=True, **changes):
    run = tiny_run(adaptive=adaptive)
    run.privacy.noise_multiplier = None
    run.individual = IndividualConfig(name=method, epsilons=EPSILONS, shares=[0.5, 0.5])
    run.clip.clip_norm = 0.01  # far below every norm: everything is clipped
    for name, value in changes.items():
        setattr(run.clip, name, value)
    return run


@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_an_example_moves_the_sum_by_its_own_bound(tmp_path, groups):
    """s_g·C for an example of group g: what the noise multiplier of the group is measured against."""
    trainer = make_trainer(tmp_path, individual_run("scaling", adaptive=False, groups=groups))
    plan, stepper = trainer.plan, trainer.stepper
    assert len(set(plan.budgets.scales)) == 2
    members = stepper.clip_scales
    for example in range(12):
        stepper.clear()
        piece = np.asarray([example])
        stepper.backward(trainer.losses_of(piece), members[piece])
        norm = torch.cat([g.flatten() for g in stepper.gradients]).double().norm()
        assert float(norm) == pytest.approx(float(members[example]) * 0.01, rel=1e-4)
    assert sorted(set(members.tolist())) == sorted(plan.budgets.scales)


def test_the_rounding_of_the_sums_is_held_against_the_group_that_is_hidden_best(tmp_path):
    """It is the same for all, and the noise that pays for it is 10^8 thresholds of that group."""
    trainer = make_trainer(tmp_path, individual_run("scaling", adaptive=False))
    release, budgets = trainer.stepper.release, trainer.plan.budgets
    scales = (1e-8, *budgets.scales[1:])
    release.plan = replace(trainer.plan, budgets=replace(budgets, scales=scales))
    with pytest.raises(UserError, match="their rounding would cost more than is accounted for"):
        release.noise(0)


def test_sampling_leaves_the_thresholds_alone(tmp_path):
    trainer = make_trainer(tmp_path, individual_run("sampling"))
    assert trainer.stepper.clip_scales is None
    assert trainer.clipper.max_clip_scale == 1.0
    drawn = np.concatenate([trainer.stepper.sampler.draw(step) for step in range(400)])
    rates = np.bincount(drawn, minlength=60) / 400
    low, high = trainer.plan.budgets.rates
    assert sorted(rates > (low + high) / 2) == [False] * 30 + [True] * 30


@pytest.mark.parametrize("method", ["sampling", "scaling"])
def test_a_run_spends_what_it_promised_to_each_group(tmp_path, method):
    trainer = run_to_end(tmp_path, individual_run(method))
    plan, ledger = trainer.plan, trainer.ledger
    by_budget = ledger.epsilons_by_budget(plan.delta)
    for group, target in enumerate(EPSILONS):
        assert 0.99 * target < by_budget[group]["rdp"] <= target * (1 + 1e-6)
    block = statement.privacy_block(
        trainer.run, plan, ledger.epsilons(plan.delta), trainer.num_groups, ledger.steps_charged, by_budget
    )
    assert block["epsilon"]["rdp"] == by_budget[1]["rdp"]
    groups = block["individual"]["groups"]
    assert [group["target"] for group in groups] == EPSILONS
    assert [group["examples"] for group in groups] == [30, 30]
    assert any("individual" in note for note in block["notes"])


def test_resumed_it_ends_the_same(tmp_path):
    whole = run_to_end(tmp_path / "whole", individual_run("scaling"))
    resumed = cut_short(tmp_path / "cut", individual_run("scaling"), steps=4)
    assert resumed.step == 4
    train(resumed)
    assert np.array_equal(weights(resumed), weights(whole))
    assert resumed.ledger.steps_charged == 6


def test_a_file_that_changed_in_between_is_refused(tmp_path):
    file = tmp_path / "groups.txt"
    file.write_text("1\n2\n" * 30)
    run = individual_run("scaling")
    run.individual.shares, run.individual.groups = [], str(file)
    cut = make_trainer(tmp_path / "run", run)
    cut.steps = 2
    train(cut)
    file.write_text("2\n1\n" * 30)
    with pytest.raises(UserError, match="examples have changed their budget groups"):
        train(make_trainer(tmp_path / "run", run))


def composed(*overrides):
    return compose(["task=mnist", "scale=demo", "clip=flat", *overrides])


def test_the_command_line():
    run = composed("individual=scaling")
    assert run.individual.epsilons == [1.0, 2.0, 3.0]
    assert run.privacy.epsilon is None
    assert signature(run) != signature(composed("individual=sampling"))
    assert signature(composed("individual=none")) == signature(composed())
    for overrides, message in {
        ("individual=scaling", "privacy.epsilon=3"): "individual.epsilons decide the noise",
        ("individual=scaling", "individual.epsilons=[1,2]"): "must be 2 positive numbers that add up to 1",
        (
            "individual=scaling",
            "individual.epsilons=[1]",
            "individual.shares=[1]",
        ): "two or more positive numbers",
        ("individual=scaling", "individual.epsilons=[]"): "^[^\n]*two or more positive numbers[^\n]*$",
        ("individual=sampling", "privacy.sampling=shuffle"): "needs Poisson batches",
        ("individual=sampling", "clip=nonprivate"): "use a private clip",
    }.items():
        with pytest.raises(UserError, match=message):
            composed(*overrides)


def test_a_budget_for_every_example_becomes_bins(tmp_path):
    from dpexp.training.planning import binned

    file = tmp_path / "budgets.txt"
    file.write_text("\n".join(["1.0", "1.1", "4.0"] * 20))
    run = tiny_run(steps=3, adaptive=False)
    run.privacy.noise_multiplier = None
    run.individual.name, run.individual.budgets, run.individual.bins = "scaling", str(file), 2
    trainer = run_to_end(tmp_path / "run", run)
    assert trainer.plan.budgets.epsilons == (1.0, 4.0)
    assert trainer.plan.budgets.sizes == (40, 20)
    run.individual.partition = "utility"
    assert binned(run, 60)[0] == [1.0, 4.0]


def test_what_the_outputs_told_about_each_example_is_an_analysis(tmp_path):
    """At most the guarantee; the same after a crash; and the run itself is not touched."""
    run = tiny_run(steps=6, adaptive=False)
    plain = run_to_end(tmp_path / "plain", run)
    run.analysis.output_specific_every, run.analysis.rounding = 2, 0.1
    whole = run_to_end(tmp_path / "whole", run)
    assert np.array_equal(weights(plain), weights(whole))
    resumed = cut_short(tmp_path / "cut", run, steps=4)
    train(resumed)
    found = resumed.analysis.specific.epsilons(1e-3)
    assert np.array_equal(found, whole.analysis.specific.epsilons(1e-3))
    assert 0 < found.min() <= found.max() <= whole.plan.epsilon() * 1.02
    assert any("output_specific.npy" in note for note in statement.privacy_notes(run, whole.plan, {}, 0))
    quantiles = whole.details()["output_specific"]
    assert quantiles["not_private"]
    assert quantiles["epsilon_quantiles"]["1.0"] == pytest.approx(found.max())


def test_an_analysis_that_has_not_seen_all_that_was_charged_tells_nothing(tmp_path):
    """Switched on for the rest of a run alone, it took what the steps before had told for nothing."""
    run = tiny_run(steps=6, adaptive=False)
    early = make_trainer(tmp_path / "run", run)
    early.steps = 4
    train(early)
    run.analysis.output_specific_every, run.analysis.rounding = 1, 1.0
    told = run_to_end(tmp_path / "run", run).details()["output_specific"]
    assert told["epsilon_quantiles"] is None
    assert "4 of 6 charges were not looked at" in told["note"]
