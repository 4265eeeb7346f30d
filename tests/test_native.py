"""The optional C++ kernels: the same gradients as torch, noise of the right distribution, and nothing is lost without them."""

from __future__ import annotations

import functools
import gc
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpexp import native
from dpexp.clipping import attach
from dpexp.clipping.contributions import Conv, Geometry
from dpexp.errors import UserError
from dpexp.privacy.noise import add_gaussian_

needs_kernels = pytest.mark.skipif(native.kernels() is None, reason="not built: python -m dpexp.native")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DPEXP_NATIVE", "0")
    monkeypatch.setattr(native, "_loaded", functools.cache(native._loaded.__wrapped__))


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    target = torch.zeros(numel)
    add_gaussian_(target, 1.0, seeded(seed))
    return target


@needs_kernels
def test_noise_is_standard_normal_far_into_the_tails():
    drawn = noise(4_000_000).double()
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-4
    assert abs(drawn.mean()) < 5 / len(drawn) ** 0.5
    assert abs(drawn.std() - 1) < 5 / (2 * len(drawn)) ** 0.5
    for threshold in (2.0, 3.0, 4.0):
        beyond = stats.norm.sf(threshold) * 2 * len(drawn)
        assert abs(int((drawn.abs() > threshold).sum()) - beyond) < 5 * beyond**0.5
    assert 4.5 < drawn.abs().max() < 6.7


def philox(counters: np.ndarray, stream: int, key: int) -> list[np.ndarray]:
    """Philox4x32-10 by the book (Salmon et al. 2011): four words for each counter."""
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    x = [counters & low, counters >> high]
    x += [np.full_like(counters, stream & 0xFFFFFFFF), np.full_like(counters, stream >> 32)]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        k0, k1 = (np.uint64(k) for k in keys)
        x = [(second >> high) ^ x[1] ^ k0, second & low, (first >> high) ^ x[3] ^ k1, first & low]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def aes_counters(counters: np.ndarray, stream: int, key: int) -> np.ndarray:
    """AES-128 (FIPS 197) of each counter, as a 128-bit little-endian number: 16 bytes each. The key is `key`, then `stream`."""

    def times(a: int, b: int) -> int:
        product = 0
        for bit in range(8):
            product ^= (a << bit) * (b >> bit & 1)
        for bit in range(14, 7, -1):
            product ^= (0x11B << (bit - 8)) * (product >> bit & 1)
        return product

    inverse = [0, *(next(b for b in range(256) if times(a, b) == 1) for a in range(1, 256))]
    rotated = [[(b << n | b >> (8 - n)) & 255 for n in range(5)] for b in inverse]
    box = np.array([r[0] ^ r[1] ^ r[2] ^ r[3] ^ r[4] ^ 0x63 for r in rotated], np.uint8)
    double = np.array([times(b, 2) for b in range(256)], np.uint8)
    words = list(
        np.frombuffer(key.to_bytes(8, "little") + stream.to_bytes(8, "little"), np.uint8).reshape(4, 4)
    )
    constant = 1
    for i in range(4, 44):
        word = words[i - 1]
        if i % 4 == 0:
            word = box[np.roll(word, -1)] ^ np.array([constant, 0, 0, 0], np.uint8)
            constant = times(constant, 2)
        words.append(words[i - 4] ^ word)
    keys = np.stack(words).reshape(11, 4, 4)  # round, column, row
    state = np.zeros((len(counters), 16), np.uint8)
    state[:, :8] = counters.astype("<u8")[:, None].view(np.uint8)
    state = state.reshape(-1, 4, 4) ^ keys[0]
    for i in range(1, 11):
        state = box[state]
        state = np.stack([np.roll(state[..., row], -row, axis=1) for row in range(4)], axis=2)
        if i < 10:
            next_row = np.roll(state, -1, axis=2)
            every = np.bitwise_xor.reduce(state, axis=2, keepdims=True)
            state = state ^ every ^ double[state ^ next_row]
        state = state ^ keys[i]
    return state.reshape(-1, 16)


def test_the_ciphers_of_the_next_test_are_the_published_ones():
    known = [int(word[0]) for word in philox(np.zeros(1, dtype=np.uint64), 0, 0)]
    assert known == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # the authors' own test vector
    # NIST's "known answer" of the key 0 for a block of zeros, and for the key 80 00 ... 00 (AESAVS, appendix D.1)
    none = np.zeros(1, dtype=np.uint64)
    assert aes_counters(none, 0, 0).tobytes().hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"
    assert aes_counters(none, 0, 0x80).tobytes().hex() == "0edd33d3c621e546455bd8ba1418bec8"


DRAW = """
import sys, torch
from dpexp import native
native.FLAGS += sys.argv[5:]
native.build()
drawn = torch.zeros(512)
key, stream, offset = map(int, sys.argv[2:5])
native.kernels().add_normals_(drawn, 1.0, key, stream, offset)
torch.save((native.kernels().noise_generator(), drawn), sys.argv[1])
"""


