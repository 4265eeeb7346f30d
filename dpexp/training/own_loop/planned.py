"""What a run of `dpexp.PrivacyEngine` is to be, from its arguments alone: nothing is made, or written, yet."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpexp.errors import UserError
from dpexp.privacy.caveats import pointless
from dpexp.privacy.plan import Plan, make_plan
from dpexp.schemas import ClipConfig, PrivacyConfig, RunConfig
from dpexp.training.own_loop.arguments import Numbers, check_rule, checked_schedule
from dpexp.training.own_loop.units import Units, units_of
from dpexp.training.watching.reading import refuse_other_rows


@dataclass(frozen=True)
class Planned:
    """A run that is not begun.

    Attributes:
        numbers: as given, and checked.
        units: what N counts.
        plan: what is released, at which price.
        config: its settings, where a configured run has the same.
    """

    numbers: Numbers
    units: Units
    plan: Plan
    config: RunConfig

    @classmethod
    def of(
        cls,
        numbers: Numbers,
        dataset: Any,
        users: Sequence[Hashable] | None,
        *,
        delta: str | float,
        accountant: str,
        schedule: str | Mapping[str, Any],
        bands: int | str,
        groups: Any,
        rule: str,
        rescale: bool,
        allocation: str,
        secure: bool,
    ) -> Planned:
        """Plan a run; see `dpexp.PrivacyEngine`. Warns where its guarantee says nothing.

        Raises:
            UserError: what cannot be meant.
        """
        check_rule(rule, allocation)
        units = units_of(len(dataset), users, numbers.rows_per_example)
        refuse_other_rows(dataset, users)
        adaptive = numbers.target_quantile is not None
        if not rescale and (not adaptive or groups == "flat"):
            why = (
                "one group: leave it out"
                if adaptive
                else "fixed thresholds: give target_quantile too, or leave it out"
            )
            raise UserError(f"rescale=False does nothing with {why}")
        plan = make_plan(
            num_examples=units.count,
            unit=units.config.name,
            expected_batch_size=numbers.batch_size,
            steps=numbers.steps_of(units.count),
            delta=delta,
            accountant=accountant,
            epsilon=numbers.epsilon,
            noise_multiplier=numbers.noise_multiplier,
            quantile_budget=numbers.quantile_budget if adaptive else 0.0,
            schedule=checked_schedule(schedule),
            bands=bands,
        )
        for sentence in pointless(plan):
            warnings.warn(sentence, stacklevel=4)
        config = RunConfig(
            clip=ClipConfig(
                groups=groups,
                clip_norm=numbers.clip_norm,
                rule=rule,
                allocation=allocation,
                adaptive=adaptive,
                target_quantile=numbers.target_quantile or 0.5,
                quantile_lr=numbers.quantile_lr,
                rescale=rescale,
            ),
            privacy=PrivacyConfig(noise_seed=numbers.noise_seed, release="strict", secure=secure),
            unit=units.config,
            trials=numbers.trials,
        )
        return cls(numbers, units, plan, config)
