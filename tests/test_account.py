"""The command of people who only want the numbers."""

import json
import math

import numpy as np
import pytest

from dpexp.account import AccountArguments, account, as_text
from dpexp.errors import UserError
from dpexp.privacy.correlated import column_norm, noise_left
from dpexp.privacy.plan import make_plan
from dpexp.privacy.shown import upwards
from dpexp.schemas import AccountantConfig, IndividualConfig, ScheduleConfig
from tests.commands import called

PUBLISHED = ["noise_multiplier=1.07", "sample_rate=0.0243", "steps=410", "delta=1.2e-5"]


def run(tmp_path, *arguments):
    done = called("dpexp.account", *arguments, cwd=tmp_path)
    assert not list(tmp_path.iterdir())  # no folder, no log
    return done


def test_epsilon_from_noise(tmp_path):
    done = run(tmp_path, *PUBLISHED, "format=json")
    assert done.returncode == 0
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["noise_multiplier"] == 1.07
    assert result["epsilon"]["rdp"] == pytest.approx(3.019, abs=2e-3)
    assert result["epsilon"]["gdp"] == pytest.approx(2.333, abs=2e-3)
    assert result["epsilon"]["pld"] == pytest.approx(2.679, abs=2e-3)
    assert result["epsilon"]["pld"] <= result["epsilon"]["prv"] < 2.70


def test_noise_from_epsilon_as_text(tmp_path):
    done = run(tmp_path, "target_epsilon=3", "accountant=rdp", *PUBLISHED[1:])
    assert done.returncode == 0
    assert "noise multiplier  1.073" in done.stdout
    assert "calibrated to epsilon = 3 under rdp" in done.stdout
    assert "not a guarantee" in done.stdout  # beside gdp


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["noise_multiplier=1", "steps=3"],
            "not given: delta=…; sample_rate=…, or batch_size=… and num_examples=… (dpexp account --help says",
        ),
        ([*PUBLISHED, "sampel_rate=0.1"], "did you mean sample_rate?"),
        ([*PUBLISHED, "accountant=prvv"], "did you mean prv?"),
        ([*PUBLISHED[:3], "delta=1"], "delta=1.0"),
        ([*PUBLISHED[:3], "delta=small"], "delta=small is neither a number nor a rule"),
        ([*PUBLISHED, "sigma=1"], "did you mean noise_multiplier?"),
        ([*PUBLISHED, "dataset_size=60000"], "did you mean num_examples?"),
        ([*PUBLISHED, "num_examples=60,000"], "a number has no commas: num_examples=60000"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def values(**changes):
    return AccountArguments(
        **{"sample_rate": 0.02, "steps": 10, "delta": 1e-5, "noise_multiplier": 1.0, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": None}, "not given: two of noise_multiplier=…, target_epsilon=… and steps=…"),
        ({"target_epsilon": 1.0}, "give two of noise_multiplier=…, target_epsilon=… and steps=…"),
        ({"batch_size": 10.0}, "sample_rate and batch_size are both given"),
        ({"epochs": 1.0}, "steps and epochs are both given"),
        ({"sample_rate": None, "batch_size": 10.0}, "batch_size=10 needs num_examples"),
        ({"sample_rate": None, "batch_size": 10.0, "num_examples": 9}, "at most num_examples=9"),
        ({"sample_rate": None, "batch_size": 10.0, "num_examples": 0}, "num_examples=0 must be 1 or larger"),
        ({"sample_rate": None}, "sample_rate=…, or batch_size=… and num_examples=…"),
        ({"steps": None, "epochs": 0.001}, "less than one step: give 0.02 epochs or more"),
        ({"steps": None, "epochs": -1.0}, "epochs=-1 must be 0 or larger"),
        ({"steps": None, "epochs": 1.0, "sample_rate": 0.0}, "of a sample rate above 0"),
        ({"delta": "half_over_n"}, "delta=half_over_n is a rule of N: give num_examples"),
        ({"steps": None, "target_epsilon": -1.0}, "epsilon=-1.0 is not a positive number"),
        ({"steps": None, "target_epsilon": 1.0, "sample_rate": 0.0}, "is never spent"),
        (
            {"steps": None, "target_epsilon": 1.0, "schedule": ScheduleConfig("time", 0.1)},
            "drop schedule=time",
        ),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"sample_rate": 2.0}, "sample_rate=2.0"),
        ({"steps": -1}, "steps=-1"),
        ({"format": "xml"}, "text, json"),
        ({"accountant": AccountantConfig(name="zzz")}, "accountant=zzz is not a choice"),
        (
            {"noise_multiplier": None, "target_epsilon": 1.0, "accountant": AccountantConfig(name="gdp")},
            "accountant.allow_clt=true",
        ),
        ({"noise_multiplier": None, "target_epsilon": 1.0, "delta": 0.0}, "delta=0 leaves no room"),
        (
            {
                "noise_multiplier": None,
                "individual": IndividualConfig("scaling", [1.0, 2.0], [0.5, 0.5]),
                "accountant": AccountantConfig(name="gdp"),
            },
            "accountant.allow_clt=true",
        ),
        ({"bands": "0"}, "neither auto nor a whole number"),
        ({"bands": "11"}, "take at most 10"),
        ({"bands": "auto"}, "give target_epsilon=…, and steps=…"),
        ({"bands": "auto", "steps": None, "target_epsilon": 1.0}, "give target_epsilon=…, and steps=…"),
        ({"bands": "2", "sampling": "fixed"}, "needs Poisson batches"),
        ({"individual": IndividualConfig(epsilons=[1.0, 2.0])}, r"individual\.epsilons is of groups"),
        ({"individual": IndividualConfig(shares=[0.5, 0.5])}, r"individual\.shares is of groups"),
    ],
)
def test_values_that_make_no_mechanism_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        account(values(**changes))


