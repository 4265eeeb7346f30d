"""The audit command: its configuration, two tiny audits on embedded data, and bad input."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from dpexp import record
from dpexp.audit import AuditConfig, audit, audit_folder, check, table_of
from dpexp.config import compose, to_dict
from dpexp.errors import UserError
from dpexp.privacy.events import ADD_OR_REMOVE_ONE
from dpexp.training import learner, release
from tests.training.tiny import counted_noise

TINY = [
    "scale=demo", "clip=flat", "optim.epochs=null", "optim.steps=2", "runtime=cpu", "runtime.physical_batch_size=64",
    "engine.choice=rule", "data.cache=null", "privacy.noise_seed=3",
]  # fmt: skip
ONE_RUN = ["task=sst2", "optim.batch_size=60", "canaries=80", "data.num_examples=300", *TINY]
EXPOSURE = [
    "task=e2e", "method=exposure", "optim.batch_size=20", "data.num_examples=60", "repetitions=[1,4]", "secrets=2",
    "candidates=50", *TINY,
]  # fmt: skip


def configured(*overrides):
    return compose(overrides, "audit", AuditConfig)


def audited(runs, *overrides):
    run = configured(*overrides, f"runtime.runs_dir={runs}")
    check(run)
    console = Console(record=True, width=400)
    return audit(run, audit_folder(run), console), audit_folder(run), console.export_text()


@pytest.mark.parametrize(
    "overrides", [["task=sst2"], ["task=e2e", "scale=demo", "clip=flat", "privacy=eps3", "model=gpt2"]]
)
def test_the_groups_and_values_are_those_of_train(overrides):
    own = set(vars(AuditConfig())) - set(to_dict(compose(overrides)))
    audits = to_dict(configured(*overrides))
    assert {key: value for key, value in audits.items() if key not in own} == to_dict(compose(overrides))
    assert {key: audits[key] for key in own} == {key: getattr(AuditConfig(), key) for key in own}


def test_a_run_of_an_audit_is_no_training_run():
    first = audit_folder(configured(*ONE_RUN))
    assert first.parts[:3] == ("runs", "audit", "sst2")
    assert audit_folder(configured(*ONE_RUN, "canaries=70")) != first


def test_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "add_gaussian_", counted_noise())
    summary, folder, printed = audited(tmp_path, *ONE_RUN)
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert tuple(summary)[: len(record.SUMMARY_KEYS)] == record.SUMMARY_KEYS
    assert summary["data"]["rows"]["train"] == 300
    assert summary["privacy"]["sample_rate"] == pytest.approx(60 / 300)
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == summary["privacy"]["steps"] == 2
    assert not (folder / "model").exists()
    found = summary["audit"]
    assert 0 < found["included"] < found["canaries"] == 80
    assert [row["guesses"] for row in found["rows"]] == [80, 24, 8]
    assert found["epsilon_lower"] == max(row["epsilon_lower"] for row in found["rows"])
    assert found["epsilon_claimed"] == summary["privacy"]["epsilon"]["rdp"] <= 8.0
    assert not found["refuted"]
    assert "not refuted" in printed
    assert "confirms nothing" in printed
    assert ADD_OR_REMOVE_ONE in printed
    assert yaml.safe_load((folder / "config.yaml").read_text())["method"] == "one_run"


def test_exposure(tmp_path):
    summary, _, printed = audited(tmp_path, *EXPOSURE)
    found = summary["audit"]
    assert [row["repetitions"] for row in found["rows"]] == [1, 4]
    assert [secret["repetitions"] for secret in found["secrets"]] == [1, 1, 4, 4]
    assert found["candidates"] == 50
    for row in found["rows"]:
        assert 0 <= row["by_rank"] <= found["most_by_rank"]
        assert row["by_distribution"] >= 0
        assert summary["metrics"][f"exposure_{row['repetitions']}"] == row["by_distribution"]
    assert "no bound on epsilon" in printed


def test_a_claim_that_is_exceeded_is_called_refuted():
    summary = {
        "task": "t", "clip": "flat", "scale": "demo",
        "privacy": {"accountant": "rdp", "epsilon": {"rdp": 1.0}},
        "audit": {
            "method": "one_run", "canaries": 9, "delta": 1e-5, "confidence": 0.95, "epsilon_claimed": 1.0, "refuted": True,
            "what": "", "notes": [], "rows": [{"guesses": 9, "correct": 9, "epsilon_lower": 1.49996}],
        },
    }  # fmt: skip
    from dpexp.audit import show

    console = Console(record=True, width=160)
    show(summary, Path("here"), console)
    printed = console.export_text()
    assert "REFUTED" in printed
    # a lower bound is rounded downwards
    assert "1.4999" in printed
    assert table_of(summary).row_count == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=one_rum"], "one_run"),
        (["content=noise"], "random"),
        (["confidence=1.0"], "confidence=1.0"),
        (["guesses=[0.0]"], "above 0"),
        (["candidates=3"], "50"),
        (["repetitions=[2,2]"], "different counts"),
        (
            [
                "search.name=noisymax",
                "search.share=0.2",
                "clip=flat",
                "optim=sgd",
                "optim.lr=1",
                "optim.lr_schedule=constant",
                "optim.warmup_ratio=0",
                "optim.weight_decay=0",
                "optim.momentum=0",
            ],
            "releases more than noisy sums",
        ),
        (
            ["scale=small", "model.pooling=mean", "model.trainable=head", "model.frozen_features=true"],
            "plants examples",
        ),
    ],
)
def test_bad_settings_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        check(configured("task=sst2", *overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["canaries=301"], "301 canaries in 300"),
        (["method=exposure"], "take task=e2e"),
        (["method=white_box", "canaries=3"], r"canaries=3: \d of them are in and \d out, too few"),
        (
            [
                "canaries=2",
                "individual=sampling",
                "individual.epsilons=[2,8]",
                "individual.shares=[0.01,0.99]",
                "privacy=none",
            ],
            "0 of them are in and 0 out in the slots of group 1, too few",
        ),
    ],
)
def test_canaries_that_do_not_fit_are_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        audited(tmp_path, *ONE_RUN, *overrides)


def test_a_misspelt_setting_is_named():
    with pytest.raises(UserError, match="there is no setting canarys; did you mean canaries"):
        configured("task=sst2", "canarys=3")


WHITE_BOX = [
    "task=sst2",
    "method=white_box",
    "canaries=300",
    "data.num_examples=300",
    "optim.batch_size=300",
    *TINY,
]


@pytest.mark.parametrize("noise", [1.0, 0.05])
def test_the_white_box_audit_refutes_noise_that_is_too_small_and_no_other(tmp_path, monkeypatch, noise):
    """Of the whole command: canaries that pass through clipping, noise and ledger, and one who sees every noisy sum."""
    monkeypatch.setattr(release, "add_gaussian_", counted_noise(noise))
    summary, _, printed = audited(tmp_path, *WHITE_BOX, "privacy.epsilon=4", "privacy.delta=1e-5")
    found = summary["audit"]
    assert found["epsilon_claimed"] == pytest.approx(4.0, abs=0.01)
    assert found["refuted"] == (noise < 1)
    assert ("REFUTED" in printed) == (noise < 1)
    if noise == 1:
        assert 0.5 < found["epsilon_lower"] <= 4
    assert {row["estimator"] for row in found["rows"]} == {"Steinke", "f-DP", "Gaussian pair", "two worlds"}


INDIVIDUAL = [
    *WHITE_BOX, "individual=scaling", "individual.epsilons=[1,6]", "individual.shares=[0.5,0.5]", "privacy.delta=1e-5",
    "accountant=pld",
]  # fmt: skip


@pytest.mark.parametrize("defect", [False, True])
def test_each_budget_is_audited_by_its_own_canaries(tmp_path, monkeypatch, defect):
    """Where everybody is clipped as the most generous group may be, the claim of the strict group falls, and only that one."""
    scales = learner.clip_scales_of

    def most(plan, groups):
        found = scales(plan, groups)
        return torch.full_like(found, float(found.max()))

    monkeypatch.setattr(release, "add_gaussian_", counted_noise())
    if defect:
        monkeypatch.setattr(learner, "clip_scales_of", most)
    summary, _, printed = audited(tmp_path, *INDIVIDUAL)
    found = summary["audit"]
    strict, generous = found["groups"]
    assert strict["canaries"] + generous["canaries"] == 300
    assert strict["epsilon_claimed"] == pytest.approx(1.0, abs=0.1)
    assert generous["epsilon_claimed"] == pytest.approx(6.0, abs=0.3)
    assert strict["refuted"] == found["refuted"] == ("group 1: REFUTED" in printed) == defect
    assert not generous["refuted"]
    assert {row["group"] for row in found["rows"]} == {1, 2}
    assert "group 2: the claimed epsilon of" in printed


def test_budgets_by_sampling_are_audited_from_the_last_model_too(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "add_gaussian_", counted_noise())
    overrides = [*ONE_RUN, "individual=sampling", "individual.epsilons=[1,6]", "individual.shares=[0.5,0.5]"]
    found = audited(tmp_path, *overrides)[0]["audit"]
    assert [part["canaries"] > 0 for part in found["groups"]] == [True, True]
    assert not found["refuted"]
    assert found["epsilon_claimed"] in [part["epsilon_claimed"] for part in found["groups"]]


def test_the_white_box_audit_needs_one_clipping_group(tmp_path):
    with pytest.raises(UserError, match="one clipping group"):
        audited(tmp_path, *WHITE_BOX, "clip=adaptive_perlayer")
    with pytest.raises(UserError, match="one clipping group"):
        audited(tmp_path, *WHITE_BOX, "clip=embedding")


@pytest.mark.parametrize("noise", [1.0, 0.05])
def test_batches_that_grow_are_audited_at_the_rate_of_each_step(tmp_path, monkeypatch, noise):
    monkeypatch.setattr(release, "add_gaussian_", counted_noise(noise))
    growth = "optim.batch_growth={name: influence, influences: [1.0, 16.0], updates_per_epoch: 2}"
    summary, _, _ = audited(
        tmp_path, *WHITE_BOX, "optim.batch_size=150", growth, "privacy.epsilon=4", "privacy.delta=1e-5"
    )
    (whole,) = summary["privacy"]["events"]
    assert [event["sampling_probability"] for event in whole["events"]] == [0.5, 1.0]
    assert summary["audit"]["refuted"] == (noise < 1)
