"""What names a run: its signature, the neutral settings that it leaves out, and its folder."""

import dataclasses

import pytest

from dpexp.config import compose, naming, run_folder, signature, to_dict
from dpexp.config.unread import neutralise
from dpexp.durable import flattened
from dpexp.schemas import RunConfig

JOB = ("task=sst2", "clip=adaptive_perlayer")
SAME_RUN = (
    "seed=3", "trials=9", "trials_law=geometric", "tracker=tensorboard", "data.root=/x", "data.cache=/y", "runtime.eval_every=5",
    "runtime.log_every=7", "runtime.checkpoint_every=1", "runtime.eval_batch_size=3", "runtime.runs_dir=/z",
    "data.source=files", "task.hub_id=mirror/glue", "optim.lr=0.0004", "optim.batch_size=1024.0", "engine=auto",
)  # fmt: skip
ANOTHER_RUN = (
    "model=roberta_large", "model.trainable=bias", "model.dropout=0.0", "clip=perlayer", "clip.clip_norm=0.5",
    "clip.quantile_budget=0.2", "clip.allocation=weighted", "privacy=eps3", "privacy.delta=1e-5", "accountant=prv",
    "privacy.sampling=shuffle", "optim.lr=0.0002", "optim.epochs=3", "optim.batch_size=512", "peft=lora", "scale=small",
    "runtime.precision=bf16", "engine=opacus", "engine.choice=rule", "runtime.device=cpu",
    "runtime.physical_batch_size=8", "runtime.threads=2", "data.num_examples=2000", "data.max_length=32",
    "data.source=demo", "task.labels=[no,yes]",
)  # fmt: skip


@pytest.mark.parametrize("change", SAME_RUN)
def test_what_cannot_change_a_result_does_not_change_the_signature(change):
    assert signature(compose([*JOB, change])) == signature(compose(JOB))


def test_all_that_can_change_a_result_changes_the_signature():
    signatures = [
        signature(compose([*JOB, *change])) for change in ([], *([change] for change in ANOTHER_RUN))
    ]
    assert len(set(signatures)) == len(signatures)


def test_settings_that_a_fixed_threshold_ignores_are_the_same_run():
    fixed, other = compose(["task=sst2", "clip=flat"]), compose(["task=sst2", "clip=flat"])
    other.clip.target_quantile = 0.3
    assert signature(other) != signature(fixed)
    neutralise(other)
    assert signature(other) == signature(fixed)
    assert fixed.clip.quantile_budget == 0.0


def test_a_new_field_with_a_default_keeps_old_signatures():
    run = compose(JOB)
    before = signature(run)
    larger = dataclasses.make_dataclass("ClipConfig", [("novelty", float, 0.5)], bases=(type(run.clip),))
    schema = dataclasses.make_dataclass(
        "RunConfig", [("clip", larger, dataclasses.field(default_factory=larger))], bases=(RunConfig,)
    )
    changed = schema(**{**vars(run), "clip": larger(**vars(run.clip))})
    neutral = naming.RunConfig
    try:
        naming.RunConfig = schema
        assert signature(changed) == before
        changed.clip.novelty = 0.6
        assert signature(changed) != before
    finally:
        naming.RunConfig = neutral


DEFAULTS = {
    "task.name": "",
    "task.kind": "text_classification",
    "task.labels": [],
    "task.text": "text",
    "task.text_pair": None,
    "task.label": "label",
    "task.metric": "accuracy",
    "task.max_length": 128,
    "data.train": None,
    "data.dev": None,
    "data.text": None,
    "data.text_pair": None,
    "data.label": None,
    "data.num_examples": None,
    "data.max_length": None,
    "model.name": "",
    "model.id": None,
    "model.family": "hf",
    "model.architecture": None,
    "model.tokenizer": None,
    "model.trainable": "all",
    "model.dropout": None,
    "model.attention_dropout": None,
    "clip.name": "",
    "clip.private": True,
    "clip.groups": "flat",
    "clip.clip_norm": 1.0,
    "clip.init_threshold": None,
    "clip.adaptive": False,
    "clip.target_quantile": 0.5,
    "clip.quantile_lr": 0.3,
    "clip.quantile_update": "geometric",
    "clip.follows": "quantile",
    "clip.quantile_budget": 0.0,
    "clip.rescale": True,
    "clip.allocation": "global",
    "clip.rule": "abadi",
    "clip.threshold_floor": 1e-06,
    "privacy.epsilon": None,
    "privacy.noise_multiplier": None,
    "privacy.delta": "n_pow_-1.1",
    "privacy.sampling": "poisson",
    "privacy.release": "normal",
    "privacy.noise_seed": None,
    "privacy.keep_key": False,
    "privacy.secure": False,
    "privacy.bands": "1",
    "accountant.name": "rdp",
    "accountant.allow_clt": False,
    "schedule.name": "constant",
    "schedule.decay_rate": None,
    "schedule.period": None,
    "schedule.end_ratio": None,
    "schedule.updates_per_epoch": 1,
    "schedule.condition": None,
    "schedule.influences": None,
    "optim.name": "adam",
    "optim.lr": 0.001,
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-08,
    "optim.weight_decay": 0.0,
    "optim.momentum": 0.0,
    "optim.lr_schedule": "constant",
    "optim.warmup_ratio": 0.0,
    "optim.batch_size": 1024.0,
    "optim.epochs": None,
    "optim.steps": None,
    "peft.name": "full",
    "peft.rank": 0,
    "peft.alpha": 0.0,
    "peft.dropout": 0.0,
    "peft.targets": [],
    "peft.carriers": "weights",
    "peft.placement": "both",
    "peft.blocks": 0,
    "peft.prefix_length": 0,
    "peft.prefix_hidden": 0,
    "engine.name": "auto",
    "engine.choice": "measured",
    "engine.memory_cap_mib": 2048,
    "runtime.device": "auto",
    "runtime.precision": "fp32",
    "runtime.physical_batch_size": "auto",
    "runtime.threads": None,
    "scale.name": "paper",
}


def test_defaults_of_the_schemas_stay_what_they_were():
    """Signatures leave out values that equal the default, so another default would give old runs a new meaning."""
    now = dict(flattened(to_dict(RunConfig())))
    assert {key: now[key] for key in DEFAULTS} == DEFAULTS


def test_what_a_schedule_does_not_take_is_neutral():
    """A preset's parameters do not follow it to another schedule, and a constant one has none."""
    preset = ["experiment=monir2023_table8_mnist_polynomial"]
    assert compose(preset).schedule.period == 100
    constant = compose([*preset, "schedule=constant"])
    assert constant.schedule == type(constant.schedule)()
    decayed = compose([*preset, "schedule=time", "schedule.updates_per_epoch=2"]).schedule
    assert (decayed.name, decayed.period, decayed.end_ratio, decayed.updates_per_epoch) == (
        "time",
        None,
        None,
        2,
    )
    assert (
        len(
            {signature(compose([*preset, *more])) for more in ([], ["schedule.period=50"], ["schedule=time"])}
        )
        == 3
    )


def test_the_folder_of_a_run(runs_dir):
    run = compose([*JOB, "seed=2", f"runtime.runs_dir={runs_dir}"])
    assert run_folder(run) == runs_dir / "sst2" / signature(run) / "seed2"
    assert len(signature(run)) == 10
    assert int(signature(run), 16) >= 0


# Bad input, one sentence each
