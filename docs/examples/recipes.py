"""A training loop's usual wishes, each as a private loop: one function for each row of docs/recipes.md, which the tests run."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine

x = torch.randn(200, 20, generator=torch.Generator().manual_seed(0))  # your private data
y = (x[:, 0] > 0).long()
dev_x, dev_y = x[:20], y[:20]  # stands for public data here
SETTINGS = {"batch_size": 20, "steps": 12, "epsilon": 3.0, "delta": 1e-3, "clip_norm": 0.5}


def network(outputs=2):
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, outputs))


def prepare(folder, model, *tensors, **settings):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dataset = TensorDataset(*(tensors or (x, y)))
    return PrivacyEngine(model, optimizer, dataset, folder=folder, **SETTINGS | settings)


def epochs(folder):
    engine = prepare(folder, network(), batch_size=16, epochs=2, steps=None)  # 25 steps
    of_epoch = math.ceil(engine.steps / 2)
    for epoch in range(engine.steps_taken // of_epoch, 2):  # a run that goes on may begin within an epoch
        for features, labels in engine.batches(steps=of_epoch - engine.steps_taken % of_epoch):
            engine.step(F.cross_entropy(engine.model(features), labels, reduction="none"))
        engine.model.eval()
        with torch.no_grad():
            print(epoch, F.cross_entropy(engine.model(dev_x), dev_y), engine.epsilon())
        engine.model.train()
    return engine


def stop_early(folder):
    mine = {"best": torch.inf, "waited": 0}  # a run that goes on gets it back
    engine = prepare(folder, network(), keep={"stopping": mine})
    for features, labels in engine.batches():
        if mine["waited"] == 3:
            break  # nothing of this batch was released; the same script run again stops here too
        if engine.step(F.cross_entropy(engine.model(features), labels, reduction="none")):  # a step was taken
            with torch.no_grad():
                loss = F.cross_entropy(engine.model(dev_x), dev_y).item()
            better = loss < mine["best"]
            mine |= {"best": loss, "waited": 0} if better else {"waited": mine["waited"] + 1}
    engine.save()  # a checkpoint of this very step; what holds is engine.plan.epsilon(), of all planned steps
    return engine


def best_weights(folder):
    model = network()
    best = {"loss": torch.inf, "weights": None}  # a run that goes on gets it back
    engine = prepare(folder, model, keep={"best": best})
    for features, labels in engine.batches():
        if engine.step(F.cross_entropy(model(features), labels, reduction="none")):
            with torch.no_grad():
                loss = F.cross_entropy(model(dev_x), dev_y).item()
            if loss < best["loss"]:
                best |= {"loss": loss, "weights": copy.deepcopy(model.state_dict())}
    model.load_state_dict(best["weights"])
    return engine


def learning_rates(folder):
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.001}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = torch.optim.Adam(groups)
    engine = PrivacyEngine(model, optimizer, TensorDataset(x, y), folder=folder, **SETTINGS)
    for features, labels in engine.batches():
        if (
            engine.step(F.cross_entropy(model(features), labels, reduction="none"))
            and engine.steps_taken == 6
        ):
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
    return engine


def mixed_precision(folder):
    engine = prepare(folder, network())
    for features, labels in engine.batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):  # bf16, and no GradScaler
            losses = F.cross_entropy(engine.model(features), labels, reduction="none")
        engine.step(losses)
    return engine


def gradient_accumulation(folder):
    engine = prepare(folder, network(), batch_size=100)
    for features, labels in engine.batches(physical_batch_size=8):  # what fits in memory
        engine.step(F.cross_entropy(engine.model(features), labels, reduction="none"))
    return engine


def average_of_weights(folder):
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))  # before the engine
    engine = prepare(folder, model, keep={"average": average})
    for features, labels in engine.batches():
        if engine.step(F.cross_entropy(model(features), labels, reduction="none")):
            average.update_parameters(model)
    return engine


def label_smoothing(folder):
    engine = prepare(folder, network())
    for features, labels in engine.batches():
        losses = F.cross_entropy(engine.model(features), labels, reduction="none", label_smoothing=0.1)
        engine.step(losses)
    return engine


def several_labels(folder):
    engine = prepare(folder, network(outputs=3), x, (x[:, :3] > 0).float())
    for features, labels in engine.batches():
        of_labels = F.binary_cross_entropy_with_logits(engine.model(features), labels, reduction="none")
        engine.step(of_labels.mean(1))  # one number for each example
    return engine


def two_heads(folder):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.kind, self.size = nn.Linear(20, 16), nn.Linear(16, 2), nn.Linear(16, 1)

        def forward(self, features):
            hidden = torch.tanh(self.body(features))
            return self.kind(hidden), self.size(hidden)[:, 0]

    engine = prepare(folder, TwoHeads(), x, y, x.sum(1))
    for features, kinds, sizes in engine.batches():
        kind, size = engine.model(features)
        losses = F.cross_entropy(kind, kinds, reduction="none") + 0.1 * F.mse_loss(
            size, sizes, reduction="none"
        )
        engine.step(losses)
    return engine


def labels_of_tokens(folder):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(30, 8), nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, tokens):
            return self.head(self.lstm(self.embedding(tokens))[0])

    tokens = torch.randint(1, 30, (200, 9), generator=torch.Generator().manual_seed(0))
    labels = (tokens % 2).masked_fill(tokens > 20, -100)  # not every token has a label
    engine = prepare(folder, Tagger(), tokens, labels)
    for texts, wanted in engine.batches():
        of_tokens = F.cross_entropy(engine.model(texts).mT, wanted, reduction="none", ignore_index=-100)
        # the mean of each text by itself
        engine.step(of_tokens.sum(1) / (wanted != -100).sum(1).clamp(min=1))
    return engine


def pairs(folder):
    model = network(outputs=4)
    engine = prepare(folder, model, x, x.flip(1), y)  # an example is a pair with its label
    for left, right, alike in engine.batches():
        distances = (model(left) - model(right)).square().sum(1)
        engine.step(torch.where(alike == 1, distances, F.relu(1 - distances)))
    return engine


def adversarial_examples(folder):
    engine = prepare(folder, network())
    for features, labels in engine.batches():
        features.requires_grad_(True)
        loss = F.cross_entropy(engine.model(features), labels, reduction="sum")
        (direction,) = torch.autograd.grad(loss, features)  # of the inputs alone: nothing is clipped here
        moved = features.detach() + 0.1 * direction.sign()
        engine.step(F.cross_entropy(engine.model(moved), labels, reduction="none"))
    return engine


def random_augmentation(folder):
    engine = prepare(folder, network())
    for features, labels in engine.batches():
        flipped = torch.rand(len(features), 1) < 0.5  # a coin for each example, not one for the batch
        level = torch.rand(len(features), 1)  # of noise, as in diffusion
        features = torch.where(flipped, features.flip(1), features) + level * torch.randn_like(features)
        engine.step(F.cross_entropy(engine.model(features), labels, reduction="none"))
    return engine


def public_rows(folder):
    engine = prepare(folder, network())
    public_features, public_labels = torch.randn(50, 20), torch.randint(2, (50,))
    for features, labels in engine.batches():
        with engine.public():
            rehearsal = F.cross_entropy(engine.model(public_features), public_labels)
        engine.step(F.cross_entropy(engine.model(features), labels, reduction="none") + 0.1 * rehearsal)
    return engine


def adversarial_network(folder):
    generator = nn.Linear(5, 20)
    optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    engine = prepare(folder, network(outputs=1))  # the discriminator alone sees data
    for features, _ in engine.batches():
        fakes = generator(torch.randn(len(features), 5)).detach()
        losses = F.softplus(-engine.model(features)) + F.softplus(engine.model(fakes))
        if engine.step(losses[:, 0]):
            loss = F.softplus(-engine.model(generator(torch.randn(20, 5)))).mean()
            optimizer.zero_grad()
            loss.backward(inputs=list(generator.parameters()))  # not the discriminator's
            optimizer.step()
    return engine


def save_and_load(folder):
    model = network()
    engine = prepare(folder / "run", model)
    for features, labels in engine.batches():
        engine.step(F.cross_entropy(model(features), labels, reduction="none"))
    engine.close()  # the model is as it was before, without dpexp
    torch.save(model.state_dict(), folder / "model.pt")
    engine.write_card(folder)  # PRIVACY.md
    network().load_state_dict(torch.load(folder / "model.pt"))
    return engine
