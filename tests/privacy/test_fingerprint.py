"""Equal where facts, sums and key are equal, and only there."""

import hashlib

import pytest
import torch

from dpexp.privacy.fingerprint import checksum, fingerprint, fingerprint_of_facts


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


def test_equal_facts_show_before_the_sums_are_known():
    facts = {"step": 3}
    found = fingerprint(b"key", facts, [torch.ones(4)])
    assert found.startswith(fingerprint_of_facts(b"key", facts) + "-")
    assert not found.startswith(fingerprint_of_facts(b"key", {"step": 4}))
