"""Generation: what is learnt and what is only read, and one loss per example that depends on nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpexp import statement
from dpexp.clipping import attach
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import ModelBundle
from dpexp.schemas import DataConfig, GenerationConfig, RunConfig, TaskConfig
from dpexp.tasks import build_task
from dpexp.tasks.formats import FORMATS
from dpexp.tasks.generation import Generation
from dpexp.tasks.target_loss import IGNORED, target_logits, token_losses
from tests.tasks.text_tasks import bundle, make, network
from tests.training.tiny import make_trainer, run_to_end, tiny_run

__all__ = ["bundle", "make"]  # fixtures


def batch_of(task: Generation, rows: list[int]) -> dict[str, torch.Tensor]:
    return task.collate([task.train[i] for i in rows])


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_record_says_where_a_text_of_the_file_stands_in_several_examples(
    make: Callable[..., Generation],
) -> None:
    note = "a meaning representation with several texts stands in several (epsilon is that of one example)"
    said = statement.privacy_block(RunConfig(), None, {}, 0, 0, data=make().data.notes)["notes"]
    assert any(note in sentence for sentence in said)
    for layout, words in (("personachat", "a dialogue gives several"), ("triples", "a set of triples")):
        assert words in FORMATS[layout].several


def test_prompt_and_target(make: Callable[..., Generation], bundle: ModelBundle) -> None:
    task = make(prefix="summarize the ", suffix=" to{bos}")
    prompt, target = task.train[0]
    words = bundle.tokenizer.decode(prompt)
    assert words.startswith("summarize the name : ")
    assert words.endswith(" to [CLS]")
    assert bundle.tokenizer.decode(target).endswith(". [SEP]")
    assert "[SEP]" not in bundle.tokenizer.decode(target[:-1])
    batch = task.collate([task.train[0]])
    assert batch["input_ids"][0].tolist() == [*prompt, *target[:-1]]
    assert batch["targets"][0].tolist() == target.tolist()
    assert batch["positions"][0].tolist() == list(range(len(prompt) - 1, len(prompt) - 1 + len(target)))
    assert task.length(0) == len(prompt) + len(target)


def test_what_stands_in_front_of_the_end_token_is_learnt(
    make: Callable[..., Generation], bundle: ModelBundle
) -> None:
    plain, task = make(), make(before_end=" so")
    (extra,) = bundle.tokenizer(["so"], add_special_tokens=False)["input_ids"]
    end = bundle.tokenizer.eos_token_id
    for row in range(5):
        before, after = plain.train[row].target, task.train[row].target
        assert after.tolist() == [*before[:-1], *extra, end]
        assert task.length(row) == plain.length(row) + len(extra) == len(task.train[row].prompt) + len(after)
    longest = int(plain.train.lengths.max())
    assert task.train.longer_than(longest).any()
    assert not plain.train.longer_than(longest).any()
    cut = make(before_end=" so", max_target=4).train[0].target
    assert len(cut) == 4
    assert end not in cut


def test_the_loss_is_the_mean_over_the_target_of_the_whole_model(
    make: Callable[..., Generation], bundle: ModelBundle
) -> None:
    """Against the textbook: all logits, labels of -100 before the target, Hugging Face's own loss, one example at a time."""
    task = make()
    rows = [0, 3, 7]
    losses = task.losses(bundle.model, batch_of(task, rows))
    for i, loss in zip(rows, losses, strict=True):
        prompt, target = task.train[i]
        ids = torch.tensor([[*prompt, *target]], dtype=torch.int64)
        labels = torch.tensor([[IGNORED] * len(prompt) + [*target]], dtype=torch.int64)
        expected = bundle.model(input_ids=ids, labels=labels).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_masked_tokens_contribute_exactly_nothing(
    make: Callable[..., Generation], bundle: ModelBundle
) -> None:
    task = make()
    batch = batch_of(task, [0, 1, 2, 3])
    padded = batch["targets"] == IGNORED
    assert padded.any()
    losses = token_losses(bundle.model, batch)
    assert (losses[padded] == 0).all()
    bundle.model.zero_grad()
    losses[padded].sum().backward()
    assert all((gradient == 0).all() for gradient in gradients(bundle.model).values())
    # What the padded slots point at changes no loss and no gradient, to the last bit.
    reference = token_losses(bundle.model, batch)
    bundle.model.zero_grad()
    reference.sum().backward()
    before = gradients(bundle.model)
    moved = dict(batch, positions=batch["positions"].masked_fill(padded, 1))
    bundle.model.zero_grad()
    again = token_losses(bundle.model, moved)
    again.sum().backward()
    assert torch.equal(again, reference)
    for name, gradient in gradients(bundle.model).items():
        torch.testing.assert_close(gradient, before[name], rtol=1e-6, atol=1e-9)


