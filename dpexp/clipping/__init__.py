"""Per-example gradient clipping: groups × thresholds × rules × engines. Usable alone; see `attach`."""

import torch

from dpexp.torch_versions import refuse_untested

refuse_untested(torch.__version__)

from dpexp.clipping.attach import Clipper, attach  # noqa: E402
from dpexp.clipping.reports import Report  # noqa: E402

__all__ = ["Clipper", "Report", "attach"]
