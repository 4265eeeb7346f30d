"""What privacy costs over processes: a step of each runtime relative to the same runtime without privacy, and its bytes.

The baselines are PyTorch's own: DistributedDataParallel with its reducer, `fully_shard`, a schedule of
`torch.distributed.pipelining`. All ways take turns in the same processes, one thread each, and ratios are those of one turn, so
that whatever else the machine does weighs on both sides. A process that waits for another one uses no processor time: the ratio
of processor times is the one that other programs disturb least, the ratio of wall times the one that a user sees.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dpexp.benchmark.workloads import gpt2_network, with_lora
from dpexp.clipping import attach
from dpexp.clipping.devices import device_groups
from dpexp.parallel import Ranks, current
from dpexp.parallel.sharded import shard
from dpexp.pipeline.clipper import StageClipper, WholeModel
from dpexp.pipeline.flat import WAYS
from dpexp.pipeline.runner import Pipeline
from dpexp.pipeline.split import keep_stage
from dpexp.privacy.noise import KeyedGenerator, add_gaussian_
from dpexp.tasks.target_loss import example_losses

# names in the place of a workload, with a key of `SIZES`; ranks@4: four processes
RANKS = {"ranks": "full", "ranks_wide": "wide"}
# alone: every process computes the same share for itself and sends nothing, which tells what privacy costs from what processes do
METHODS = {
    "alone": ("nonprivate", "layer", "flat"),
    "ddp": ("nonprivate", "layer", "flat"),
    "fsdp": ("nonprivate", "layer", "flat"),
    "pipeline": ("nonprivate", "device", *(f"flat, {way}" for way in WAYS)),
}
# as many tokens in short and in long texts: what a norm costs is a question of their length; "lora": the rank of what alone is
# trained, as He et al. train GPT-3
_SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 2048}
_TINY = {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 50,
    "length": 8,
    "examples": 4,
    "microbatch": 2,
}
SIZES = {
    "full": (
        _SMALL | {"length": 128, "examples": 16, "microbatch": 4},
        _SMALL | {"length": 512, "examples": 4, "microbatch": 1},
        _SMALL | {"n_embd": 512, "n_head": 8, "length": 128, "examples": 16, "microbatch": 4, "lora": 8},
    ),
    # as wide as the GPT-2 that people fine-tune
    "wide": (_SMALL | {"n_embd": 768, "n_head": 12, "length": 256, "examples": 4, "microbatch": 2},),
    "tiny": (_TINY, _TINY | {"lora": 2}),
}  # fmt: skip
CLIP_NORM, RATE = 0.1, 1e-3


def measure_ranks(
    size: str, rounds: int, steps: int, processes: int = 2, noise: float = 1.0
) -> list[dict[str, Any]]:
    """Start processes on this machine, let all ways take turns in them, and compare.

    Args:
        size: a key of `SIZES`: GPT-2 with untied embeddings, all parameters trained or LoRA of some rank, on texts of some
            lengths; ``examples`` of each process.
        rounds: turns of every way; the first one is not counted.
        steps: in a turn.
        processes: how many; as many stages in the pipeline.
        noise: noise multiplier; 0 leaves the noise out.

    Returns:
        A row for each size, runtime and way: median seconds of a step (wall, and of the processor, the slowest
        process), those of its noise, the median ratios to the way without privacy, and the bytes that all processes hand to
        others in a step, by kind.
    """
    with tempfile.TemporaryDirectory() as name:
        context = mp.get_context("spawn")
        arguments = (processes, name, size, rounds, steps, noise)
        started = [context.Process(target=_work, args=(rank, *arguments)) for rank in range(processes)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise RuntimeError(f"processes ended with status {[process.exitcode for process in started]}")
        rows: list[dict[str, Any]] = json.loads((Path(name) / "rows.json").read_text(encoding="utf-8"))
        return rows


def _work(rank: int, processes: int, folder: str, size: str, rounds: int, steps: int, noise: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes)
    try:
        ranks = current()
        rows = [
            row
            for shape in SIZES[size]
            for runtime in METHODS
            for row in _measure(ranks, runtime, shape, rounds, steps, noise)
        ]
        if ranks.writes:
            (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Way:
    """One runtime and way to clip: `sums` leaves gradients, `step` adds noise and moves the weights.

    Args:
        runtime, method: see `METHODS`.
        size: one of a tuple of `SIZES`.
        ranks: all processes.
        noise: noise multiplier.
        groups: of processes, for what a pipeline sends and for its norms.
    """

    def __init__(
        self,
        runtime: str,
        method: str,
        size: dict[str, int],
        ranks: Ranks,
        noise: float,
        groups: tuple[Any, Any],
    ):
        self.method, self.ranks, self.sent = method, ranks, Counter[str]()
        self.noise = noise if method != "nonprivate" else 0.0
        self.noise_s = 0.0
        model, batch = _model(size), _batch(size, ranks.size)
        if runtime == "pipeline":
            self.sums = self._pipeline(model, batch, size, groups)
        else:
            share = {name: rows[ranks.rank :: ranks.size] for name, rows in batch.items()}
            self.sums = self._replicas_or_shards(model, share, runtime)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=RATE)

    def step(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        self.sums()
        begun = time.perf_counter()
        if self.noise:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            std = self.noise * CLIP_NORM
            add_gaussian_(gradients, [std] * len(gradients), KeyedGenerator(bytes(32)))
        self.noise_s = time.perf_counter() - begun
        self.optimizer.step()

    def _replicas_or_shards(
        self, model: nn.Module, share: dict[str, Tensor], runtime: str
    ) -> Callable[[], None]:
        self.model = shard(model) if runtime == "fsdp" else model
        if self.method == "nonprivate":
            network = self.model
            if runtime == "ddp":
                network = DistributedDataParallel(model)
                # the reducer calls all_reduce by itself otherwise, where nobody counts
                network.register_comm_hook(dist.group.WORLD, allreduce_hook)
            return lambda: _losses(network, share).sum().backward()
        clipper = attach(model, self.method, CLIP_NORM)
        clipper.reduces = runtime == "fsdp"

        def sums() -> None:
            clipper.backward(_losses(model, share))
            if runtime == "ddp":
                self.ranks.sum_([p.grad for p in model.parameters() if p.grad is not None])

        return sums

    def _pipeline(
        self, model: nn.Module, batch: dict[str, Tensor], size: dict[str, int], groups: tuple[Any, Any]
    ) -> Callable[[], None]:
        count, clipper = self.ranks.size, None
        spec: Any = device_groups(model, count) if self.method == "device" else "flat"
        plan = WholeModel(model, spec, count)
        self.model = keep_stage(model, self.ranks.rank, count)
        if self.method != "nonprivate":
            clipper = StageClipper(model, plan, engine="auto")
            clipper.thresholds = [CLIP_NORM] * len(plan.groups)
        pipeline = Pipeline(
            model, self.ranks.rank, count, example_losses, groups[0],
            clipper=None if clipper is None else clipper.clipper,
            flat=self.method.removeprefix("flat, ") if "flat" in self.method else None, norms=groups[1],
        )  # fmt: skip
        self.sent = pipeline.traffic.bytes

        def sums() -> None:
            pipeline.run(dict(batch), size["microbatch"])

        return sums


# the engines measure and prove in their first steps
WARM = 5


def _measure(
    ranks: Ranks,
    runtime: str,
    size: dict[str, int],
    rounds: int,
    steps: int,
    noise: float,
    warm: int = WARM,
) -> list[dict[str, Any]]:
    everybody = list(range(ranks.size))
    groups = dist.new_group(everybody), dist.new_group(everybody)
    ways = {method: Way(runtime, method, size, ranks, noise, groups) for method in METHODS[runtime]}
    spent: dict[str, list[tuple[float, float, float]]] = {method: [] for method in ways}
    for turn in range(rounds + 1):
        for method, way in ways.items():
            for _ in range(warm if not turn else 0):
                way.step()
            found = []
            for _ in range(steps):
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                way.step()
                own = (time.perf_counter() - wall, time.process_time() - cpu, way.noise_s)
                found.append(tuple(max(values) for values in zip(*ranks.gather(own), strict=True)))
            if turn:
                middle = [statistics.median(values) for values in zip(*found, strict=True)]
                spent[method].append((middle[0], middle[1], middle[2]))
    rows = []
    for method, way in ways.items():
        sent = _bytes(way, counted=runtime != "pipeline")
        times = list(zip(*spent[method], strict=True))
        bases = list(zip(*spent["nonprivate"], strict=True))
        ratios = [
            statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in zip(times[:2], bases[:2], strict=True)
        ]
        wall, cpu, noise_s = (statistics.median(values) for values in times)
        rows.append(
            {
                "runtime": runtime, "method": method, "length": size["length"], "processes": ranks.size,
                "parameters": sum(p.numel() for p in _model(size).parameters()), "lora": size.get("lora", 0),
                "wall_s": wall, "cpu_s": cpu, "noise_s": noise_s, "wall_ratio": ratios[0], "cpu_ratio": ratios[1],
                "bytes": sent, "load_average": os.getloadavg()[0],
            }
        )  # fmt: skip
    return rows


def _bytes(way: Way, counted: bool) -> dict[str, int]:
    """What all processes hand to others in one step, by kind."""
    way.sent.clear()
    with _collectives(way.sent) if counted else nullcontext():
        way.step()
    together: Counter[str] = Counter()
    for own in way.ranks.gather(dict(way.sent)):
        together.update(own)
    return {kind: together[kind] for kind in sorted(together)}


@contextmanager
def _collectives(sent: Counter[str]) -> Iterator[None]:
    """Count what goes through the collectives of `torch.distributed` that a step uses."""
    # of each: the kind, and which argument is what travels; the names of torch 2.11 and of later versions
    of_name = {
        "all_reduce": ("sums", "tensor", 0),
        "all_gather_into_tensor": ("weights", "output_tensor", 0),
        "all_gather_single": ("weights", "output_tensor", 0),
        "reduce_scatter_tensor": ("sums", "input", 1),
        "reduce_scatter_single": ("sums", "input", 1),
    }
    before = {name: getattr(dist, name) for name in of_name if hasattr(dist, name)}

    def counting(name: str) -> Callable[..., Any]:
        kind, argument, place = of_name[name]

        def call(*arguments: Any, **named: Any) -> Any:
            tensor: Tensor = named[argument] if argument in named else arguments[place]
            sent[kind if tensor.is_floating_point() else "messages"] += tensor.nbytes
            return before[name](*arguments, **named)

        return call

    try:
        for name in before:
            setattr(dist, name, counting(name))
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _model(size: dict[str, int]) -> nn.Module:
    shape = {name: size[name] for name in ("n_layer", "n_embd", "n_head", "vocab_size")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = gpt2_network(**shape, n_positions=size["length"], tie_word_embeddings=False)
        return (with_lora(model, size["lora"]) if "lora" in size else model).train()


def _losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none").mean(1)


def _batch(size: dict[str, int], processes: int) -> dict[str, Tensor]:
    """A logical batch, with a loss on every token."""
    draw = torch.Generator().manual_seed(1)
    shape = (size["examples"] * processes, size["length"])
    return {
        "input_ids": torch.randint(size["vocab_size"], shape, generator=draw),
        "positions": torch.arange(size["length"]).repeat(shape[0], 1),
        "targets": torch.randint(size["vocab_size"], shape, generator=draw),
    }