def test_no_epsilon_is_printed_smaller_than_it_is():
    result = account(values()) | {
        "epsilon": {"rdp": 1.00002, "gdp": 0.0, "prv": 2.30001e-5, "pld": 3.0 + 1e-14}
    }
    shown = [line.split()[2] for line in as_text(result).splitlines() if line.startswith("epsilon")]
    assert shown == ["1.0001", "0", "2.301e-05", "3.0000"]


def test_an_infinite_epsilon_is_null_in_json():
    result = account(values(noise_multiplier=0.0))
    assert result["epsilon"] == {"rdp": None, "gdp": None, "prv": None, "pld": None}
    assert "Infinity" not in json.dumps(result)


def test_an_accountant_that_finds_nothing_does_not_speak_for_the_others():
    """ε of 618 by RDP: the grids of the others end at 500."""
    lines = as_text(account(arguments(noise_multiplier=0.3, sample_rate=0.9, steps=100))).splitlines()
    said = {line.split()[1]: line for line in lines if line.startswith("epsilon")}
    assert "upper bound" in said["rdp"]
    for name in ("prv", "pld"):
        assert "inf         none found, a limit of its arithmetic" in said[name]
    nobody = as_text(account(arguments(noise_multiplier=0.0)))
    assert "none found" not in nobody


def test_a_delta_that_protects_nobody_is_marked():
    given = {
        "noise_multiplier": 1.0,
        "sample_rate": None,
        "num_examples": 500,
        "batch_size": 50.0,
        "steps": 5,
    }
    said = [as_text(account(arguments(**given, delta=delta))) for delta in ("0.002", "0.001")]
    assert ["not below 1/N" in text for text in said] == [True, False]


def test_nothing_released_costs_nothing():
    assert set(account(values(steps=0))["epsilon"].values()) == {0.0}