@needs_kernels
@pytest.mark.parametrize(("key", "stream", "offset"), [(0, 0, 0), (2**40 + 5, 2**50 + 3, 256 * (2**26 - 1))])
@pytest.mark.parametrize("flags", [[], ["-mno-vaes"], ["-mno-vaes", "-mno-aes"]], ids=" ".join)
def test_noise_is_that_of_the_published_generators(
    key: int, stream: int, offset: int, flags: list[str], tmp_path: Path
):
    """Whatever the processor has: instructions for four blocks of the cipher at once, for one, for none."""
    if flags and platform.machine() != "x86_64":
        pytest.skip("the flags are those of another processor")
    if flags:  # another library of the same operators: in a process of its own
        numbers = [str(number) for number in (key, stream, offset)]
        subprocess.run([sys.executable, "-c", DRAW, tmp_path / "drawn", *numbers, *flags], check=True)
        generator, drawn = torch.load(tmp_path / "drawn")
    else:
        generator, drawn = native.kernels().noise_generator(), torch.zeros(512)
        native.kernels().add_normals_(drawn, 1.0, key, stream, offset)
    assert generator == "philox4x32-10" or "-mno-aes" not in flags
    for block in range(2):
        counters = offset // 4 + 64 * block + np.arange(64, dtype=np.uint64)
        if generator == "philox4x32-10":
            words = np.concatenate(philox(counters, stream, key))
        else:
            words = aes_counters(counters, stream, key).view("<u4").ravel()
        radii, angles = words.astype(np.uint32)[:128], words.astype(np.uint32)[128:]
        radius = np.sqrt(-2 * np.log((radii >> 1) * 2.0**-31 + 2.0**-32))
        angle = np.pi * angles.astype(np.int32) * 2.0**-31
        wanted = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        np.testing.assert_allclose(drawn[256 * block :][:256].double().numpy(), wanted, atol=2e-5)


@needs_kernels
def test_neighbours_lanes_and_streams_are_independent():
    drawn = noise(1 << 20)
    for lag in (1, 2, 64, 128, 256, 4096):  # the two halves of a pair are 64 apart
        a, b = drawn[:-lag], drawn[lag:]
        for f in (lambda x: x, torch.square, torch.abs):
            correlation = np.corrcoef(f(a).numpy(), f(b).numpy())[0, 1]
            assert abs(correlation) < 5 / len(a) ** 0.5, lag
    other = noise(1 << 20, seed=1)
    assert abs(np.corrcoef(drawn.numpy(), other.numpy())[0, 1]) < 5 / 2**10
    first, second = torch.zeros(5000), torch.zeros(5000)
    add_gaussian_([first, second], 1.0, seeded(0))
    assert not torch.equal(first, second)


@needs_kernels
@pytest.mark.parametrize("numel", [1, 63, 257, 4096, 4097, 100_003])
def test_threads_and_length_do_not_change_the_noise(numel: int):
    before = torch.get_num_threads()
    try:
        drawn = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            drawn.append(noise(numel))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0], noise(numel + 1000)[:numel])


@needs_kernels
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("groups", "rows", "stride"), [(1, 1, 1), (2, 1, 2), (1, 2, 2), (4, 2, 1)])
def test_convolutions_over_cores_equal_the_loop(transposed, dtype, groups, rows, stride):
    layer: nn.Module
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 12, 3, stride=stride, padding=1, groups=groups, bias=False).to(dtype)
    x = torch.randn(5 * rows, 8, 9, 7, dtype=dtype, generator=seeded(0))
    gy = torch.randn(layer(x).shape, dtype=dtype, generator=seeded(1))
    geometry = Geometry((stride, stride), (1, 1), (1, 1), groups, transposed, (0, 0) if transposed else ())
    conv = Conv(x, gy, layer.weight.shape, geometry, 5)
    factors = torch.linspace(0, 1, 5, dtype=conv.dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    norms, total = conv.norms_and_sum("cores", lambda _, where: factors[where])
    expected_norms, expected = conv.norms_and_sum("loop", lambda _, where: factors[where])
    torch.testing.assert_close(norms, expected_norms, rtol=tolerance, atol=0)
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_without_them_torch_computes_and_says_so(without_kernels):
    assert native.kernels() is None
    assert native.backend() == "torch"
    assert stats.kstest(noise(200_000).numpy(), "norm").pvalue > 1e-4
    x = torch.randn(2, 3, 5, 5)
    assert "cores" not in Conv(x, x, (3, 3, 3, 3), Geometry((1, 1), (1, 1), (1, 1)), 2).methods()


def test_no_compiler_is_one_clear_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("DPEXP_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"no C\+\+ compiler is installed"):
        native.build()


@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_the_sums_die_with_the_gradients(groups: str):
    """A reference cycle would keep a copy of all gradients until some garbage collection: memory that no profiler explains."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 4), nn.LayerNorm(4))
    clipper = attach(model, groups=groups)
    gc.collect()
    gc.disable()
    try:
        clipper.backward(model(torch.randn(3, 2, 5, 5)).sum(1))
        held = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
        assert len(held) == 6
        model.zero_grad()
        assert [ref() for ref in held] == [None] * 6
    finally:
        gc.enable()
