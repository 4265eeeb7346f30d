"""Gaussian noise, added in place: exact in its standard deviation, the same for any number of threads.

On a CPU the elements of a tensor are cut into chunks of fixed size. Each chunk has a generator of its own,
seeded by (seed, position of the tensor, number of the chunk), so that who fills it and when does not
matter. Besides one chunk per thread no memory is used. Where `dpexp.native` was built, its counter-based noise
takes the place of these generators, several times faster: other values of the same distribution (float64 keeps
its own). On other devices the device's own generator draws.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpexp import native
from dpexp.errors import UserError

_CHUNK = 1 << 16  # elements of one generator: 256 KiB of noise, which stays in a core's cache
_SERIAL = 1 << 15  # the longest tensor on which torch starts no threads; ours would each start a team
_NATIVE_BLOCK = 1 << 20
_DEVICE_BLOCK = 1 << 24


class SecureGenerator:
    """Noise from a cryptographic keystream (SHAKE-256) in place of a statistical generator; slow, CPU only.

    Each value is half the sum of four double-precision Gaussians, which makes it infeasible to search for
    the uniform numbers behind an observed float (Mironov 2012 shows the attack; Holohan & Braghin 2021,
    "Secure random sampling in differential privacy", the remedy, with n = 2). ``key`` is secret and may be
    used for one step only; 32 bytes or more."""

    def __init__(self, key: bytes) -> None:
        if len(key) < 32:
            raise UserError(f"a secure generator needs a key of at least 32 bytes, not {len(key)}")
        self._key = key
        self._calls = 0

    def next_key(self) -> bytes:
        """A key for one call of `add_gaussian_`; the next one differs."""
        self._calls += 1
        return hashlib.sha256(b"dpexp secure noise" + self._calls.to_bytes(8, "little") + self._key).digest()


class _Job(NamedTuple):
    """A run of contiguous elements that one generator serves."""

    target: Tensor
    std: float
    seed: bytes


@torch.no_grad()
def add_gaussian_(
    tensors: Tensor | Iterable[Tensor],
    std: float | Sequence[float] | Tensor,
    generator: torch.Generator | SecureGenerator | None = None,
) -> None:
    """Add independent N(0, std²) noise to every element of every tensor, in place.

    Args:
        tensors: floating point tensors of any shape, strides and device. Values below float32 are raised to
            float32 for the addition; float64 gets float64 noise. Of a DTensor each rank adds to its own
            shard: all ranks must pass the same seed, and replicas then get the same noise.
        std: one standard deviation for all or one per tensor, in the unit of the tensors. Where it is 0
        nothing changes.
        generator: its seed, and how often it was used before, decide all noise, for any number of threads.
            None draws from the operating system, not from ``torch.manual_seed``, which is public.

    Raises `UserError`, before anything is changed, for a std that is negative, infinite or NaN, a count of
    stds other than the tensors', or a tensor that cannot hold noise."""
    targets = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    stds = _standard_deviations(std, len(targets))
    locals_ = [_local(tensor, index) for index, tensor in enumerate(targets)]
    secure = isinstance(generator, SecureGenerator)
    seed = generator.next_key() if isinstance(generator, SecureGenerator) else _draw_seed(generator)
    jobs: list[_Job] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for index, ((tensor, shard), sigma) in enumerate(zip(locals_, stds, strict=True)):
        if sigma == 0 or tensor.numel() == 0:
            continue
        tensor_seed = hashlib.sha256(seed + f"{index}{shard}".encode()).digest()
        if tensor.device.type != "cpu" and not secure:
            _add_on_device(tensor, sigma, tensor_seed)
            continue
        kernels = None if secure or tensor.dtype == torch.float64 else native.kernels()
        if kernels is not None:
            _add_natively(kernels, tensor, sigma, tensor_seed)
            continue
        flat = tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            flat = tensor.cpu().contiguous()
            flat = flat.clone() if flat is tensor else flat
            copies.append((tensor, flat))
        jobs.extend(
            _Job(part, sigma, tensor_seed + chunk.to_bytes(8, "little"))
            for chunk, part in enumerate(flat.view(-1).split(_CHUNK))
        )
    _run(jobs, secure)
    for tensor, noisy in copies:
        tensor.copy_(noisy)


