"""What a record and a model's card say of privacy: the numbers, and in sentences what a reader of them must know."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_accounting import DpEvent

from dpexp.durable import read_yaml
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.caveats import MEANINGLESS, caveats
from dpexp.privacy.events import composed, decode, encode
from dpexp.privacy.keys import COPIED
from dpexp.privacy.noise import describe
from dpexp.privacy.plan_checks import UNITS
from dpexp.privacy.shown import upwards
from dpexp.privacy.tradeoff import NO_BOUND, attack
from dpexp.privacy.tuning import tuned_epsilons

if TYPE_CHECKING:
    from dpexp.privacy.individual import Budgets
    from dpexp.privacy.plan import Plan
    from dpexp.schemas import RunConfig

ACCOUNTANTS = ("rdp", "gdp", "prv", "pld")
# what a run without privacy has released
UNPROTECTED = "model without any guarantee"
# in a task's notes: for the holder of the data alone
COUNTED_WITHOUT_NOISE = "without noise on private data"
_TUNING = "epsilon excludes the tuning"


def privacy_block(
    run: "RunConfig",
    plan: "Plan | None",
    spent: dict[str, float | None],
    num_groups: int,
    charged: int,
    by_budget: Sequence[dict[str, float | None]] = (),
    data: Sequence[str] = (),
    copied: bool = False,
    events: Sequence[DpEvent] = (),
    unproven: Sequence[str] = (),
    again: int = 0,
) -> dict[str, Any]:
    """The summary's privacy block.

    Args:
        run: the configuration.
        plan: None for a non-private run.
        spent: ε under every accountant, computed from the ledger; empty for a non-private run.
        num_groups: K.
        charged: steps in the ledger, those paid twice after a change of the runtime included.
        by_budget: ε of each group of examples, where they have budgets of their own.
        data: what the task says about its data, see `DataInfo.notes`.
        copied: the run's folder was found to be a copy (`dpexp.privacy.keys`).
        events: what the ledger holds about an example, of each group of examples with a budget.
        unproven: what of a person's own code could not be looked at.
        again: how many of the charges were not the first one of their step.
    """
    if plan is None:
        return {
            "epsilon": dict.fromkeys(ACCOUNTANTS),
            **dict.fromkeys(
                ("delta", "accountant", "noise_multiplier", "sigma_new", "sigma_b", "sample_rate")
            ),
            "steps": 0,
            "sampling": run.privacy.sampling,
            "released": [UNPROTECTED if run.optim.steps != 0 else "model as it was, untrained"],
            "neighbouring": None,
            **_attack(()),
            "events": [],
            "notes": [
                "trained without privacy: nothing is guaranteed about the training data"
                if run.optim.steps != 0
                else "no step was taken (optim.steps=0): nothing of the training data is in the model",
                *(f"not proven: {note}" for note in unproven),
                *_about_data(data),
            ],
            "trials": run.trials,
            "trials_law": run.trials_law,
            "epsilon_with_tuning": None,
        }
    adaptive = plan.quantile_budget > 0
    # of a course that a search chose, only the filter's budget is guaranteed
    fixed = () if plan.moves else events
    # whoever looks at several results may have stopped each of them by how good it was
    whole = _with_the_rest(plan, events, charged - again)
    return {
        "epsilon": {name: _finite(spent.get(name)) for name in ACCOUNTANTS},
        "delta": plan.delta,
        "accountant": plan.accountant,
        "noise_multiplier": plan.noise_multiplier,
        "sigma_new": plan.sigma_new(0),
        "sigma_b": plan.sigma_b(0, num_groups) if adaptive else None,
        "sample_rate": plan.sample_rate,
        "steps": charged,
        "sampling": plan.sampling,
        **({"bands": plan.bands} if plan.bands > 1 else {}),
        "released": [
            "gradients",
            *(["norms" if run.clip.follows == "norm" else "counts"] if adaptive else []),
            *(["step sizes" if plan.search.moves else "losses"] if plan.search else []),
        ],
        "neighbouring": plan.neighbouring,
        # what holds for Poisson batches bounds no attack on shuffled ones
        **_attack(() if plan.sampling == "shuffle" else fixed),
        "events": [encode(event) for event in events],
        "notes": [
            *privacy_notes(run, plan, spent, again, copied),
            *(f"not proven: {note}" for note in unproven),
            *_about_data(data),
        ],
        "trials": run.trials,
        "trials_law": run.trials_law,
        "epsilon_with_tuning": _with_tuning(whole or fixed, plan.delta, run.trials, run.trials_law),
        **({"individual": individual_block(plan.budgets, by_budget)} if plan.budgets is not None else {}),
        **({"unit": plan.unit} if plan.unit != "example" else {}),
        **({"filtered": True} if plan.moves else {}),
        **({"planned": _planned(plan, whole, charged - again)} if whole else {}),
    }


def _with_the_rest(plan: "Plan", events: Sequence[DpEvent], taken: int) -> list[DpEvent]:
    """Of a run that ended before its plan did: what it has released, and what the steps that are left would have; of each group
    of examples. Nothing of any other run."""
    if plan.moves or taken >= plan.steps:
        return []
    budgets = [None] if plan.budgets is None else range(plan.num_budgets)
    return [
        composed([(spent, 1), (plan.rest(taken, budget), 1)])
        for spent, budget in zip(events, budgets, strict=False)
    ]


def _planned(plan: "Plan", whole: Sequence[DpEvent], taken: int) -> dict[str, Any]:
    """How many steps were planned and taken, and ε of all of them."""
    spent = max(epsilon(event, plan.delta, plan.accountant) for event in whole)
    return {"steps": plan.steps, "taken": taken, "epsilon": spent}


def _attack(events: Sequence[DpEvent]) -> dict[str, float | None]:
    """μ, its regret and the best attack, of the least protected group; None where nothing is known of them."""
    found = [attack(event) for event in events]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return dict.fromkeys(NO_BOUND.plain())
    return max(known, key=lambda one: (one.tpr, one.mu)).plain()


def _with_tuning(
    events: Sequence[DpEvent], delta: float, trials: int, law: str | None
) -> dict[str, float | None] | None:
    """ε of the least protected group with the choice among the trials included; None where there was no choice."""
    if not events or (trials == 1 and law is None):
        return None
    found = [tuned_epsilons(event, delta, trials, law) for event in events]
    worst: dict[str, float | None] = {}
    for name in ACCOUNTANTS:
        values = [one[name] for one in found]
        worst[name] = None if None in values else _finite(max(value for value in values if value is not None))
    return worst


def with_choice(privacy: Mapping[str, Any]) -> tuple[str, float] | None:
    """ε of a record with the choice among its trials, and by which accountant; None where it has none.

    Of a random number of trials rdp alone has a price.
    """
    tuned = privacy.get("epsilon_with_tuning") or {}
    names = dict.fromkeys((privacy.get("accountant"), "rdp"))
    return next(((str(name), tuned[name]) for name in names if tuned.get(name) is not None), None)


def _about_data(notes: Sequence[str]) -> list[str]:
    """Of a task's notes, those that may go with the model."""
    return [f"data: {note}" for note in notes if COUNTED_WITHOUT_NOISE not in note]


