"""What clipping costs in a pipeline, by arithmetic: bytes by kind, synchronisations and time of a step.

A model, with its assumptions beside it; what it says of bytes is what a run of two stages counts (tests/pipeline).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

WAYS = ("per device", "flat, idle", "flat, offload", "flat, second backward", "flat, once at the end")


@dataclass(frozen=True)
class Assumptions:
    """GPT-3 on the machine of He et al., App. C.2, unless another number is given.

    Attributes:
        parameters, layers, width: of the model; rank: of LoRA on the query and value matrices of each layer.
        stages: K; microbatch: b, examples in one; batch: expected B of a step; tokens: T of an example.
        flops: of a device per second, as reached; between, to_host: bytes per second to the next device and to the host.
        latency: seconds of one message.
        activation, gradient: bytes of one number between stages, and of one in a per-example gradient or a sum.
    """

    parameters: float = 175e9
    layers: int = 96
    width: int = 12288
    rank: int = 32
    stages: int = 16
    microbatch: int = 1
    batch: int = 512
    tokens: int = 512
    flops: float = 50e12
    between: float = 25e9
    to_host: float = 12e9
    latency: float = 20e-6
    activation: int = 2
    gradient: int = 4

    @property
    def trained(self) -> int:
        """Parameters of LoRA in one stage: two factors for two matrices in each layer."""
        return ceil(self.layers / self.stages) * 2 * 2 * self.width * self.rank

    @property
    def forward(self) -> float:
        """Seconds of a microbatch's forward in one stage: 2 flops for each parameter and token."""
        return 2 * self.parameters / self.stages * self.tokens * self.microbatch / self.flops


@dataclass(frozen=True)
class Cost:
    """Of one step, for one device.

    Attributes:
        between: bytes of activations and their gradients, to a neighbour.
        norms: bytes of norms given to the other stages.
        host: bytes of per-example gradients to the host and back.
        sums: bytes of clipped sums to the other replicas.
        waits: times that all stages wait for each other before the update.
        seconds: of the whole step.
    """

    between: float
    norms: float
    host: float
    sums: float
    waits: int
    seconds: float


def cost(way: str, devices: int, given: Assumptions) -> Cost:
    """Compute the cost of a step.

    The backward of a frozen model with LoRA takes one forward for the rematerialisation (He et al., Algorithm 4, line 4) and one
    for the gradients of the inputs; those of the factors are small. Without synchronisation a schedule of J microbatches in K
    stages takes J + K - 1 turns of a forward and a backward.
    """
    replicas = devices // given.stages
    pieces = ceil(given.batch / replicas / given.microbatch)
    examples = pieces * given.microbatch
    backward = 2 * given.forward
    turn, turns = given.forward + backward, pieces + given.stages - 1
    boundary = 2 * examples * given.tokens * given.width * given.activation
    sums = 2 * given.trained * given.gradient * (replicas - 1) / replicas
    seconds = turns * turn + sums / given.between
    joining = 2 * log2(given.stages) * given.latency
    norms, host, waits = 0.0, 0.0, 0
    if way != "per device":
        norms, waits = 8.0 * examples, 1 if way == "flat, once at the end" else pieces
        seconds += waits * joining
    if way == "flat, idle":
        # the last stage may go on when the first has ended its backward of this microbatch, and so on for each
        seconds = pieces * (given.forward + given.stages * backward + joining) + sums / given.between
        seconds += (given.stages - 1) * given.forward
    elif way == "flat, offload":
        host = 2.0 * examples * given.trained * given.gradient
        seconds += host / given.to_host
    elif way in ("flat, second backward", "flat, once at the end"):
        seconds += pieces * backward
    return Cost(boundary, norms, host, sums, waits, seconds)
