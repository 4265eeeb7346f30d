"""Every task as its configuration composes it: one loss per example, of that example alone, and Opacus' gradients are ours.

The batch and the model are those of `scale=demo`, in float64. What is compared with is plain autograd on one example at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.engines import ENGINES
from dpexp.config import compose
from dpexp.models import build_model, build_tokenizer
from dpexp.schemas import RunConfig
from dpexp.tasks import Task, build_task
from dpexp.tasks.target_loss import IGNORED

CONF = Path(__file__).parents[2] / "conf"
TASKS = sorted(path.stem for path in (CONF / "task").glob("*.yaml") if path.stem != "custom")
IMAGES = ("cifar10", "cifar100", "cifar10_jpeg", "fashion_mnist", "images", "mnist")
GENERATED = ("dart", "e2e", "personachat", "samsum", "text_generation", "webnlg")
B = 5
STEP = 3  # of the training: augmentations depend on it
WAYS = {
    "lora": ["peft.rank=2"], "prefix": ["peft.prefix_hidden=6"],
    "prompt": ["peft.prefix_length=3"], "p_tuning": ["peft.prefix_hidden=6"], "rgp": ["peft.rank=1"], "top2": ["peft.blocks=1"],
    "bitfit": [], "head": [], "adapters": ["peft.rank=4"],
}  # fmt: skip
OF_A_HEAD = {
    "classifier": ("qnli",),
    "masked_lm": ("sst2_infilling",),
    "causal_lm": ("e2e",),
    "image_classifier": ("cifar10", "model=vit_tiny_random"),
}
# a tied head; no keys and values to extend
NOT_THERE = {
    ("causal_lm", "head"),
    ("image_classifier", "prefix"),
    ("image_classifier", "prompt"),
    ("image_classifier", "p_tuning"),
}


@dataclass(frozen=True, eq=False)
class Case:
    """chosen: numbers of B training examples, from the shortest to the longest."""

    task: Task
    model: nn.Module
    chosen: list[int]


SETTINGS = (
    "scale=demo", "clip=flat", "privacy=noise", "privacy.noise_multiplier=1.0", "privacy.delta=1e-3",
    "optim.epochs=null", "optim.steps=1", "optim.batch_size=8", "data.num_examples=40",
)  # fmt: skip
OWN = {  # what a person must say of own data that its configuration cannot know
    "text_infilling": (
        "task.template='<S1> is [MASK] .'",
        "task.label_words.0=awful",
        "task.label_words.1=superb",
    ),
}


def composed(task: str, *more: str) -> RunConfig:
    return compose([f"task={task}", *SETTINGS, *OWN.get(task, ()), *more])


@functools.cache
def case_of(task_name: str, *more: str) -> Case:
    """As `dpexp.train` builds it, without dropout."""
    run = composed(task_name, *more)
    tokenizer = build_tokenizer(run.model, scale="demo")
    task = build_task(run.task, run.data, "demo", tokenizer, run.seed)
    bundle = build_model(
        run.model, run.peft,
        head=task.head, num_labels=len(task.labels), scale="demo", seed=run.seed, tokenizer=tokenizer,
        image_shape=task.image_shape,
    )  # fmt: skip
    model = bundle.model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attn_dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    by_length = sorted(range(len(task.train)), key=task.length)
    chosen = [by_length[i * (len(by_length) - 1) // (B - 1)] for i in range(B)]
    assert len(set(chosen)) == B
    return Case(task, stirred(model.double()), chosen)


def stirred(model: nn.Module) -> nn.Module:
    """What begins at zero, like LoRA's B, has no gradient to compare: a little noise on everything that trains."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def batch_of(task: Task, numbers: list[int]) -> dict[str, Tensor]:
    """As training sees it, with floating-point inputs in float64."""
    batch = task.collate([task.train[i] for i in numbers])
    batch = task.augmented(batch, np.array(numbers), 0, STEP)
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def losses_of(case: Case, numbers: list[int]) -> Tensor:
    return case.task.losses(case.model, batch_of(case.task, numbers))


