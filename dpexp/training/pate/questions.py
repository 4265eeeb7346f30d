"""What PATE asks its teachers about public data, and how a student learns from the noisy answers.

About an image: which class it is of. About a text that is being written: what the next word is (SeqPATE, Tian et al. 2022). An
answer of one teacher is a vector of numbers from 0 on that add up to one, a vote or a distribution; two of them lie at most √2
apart, and all teachers' add up to one row of ``[Q, C]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.models.trainable import train_mode
from dpexp.privacy.sampling import PoissonSampler
from dpexp.tasks.decoding import Context, decode
from dpexp.tasks.formats import GROUP, SOURCE, TARGET
from dpexp.tasks.images import ImageClassification
from dpexp.tasks.sequences import Example, target_tokens
from dpexp.tasks.target_loss import IGNORED, target_logits, token_losses
from dpexp.training.pate.teachers import VotesConfig, learn, neighbour_votes, predictions, shuffled

if TYPE_CHECKING:
    from dpexp.tasks.generation import Generation

# texts that go through a language model at once
TEXTS_AT_ONCE = 8


class Classes:
    """Which class is an image of? The first images of the dev set are asked about, and the student is measured on the others.

    Args:
        task: its dev set is public.
        votes: ``queries``, and how the student learns.
        metric: what the share of right predictions is called.
        device: where to compute.

    Raises:
        UserError: no image would be left to measure on.
    """

    note = "the first images of the dev set are public queries, the student is measured on the others"

    def __init__(
        self, task: ImageClassification, votes: VotesConfig, metric: str, device: torch.device
    ) -> None:
        if votes.queries >= len(task.dev):
            raise UserError(
                f"pate.queries={votes.queries} leaves none of the {len(task.dev)} public images to measure the student on: "
                "ask fewer"
            )
        self.task, self.votes, self.metric, self.device = task, votes, metric, device
        self.images = task.collate([task.dev[i] for i in range(votes.queries)])["pixel_values"]

    def answers(self, network: nn.Module) -> np.ndarray:
        """What one teacher says: its votes, ``[Q, C]`` float64, a one in each row."""
        return np.eye(len(self.task.labels))[predictions(network, self.images, self.device)]

    def of_neighbours(self, key: bytes) -> np.ndarray:
        """The sums of the votes of private images, of a fresh sample for each query."""
        task, votes = self.task, self.votes
        private = task.collate([task.train[i] for i in range(task.num_examples)])
        sampler = PoissonSampler(task.num_examples, votes.rate, key)
        return neighbour_votes(
            private["pixel_values"].flatten(1), private["labels"].numpy(), self.images.flatten(1), len(task.labels),
            votes.neighbours, sampler.draw,
        )  # fmt: skip

    def teach(self, student: nn.Module, noisy: np.ndarray, seed: int) -> dict[str, float]:
        """Let the student, in place, learn the class with the most votes of each row of ``noisy``, ``[Q, C]``.

        Returns:
            the share of other public images that it is right about, and of answers that were right.
        """
        task, votes = self.task, self.votes
        labels = noisy.argmax(1)
        learn(
            student, task, range(votes.queries), labels=labels, split="dev", epochs=votes.student_epochs,
            seed=seed, lr=votes.lr, batch_size=votes.batch_size, device=self.device,
        )  # fmt: skip
        truth = np.asarray([task.dev[i].label for i in range(len(task.dev))])
        images = task.collate([task.dev[i] for i in range(votes.queries, len(task.dev))])["pixel_values"]
        right = predictions(student, images, self.device) == truth[votes.queries :]
        return {
            self.metric: float(right.mean()),
            "answers_right": float((labels == truth[: votes.queries]).mean()),
        }


class NextTokens:
    """What is the next word? The public model writes texts on public sources, and is asked about where it is least sure.

    Everything that decides the questions is public: the first ``pate.texts`` sources of the dev set, what the model from before
    any fine-tuning writes on them, the ``pate.queries`` places where it gives its own word the lowest probability, and there
    the ``pate.candidates`` words that it holds likeliest. Teachers say how likely each of these is, relative to the
    others (in the paper the student chooses them as it learns; here all questions are known before the first answer).

    Args:
        task: its dev set is public, of which the sources alone are used for questions.
        votes: ``texts``, ``queries``, ``candidates``, and how the student learns.
        model: the public one.
        device: where to compute.

    Raises:
        UserError: too few sources, places or words.
    """

    note = (
        "the first sources of the dev set are public queries, with texts that the public model wrote; the student is measured on "
        "the pairs of other sources"
    )

    def __init__(self, task: Generation, votes: VotesConfig, model: nn.Module, device: torch.device) -> None:
        self.task, self.votes, self.device = task, votes, device
        groups = task.tables["dev"].columns[GROUP]
        first = list(dict.fromkeys(groups))[: votes.texts]
        self.others = [row for row, group in enumerate(groups) if group not in set(first)]
        if not self.others:
            raise UserError(
                f"pate.texts={votes.texts} leaves none of the {len(first)} public sources to measure the student on: take fewer"
            )
        self.texts = self._written(model.to(device).eval(), [groups.index(group) for group in first])
        sure, words = [], []
        for batch in self._batches(range(len(self.texts))):
            with torch.no_grad():
                told = self._logits(model, batch).log_softmax(-1)
            places = batch["targets"] != IGNORED
            own = told.gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]
            sure.append(own.masked_fill(~places, torch.inf).cpu())
            words.append(told.topk(min(votes.candidates, told.shape[-1]), -1).indices.cpu())
        # [texts, L], padded to the longest text
        longest = max(part.shape[1] for part in sure)
        certain = torch.cat([_padded(part, longest, torch.inf) for part in sure])
        asked = certain.flatten().argsort(stable=True)[: votes.queries].sort().values
        if (there := int((~certain.isposinf()).sum())) < votes.queries:
            raise UserError(
                f"pate.queries={votes.queries} is more than the {there} words of pate.texts={votes.texts} "
                "texts: ask fewer, or about more texts"
            )
        # of each question: its text, its place in the text, its candidates
        self.text, self.place = asked // longest, asked % longest
        self.candidates = torch.cat([_padded(part, longest, 0) for part in words])[self.text, self.place]
        self.before = self._measured(model)

    def answers(self, network: nn.Module) -> np.ndarray:
        """What one teacher says: how likely each candidate is, ``[Q, C]`` float64 with rows that add up to one.

        A network that has come to nothing holds all for equally likely.
        """
        found = torch.empty(self.candidates.shape, dtype=torch.float64)
        with torch.no_grad():
            for where, logits in self._asked(network.eval(), np.unique(self.text.numpy())):
                found[where] = logits.double().softmax(-1).cpu()
        return torch.where(found.isfinite().all(1, keepdim=True), found, 1 / found.shape[1]).numpy()

    def teach(self, student: nn.Module, noisy: np.ndarray, seed: int) -> dict[str, float]:
        """Let the student, in place, learn the distributions nearest to the teachers' noisy mean ``[Q, C]``, by cross-entropy.

        Returns:
            `nll` per token and `perplexity` on pairs of other public sources, and both as they were before.
        """
        votes, wanted = self.votes, torch.from_numpy(on_the_simplex(noisy))
        optimizer = torch.optim.Adam(student.to(self.device).parameters(), lr=votes.lr)
        texts = np.unique(self.text.numpy())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for epoch in range(votes.student_epochs):
                order = shuffled(len(texts), seed, f"epoch {epoch}")
                for start in range(0, len(order), votes.batch_size):
                    chosen = np.sort(texts[order[start : start + votes.batch_size]])
                    optimizer.zero_grad()
                    share = 1 / int(np.isin(self.text.numpy(), chosen).sum())
                    for where, logits in self._asked(train_mode(student), chosen, whole=True):
                        (-(wanted[where].to(logits) * logits).sum() * share).backward()
                    optimizer.step()
        return self._measured(student.eval()) | {f"{name}_before": x for name, x in self.before.items()}

    def _written(self, model: nn.Module, rows: list[int]) -> list[Example]:
        """What the public model writes on the sources of these rows of dev, as examples."""
        task, table = self.task, self.task.tables["dev"].columns
        prompts = [task.dev.prompt(row) for row in rows]
        contexts = [
            Context(table[SOURCE][row], [table[TARGET][row]], prompt)
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        with torch.no_grad():
            found = decode(model, self.device, task.tokenizer, contexts, task.settings, TEXTS_AT_ONCE)
        tokens = target_tokens(task.tokenizer, task.dev.frame, [written.text for written in found])
        return [Example(prompt, target) for prompt, target in zip(prompts, tokens, strict=True)]

    def _batches(self, texts: Any) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            chosen = texts[start : start + TEXTS_AT_ONCE]
            yield self._on_device(self.task.collate([self.texts[i] for i in chosen]))

    def _on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return target_logits(model, **{k: v for k, v in batch.items() if k != "targets"}).float()

    def _asked(
        self, model: nn.Module, texts: np.ndarray, *, whole: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers of questions about these texts, and a model's logits of their candidates; ``whole``: log-probabilities."""
        for start, batch in zip(
            range(0, len(texts), TEXTS_AT_ONCE), self._batches(texts.tolist()), strict=True
        ):
            chosen = torch.from_numpy(texts[start : start + TEXTS_AT_ONCE])
            where = torch.isin(self.text, chosen).nonzero().squeeze(1)
            logits = self._logits(model, batch)
            row = torch.searchsorted(chosen, self.text[where])
            picked = logits[row.to(self.device), self.place[where].to(self.device)]
            picked = picked.log_softmax(-1) if whole else picked
            yield where, picked.gather(-1, self.candidates[where].to(self.device))

    @torch.no_grad()
    def _measured(self, model: nn.Module) -> dict[str, float]:
        """Mean negative log-likelihood per token on the pairs of other public sources, and what it means."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.others), TEXTS_AT_ONCE):
            rows = self.others[start : start + TEXTS_AT_ONCE]
            batch = self._on_device(self.task.collate([self.task.dev[i] for i in rows]))
            total += float(token_losses(model, batch).double().sum())
            tokens += int((batch["targets"] != IGNORED).sum())
        return {"nll": total / tokens, "perplexity": float(np.exp(min(total / tokens, 700.0)))}


def on_the_simplex(rows: np.ndarray) -> np.ndarray:
    """Find the distribution that is nearest to each row of ``[Q, C]`` (Duchi et al. 2008, Figure 1)."""
    largest_first = -np.sort(-rows, axis=1)
    surplus = (largest_first.cumsum(1) - 1) / np.arange(1, rows.shape[1] + 1)
    last = (largest_first > surplus).sum(1) - 1
    return np.maximum(rows - surplus[np.arange(len(rows)), last][:, None], 0.0)


def _padded(x: Tensor, length: int, value: float) -> Tensor:
    """``[b, L, …]`` with L made ``length``."""
    missing = x.new_full((x.shape[0], length - x.shape[1], *x.shape[2:]), value)
    return torch.cat([x, missing], 1)
