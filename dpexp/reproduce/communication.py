"""The model of `dpexp.complexity.pipeline` at the size of He et al., section 4, who claim in words what it gives in numbers."""

from __future__ import annotations

from dpexp.complexity.pipeline import WAYS, Assumptions, cost
from dpexp.reproduce.documents import Document, as_rows, block, page

EPOCHS, SAMSUM = 5, 14_732
DEVICES = (16, 64, 256, 512)
# of each of WAYS
CLAIMS = (
    "no extra communication (section 4, App. C.1)",
    "(i) 'costly since it forces devices to be idle'",
    "(ii) 'costly due to slow CPU-GPU data transfer'",
    "(iii) 'costly due to performing the extra round of backpropagation'",
    "'does not bypass the complications in the subsequent gradient rescaling step'",
)
_COLUMNS = (
    "clipping", "devices", "MB to a neighbour", "KB of norms", "GB to the host and back", "MB of sums to replicas", "waits",
    "step, s", "step / per device", "He et al. say",
)  # fmt: skip


def communication_he() -> Document:
    """Section 4 of He et al.: per-device clipping beside flat clipping in its four ways, for each number of devices."""
    a, lines = Assumptions(), []
    for devices in DEVICES:
        base = cost("per device", devices, a).seconds
        for way, claim in zip(WAYS, CLAIMS, strict=True):
            one = cost(way, devices, a)
            lines.append((
                way, devices, f"{one.between / 1e6:.0f}", f"{one.norms / 1e3:.2f}", f"{one.host / 1e9:.1f}",
                f"{one.sums / 1e6:.0f}", one.waits, f"{one.seconds:.1f}", f"{one.seconds / base:.3f}", claim,
            ))  # fmt: skip
    steps = round(EPOCHS * SAMSUM / a.batch)
    return page(
        "communication-he", [block(as_rows(_COLUMNS, lines))], a=a, billions=a.parameters / 1e9, tflops=a.flops / 1e12,
        between=a.between / 1e9, to_host=a.to_host / 1e9, latency=a.latency * 1e6, epochs=EPOCHS, examples=SAMSUM, steps=steps,
        hours=steps * cost("per device", a.stages, a).seconds / 3600,
        full=2 * a.batch * a.parameters / a.stages * a.gradient / 1e12,
    )  # fmt: skip
