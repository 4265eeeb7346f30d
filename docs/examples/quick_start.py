"""Train a small network privately in your own loop. Copy it, and put your model and your data in the place of these."""

import torch
import torch.nn.functional as F

from dpexp import PrivacyEngine

x = torch.randn(5000, 20, generator=torch.manual_seed(0))  # your data
y = (x[:, 0] > 0).long()
dataset = torch.utils.data.TensorDataset(x[:4000], y[:4000])  # private
dev_x, dev_y = x[4000:], y[4000:]  # public: nothing protects what accuracy is measured on
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

engine = PrivacyEngine(model, optimizer, dataset, folder="runs/mine",
                       batch_size=400, epochs=10, epsilon=3, delta=1e-5, clip_norm=0.1)  # fmt: skip
for features, labels in engine.batches(physical_batch_size=128):  # pieces of Poisson batches
    losses = F.cross_entropy(model(features), labels, reduction="none")  # one loss per example
    engine.step(losses)  # clips; at the end of a batch: ledger, noise, optimizer

accuracy = (model(dev_x).argmax(1) == dev_y).float().mean()
print(f"ε = {engine.epsilon():.2f} (RDP), {engine.epsilon('pld'):.2f} (PLD); accuracy on dev {accuracy:.2f}")