@functools.cache
def alone(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses `[B]` and gradients by parameter `[B, ...]` of the chosen examples, each in a batch of its own."""
    params = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    losses, rows = [], []
    for i in case.chosen:
        loss = losses_of(case, [i])
        assert loss.shape == (1,)
        rows.append(torch.autograd.grad(loss.sum(), list(params.values()), materialize_grads=True))
        losses.append(loss.detach())
    return torch.cat(losses), {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(params)}


def compare(case: Case, engine: str, groups: str) -> None:
    """`p.grad` and norms of an engine against `alone`; about half of the examples are clipped."""
    _, per_example = alone(case)
    squares = {name: g.flatten(1).square().sum(1) for name, g in per_example.items()}
    limit = torch.stack(list(squares.values())).sum(0).sqrt().median().item()
    clipper = attach(
        case.model, groups=groups, clip_norm=limit, engine=engine, rows_per_example=case.task.rows_per_example
    )
    try:
        case.model.zero_grad()
        report = clipper.backward(losses_of(case, case.chosen))
        for k, group in enumerate(clipper.groups):
            norms = torch.stack([squares[name] for name in group.params]).sum(0).sqrt()
            torch.testing.assert_close(
                report.norms[k], norms, rtol=1e-5, atol=1e-7 * limit, check_dtype=False
            )
            factors = (clipper.thresholds[k] / norms.clamp(min=1e-30)).clamp(max=1)
            for name, parameter in group.params.items():
                expected = torch.tensordot(factors, per_example[name], dims=1)
                torch.testing.assert_close(
                    parameter.grad, expected, rtol=1e-4, atol=1e-6 * limit, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert 0 < int(report.clipped.sum()) < report.norms.numel() or groups == "layer"
    finally:
        clipper.detach()
        case.model.zero_grad()


@pytest.mark.parametrize("task_name", TASKS)
def test_opacus_and_ours_give_the_gradients_of_one_example_at_a_time(task_name: str) -> None:
    case = case_of(task_name)
    both = ("flat", "layer")
    for groups in both:
        compare(case, "auto", groups)
    # the two take turns from task to task
    compare(case, "opacus", both[TASKS.index(task_name) % 2])


def test_types_that_look_the_embedding_up_again_are_clipped_by_every_engine() -> None:
    # the tokens, their types and the head share one matrix
    case = case_of("personachat", "recipe=li2022_personachat", "model.untied=false")
    for engine in ENGINES:
        compare(case, engine, "flat")


@pytest.mark.parametrize("task_name", TASKS)
def test_every_example_has_one_loss_of_its_own(task_name: str) -> None:
    case = case_of(task_name)
    together = losses_of(case, case.chosen)
    assert together.shape == (B,)
    assert together.dtype == torch.float64
    assert bool(together.isfinite().all())
    assert len(set(together.tolist())) == B
    by_itself, _ = alone(case)
    torch.testing.assert_close(together.detach(), by_itself)  # removing all others, and their padding
    reverse = losses_of(case, case.chosen[::-1])
    torch.testing.assert_close(reverse.flip(0), together)
    others = [i for i in range(len(case.task.train)) if i not in case.chosen]
    for position in range(B):  # altering one moves its own loss and no other
        numbers = list(case.chosen)
        numbers[position] = others[position]
        changed = losses_of(case, numbers)
        kept = [k for k in range(B) if k != position]
        torch.testing.assert_close(changed[kept], together[kept])
        assert not torch.isclose(changed[position], together[position])


@pytest.mark.parametrize("task_name", TASKS)
def test_no_batch_is_a_batch_of_no_losses(task_name: str) -> None:
    case = case_of(task_name)
    nobody = case.task.losses(case.model, case.task.collate([]))
    assert nobody.shape == (0,)


def padding_of(batch: dict[str, Tensor]) -> Tensor | None:
    """`[B, T]` where no token of an example stands; None for images."""
    if "attention_mask" in batch:
        return batch["attention_mask"] == 0
    if "positions" in batch:  # the last target is predicted from the last token that the model reads
        last = batch["positions"].amax(1)
        return torch.arange(batch["input_ids"].shape[1]) > last[:, None]
    return None


@pytest.mark.parametrize("task_name", [name for name in TASKS if name not in IMAGES])
def test_what_stands_in_the_padding_changes_neither_losses_nor_norms(task_name: str) -> None:
    case = case_of(task_name)
    batch = batch_of(case.task, case.chosen)
    padding = padding_of(batch)
    assert padding is not None, "a text batch that says nothing of its padding"
    assert bool(padding.any()), "the chosen examples should differ in length"
    other = dict(batch)
    other["input_ids"] = torch.where(padding, (batch["input_ids"] + 7) % 20, batch["input_ids"])
    found = []
    clipper = attach(case.model, groups="layer")
    try:
        for each in (batch, other):
            losses = case.task.losses(case.model, each)
            found.append((losses.detach(), clipper.backward(losses).norms))
            case.model.zero_grad()
    finally:
        clipper.detach()
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("task_name", GENERATED)
def test_a_target_token_counts_and_what_is_only_read_does_not(task_name: str) -> None:
    case = case_of(task_name)
    batch = batch_of(case.task, case.chosen)
    losses = case.task.losses(case.model, batch)
    first = torch.arange(batch["targets"].shape[1]) == 0
    assert bool((batch["targets"][:, 0] != IGNORED).all())
    of_the_first = batch | {"targets": torch.where(first, batch["targets"], IGNORED)}
    shorter = case.task.losses(case.model, of_the_first)
    assert not torch.isclose(shorter, losses).any()
    elsewhere = of_the_first | {"positions": torch.where(first, batch["positions"], 0)}
    torch.testing.assert_close(case.task.losses(case.model, elsewhere), shorter)


def test_several_changed_copies_of_an_image_are_one_example() -> None:
    case = case_of("cifar10", "task.augmentations=3")
    assert case.task.rows_per_example == 3
    assert len(batch_of(case.task, case.chosen)["pixel_values"]) == 3 * B
    for engine in ("auto", "opacus"):
        compare(case, engine, "layer")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", OF_A_HEAD)
def test_every_way_to_fine_tune_agrees_on_a_task_of_every_head(head: str, way: str) -> None:
    if (head, way) in NOT_THERE:
        pytest.skip("refused: see tests/models/test_finetuning.py")
    case = case_of(*OF_A_HEAD[head], f"peft={way}", *WAYS[way])
    assert case.task.head == head
    # a configuration refuses these with engine=opacus
    prompted = way in ("prompt", "p_tuning")
    for engine in ("auto",) if prompted else ("auto", "opacus"):
        compare(case, engine, "layer")
