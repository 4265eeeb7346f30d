"""Gaussian noise on a public grid, added in place: no value that is possible for one data set is impossible for its neighbour.

The values are rounded to multiples of std/2^40, and whole multiples that follow the discrete Gaussian are added; what happens to
the sum afterwards, rounding to the tensor's precision included, is a function of a released number. docs/privacy.md derives what
this costs: nothing that the digits of ε could show. The default draws by `dpexp.privacy.staircase` (in C++ where `dpexp.native`
was built), right to 2^-45 in every probability; a `SecureGenerator` by `dpexp.privacy.exact`, without any error.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpexp import native
from dpexp.errors import UserError
from dpexp.parallel.shards import is_sharded, part_here
from dpexp.privacy import exact
from dpexp.privacy.cipher import chacha
from dpexp.privacy.discrete import Piece, integers
from dpexp.privacy.staircase import GROUP, SCALE_BITS, staircase

# The noise is larger than asked for by this share: it pays for the rounding of the values to the grid (`check_multiplier`).
INFLATION = 2.0**-16
# Of σ√d: twice as much is paid for.
_LARGEST = 2.0**23
_STDS = (1e-250, 1e250)

# Elements whose noise is drawn together, a multiple of `staircase.GROUP`; on a GPU more, to keep it busy.
_BATCH, _GPU_BATCH = 1 << 19, 1 << 22
_EXACT_BATCH = 1 << 18
_CAST_BLOCK, _PUT_BLOCK = 1 << 20, 1 << 16
# numbers that are compared before the kernels are trusted: those of a bad compiler differed in one of 150
_COMPARED = 1 << 14
_POOL_BLOCKS = 1 << 13
_EXACT_ROUNDS = 20


class KeyedGenerator:
    """A stream of noise under a secret key, one for each use.

    Args:
        key: 32 bytes or more, all of which count; used for one purpose and one step only.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) < 32:
            raise UserError(f"a generator of noise needs a key of at least 32 bytes, not {len(key)}")
        self._key = key
        self._calls = 0

    def next_key(self) -> bytes:
        """Derive 32 bytes for one call of `add_gaussian_`; the next ones differ."""
        self._calls += 1
        name = f"dpexp {type(self).__name__} {self._calls} ".encode()
        return hashlib.sha256(name + self._key).digest()


class SecureGenerator(KeyedGenerator):
    """The strongest form: the exact discrete Gaussian by whole numbers alone. Some hundred times slower, always on the CPU."""


class _Job(NamedTuple):
    """A contiguous, flat tensor, the step of its grid, and from which place on which stream of which key serves it."""

    flat: Tensor
    grid: float
    key: bytes
    stream: int
    start: int = 0


@torch.no_grad()
def add_gaussian_(
    tensors: Tensor | Iterable[Tensor],
    std: float | Sequence[float] | Tensor,
    generator: torch.Generator | KeyedGenerator | None = None,
) -> None:
    """Add independent Gaussian noise of standard deviation std to every element of every tensor, in place.

    An element s becomes g·(round(s/g) + n) on the grid g = std·(1 + 2^-16)/2^40, with n from the discrete Gaussian of standard
    deviation 2^40, computed in float64 and rounded once to the precision of the tensor. For a step of d elements in which one
    example moves the tensors by std/σ, this is as private as real-valued Gaussian noise of multiplier σ while σ√d ≤ 2^23, up to
    an ε' of 2^-44·√(d·ln(1/δ')/2) and a δ' + d·2^-90 of your choice of δ' (docs/privacy.md, Noise): 8e-9 at d = 1e9, δ' = 1e-16.

    Args:
        tensors: floating point tensors of any shape, strides and device. Values below float32 are raised to float32 before they
            are rounded for the last time. Of a DTensor each rank adds to its own part, with the noise that this part would get
            in one process: all ranks must pass the same tensors and the same seed.
        std: one standard deviation for all or one per tensor, in the unit of the tensors. Where it is 0
            nothing changes.
        generator: its key (of a `torch.Generator`: its seed and state), and how often it was used before, decide all noise, for
            any number of threads and on every device. None draws a key of 256 bits from the operating system, not from
            ``torch.manual_seed``, which is public. A `torch.Generator` is for tests: few seeds can be searched.

    Raises:
        UserError: before anything is changed, for a std that is negative, infinite, NaN or beyond 1e±250, a count of stds other
            than the tensors', or a tensor that cannot hold noise.
    """
    targets = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    stds = _standard_deviations(std, len(targets))
    _draw_onto(_locals(targets, generator), map(_grid, stds), generator)


