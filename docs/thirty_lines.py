"""Private training in a loop of your own: model, optimiser and data are yours, the rest is the engine's."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine


def train(folder, examples=2000, batch=200, steps=60, epsilon=3.0, clip_norm=1.0):
    x = torch.randn(examples + 500, 20, generator=torch.Generator().manual_seed(0))  # your data
    y = (x[:, 0] + x[:, 1] > 0).long()
    private = x[:examples], y[:examples]
    dev_x, dev_y = x[examples:], y[examples:]  # public: nothing protects what accuracy is measured on
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    with PrivacyEngine(
        model, optimizer, TensorDataset(*private), folder=folder,
        batch_size=batch, steps=steps, epsilon=epsilon, delta="half_over_n", clip_norm=clip_norm,
    ) as engine:  # fmt: skip
        for features, labels in engine.batches(physical_batch_size=64):
            losses = F.cross_entropy(model(features), labels, reduction="none")  # one loss per example
            engine.step(losses)  # clips; at the end of a batch: ledger, noise, optimizer

    accuracy = (model(dev_x).argmax(1) == dev_y).float().mean().item()
    return accuracy, engine.epsilon("rdp"), engine.epsilon("pld")


if __name__ == "__main__":
    accuracy, rdp, pld = train("runs/thirty_lines")
    print(f"accuracy on public data {accuracy:.3f} at epsilon {rdp:.3f} (RDP), {pld:.3f} (PLD), delta 1/(2N)")