def seed_torch(seed: int) -> None:
    """Seed torch's default generators, of every device, for what a forward pass draws (dropout).

    The CPU's gets its whole state from the seed, in [0, 2^63); ``torch.manual_seed`` would keep 32 bits of it."""
    torch.manual_seed(seed)
    layout = _state_layout()
    if layout is not None:
        torch.default_generator.set_state(_full_state(layout, seed.to_bytes(8, "little")))


def _add_natively(kernels: Any, tensor: Tensor, std: float, seed: bytes) -> None:
    """Noise from a counter: that of an element depends on its place, not on strides or precision."""
    key, stream = (int.from_bytes(seed[i : i + 8], "little", signed=True) for i in (0, 8))
    for flat in _flat_parts(tensor):
        if flat.dtype == torch.float32:
            kernels.add_normals_(flat, std, key, stream, 0)
            continue
        buffer = torch.empty(min(flat.numel(), _NATIVE_BLOCK))
        for start, part in zip(count(0, _NATIVE_BLOCK), flat.split(_NATIVE_BLOCK), strict=False):
            noise = buffer[: part.numel()].zero_()
            kernels.add_normals_(noise, 1.0, key, stream, start)
            part.copy_(part.float().add_(noise, alpha=std))


def _standard_deviations(std: float | Sequence[float] | Tensor, number: int) -> list[float]:
    values = std.tolist() if isinstance(std, Tensor) else std
    stds = [float(values)] * number if isinstance(values, int | float) else [float(value) for value in values]
    if len(stds) != number:
        raise UserError(
            f"{len(stds)} standard deviations for {number} tensors: give one for all, or one for each"
        )
    for index, value in enumerate(stds):
        if not 0 <= value < math.inf:
            raise UserError(
                f"the standard deviation of tensor {index} is {value}; it must be a number, 0 or larger"
            )
    return stds


