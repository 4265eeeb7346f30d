"""Private training without the framework: a plan, a ledger, a clipper, and an ordinary loop."""

import torch
import torch.nn.functional as F
from torch import nn

from dpexp.clipping import attach
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.noise import add_gaussian_
from dpexp.privacy.plan import make_plan
from dpexp.privacy.sampling import PoissonSampler, load_or_make_key, stream


def train(folder, examples=2000, batch=200.0, steps=60, epsilon=3.0, clip_norm=1.0):
    x = torch.randn(examples, 20, generator=torch.Generator().manual_seed(0))  # your private data
    y = (x[:, 0] + x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    plan = make_plan(
        num_examples=examples, expected_batch_size=batch, steps=steps, delta="half_over_n", epsilon=epsilon
    )
    ledger = Ledger(folder / "ledger.jsonl")
    key = load_or_make_key(folder / "secret.key")
    sampler = PoissonSampler(examples, plan.sample_rate, key)
    clipper = attach(model, groups="flat", clip_norm=clip_norm)

    for step in range(steps):
        drawn = torch.from_numpy(sampler.draw(step))  # may be empty: a step like any other
        losses = F.cross_entropy(model(x[drawn]), y[drawn], reduction="none")  # one loss per example
        clipper.backward(losses)  # p.grad = sum of clipped per-example gradients
        ledger.begin_step(step, plan.step_event(step), fingerprint="one process, never resumed")
        noise = torch.Generator().manual_seed(stream(key, "noise", step))
        gradients = [p.grad for p in model.parameters()]
        add_gaussian_(gradients, plan.sigma_new(step) * clip_norm, generator=noise)
        torch._foreach_div_(gradients, batch)  # the expected batch, never the drawn one
        optimizer.step()
        optimizer.zero_grad()

    accuracy = (model(x).argmax(1) == y).float().mean().item()
    return accuracy, ledger.epsilon(plan.delta, "rdp"), ledger.epsilon(plan.delta, "pld")


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        accuracy, rdp, pld = train(Path(folder))
        print(f"training accuracy {accuracy:.3f} at epsilon {rdp:.3f} (RDP), {pld:.3f} (PLD), delta 1/(2N)")
