"""Equal where facts, sums and key are equal, and only there."""

import hashlib

import pytest
import torch

from dpexp import native
from dpexp.privacy.fingerprint import _add_up, _weights, checksum, fingerprint, fingerprint_of_facts


def test_a_checksum_sees_what_sums_cancel():
    tensor = torch.arange(1.0, 300_001.0)
    digest = checksum([tensor])
    up_and_down = tensor.clone()
    up_and_down[10] = torch.nextafter(tensor[10], torch.tensor(torch.inf))
    up_and_down[11] = torch.nextafter(tensor[11], torch.tensor(0.0))
    swapped = tensor.clone()
    swapped[[5, 200_000]] = tensor[[200_000, 5]]
    assert checksum([tensor.clone()]) == digest
    assert len({digest, checksum([up_and_down]), checksum([swapped])}) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_checksum_sees_signs_in_pairs(dtype):
    # two differences of half the range add up to nothing modulo the whole, whatever odd numbers weigh them
    tensor = torch.randn(1000, dtype=dtype)
    assert checksum([tensor]) != checksum([-tensor])


def test_the_weights_of_a_checksum_come_from_the_key():
    # who knew them could choose differences that cancel
    tensor = torch.arange(10)
    assert len({checksum([tensor], key) for key in (b"", b"one", b"two")}) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_takes_every_dtype_and_layout(dtype):
    tensor = torch.randn(6, 5).to(dtype)
    assert checksum([tensor.t()]) == checksum([tensor.t().contiguous()])
    assert checksum([tensor]) != checksum([tensor + 1])


def test_a_fingerprint_needs_the_same_facts_the_same_sums_and_the_key():
    facts, sums = {"step": 3, "threads": 2}, [torch.ones(4)]
    same = fingerprint(b"key", facts, sums)
    assert fingerprint(b"key", dict(reversed(facts.items())), [torch.ones(4)]) == same
    different = {
        fingerprint(b"key", facts | {"threads": 1}, sums),
        fingerprint(b"key", facts, [torch.ones(4) + 1e-7]),
        fingerprint(b"other", facts, sums),
    }
    assert same not in different
    assert len(different) == 3
    # Anyone can compute the plain hash of a guess; it must not stand in the ledger.
    assert hashlib.sha256(b"sums" + checksum(sums)).hexdigest()[:32] not in same


def test_who_reads_fingerprints_does_not_see_which_steps_have_equal_sums():
    # those of nobody, say: whether the one example with a gradient was drawn
    empty = [torch.zeros(4)]
    found = [fingerprint(b"key", {"step": step}, empty).partition("-")[2] for step in range(3)]
    assert len(set(found)) == 3


def test_equal_facts_show_before_the_sums_are_known():
    facts = {"step": 3}
    found = fingerprint(b"key", facts, [torch.ones(4)])
    assert found.startswith(fingerprint_of_facts(b"key", facts) + "-")
    assert not found.startswith(fingerprint_of_facts(b"key", {"step": 4}))


@pytest.mark.skipif(native.kernels() is None, reason="no C++ compiler builds the kernels")
def test_the_kernels_and_torch_find_the_same_checksums(monkeypatch):
    shapes = [(0,), (1,), (3, 5), (1 << 14,), (1 << 17,), ((1 << 17) + 1,), (300_001,)]
    tensors = [
        torch.randn(shape, dtype=dtype) for shape in shapes for dtype in (torch.float32, torch.float64)
    ]
    tensors += [torch.full((70_000,), -(2**31), dtype=torch.int32), torch.randn(9, 9).t()]
    weights = _weights(b"key")

    def found():
        # a part of a sharded tensor: it begins and ends in the middle of a chunk
        parts = [torch.zeros(4, dtype=torch.int64) for _ in range(3)]
        for part, (place, stop) in zip(parts, [(0, 7), (100_000, 290_000), (1 << 17, 1 << 18)], strict=True):
            _add_up(torch.arange(place, stop, dtype=torch.int32), weights, place, part)
        return [
            checksum(tensors, b"key"),
            *(checksum([t], b"key") for t in tensors),
            torch.stack(parts).tolist(),
        ]

    fast = found()
    monkeypatch.setattr(native, "kernels", lambda: None)
    assert fast == found()
