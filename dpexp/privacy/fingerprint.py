"""What makes two releases of a step the same release: keyed fingerprints of its facts and of its sums.

Noise may be used twice for exactly the same sum only, because the difference of two sums under the same noise is their
difference in the clear.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpexp import native
from dpexp.parallel.shards import part_here
from dpexp.privacy.sampling import generator_from

# elements: a chunk and its weights stay in the cache
_CHUNK = 1 << 17
# of a wider number, two words: a weight times its highest bit would say no more than that it was flipped
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def fingerprint_of_facts(key: bytes, facts: Mapping[str, Any]) -> str:
    """First half of a fingerprint: everything that should make two computations of a step equal.

    Known before the step begins. 32 hex digits.
    """
    return hmac.new(key, json.dumps(facts, sort_keys=True, default=str).encode(), hashlib.sha256).hexdigest()[
        :32
    ]


def fingerprint(key: bytes, facts: Mapping[str, Any], sums: Iterable[Tensor]) -> str:
    """What makes two releases of a step the same release.

    Noise may be used twice for exactly the same sum only, because the difference of two sums under the same noise is
    their difference in the clear. The facts (configuration, data, code, runtime, noise scale) say that the sums should
    be equal; the checksum of the sums themselves says that they are, also where a runtime is not deterministic although
    nothing about it changed. It is taken before the noise, so it is keyed: without the run's secret key nobody can test
    a guess about the data against the ledger. And it is keyed for these facts alone, which name the step:
    else who reads the ledger would see which steps have equal sums, such as those that nobody with a gradient was drawn for.

    Returns:
        `fingerprint_of_facts`, a dash, and 32 hex digits of the sums.
    """
    of_facts = fingerprint_of_facts(key, facts)
    keyed = hmac.new(key, b"sums" + of_facts.encode() + checksum(sums, key), hashlib.sha256).hexdigest()[:32]
    return f"{of_facts}-{keyed}"


def checksum(tensors: Iterable[Tensor], key: bytes = b"") -> bytes:
    """32 bytes that differ when any bit of any tensor differs: they are equal with probability 2^-32 at most, over the key.

    Every chunk contributes Σ_j word_j·w_j mod 2^64, where words have 32 bits at most and the weights are odd and drawn from the
    key (universal hashing: who has no key cannot look for tensors of one checksum). One pass over memory, on the tensor's own
    device. A plain sum or exclusive-or would miss differences that cancel, such as one element a rounding
    step higher and another one lower. Of a sharded tensor each rank takes its part of the sums, so that it has the checksum of
    the whole one; all ranks must call together.
    """
    sums: list[Tensor] = []
    weights: dict[torch.device, Tensor] = {}
    # process groups -> which of the tensors lie in parts
    spread: dict[tuple[Any, ...], list[int]] = {}
    for tensor in tensors:
        part, place, over = part_here(tensor.detach())
        device = part.device
        if device not in weights:
            weights[device] = _weights(key).to(device)
        words = _WORDS[part.element_size()]
        each = part.element_size() // words.itemsize
        bits, place = part.reshape(-1).view(words), place * each
        if over:
            spread.setdefault(tuple(over), []).append(len(sums))
        sums.append(torch.zeros(-(-tensor.numel() * each // _CHUNK), dtype=torch.int64, device=device))
        _add_up(bits, weights[device], place, sums[-1])
    for groups, numbers in spread.items():
        together = torch.cat([sums[number] for number in numbers])
        for group in groups:
            torch.distributed.all_reduce(together, group=group)
        parts = together.split([len(sums[number]) for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            sums[number] = part
    by_device: dict[torch.device, list[Tensor]] = {}
    for values in sums:
        by_device.setdefault(values.device, []).append(values)
    digest = hashlib.sha256()
    for of_device in by_device.values():
        digest.update(torch.cat(of_device).cpu().numpy().tobytes())
    return digest.digest()


def _add_up(words: Tensor, weights: Tensor, place: int, out: Tensor) -> None:
    """Write into ``out`` the sums of all chunks of a tensor, of which ``words`` are the part that begins at ``place``."""
    kernels = native.kernels() if words.dtype == torch.int32 and words.device.type == "cpu" else None
    if kernels is not None:
        kernels.checksums_(out, words, weights, place)
        return
    at = 0
    while at < len(words):
        number, first = divmod(place + at, _CHUNK)
        chunk = words[at : at + _CHUNK - first]
        out[number] = (chunk.to(torch.int64) * weights[first : first + len(chunk)]).sum()
        at += len(chunk)


# a run takes the same ones in each of its steps
@lru_cache(maxsize=2)
def _weights(key: bytes) -> Tensor:
    generator = generator_from(hmac.digest(key, b"weights of a checksum", "sha256"))
    drawn = generator.integers(-(2**63), 2**63, _CHUNK)
    return torch.from_numpy(drawn | 1)
