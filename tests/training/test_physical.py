"""How large a physical batch may be."""

import weakref

import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.training import learner, physical
from dpexp.training.physical import automatic_size, repeated
from tests.training.tiny import make_trainer, tiny_run, train

CPU = torch.device("cpu")


def test_on_a_cpu_the_size_follows_the_activations(monkeypatch):
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
    parameters = list(model.parameters())

    def forward(count):
        return model(torch.ones(count, 1000)).squeeze(1)

    # Kept per example: the input and one hidden activation of 1,000 floats each (ReLU's output is Linear's input).
    monkeypatch.setattr(physical, "CPU_ACTIVATION_BYTES", 40 * 8000)
    assert automatic_size(forward, None, parameters, CPU, 1e6) == 32
    monkeypatch.setattr(physical, "CPU_ACTIVATION_BYTES", 1)
    assert automatic_size(forward, None, parameters, CPU, 1e6) == 1
    monkeypatch.setattr(physical, "CPU_ACTIVATION_BYTES", 1 << 40)
    assert automatic_size(forward, None, parameters, CPU, 5.0) == 8  # no use in more than the logical batch
    assert all(parameter.grad is None for parameter in parameters)


def test_frozen_weights_are_no_activations(tmp_path, monkeypatch):
    """A large frozen network, as LoRA and heads have, left room for one example."""
    monkeypatch.setattr(physical, "CPU_ACTIVATION_BYTES", 1 << 20)
    model = nn.Sequential(nn.Linear(10, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 3))
    model[1].requires_grad_(False)
    run = tiny_run(steps=1)
    run.runtime.physical_batch_size = "auto"
    assert make_trainer(tmp_path, run, model=model).physical_batch_size == 32


def test_the_trial_on_a_cpu_lets_its_graph_go():
    """Tanh saves its own output: given back to autograd as it is, it would keep its graph alive for good."""
    layer, outputs = nn.Linear(4, 4), []

    def forward(count):
        output = torch.tanh(layer(torch.ones(count, 4)))
        outputs.append(weakref.ref(output))
        return output.sum(1)

    automatic_size(forward, None, list(layer.parameters()), CPU, 8)
    assert [output() for output in outputs] == [None, None]


@pytest.mark.parametrize(("fits", "expected"), [(1, 1), (10, 4), (64, 32), (100_000, 256)])
def test_on_a_gpu_it_doubles_until_the_memory_is_gone_and_keeps_a_reserve(monkeypatch, fits, expected):
    parameter = nn.Parameter(torch.zeros(1))

    def forward(count):
        if count > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return parameter.expand(count)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    found = automatic_size(
        forward, lambda losses: losses.sum().backward(), [parameter], torch.device("cuda"), 200
    )
    assert found == expected
    assert parameter.grad is None


@pytest.mark.parametrize("method", ["jl", "adaclip", "scaled", "ellipsoid", "embedding", "microbatch"])
def test_every_way_of_clipping_goes_through_the_trial_of_a_gpu(tmp_path, monkeypatch, method):
    run = tiny_run(steps=2, adaptive=False)
    run.clip.name = run.clip.method = method
    run.clip.groups, run.clip.projections, run.clip.basis, run.clip.public_examples = "flat", 4, 4, 12
    run.clip.microbatch, run.engine.name, run.runtime.physical_batch_size = 5, "auto", "auto"
    run.clip.allocation = "equal_budget" if method == "embedding" else "global"
    if method == "jl":
        run.accountant.name = "pld"

    def as_on_a_gpu(forward, backward, parameters, device, expected_batch):
        return physical._largest_on_gpu(forward, backward, parameters, 16)

    monkeypatch.setattr(learner, "automatic_size", as_on_a_gpu)
    trainer = make_trainer(tmp_path, run)
    assert trainer.physical_batch_size == 16
    train(trainer)
    assert trainer.step == 2


def test_when_not_even_one_example_fits_it_says_so(monkeypatch):
    def forward(count):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    with pytest.raises(UserError, match="not even one example"):
        automatic_size(forward, None, [nn.Parameter(torch.zeros(1))], torch.device("cuda"), 200)


def test_a_public_batch_is_repeated_to_any_size():
    batch = {"x": torch.arange(6).view(3, 2), "y": torch.arange(3)}
    assert repeated(batch, 5)["y"].tolist() == [0, 1, 2, 0, 1]
    assert repeated(batch, 2)["x"].tolist() == [[0, 1], [2, 3]]