def individual_block(budgets: "Budgets", by_budget: Sequence[dict[str, float | None]]) -> dict[str, Any]:
    """What each group of examples was promised and has spent."""
    rows = zip(budgets.epsilons, budgets.sizes, budgets.rates, budgets.scales, by_budget, strict=True)
    return {
        "method": budgets.method,
        "membership": budgets.membership,
        "groups": [
            {
                "target": target,
                "examples": size,
                "sample_rate": rate,
                "clip_scale": scale,
                "epsilon": {name: _finite(spent.get(name)) for name in ACCOUNTANTS},
            }
            for target, size, rate, scale, spent in rows
        ],
    }


def _finite(value: float | None) -> float | None:
    # JSON has no infinity
    return value if value is not None and math.isfinite(value) else None


def privacy_notes(
    run: "RunConfig", plan: "Plan", spent: dict[str, float | None], again: int, copied: bool = False
) -> list[str]:
    """What a reader of ε must know, in sentences."""
    notes = [
        f"the unit of privacy is one {UNITS[plan.unit]}: neighbouring data sets differ in one ({plan.neighbouring})"
    ]
    if plan.unit == "user":
        notes.append(
            f"N, delta and the sampling rate are those of users; a step takes at most {run.unit.rows} rows of a user, and clips "
            "what they give together"
        )
    else:
        notes.append(
            "somebody who gave several examples is protected less: with k of them by k times epsilon, at a larger delta"
        )
    if plan.sampling == "poisson":
        notes.append("batches are drawn by Poisson sampling, as the accountants assume")
    notes += caveats(plan)
    if run.clip.method in ("ellipsoid", "embedding"):
        notes.append(
            f"clip={run.clip.name} looked at the first examples of the dev set, {run.clip.public_examples} at most, which is "
            "public; metrics on it are a little optimistic for that"
        )
    notes += _unbounded(spent)
    decided = spent.get(plan.accountant)
    if decided is not None and MEANINGLESS < decided < math.inf:
        shown = upwards(decided, ".4g")
        notes.append(
            f"epsilon = {shown} protects nobody: it lets an adversary's odds grow by a factor of e^{shown}; "
            "values of 10 and less are usual"
        )
    if plan.noise_multiplier > 0:
        notes.append(describe(run.privacy.secure))
        if run.runtime.precision != "fp32":
            notes.append(
                f"forward and backward computed in {run.runtime.precision}: the gradients of all examples whose physical batch "
                "another one makes larger, or pads further, are rounded otherwise, each by some 2^-8 (fp16: 2^-11) of its "
                "clipped length, which epsilon does not count (docs/privacy.md)"
            )
    if run.privacy.noise_seed is not None:
        notes.append(
            "sampling and noise were drawn from a fixed seed: the guarantee holds only while that seed is secret, and it "
            "stands in this record; a copy of this run shares its samples, and the two epsilons do not add up"
        )
    if copied:
        notes.append(COPIED)
    if again:
        notes.append(
            f"{again} steps were charged twice: they were run again, after an interruption with another runtime or from a "
            "checkpoint with other settings, and with fresh noise. If how often went by how good the weights were, that number "
            "was not fixed beforehand, and what holds is epsilon of as many charges as there could have been"
        )
    notes.append(_tuned(run.trials, run.trials_law))
    if run.optim.keep_best_every:
        notes.append(
            f"of the weights after every {run.optim.keep_best_every} steps and the last one, those were kept that scored best on "
            "the dev set (optim.keep_best_every): all steps are charged, and the choice costs nothing as long as dev is public; "
            "what is measured on the same set is a little optimistic"
        )
    if run.task.held_out:
        notes.append(
            f"the last {run.task.held_out} rows of the training file are the dev set (task.held_out): {_learnt_from_dev(run)} "
            "and nothing protects them; what the metrics say of them is public"
        )
    notes.append("the dev set, on which the metrics are computed, is taken to be public, and so is N")
    if run.privacy.release != "strict":
        notes.append(
            'the lines marked "not_private" in metrics.jsonl, the SHA-256 of the training data, times, sizes and what '
            "details.data_notes counted on the training data are outside the guarantee: keep them to yourself"
        )
    if run.analysis.output_specific_every:
        notes.append(
            "details.output_specific, output_specific.npy and the checkpoint hold what single examples contributed, without "
            "noise: they are outside the guarantee too"
        )
    return notes