def test_prompt_tokens_are_no_targets(make: Callable[..., Generation], bundle: ModelBundle) -> None:
    """The gradient with respect to every logit is that of the targets alone: no other position reaches the output layer."""
    task = make()
    batch = batch_of(task, [0, 1])
    logits = target_logits(bundle.model, batch["input_ids"], batch["positions"])
    assert logits.shape == (2, batch["targets"].shape[1], len(bundle.tokenizer))
    whole = bundle.model(input_ids=batch["input_ids"]).logits
    rows = torch.arange(2)[:, None]
    torch.testing.assert_close(logits, whole[rows, batch["positions"]], rtol=1e-5, atol=1e-6)
    assert not bundle.model.get_output_embeddings()._forward_pre_hooks, (
        "the hook is gone after the forward pass"
    )


@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_padding_moves_neither_losses_nor_norms(
    make: Callable[..., Generation], bundle: ModelBundle, groups: str
) -> None:
    task = make()
    model = bundle.model.double()
    clipper = attach(model, groups=groups, clip_norm=0.1)
    batch = batch_of(task, [0, 1, 2])
    more = {name: torch.nn.functional.pad(tensor, (0, 9), value=fill) for (name, tensor), fill in zip(
        batch.items(), (5, 0, IGNORED), strict=True)}  # fmt: skip
    losses = task.losses(model, batch)
    norms = clipper.backward(losses).norms
    model.zero_grad()
    padded = task.losses(model, more)
    torch.testing.assert_close(padded, losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(clipper.backward(padded).norms, norms, rtol=1e-9, atol=1e-12)
    clipper.detach()


def test_a_loss_depends_on_its_own_example_alone(
    make: Callable[..., Generation], bundle: ModelBundle
) -> None:
    task = make()
    model = bundle.model.double()
    alone = task.losses(model, batch_of(task, [4]))
    for others in ([4, 0, 1], [4, 9, 11, 13], [4, 4]):
        together = task.losses(model, batch_of(task, others))
        torch.testing.assert_close(together[0], alone[0], rtol=1e-9, atol=1e-12)
    losses = task.losses(model, batch_of(task, [4, 0, 1]))
    assert losses.shape == (3,)
    embeddings = model.get_input_embeddings()
    seen: list[torch.Tensor] = []
    handle = embeddings.register_forward_hook(
        lambda module, args, out: seen.append(out.requires_grad_()) or out
    )
    losses = task.losses(model, batch_of(task, [4, 0, 1]))
    handle.remove()
    (gradient,) = torch.autograd.grad(losses[1], seen)
    assert gradient[1].abs().sum() > 0
    assert gradient[[0, 2]].abs().sum() == 0


def test_leaving_one_example_out_moves_the_sum_by_at_most_c(
    make: Callable[..., Generation], bundle: ModelBundle
) -> None:
    task = make()
    model = bundle.model.double()
    clipper = attach(model, groups="flat", clip_norm=0.05)

    def total(rows: list[int]) -> torch.Tensor:
        model.zero_grad()
        clipper.backward(task.losses(model, batch_of(task, rows)))
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    everyone = total([0, 1, 2, 3])
    for left_out in range(4):
        rest = total([i for i in range(4) if i != left_out])
        assert float((everyone - rest).norm()) <= 0.05 * (1 + 1e-9)
    clipper.detach()


@pytest.mark.parametrize("groups", ["flat", "layer"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_engine_gives_the_gradient_of_the_naive_loop(
    make: Callable[..., Generation], groups: str, tied: bool
) -> None:
    task = make()
    batch = batch_of(task, [0, 1, 2, 5])
    found = {}
    for engine in ("loop", "auto"):
        model = network(tied=tied).model.double()
        clipper = attach(model, groups=groups, clip_norm=0.1, engine=engine)
        report = clipper.backward(task.losses(model, batch))
        clipper.detach()
        found[engine] = (report.norms, gradients(model))
    torch.testing.assert_close(found["auto"][0], found["loop"][0], rtol=1e-9, atol=1e-12)
    for name, gradient in found["loop"][1].items():
        torch.testing.assert_close(found["auto"][1][name], gradient, rtol=1e-9, atol=1e-12)
    assert len(found["auto"][1]) == len(found["loop"][1]) > 10


def test_the_empty_batch(make: Callable[..., Generation], bundle: ModelBundle) -> None:
    task = make()
    batch = task.collate([])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (0, 1), "positions": (0, 1), "targets": (0, 1)
    }  # fmt: skip
    assert task.losses(bundle.model, batch).shape == (0,)


def test_what_is_too_long_is_cut_and_counted(make: Callable[..., Generation], bundle: ModelBundle) -> None:
    whole = make()
    task = make(max_length=32, max_target=8)
    prompts, targets = (np.array([len(x[k]) for x in whole.train]) for k in (0, 1))
    assert max(task.length(i) for i in range(40)) == 32
    note = next(n for n in task.data.notes if n.startswith("train: the source"))
    assert f"of {int((prompts > 32 - np.minimum(targets, 8)).sum())} of 40 rows was cut at its end" in note
    assert "without noise on private data" in note
    assert any(
        f"the target of {int((targets > 8).sum())} of 40 rows was cut to 8" in n for n in task.data.notes
    )
    long = int(targets.argmax())
    assert task.train[long].target.tolist() == whole.train[long].target[:8].tolist(), (
        "cut, so without an end token"
    )
    assert task.train[long].prompt[-1] == bundle.tokenizer.bos_token_id, "the separator is never lost"
    start = make(max_length=32, max_target=8, cut="start").train[long]
    kept = len(start.prompt) - 1
    assert start.prompt[:-1].tolist() == whole.train[long].prompt[:-1].tolist()[-kept:]
    with pytest.raises(UserError, match=r"leaves no room for a source beside 1 tokens of instruction"):
        make(max_length=9, max_target=8)


def test_an_over_long_row_is_named_where_cutting_is_not_wanted(
    bundle: ModelBundle, own_data: Callable[..., DataConfig]
) -> None:
    def build(rows: list[tuple[str, str]]) -> None:
        task = TaskConfig(
            name="text_generation", kind="generation", metric="summarization", max_length=16, overlong="error",
            generation=GenerationConfig(max_target=6, when="never"), num_examples={"small": None},
        )  # fmt: skip
        build_task(task, own_data(rows, text="text", label="label"), "small", bundle.tokenizer, 0)

    build([("the place", "a b"), ("the place", "a a a a a")])
    with pytest.raises(
        UserError, match=r"train\.csv, line 3: with its target more than the 16 tokens .* here 1 of 2"
    ):
        build([("the place", "a b"), ("the " * 20, "a")])
    with pytest.raises(
        UserError, match=r"train\.csv, line 2: a target of more than task\.generation\.max_target=6"
    ):
        build([("the place", "a " * 9), ("the place", "a")])


def test_text_that_spells_a_special_token_stays_text(
    bundle: ModelBundle, own_data: Callable[..., DataConfig]
) -> None:
    task = TaskConfig(
        name="text_generation", kind="generation", metric="summarization",
        generation=GenerationConfig(max_target=20, when="never"), num_examples={"demo": None},
    )  # fmt: skip
    made = build_task(
        task,
        own_data([("the [SEP] place", "a [SEP] b")], text="text", label="label"),
        "demo",
        bundle.tokenizer,
        0,
    )
    end = bundle.tokenizer.eos_token_id
    assert end not in made.train[0].prompt
    assert made.train[0].target.tolist().count(end) == 1
    assert made.data.source == "own files"
    assert "no dev set was given (data.dev), so nothing is measured" in made.data.notes


def test_own_pairs_may_have_no_header_and_malformed_rows(
    bundle: ModelBundle, own_data: Callable[..., DataConfig]
) -> None:
    task = TaskConfig(
        name="text_generation", kind="generation", metric="summarization", num_examples={"demo": None},
        generation=GenerationConfig(max_target=20, when="never"), columns=["text", "label"], malformed="skip",
    )  # fmt: skip
    # the line that the fixture writes as a header is a row then
    mine = own_data([("a", "b"), ("c", "d,one more")], text="text", label="label")
    made = build_task(task, mine, "demo", bundle.tokenizer, 0)
    assert len(made.train) == 2
    assert any(
        "train: 1 rows that are malformed or have no target were left out" in n for n in made.data.notes
    )


def test_own_data_asks_for_its_declared_n(bundle: ModelBundle, own_data: Callable[..., DataConfig]) -> None:
    task = TaskConfig(
        name="text_generation", kind="generation", metric="summarization", num_examples={"demo": None}
    )
    with pytest.raises(UserError, match=r"3 examples are declared, and .* has 1"):
        build_task(
            task,
            own_data([("a", "b")], text="text", label="label", num_examples=3),
            "demo",
            bundle.tokenizer,
            0,
        )
    wrong = TaskConfig(name="x", kind="generation", metric="rouge")
    with pytest.raises(UserError, match=r"task\.metric=rouge is unknown"):
        build_task(wrong, own_data([("a", "b")]), "demo", bundle.tokenizer, 0)


def test_in_context_learning_shows_pairs_of_the_training_file(
    make: Callable[..., Generation], bundle: ModelBundle
) -> None:
    plain, shown, others = (
        make(max_target=8, **extra) for extra in ({}, {"shots": 1}, {"shots": 1, "prompt_set": 1})
    )
    prompts = [bundle.tokenizer.decode(task.splits["dev"].prompt(0)) for task in (plain, shown, others)]
    assert len(set(prompts)) == 3
    assert prompts[1].split()[-3:] == prompts[0].split()[-3:]
    assert prompts[1].count("name :") == 2 * prompts[0].count("name :")
    assert "in-context learning" in shown.data.notes[-1]
    # a text ends where the next demonstration would begin
    assert (plain.settings.stop, shown.settings.stop) == ([], ["\n\n"])
    with pytest.raises(UserError, match="set it to target"):
        make(shots=1, beam_length="whole")
    with pytest.raises(UserError, match=r"has \d+ pairs"):
        make(shots=10**6)
    with pytest.raises(UserError, match=r"optim\.steps=0"):
        compose(["task=e2e", "scale=demo", "clip=nonprivate", "task.generation.shots=2"])
    shown = ["optim.epochs=null", "optim.steps=0", "privacy=none", "privacy.release=strict"]
    with pytest.raises(UserError, match="for what may be shown to anybody"):
        compose(["task=e2e", "scale=demo", "clip=nonprivate", "task.generation.shots=2", *shown])


def test_long_training_rows_are_left_out_and_n_counts_the_others(
    bundle: ModelBundle, own_data: Callable[..., DataConfig]
) -> None:
    rows = [
        ("the place", "a b"),
        ("the place is the place", "a a"),
        ("the place", "a " * 9),
        ("the", "a b a"),
    ]
    lengths = [6, 9, 13, 6]  # prompt and target, with what stands between them and the end token

    def build(most: int | None, declared: int) -> Generation:
        task = TaskConfig(
            name="text_generation", kind="generation", metric="summarization", max_length=64, drop_over=most,
            generation=GenerationConfig(max_target=20, when="never"), num_examples={"small": None},
        )  # fmt: skip
        data = own_data(rows, rows, text="text", label="label")
        made = build_task(task, replace(data, num_examples=declared), "small", bundle.tokenizer, 0)
        assert isinstance(made, Generation)
        return made

    whole = build(None, 4)
    assert [whole.length(i) for i in range(4)] == lengths
    short = build(9, 3)
    assert [short.length(i) for i in range(3)] == [6, 9, 6], "a row of exactly so many tokens stays"
    assert short.num_examples == 3
    assert len(short.dev) == 4, "what is measured stays whole"
    assert any(
        note.startswith("train: 1 of 4 rows of more than 9 tokens were left out") for note in short.data.notes
    )
    for i, j in enumerate((0, 1, 3)):
        assert short.train[i].target.tolist() == whole.train[j].target.tolist()
    with pytest.raises(UserError, match=r"4 examples are declared, and .* has 3"):
        build(9, 4)
    with pytest.raises(UserError, match=r"all 4 rows .* more than 3 tokens"):
        build(3, 4)


class ScaledTogether(nn.Module):
    """By one number for the whole batch, which no gradient shows."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.detach().abs().amax()


def test_what_lies_before_a_frozen_output_layer_is_looked_at(
    make: Callable[..., Generation], bundle: ModelBundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # as with LoRA: the losses leave the model at its last hidden states, and its own output has no rows
    model: Any = bundle.model
    model.lm_head.requires_grad_(False)
    run = tiny_run()
    run.task.kind, run.optim.steps = "generation", 1
    trainer = run_to_end(tmp_path / "apart", run, task=make(), model=model)
    assert trainer.details()["clipping_notes"] == []
    assert "not looked at" not in caplog.text
    trainer.detach()
    model.transformer.ln_f = nn.Sequential(model.transformer.ln_f, ScaledTogether())
    with pytest.raises(UserError, match="mixes examples"):
        make_trainer(tmp_path / "together", run, task=make(), model=model)