def room_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make what `draw_whole` writes to: float64, one for each tensor, of its shape; of a DTensor for the part that lies here."""
    parts = (_local(tensor, index)[0] for index, tensor in enumerate(tensors))
    return [torch.zeros(part.shape, dtype=torch.float64, device=part.device) for part in parts]


def draw_whole(
    tensors: Sequence[Tensor], generator: torch.Generator | KeyedGenerator | None, out: Sequence[Tensor]
) -> None:
    """Draw the whole numbers that `add_gaussian_` would add to these tensors: they follow the discrete Gaussian of 2^40.

    Args:
        tensors, generator: see `add_gaussian_`.
        out: of `room_for`; what is in it is overwritten.
    """
    places = [place for _, place in _locals(tensors, generator)]
    drawn = [whole.zero_() for whole in out]
    _draw_onto(list(zip(drawn, places, strict=True)), [1.0] * len(drawn), generator)


@torch.no_grad()
def put_on_grid_(tensors: Sequence[Tensor], stds: Sequence[float], noise: Sequence[Tensor]) -> None:
    """Round tensors to the grids of their standard deviations and add whole numbers, as `add_gaussian_` does, in place.

    Args:
        tensors, stds: see `add_gaussian_`.
        noise: in units of the grid, as `draw_whole` draws it.
    """
    for index, (tensor, sigma, whole) in enumerate(zip(tensors, stds, noise, strict=True)):
        part, _ = _local(tensor, index)
        if sigma == 0 or not part.numel():
            continue
        flat = [each.view(-1).split(_PUT_BLOCK) if part.is_contiguous() else [each] for each in (part, whole)]
        for block, numbers in zip(*flat, strict=True):
            _put(block, _grid(sigma), numbers)


def _grid(std: float) -> float:
    """The step of the grid on which noise of this standard deviation lies."""
    return std * (1 + INFLATION) * 2.0**-SCALE_BITS


def _put(part: Tensor, grid: float, noise: Tensor) -> None:
    """Round to the grid, and add whole numbers of its steps."""
    noisy = part.double().mul_(1 / grid).round_().add_(noise).mul_(grid)
    part.copy_(noisy if part.dtype == torch.float64 else noisy.float())


def _locals(
    tensors: Sequence[Tensor], generator: torch.Generator | KeyedGenerator | None
) -> list[tuple[Tensor, int]]:
    """The parts that lie here, and their places."""
    if isinstance(generator, SecureGenerator) and any(map(is_sharded, tensors)):
        raise UserError(
            "the exact form of the noise draws for all tensors one after another, and here they lie in shards: leave secure out, "
            "or let every process hold the whole model"
        )
    return [_local(tensor, index) for index, tensor in enumerate(tensors)]


def _draw_onto(
    parts: Sequence[tuple[Tensor, int]],
    grids: Iterable[float],
    generator: torch.Generator | KeyedGenerator | None,
) -> None:
    """Round parts of tensors to their grids and add discrete Gaussian noise; where a grid is 0 nothing changes."""
    key = generator.next_key() if isinstance(generator, KeyedGenerator) else _draw_key(generator)
    jobs: list[_Job] = []
    copies: list[tuple[Tensor, Tensor]] = []
    secure = isinstance(generator, SecureGenerator)
    tensor_key = hashlib.sha256(key).digest()
    for index, ((tensor, place), grid) in enumerate(zip(parts, grids, strict=True)):
        if grid == 0 or tensor.numel() == 0:
            continue
        flat = tensor if tensor.device.type in {"cpu", "cuda"} else tensor.cpu()
        # of a part of a tensor: noise is drawn in groups, of which the part may begin in the middle
        lead = place % GROUP
        if lead or not flat.is_contiguous() or flat is not tensor:
            flat = torch.cat([flat.new_zeros(lead), flat.reshape(-1)])
            copies.append((tensor, flat[lead:]))
        jobs.append(_Job(flat.view(-1), grid, tensor_key, index, place - lead))
    kernels = _kernels()
    in_batches = []
    for job in jobs:
        if kernels is None or secure or job.flat.device.type != "cpu":
            in_batches.append(job)
        else:
            _add_natively(kernels, job)
    _add_in_batches(in_batches, secure)
    for tensor, noisy in copies:
        tensor.copy_(noisy.view(tensor.shape))


def check_multiplier(noise_multiplier: float, elements: int) -> None:
    """Refuse a step whose rounding to the grid the noise's surplus (`INFLATION`) would not pay for.

    Args:
        noise_multiplier: σ of the step.
        elements: d, how many numbers it releases.

    Raises:
        UserError: σ√d is larger than 2^23.
    """
    if noise_multiplier * math.sqrt(elements) > _LARGEST:
        raise UserError(
            f"a noise multiplier of {noise_multiplier:g} for {elements} numbers: their rounding would cost more than is "
            f"accounted for; take at most {_LARGEST / math.sqrt(elements):g}, where ε is next to nothing already"
        )


def check_stds(stds: Sequence[float]) -> None:
    """Refuse standard deviations whose grid is no number of 64 bits.

    Raises:
        UserError: one is negative, infinite, NaN or beyond 1e±250.
    """
    for index, std in enumerate(stds):
        if std != 0 and not _STDS[0] <= std <= _STDS[1]:
            raise UserError(
                f"the standard deviation of tensor {index} is {std}; it must be 0, or a number from {_STDS[0]} to {_STDS[1]}: "
                "choose another noise multiplier (or clip norm)"
            )


def describe(secure: bool) -> str:
    """Say in one sentence which noise a run had and what it rests on, for its record and its privacy card."""
    how, cipher = (
        ("the exact discrete Gaussian (Canonne, Kamath & Steinke 2020, by whole numbers alone)", "ChaCha20")
        if secure
        else ("the discrete Gaussian (each probability right to a factor of 1 ± 2^-45)", "ChaCha8")
    )
    return (
        f"the noise is {how} on a public grid of its standard deviation / 2^40, from {cipher} under a 256-bit key; it rests on "
        "this cipher, on a key that stays secret, and on clipped sums whose own rounding in floating point is small against C"
    )


def _kernels() -> Any | None:
    """Those of `dpexp.native`, where they draw what their twin draws."""
    kernels = native.kernels()
    return kernels if kernels is not None and _trusted(native.backend()) else None


@cache
def _trusted(backend: str) -> bool:
    """Whether the kernels draw the numbers of their twin; asked once per process.

    A compiler that takes sums apart (``-ffast-math``, the default of some) accepts other numbers at the edges of layers.
    """
    key, length = bytes(range(200, 232)), _COMPARED
    mine = torch.zeros(length, dtype=torch.float64)
    _add_natively(native.kernels(), _Job(mine, 1.0, key, 1))
    (theirs,) = integers(key, [Piece(1, 0, length)], mine.device)
    if torch.equal(mine, theirs):
        return True
    warnings.warn(
        f"the {backend} kernels draw other noise than they must, so pure torch draws it, which takes about twenty times as long: "
        f"build them again with g++ or clang++ and without -ffast-math (unset CXX, delete {native.library_path()})",
        stacklevel=2,
    )
    return False


def _add_natively(kernels: Any, job: _Job) -> None:
    stairs = _stairs()
    key = _words_of(job.key)
    if job.flat.dtype in {torch.float32, torch.float64}:
        kernels.add_noise_(job.flat, job.grid, key, job.stream, job.start, *stairs)
        return
    for start in range(0, job.flat.numel(), _CAST_BLOCK):
        part = job.flat[start : start + _CAST_BLOCK]
        raised = part.float()
        kernels.add_noise_(raised, job.grid, key, job.stream, job.start + start, *stairs)
        part.copy_(raised)


def _add_in_batches(jobs: Iterable[_Job], secure: bool) -> None:
    """The same without the kernels, many small tensors at a time."""
    for (key, device), group in groupby(jobs, lambda job: (job.key, job.flat.device)):
        limit = _EXACT_BATCH if secure else _GPU_BATCH if device.type == "cuda" else _BATCH
        with _one_thread():
            for batch in _batches(group, limit):
                pieces = [Piece(job.stream, start, part.numel()) for job, start, part in batch]
                drawn = _exact_integers(key, pieces) if secure else integers(key, pieces, device)
                for (job, _, part), noise in zip(batch, drawn, strict=True):
                    _put(part, job.grid, noise.to(device))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Start no threads within operations: for hundreds of small ones that takes longer than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _exact_integers(key: bytes, pieces: Sequence[Piece]) -> Sequence[Tensor]:
    lengths = [piece.length for piece in pieces]
    # A batch takes less than 2^10 blocks of the cipher for an element, so that no two of them meet.
    words = _word_stream(key, pieces[0].stream, pieces[0].start << 10)
    drawn = exact.discrete_gaussian(sum(lengths), SCALE_BITS, words)
    return torch.from_numpy(drawn).double().split(lengths)


def _batches(jobs: Iterable[_Job], limit: int) -> Iterator[list[tuple[_Job, int, Tensor]]]:
    """Parts of tensors, with the place where they begin, that have about `limit` elements together."""
    batch: list[tuple[_Job, int, Tensor]] = []
    size = 0
    for job in jobs:
        for start in range(0, job.flat.numel(), limit):
            part = job.flat[start : start + limit]
            batch.append((job, job.start + start, part))
            size += part.numel()
            if size >= limit:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _word_stream(key: bytes, stream: int, counter: int) -> Callable[[int], NDArray[np.uint64]]:
    """The cipher's words one after another, 64 bits each, from a counter on."""
    at, pool = counter, np.empty(0, np.uint64)

    def take(count: int) -> NDArray[np.uint64]:
        nonlocal at, pool
        if len(pool) < count:
            blocks = max(-(-(count - len(pool)) // 8), _POOL_BLOCKS)
            pool = np.concatenate([pool, _blocks(key, stream, at, blocks)])
            at += blocks
        taken, pool = pool[:count], pool[count:]
        return taken

    return take


def _blocks(key: bytes, stream: int, first: int, number: int) -> NDArray[np.uint64]:
    kernels = _kernels()
    if kernels is None:
        words = chacha(key, torch.arange(first, first + number), stream, 0, _EXACT_ROUNDS).t().contiguous()
    else:
        words = torch.empty(number, 16, dtype=torch.int32)
        kernels.chacha_(words, _words_of(key), first, stream, 0, _EXACT_ROUNDS)
    return words.view(-1).numpy().view(np.uint64)


@lru_cache(maxsize=1)
def _stairs() -> tuple[Tensor, Tensor, float]:
    stairs = staircase()
    # as 32 bits, whatever their sign
    packed = torch.tensor(stairs.packed).int()
    return packed, torch.tensor(stairs.heights, dtype=torch.int32), float(stairs.total)


def _words_of(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.int32)


def _standard_deviations(std: float | Sequence[float] | Tensor, number: int) -> list[float]:
    values = std.tolist() if isinstance(std, Tensor) else std
    stds = [float(values)] * number if isinstance(values, int | float) else [float(value) for value in values]
    if len(stds) != number:
        raise UserError(
            f"{len(stds)} standard deviations for {number} tensors: give one for all, or one for each"
        )
    check_stds(stds)
    return stds


def _local(tensor: Tensor, index: int) -> tuple[Tensor, int]:
    """The part of a tensor that lies in this process, and its place in the flattened whole."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.layout != torch.strided:
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UserError(
            f"tensor {index} ({kind}) cannot hold noise: a dense tensor of floating point numbers is needed"
        )
    part, place, _ = part_here(tensor)
    return part, place


def _draw_key(generator: torch.Generator | None) -> bytes:
    """32 bytes. The state of torch's CPU generator holds only 32 bits of its seed, so the seed itself goes
    in as well."""
    if generator is None:
        return secrets.token_bytes(32)
    drawn = torch.randint(256, (32,), generator=generator, device=generator.device, dtype=torch.uint8)
    return hashlib.sha256(
        f"dpexp noise {generator.initial_seed()} ".encode() + bytes(drawn.tolist())
    ).digest()
