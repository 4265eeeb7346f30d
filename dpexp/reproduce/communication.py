"""The model of `dpexp.complexity.pipeline` at the size of He et al., section 4, who claim in words what it gives in numbers."""

from __future__ import annotations

from dpexp.complexity.pipeline import WAYS, Assumptions, cost
from dpexp.reproduce.documents import Document, Rows, Section, as_rows

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


def rows(given: Assumptions) -> Rows:
    """Compute a row for each way and number of devices."""
    lines = []
    for devices in DEVICES:
        base = cost("per device", devices, given).seconds
        for way, claim in zip(WAYS, CLAIMS, strict=True):
            one = cost(way, devices, given)
            lines.append((
                way, devices, f"{one.between / 1e6:.0f}", f"{one.norms / 1e3:.2f}", f"{one.host / 1e9:.1f}",
                f"{one.sums / 1e6:.0f}", one.waits, f"{one.seconds:.1f}", f"{one.seconds / base:.3f}", claim,
            ))  # fmt: skip
    return as_rows(_COLUMNS, lines)


def communication_he() -> Document:
    """Section 4 of He et al.: per-device clipping beside flat clipping in its four ways."""
    given = Assumptions()
    steps = round(EPOCHS * SAMSUM / given.batch)
    hours = steps * cost("per device", given.stages, given).seconds / 3600
    full = 2 * given.batch * given.parameters / given.stages * given.gradient / 1e12
    words = (
        f"GPT-3 ({given.parameters / 1e9:.0f}B parameters, {given.layers} layers × {given.width}) in {given.stages} stages, LoRA "
        f"of rank {given.rank} on query and value, B = {given.batch} of {given.tokens} tokens, microbatches of "
        f"{given.microbatch}; the other devices hold replicas. For one device and one step.",
        f"**Assumed, not measured:** {given.flops / 1e12:.0f} TFLOP/s reached (V100), {given.between / 1e9:.0f} GB/s to a "
        f"neighbour, {given.to_host / 1e9:.0f} GB/s to the host, {given.latency * 1e6:.0f} µs a message, transfers to the host "
        "not hidden, those between stages hidden, activations in 16 bits, rematerialisation in every backward. He et al. state "
        "the stages, the rank and the microbatch (App. C.2); B and T they do not.",
        f"A check: {EPOCHS} epochs of SAMSum's {SAMSUM:,} examples are {steps} steps, {hours:.0f} hours of training per device "
        "on 16; He et al. report 15 hours (App. C.2).",
        "Norms themselves are next to nothing, as He et al. say: what costs is to wait for them, or to compute or carry "
        "gradients twice. That they are joined once rather than often saves nothing, because the second "
        "back-propagation takes the time.",
        "Offloading is cheap here because LoRA's gradients are small: with all parameters training it would be "
        f"{full:.0f} TB a step. Derivation: docs/pipeline.md.",
    )
    section = Section("", (), _COLUMNS, rows(given))
    title = "He et al., section 4: what clipping costs in a pipeline"
    return Document("communication-he", title, words, (section,), foot="")
