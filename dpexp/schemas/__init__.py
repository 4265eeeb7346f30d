"""What a run is made of: one dataclass per configuration group.

These classes are the types; the values and their reasons stand in ``conf/*/*.yaml``. Nothing here knows Hydra.
A field's default is the neutral value that the signature of a run leaves out (``dpexp.config.signature``): adding
a field with a default keeps every old signature, changing the default of a field gives old runs a new meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from dpexp.schemas.choices import CHOICES
from dpexp.schemas.guarantee import (
    AccountantConfig,
    ClipConfig,
    IndividualConfig,
    PrivacyConfig,
    ScheduleConfig,
    SearchConfig,
    UnitConfig,
)
from dpexp.schemas.learning import DataConfig, GenerationConfig, ModelConfig, PeftConfig, TaskConfig
from dpexp.schemas.running import (
    AnalysisConfig,
    EngineConfig,
    OptimConfig,
    RuntimeConfig,
    ScaleConfig,
    TrackerConfig,
)

__all__ = [
    "CHOICES", "AccountantConfig", "AnalysisConfig", "ClipConfig", "DataConfig", "EngineConfig", "GenerationConfig",
    "IndividualConfig", "ModelConfig", "OptimConfig", "PeftConfig", "PrivacyConfig", "RunConfig", "RuntimeConfig",
    "ScaleConfig", "ScheduleConfig", "SearchConfig", "TaskConfig", "TrackerConfig", "UnitConfig",
    "group_class", "setting_names",
]  # fmt: skip


@dataclass
class RunConfig:
    """Everything that ``python -m dpexp.train`` needs to know, resolved and checked."""

    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    accountant: AccountantConfig = field(default_factory=AccountantConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    unit: UnitConfig = field(default_factory=UnitConfig)
    individual: IndividualConfig = field(default_factory=IndividualConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    seed: int = 0
    # how many configurations this one was chosen from
    trials: int = 1
    # that their number was drawn from
    trials_law: str | None = None


def setting_names(schema: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings of a dataclass; a mapping counts as one, whatever it holds."""
    for each in fields(schema):
        if inner := group_class(each):
            yield from setting_names(inner, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name


def group_class(setting: Field[Any]) -> type | None:
    """Find the class of a field that is a group of settings; None of a setting."""
    made: Any = setting.default_factory
    return made if isinstance(made, type) and is_dataclass(made) else None