def _local(tensor: Tensor, index: int) -> tuple[Tensor, str]:
    """The tensor that lies in this process, and which shard it is (the same text on all ranks that hold a
    replica)."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.layout != torch.strided:
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UserError(
            f"tensor {index} ({kind}) cannot hold noise: a dense tensor of floating point numbers is needed"
        )
    if not hasattr(tensor, "to_local"):
        return tensor, ""
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    if any(placement.is_partial() for placement in tensor.placements):
        raise UserError(f"tensor {index} is a partial sum: reduce it over the ranks before noise is added")
    shard = [
        tensor.device_mesh.get_local_rank(dim)
        for dim, p in enumerate(tensor.placements)
        if not p.is_replicate()
    ]
    return tensor.to_local(), str(shard)


def _draw_seed(generator: torch.Generator | None) -> bytes:
    """32 bytes. The state of torch's CPU generator holds only 32 bits of its seed, so the seed itself goes
    in as well."""
    if generator is None:
        return secrets.token_bytes(32)
    drawn = torch.randint(1 << 62, (1,), generator=generator, device=generator.device).item()
    return hashlib.sha256(f"dpexp noise {generator.initial_seed()} {drawn}".encode()).digest()


def _run(jobs: list[_Job], secure: bool) -> None:
    """Do the jobs, on as many threads as torch would use, each with a contiguous share of about equal
    size."""
    workers = min(torch.get_num_threads(), os.cpu_count() or 1, len(jobs) // 4)
    if workers <= 1:
        _work(jobs, secure)
        return
    size = sum(job.target.numel() for job in jobs) / workers
    shares: list[list[_Job]] = [[] for _ in range(workers)]
    done = 0
    for job in jobs:
        shares[min(int(done / size), workers - 1)].append(job)
        done += job.target.numel()
    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(_work, share, secure) for share in shares]:
            future.result()


@torch.no_grad()  # the mode is each thread's own
def _work(jobs: list[_Job], secure: bool) -> None:
    generator = torch.Generator()
    buffers: dict[torch.dtype, Tensor] = {}
    for target, std, seed in jobs:
        precision = torch.float64 if target.dtype == torch.float64 else torch.float32
        if precision not in buffers:
            buffers[precision] = torch.empty(_CHUNK, dtype=precision)
        noise = buffers[precision][: target.numel()]
        if secure:
            noise.copy_(torch.from_numpy(_secure_normals(seed, noise.numel())))
        else:
            _fill(noise, generator, seed)
        for part, drawn in zip(target.split(_SERIAL), noise.split(_SERIAL), strict=True):
            if part.dtype == precision:
                part.add_(drawn, alpha=std)
            else:
                part.copy_(part.to(precision).add_(drawn, alpha=std))


def _fill(noise: Tensor, generator: torch.Generator, seed: bytes) -> None:
    """Standard normals from a generator whose whole state comes from the seed.

    ``manual_seed`` would keep 32 bits of it: among the millions of chunks of a run some would then repeat.
    """
    layout = _state_layout()
    if (
        layout is None or noise.dtype == torch.float64
    ):  # in double precision torch is five times slower than numpy
        rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(_words(seed)[:8].tolist())))
        numbers = noise.numpy()
        rng.standard_normal(out=numbers, dtype=numbers.dtype)
        return
    generator.set_state(_full_state(layout, seed))
    noise.normal_(generator=generator)


def _full_state(layout: NDArray[np.uint64], seed: bytes) -> Tensor:
    state = layout.copy()
    state[3:627] = _words(seed)
    return torch.from_numpy(state.view(np.uint8))


def _words(seed: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(hashlib.shake_256(seed).digest(4 * 624), dtype=np.uint32)


@lru_cache(maxsize=1)
def _state_layout() -> NDArray[np.uint64] | None:
    """A freshly seeded state of torch's CPU generator, where its 624 words are found at 3; None for another
    layout."""
    state = torch.Generator().manual_seed(5489).get_state().numpy().view(np.uint64).copy()
    second = (1812433253 * (5489 ^ (5489 >> 30)) + 1) & 0xFFFFFFFF
    return state if len(state) > 627 and state[3] == 5489 and state[4] == second else None


def _secure_normals(seed: bytes, count: int) -> NDArray[np.float64]:
    """Sums of four Gaussians by Box and Muller, halved: standard normal."""
    words = np.frombuffer(hashlib.shake_256(b"secure" + seed).digest(32 * count), dtype=np.uint64).reshape(
        4, count
    )
    uniforms = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
    radii, angles = np.sqrt(-2 * np.log(uniforms[:2])), 2 * np.pi * uniforms[2:]
    return (radii * (np.cos(angles) + np.sin(angles))).sum(axis=0) / 2


def _add_on_device(tensor: Tensor, std: float, seed: bytes) -> None:
    """By the device's own generator, in blocks of one reused buffer."""
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(seed[:8], "little") >> 1)
    precision = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    for flat in _flat_parts(tensor):
        buffer = torch.empty(min(flat.numel(), _DEVICE_BLOCK), dtype=precision, device=tensor.device)
        for part in flat.split(_DEVICE_BLOCK):
            noise = buffer[: part.numel()].normal_(generator=generator)
            if part.dtype == precision:
                part.add_(noise, alpha=std)
            else:
                part.copy_(part.to(precision).add_(noise, alpha=std))


def _flat_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The elements as one contiguous view, or as a copy that is written back."""
    if tensor.is_contiguous():
        yield tensor.view(-1)
    else:
        copy = tensor.contiguous()
        yield copy.view(-1)
        tensor.copy_(copy)
