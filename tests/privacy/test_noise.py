"""Noise: its distribution, its independence, and that nothing but the seed decides it."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from dpexp import native
from dpexp.errors import UserError
from dpexp.privacy import noise
from dpexp.privacy.noise import KeyedGenerator, SecureGenerator, add_gaussian_, check_multiplier

# Looked for here, while the cache is not yet each test's own.
BUILT = native.kernels() is not None
LONG = 3 * (1 << 16) + 12345  # several chunks and a rest


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(shape=(LONG,), std=1.0, seed=0, dtype=torch.float32, generator=None):
    tensor = torch.zeros(shape, dtype=dtype)
    add_gaussian_([tensor], std, generator or seeded(seed))
    return tensor


GENERATORS = {
    "float32": lambda: drawn(),
    "float64": lambda: drawn(dtype=torch.float64),
    "keyed": lambda: drawn(generator=KeyedGenerator(b"k" * 32)),
    "secure": lambda: drawn(generator=SecureGenerator(b"k" * 32)),
}


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(native, "kernels", lambda: None)


@pytest.mark.parametrize("kind", GENERATORS)
def test_noise_is_gaussian(kind):
    values = GENERATORS[kind]().double().numpy()
    assert kstest(values, norm.cdf).pvalue > 1e-3
    assert values.std() == pytest.approx(1.0, abs=4 / math.sqrt(2 * LONG))
    # No structure at any lag that the chunks, the vector units or the threads could make.
    for lag in (1, 2, 8, 16, 1 << 15, 1 << 16):
        correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(LONG - lag)


@pytest.mark.skipif(not BUILT, reason="no C++ compiler builds the kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_kernels_and_torch_draw_the_same_noise(dtype, request):
    def noisy():
        tensors = [
            torch.linspace(-3, 3, LONG).to(dtype),
            torch.zeros(7, dtype=dtype),
            torch.ones(50, 40, dtype=dtype).t(),
        ]
        add_gaussian_(tensors, [1.0, 1e-9, 0.3], KeyedGenerator(b"k" * 32))
        return tensors

    first = noisy()
    request.getfixturevalue("without_kernels")
    assert all(torch.equal(a, b) for a, b in zip(first, noisy()))


def test_batches_of_torch_do_not_change_the_noise(without_kernels, monkeypatch):
    expected = drawn(generator=KeyedGenerator(b"k" * 32))
    monkeypatch.setattr(noise, "_BATCH", 1 << 15)
    assert torch.equal(expected, drawn(generator=KeyedGenerator(b"k" * 32)))


@pytest.mark.parametrize("kind", [KeyedGenerator, SecureGenerator])
def test_all_of_a_key_counts(kind):
    keys = [b"k" * 40, b"k" * 39 + b"l", b"l" + b"k" * 39, b"k" * 32]
    found = {drawn((3,), generator=kind(key)).numpy().tobytes() for key in keys}
    assert len(found) == len(keys)


@pytest.mark.parametrize("std", [1e-6, 0.3, 1e4])
def test_each_tensor_has_its_own_standard_deviation(std):
    tensors = [torch.zeros(50_000), torch.zeros(200, 300), torch.zeros(50_000)]
    add_gaussian_(tensors, [std, 2 * std, 0.0], seeded())
    for tensor, expected in zip(tensors, [std, 2 * std]):
        assert tensor.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * tensor.numel()))
    assert not tensors[2].any()


def test_noise_is_added_to_what_is_there():
    value = torch.randn(LONG, generator=seeded(9))
    noisy = value.clone()
    add_gaussian_(noisy, 0.5, seeded())
    assert torch.allclose(noisy - value, drawn(std=0.5), atol=1e-6)


def test_the_same_seed_gives_the_same_noise_for_any_number_of_threads():
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            tensors = [
                torch.zeros(7),
                torch.zeros(20, LONG // 10).t(),
                torch.zeros(LONG, dtype=torch.bfloat16),
            ]
            add_gaussian_(tensors, [1.0, 2.0, 3.0], seeded(5))
            found.append(tensors)
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_noise_is_independent_of_the_global_generators():
    torch.manual_seed(1)
    first = drawn(seed=4)
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(first, drawn(seed=4))


def test_seeds_that_share_their_low_32_bits_differ():
    """torch's CPU generator keeps only those: a run's millions of chunks would repeat."""
    assert not torch.equal(drawn(seed=7), drawn(seed=7 + (1 << 40)))


def test_tensors_chunks_calls_and_seeds_are_independent():
    generator = seeded()
    one, two = torch.zeros(LONG), torch.zeros(LONG)
    add_gaussian_([one, two], 1.0, generator)
    later = torch.zeros(LONG)
    add_gaussian_([later], 1.0, generator)
    pieces = [one, two, later, drawn(seed=1)]
    pieces += [one.roll(1 << 16)]
    for i, a in enumerate(pieces):
        for b in pieces[:i]:
            assert abs(np.corrcoef(a.numpy(), b.numpy())[0, 1]) < 4.5 / math.sqrt(LONG)


def test_a_tensor_without_noise_does_not_shift_the_others():
    both, one = [torch.zeros(10), torch.zeros(10)], [torch.zeros(10), torch.zeros(10)]
    add_gaussian_(both, [1.0, 1.0], seeded())
    add_gaussian_(one, [0.0, 1.0], seeded())
    assert torch.equal(both[1], one[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (17,), (3, 0, 2), (0,), (40, 50), (2, 3, 4, 5)])
def test_all_shapes_and_dtypes(shape, dtype):
    tensor = torch.ones(shape, dtype=dtype)
    add_gaussian_([tensor], 1.0, seeded())
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.isfinite().all()
    assert tensor.numel() == 0 or (tensor != 1).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once_after_the_addition(dtype):
    """Noise and sum in double precision, then the precision of the tensor; not rounded noise on a rounded value."""
    value = torch.linspace(-3, 3, 4096).to(dtype)
    noisy = value.clone()
    add_gaussian_(noisy, 0.37, seeded(3))
    expected = value.double() + 0.37 * drawn((4096,), seed=3, dtype=torch.float64)
    assert (noisy == expected.float().to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.t(),
        lambda base: base[::2, ::3],
        lambda base: base[:, 5],
        lambda base: base.view(10, 20, 10, 3).to(memory_format=torch.channels_last),
    ],
)
def test_strides_do_not_matter(view):
    base = torch.zeros(200, 30)
    target = view(base)
    contiguous = torch.zeros(target.shape)
    add_gaussian_(target, 1.0, seeded())
    add_gaussian_(contiguous, 1.0, seeded())
    assert torch.equal(target, contiguous)


def test_only_the_view_is_touched():
    base = torch.zeros(20, 30)
    add_gaussian_(base[::2], 1.0, seeded())
    assert not base[1::2].any()


def test_gradients_of_parameters_are_accepted_as_they_come():
    parameter = torch.nn.Parameter(torch.zeros(10))
    parameter.grad = torch.zeros(10)
    add_gaussian_((p.grad for p in [parameter]), 1.0, seeded())
    assert parameter.grad.std() > 0
    add_gaussian_(parameter, 1.0, seeded())
    assert torch.equal(parameter.detach(), parameter.grad)
    assert parameter.grad_fn is None


def test_without_a_generator_the_system_decides():
    torch.manual_seed(0)
    first = torch.zeros(100)
    add_gaussian_(first, 1.0)
    torch.manual_seed(0)
    second = torch.zeros(100)
    add_gaussian_(second, 1.0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf, 1e-300, 1e300, [1.0, -1.0], [1.0, math.nan]])
def test_a_bad_standard_deviation_is_refused_before_anything_changes(std):
    tensors = [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(UserError, match="standard deviation of tensor"):
        add_gaussian_(tensors, std, seeded())
    assert not torch.stack(tensors).any()


def test_one_standard_deviation_for_each_tensor():
    with pytest.raises(UserError, match="2 standard deviations for 3 tensors"):
        add_gaussian_([torch.zeros(3)] * 3, [1.0, 2.0], seeded())
    tensors = [torch.zeros(3), torch.zeros(3)]
    add_gaussian_(tensors, torch.tensor([0.0, 1.0]), seeded())
    assert not tensors[0].any()
    assert tensors[1].any()


@pytest.mark.parametrize("bad", [torch.zeros(3, dtype=torch.int64), torch.zeros(3).to_sparse(), None])
def test_what_cannot_hold_noise_is_refused_before_anything_changes(bad):
    good = torch.zeros(3)
    with pytest.raises(UserError, match="tensor 1"):
        add_gaussian_([good, bad], 1.0, seeded())
    assert not good.any()


def test_an_empty_list_is_fine():
    add_gaussian_([], 1.0, seeded())
    add_gaussian_([], [], seeded())


def test_secure_noise_replays_from_its_key_and_never_repeats():
    assert torch.equal(
        drawn((50,), generator=SecureGenerator(b"a" * 32)), drawn((50,), generator=SecureGenerator(b"a" * 32))
    )
    generator = SecureGenerator(b"a" * 32)
    assert not torch.equal(drawn((50,), generator=generator), drawn((50,), generator=generator))
    with pytest.raises(UserError, match="32 bytes"):
        SecureGenerator(b"short")


@pytest.fixture
def one_process_mesh(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        pytest.skip("another test left a process group")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_shard_gets_the_noise_that_it_would_get_in_the_whole(one_process_mesh, monkeypatch):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _utils

    def noise_of(tensors):
        add_gaussian_(tensors, [0.5, 1.0], seeded())
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]

    whole = noise_of([torch.ones(37, 9), torch.zeros(500)])
    for rows in [slice(0, 20), slice(20, 37), slice(5, 6)]:
        offset = (rows.start, 0)
        monkeypatch.setattr(_utils, "compute_local_shape_and_global_offset", lambda *_, at=offset: ((), at))
        part = DTensor.from_local(torch.ones(37, 9)[rows], one_process_mesh, [Shard(0)])
        copy = DTensor.from_local(torch.zeros(500), one_process_mesh, [Replicate()])
        found = noise_of([part, torch.zeros(500)])
        assert torch.equal(found[0], whole[0][rows])
        assert torch.equal(found[1], whole[1])
        monkeypatch.undo()
        assert torch.equal(noise_of([torch.ones(37, 9), copy])[1], whole[1])
    partial = DTensor.from_local(torch.zeros(500), one_process_mesh, [Partial()])
    with pytest.raises(UserError, match="partial sum"):
        noise_of([partial, torch.zeros(1)])
    with pytest.raises(UserError, match="leave secure out"):
        add_gaussian_(copy, 1.0, SecureGenerator(b"k" * 32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [KeyedGenerator, SecureGenerator])
def test_on_a_gpu_the_noise_is_that_of_the_cpu(dtype, kind):
    def draw(device):
        tensors = [
            torch.zeros(300, 1000, dtype=dtype, device=device).t(),
            torch.ones((), dtype=dtype, device=device),
        ]
        add_gaussian_(tensors, [2.0, 1.0], kind(b"k" * 32))
        return [tensor.cpu() for tensor in tensors]

    assert all(torch.equal(a, b) for a, b in zip(draw("cuda"), draw("cpu")))


def test_a_step_that_its_grid_is_too_coarse_for_is_refused():
    check_multiplier(100.0, 10**9)
    with pytest.raises(UserError, match=r"at most 838\.861, where"):
        check_multiplier(1000.0, 10**8)
