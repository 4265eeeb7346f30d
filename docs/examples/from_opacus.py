"""What Opacus and fastDP call by other names: one function for each row of docs/from_opacus.md, which the tests run."""

import math

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine
from dpexp.errors import UserError

x = torch.randn(200, 20, generator=torch.Generator().manual_seed(0))  # your private data
y = (x[:, 0] > 0).long()
dataset = TensorDataset(x, y)


def network():
    return nn.Sequential(nn.Linear(20, 16), nn.GroupNorm(4, 16), nn.Tanh(), nn.Linear(16, 2))


def train(engine, physical_batch_size=64):
    for features, labels in engine.batches(physical_batch_size=physical_batch_size):
        engine.step(F.cross_entropy(engine.model(features), labels, reduction="none"))
    return engine


def prepare(folder, **settings):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"batch_size": 20, "epochs": 1, "noise_multiplier": 1.0, "delta": 1e-3} | settings
    return PrivacyEngine(model, optimizer, dataset, folder=folder, **settings)


def make_private(folder):
    return train(prepare(folder, noise_multiplier=1.1, clip_norm=1.0))


def make_private_with_epsilon(folder):
    engine = train(prepare(folder, noise_multiplier=None, epsilon=3.0, delta=1e-3, epochs=2))
    assert engine.epsilon() <= 3.0
    return engine


def epoch_loop(folder):
    engine = prepare(folder, batch_size=16, epochs=2)  # 25 steps
    for _ in range(2):
        for features, labels in engine.batches(steps=math.ceil(engine.steps / 2)):  # so many, then it ends
            engine.step(F.cross_entropy(engine.model(features), labels, reduction="none"))
        print(engine.epsilon())
    return engine


def get_epsilon(folder):
    engine = train(prepare(folder))
    print(engine.epsilon(), engine.epsilon("pld"))  # of the steps in the ledger, at the engine's delta
    return engine


def get_noise_multiplier(folder):
    engine = prepare(folder, noise_multiplier=None, epsilon=3.0)
    print(engine.plan.noise_multiplier)
    return train(engine)


def batch_memory_manager(folder):
    return train(prepare(folder, batch_size=100), physical_batch_size=16)


def module_validator(folder):
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    try:
        PrivacyEngine(model, optimizer, dataset, folder=folder, batch_size=20, steps=1, epsilon=3, delta=1e-3)
    except UserError as error:  # names the module and the way out; nothing is replaced behind your back
        return str(error)


def recurrent_layers(folder):
    class Texts(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(30, 8), nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, tokens):
            hidden, there = self.lstm(self.embedding(tokens))[0], (tokens > 0).unsqueeze(-1)
            return self.head((hidden * there).sum(1) / there.sum(1))  # the mean of each text's own tokens

    texts = [(torch.arange(1, 4 + i % 5), i % 2) for i in range(200)]
    model = Texts()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = PrivacyEngine(
        model, optimizer, texts, folder=folder, batch_size=20, steps=3, epsilon=3, delta=1e-3
    )

    def padded(rows):
        tokens = nn.utils.rnn.pad_sequence([text for text, _ in rows], batch_first=True)
        return tokens, torch.tensor([label for _, label in rows])

    for tokens, labels in engine.batches(padded):
        engine.step(F.cross_entropy(model(tokens), labels, reduction="none"))
    return engine


def hugging_face_model(folder):
    sizes = dict(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = TensorDataset(torch.randint(1, 30, (200, 6)), y)
    engine = PrivacyEngine(
        model, optimizer, rows, folder=folder, batch_size=20, steps=3, epsilon=3, delta=1e-3
    )
    for tokens, labels in engine.batches():
        outputs = model(input_ids=tokens)
        engine.step(F.cross_entropy(outputs.logits, labels, reduction="none"))  # not outputs.loss, a mean
    return engine


def per_layer_clipping(folder):
    return train(prepare(folder, groups="layer"))


def adaptive_clipping(folder):
    engine = train(prepare(folder, target_quantile=0.5))
    assert engine.clipper.thresholds.item() != 1.0
    return engine


def automatic_clipping(folder):
    return train(prepare(folder, rule="automatic"))


def ghost_clipping(folder):
    return train(prepare(folder, engine="ghost"))  # or leave it out: the fastest way is chosen layer by layer


def noise_scheduler(folder):
    return train(prepare(folder, schedule={"name": "exponential", "decay_rate": 0.02}))


def secure_mode(folder):
    return train(prepare(folder, secure=True))


def learning_rate_scheduler(folder):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    settings = {"batch_size": 20, "steps": 10, "epsilon": 3.0, "delta": 1e-3}
    return train(PrivacyEngine(model, optimizer, dataset, folder=folder, scheduler=scheduler, **settings))


def checkpoint(folder):
    engine = prepare(folder, checkpoint_every=2)
    for number, (features, labels) in enumerate(engine.batches()):
        if number == 5:
            break  # or kill -9
        engine.step(F.cross_entropy(engine.model(features), labels, reduction="none"))
    engine.close()
    return train(prepare(folder, checkpoint_every=2))  # the same lines again go on from there


def frozen_layers(folder):
    model = network()
    model[0].requires_grad_(False)  # or PEFT: whatever requires gradients is clipped
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return train(
        PrivacyEngine(model, optimizer, dataset, folder=folder, batch_size=20, steps=3, epsilon=3, delta=1e-3)
    )


def save(folder):
    engine = train(prepare(folder / "run"))
    engine.close()  # the model is plain again
    torch.save(engine.model.state_dict(), folder / "model.pt")
    engine.write_card(folder)  # PRIVACY.md beside the weights: epsilon, delta, conditions
    return engine


def clipping_alone(folder):
    from dpexp.clipping import attach

    model = network()
    clipper = attach(model, clip_norm=1.0)
    report = clipper.backward(F.cross_entropy(model(x), y, reduction="none"))
    assert report.norms.shape == (1, 200)  # and p.grad is the sum of the clipped gradients
    clipper.detach()