def _learnt_from_dev(run: "RunConfig") -> str:
    """What a run makes of the rows that it is measured on, in words."""
    used = []
    if run.clip.method in ("ellipsoid", "embedding"):
        used.append(f"clip={run.clip.name} takes gradients of them for public")
    if run.schedule.name == "validation":
        used.append("schedule=validation follows the score on them")
    if run.optim.keep_best_every:
        used.append("optim.keep_best_every chooses by the score on them")
    return f"{', '.join(used)}," if used else "nothing is learnt from them"


def _unbounded(spent: dict[str, float | None]) -> list[str]:
    """What it means where accountants find no finite ε. gdp bounds nothing, finite or not."""
    bounds = {name: value for name, value in spent.items() if value is not None and name != "gdp"}
    infinite = [name for name, value in bounds.items() if not math.isfinite(value)]
    finite = [f"{name} {upwards(value)}" for name, value in bounds.items() if math.isfinite(value)]
    if not infinite:
        return []
    if not finite:
        return ["epsilon has no finite value: there is no guarantee to speak of"]
    return [
        f"{', '.join(infinite)} found no finite epsilon, which is a limit of its arithmetic and not of the mechanism: "
        f"{', '.join(finite)} is an upper bound on its own"
    ]


def _tuned(trials: int, law: str | None) -> str:
    if law is not None:
        chosen = f"the best of a {law} number of trials, {trials} on average"
    else:
        several = f"chosen from {trials} configurations, each taken to have cost what this one did"
        chosen = "no other trial was declared" if trials == 1 else several
    return f"{chosen}; {_TUNING}"


def trials_of(run: "RunConfig", earlier: Path) -> tuple[int, str | None]:
    """How many configurations a run says it was chosen from, and their law; no fewer than an earlier session in its folder said.

    Args:
        run: its settings now.
        earlier: the settings of the earlier session, as YAML; there may be none.
    """
    told = read_yaml(earlier)
    try:
        before = int(told["trials"])
    except (ValueError, KeyError, TypeError):
        return run.trials, run.trials_law
    return (run.trials, run.trials_law) if run.trials >= before else (before, told.get("trials_law"))


def declare_trials(summary: dict[str, Any], trials: int, law: str | None = None) -> bool:
    """Let a finished run say that it was chosen from more configurations than it knew of. Returns whether it is news.

    How many were tried is known when the last one has ended, and the best of them is finished then. Fewer is no news: what
    was tried stays tried.
    """
    privacy = summary["privacy"]
    before = int(privacy.get("trials") or 1)
    if trials < before or (trials, law) == (before, privacy.get("trials_law")):
        return False
    privacy["trials"], privacy["trials_law"] = trials, law
    # older records hold no events; of a course that a filter ended they make no composition
    if (events := privacy.get("events")) and not privacy.get("filtered"):
        privacy["epsilon_with_tuning"] = _with_tuning(
            [decode(e) for e in events], privacy["delta"], trials, law
        )
    privacy["notes"] = [_tuned(trials, law) if _TUNING in note else note for note in privacy["notes"]]
    return True