def test_decaying_noise(tmp_path):
    """Ten steps of an epoch of five: the second half at half the noise."""
    decay = ScheduleConfig(name="time", decay_rate=1.0)
    result = account(values(sample_rate=0.2, schedule=decay))
    assert (result["noise_multiplier"], result["last_noise_multiplier"]) == (1.0, 0.5)
    assert result["schedule"] == {"name": "time", "decay_rate": 1.0}
    constant = [account(values(sample_rate=0.2, noise_multiplier=s))["epsilon"]["rdp"] for s in (1.0, 0.5)]
    assert constant[0] < result["epsilon"]["rdp"] < constant[1]
    again = account(
        values(
            sample_rate=0.2, schedule=decay, noise_multiplier=None, target_epsilon=result["epsilon"]["rdp"]
        )
    )
    assert again["noise_multiplier"] == pytest.approx(1.0, rel=2e-4)
    done = run(
        tmp_path, "noise_multiplier=1", "sample_rate=0.2", "steps=10", "delta=1e-5", "schedule=time",
        "schedule.decay_rate=1",
    )  # fmt: skip
    assert "in the last step  0.5" in done.stdout
    with pytest.raises(UserError, match=r"schedule\.decay_rate"):
        account(values(schedule=ScheduleConfig(name="time")))


def arguments(**changes):
    return AccountArguments(
        **{"noise_multiplier": 1.07, "sample_rate": 0.0243, "steps": 410, "delta": 1.2e-5} | changes
    )


def test_the_numbers_beside_epsilon():
    result = account(arguments())
    assert result["mu"] == pytest.approx(0.718, abs=1e-3)
    assert result["mu_regret"] == pytest.approx(0.0296, abs=1e-3)
    # never more than what (ε, δ) says, at any ε: here at that of pld
    assert 1e-3 < result["tpr_at_fpr_0.001"] < 1e-3 * math.exp(result["epsilon"]["pld"]) + 1.2e-5
    assert "zero-out" in result["neighbouring"]
    assert result["epsilon_with_tuning"] is None
    text = as_text(result)
    assert "Gaussian DP: a fit from above, with regret 0.03" in text
    assert "TPR at FPR 0.001  0.0068" in text
    silent = as_text(account(arguments(noise_multiplier=0.0)))
    assert "mu                inf         Gaussian DP: no finite one" in silent
    assert "TPR at FPR 0.001  1.0000" in silent


def test_the_price_of_tuning():
    composed, drawn = account(arguments(trials=12)), account(arguments(trials=12, trials_law="geometric"))
    assert composed["epsilon_with_tuning"]["rdp"] == account(arguments(steps=410 * 12))["epsilon"]["rdp"]
    assert (
        composed["epsilon"]["rdp"]
        < drawn["epsilon_with_tuning"]["rdp"]
        < composed["epsilon_with_tuning"]["rdp"]
    )
    assert drawn["epsilon_with_tuning"]["pld"] is None
    assert "with tuning pld   10.2" in as_text(composed)
    assert "with tuning rdp   5.81" in as_text(drawn)
    assert "with tuning pld" not in as_text(drawn)
    with pytest.raises(UserError, match=r"trials=1\.5 must be a whole number"):
        account(arguments(trials=1.5))


def test_batches_of_a_fixed_size():
    result = account(arguments(noise_multiplier=3.0, sampling="fixed"))
    assert result["neighbouring"] == "replace one example by another"
    # sensitivity is twice that of removing an example
    assert result["epsilon"]["rdp"] > account(arguments(noise_multiplier=1.5))["epsilon"]["rdp"]
    assert (result["epsilon"]["pld"], result["mu"]) == (None, None)
    assert "epsilon pld" not in as_text(result)
    # a rate is not rounded, however small
    rare = arguments(noise_multiplier=1.0, steps=10**13, sampling="fixed", sample_rate=4e-10)
    assert account(rare)["epsilon"]["rdp"] > 0.5
    with pytest.raises(UserError, match="choices: poisson, fixed"):
        account(arguments(sampling="shuffle"))


