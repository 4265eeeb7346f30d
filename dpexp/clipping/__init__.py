"""Per-example gradient clipping: groups × thresholds × rules × engines. Usable alone; see `attach`."""

from dpexp.clipping.attach import Clipper, Report, attach

__all__ = ["Clipper", "Report", "attach"]
