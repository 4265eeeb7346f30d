"""The settings of an audit."""

from dataclasses import dataclass, field

from dpexp.schemas import RunConfig


@dataclass
class AuditConfig(RunConfig):
    """A run of `dpexp.train`, and what is done to it: the settings of ``conf/audit.yaml``."""

    method: str = "one_run"
    canaries: int = 1000
    content: str = "random"
    guesses: list[float] = field(default_factory=lambda: [1.0, 0.3, 0.1])
    confidence: float = 0.95
    repetitions: list[int] = field(default_factory=lambda: [1, 10, 100])
    secrets: int = 3
    candidates: int = 1000