def test_examples_batch_and_epochs_are_those_of_training():
    """As `dpexp.PrivacyEngine` counts them: the rate is B/N, an epoch N/B steps, and a rule of δ goes by N."""
    sizes = {"sample_rate": None, "steps": None, "num_examples": 60_000, "batch_size": 1024}
    plan = make_plan(
        num_examples=60_000, expected_batch_size=1024, steps=586, delta="half_over_n", noise_multiplier=1.1
    )
    result = account(arguments(**sizes, epochs=10, delta="half_over_n", noise_multiplier=1.1))
    assert (result["steps"], result["sample_rate"]) == (plan.steps, plan.sample_rate)
    assert result["epsilon"]["rdp"] == plan.epsilon()
    assert result["delta"] == plan.delta == 1 / 120_000
    assert result["epochs"] == pytest.approx(10, abs=1e-2)
    assert "sample rate       0.0170667 (1024 of 60000)\nsteps             586 (10 epochs)" in as_text(result)
    # a rate alone knows of epochs, too
    assert account(arguments(steps=None, epochs=10, sample_rate=1024 / 60_000))["steps"] == 586


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_how_long_a_budget_lasts(name):
    known = {"noise_multiplier": 1.1, "accountant": AccountantConfig(name=name)}
    result = account(arguments(**known, target_epsilon=2.0, steps=None))
    assert (
        result["epsilon"][name]
        <= 2.0
        < account(arguments(**known, steps=result["steps"] + 1))["epsilon"][name]
    )
    text = f"steps             {result['steps']} ({result['epochs']:.4g} epochs), the most that keep epsilon = 2 under {name}"
    assert text in as_text(result)
    # one step spends more
    assert account(arguments(noise_multiplier=0.1, target_epsilon=2.0, steps=None))["steps"] == 0


def test_correlated_noise_is_that_of_training():
    sizes = {"num_examples": 1000, "expected_batch_size": 20, "steps": 60, "delta": 1e-5, "epsilon": 8.0}
    alone, plan = make_plan(**sizes), make_plan(**sizes, bands="auto")
    asked = {"noise_multiplier": None, "target_epsilon": 8.0, "steps": 60}
    result = account(values(**asked, bands="auto"))
    assert result["bands"] == plan.bands > 1
    assert result["noise_multiplier"] == plan.noise_multiplier
    assert result["epsilon"]["pld"] == plan.epsilon(accountant="pld")
    ratio = plan.noise_in_weights() / alone.noise_in_weights()
    assert result["added_up"] == pytest.approx(ratio, rel=1e-3)
    assert f"bands             {plan.bands}: noise adds up to {result['added_up']:.3g} of" in as_text(result)
    in_steps = column_norm(plan.bands, 60) * noise_left(plan.bands, 60)
    ratio = plan.noise_multiplier * np.sqrt(np.mean(in_steps**2)) / alone.noise_multiplier
    assert result["in_one_step"] == pytest.approx(ratio, rel=1e-3)
    assert f"{result['in_one_step']:.3g} times as large in one step" in as_text(result)
    assert account(values(**asked, bands=str(plan.bands))) == result
    longest = account(
        values(bands="4", target_epsilon=8.0, steps=None, noise_multiplier=plan.noise_multiplier)
    )
    # no step more, and what the last b steps cost is paid for with the first of them
    assert longest["steps"] % 4 == 0
    assert "bands" not in account(values())


def test_a_grid_shows_what_each_of_its_jobs_found(tmp_path):
    done = called("dpexp.account", "noise_multiplier=1,2", *PUBLISHED[1:], "-m", cwd=tmp_path)
    assert done.returncode == 0
    (lines,) = (tmp_path / "runs" / "multirun").glob("*/jobs.jsonl")
    ended = [job["metrics"] for job in map(json.loads, lines.read_text().splitlines()) if job["metrics"]]
    assert [job["σ"] for job in ended] == [1, 2]
    alone = account(arguments(noise_multiplier=2.0, sample_rate=0.0243, steps=410, delta=1.2e-5))
    assert ended[1]["ε pld"] == alone["epsilon"]["pld"]
    assert upwards(alone["epsilon"]["pld"], ".4g") in done.stdout.split("2 jobs, 0 failed")[1]
