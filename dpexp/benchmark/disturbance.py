"""What the host of a virtual machine took away while something was measured."""

from __future__ import annotations

from pathlib import Path

_STAT = Path("/proc/stat")
# user, nice, system, idle, iowait, irq, softirq, steal; what follows is in user and nice already (proc(5))
_FIELDS, _STEAL = 8, 7


class Stolen:
    """Counts from its making on.

    Args:
        stat: the kernel's counters; another file in tests.
    """

    def __init__(self, stat: Path = _STAT):
        self.stat = stat
        self.before = self._counters()

    def share(self) -> float | None:
        """Return the share of the processors' time that other machines of the host got although this one wanted it.

        Returns:
            In [0, 1]; None where the system does not tell.
        """
        now = self._counters()
        if self.before is None or now is None:
            return None
        passed = [late - early for late, early in zip(now, self.before, strict=True)]
        return passed[_STEAL] / sum(passed) if sum(passed) > 0 else None

    def _counters(self) -> list[int] | None:
        try:
            words = self.stat.read_text(encoding="ascii").split("\n", 1)[0].split()
            values = [int(word) for word in words[1 : _FIELDS + 1]]
        except (OSError, ValueError):
            return None
        return values if len(values) == _FIELDS else None
