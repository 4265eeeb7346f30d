"""Generated text: left padding, references, an interrupted evaluation, and the papers' prompts on real rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import ModelBundle
from dpexp.schemas import DataConfig, GenerationConfig
from dpexp.tasks import build_task, decoding, generation
from dpexp.tasks.decoding import Context, Written, continued, decode
from dpexp.tasks.generation import Generation
from dpexp.tasks.pairs import find_pairs
from dpexp.tasks.sources import Found
from tests.tasks.text_tasks import bundle, make

__all__ = ["bundle", "make"]  # fixtures

CPU = torch.device("cpu")


def test_left_padding_gives_what_one_by_one_gives(
    make: Callable[..., Generation], bundle: ModelBundle
) -> None:
    task = make()
    prompts = [task.splits["dev"].prompt(i) for i in range(6)]
    assert len({len(prompt) for prompt in prompts}) > 2, "prompts of one length would show nothing"
    model = bundle.model.eval()
    settings = GenerationConfig(max_target=12, num_beams=3)
    with torch.no_grad():
        together = continued(model, CPU, bundle.tokenizer, prompts, settings)
        alone = [continued(model, CPU, bundle.tokenizer, [prompt], settings)[0] for prompt in prompts]
    assert together == alone
    assert len({written.text for written in alone}) > 1, "one text for all would show nothing"


def test_references_are_grouped_by_source(make: Callable[..., Generation]) -> None:
    task = make()
    contexts = task.contexts("dev")
    assert sum(len(context.references) for context in contexts) == 48
    assert len({context.source for context in contexts}) == len(contexts) < 48
    few = make(examples=5).contexts("dev")
    assert len(few) == 5
    assert {c.source for c in few} <= {c.source for c in contexts}


def test_an_interrupted_evaluation_goes_on(
    make: Callable[..., Generation], bundle: ModelBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make()
    contexts = task.contexts("dev")[:8]
    settings = GenerationConfig(max_target=6, num_beams=2)
    model = bundle.model.eval()
    path = tmp_path / "predictions" / "dev.jsonl"
    asked: list[int] = []

    def counted(*args: Any) -> list[Written]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(len(args[3]))
        return continued(*args)

    def run(**changes: Any) -> list[Written]:
        with torch.no_grad():
            return decode(model, CPU, bundle.tokenizer, contexts, settings, 4, path, **changes)

    monkeypatch.setattr(decoding, "continued", counted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert asked == [2, 2]
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"index": 5, "predic')  # torn by the interruption
    with open(path, "ab") as torn:
        torn.write("é".encode()[:1])  # inside a character
    monkeypatch.setattr(decoding, "continued", continued)
    seen: list[int] = []
    resumed = run(progress=seen.append)
    assert seen[0] == 4, "the first four are not made again"
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]][1:]
    assert sorted(line["index"] for line in lines) == list(range(8))
    assert all(Written(line["prediction"], line["ended"]) == resumed[line["index"]] for line in lines)
    assert lines[0]["input"] == contexts[lines[0]["index"]].source
    assert lines[0]["references"] == contexts[lines[0]["index"]].references
    path.unlink()
    assert run() == resumed
    with torch.no_grad():
        next(model.parameters()).add_(0.5)  # other weights: nothing of the old file is used
    seen.clear()
    run(progress=seen.append)
    assert seen[0] == 0


def test_the_loss_of_some_rows_spread_evenly(make: Callable[..., Generation], bundle: ModelBundle) -> None:
    task = make(loss_examples=5)
    calls: list[tuple[int, int]] = []
    found = task.evaluate(bundle.model, CPU, 16, lambda done, total: calls.append((done, total)))
    with torch.no_grad():
        losses = [task.losses(bundle.model.eval(), task.collate([task.dev[i]])) for i in (0, 9, 19, 28, 38)]
    assert found["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert calls[-1] == (5, 5)
    assert make(loss_examples=1000).evaluate(bundle.model, CPU, 16) == make().evaluate(bundle.model, CPU, 16)


def test_evaluation_measures_and_leaves_the_model_as_it_was(
    make: Callable[..., Generation], bundle: ModelBundle, tmp_path: Path
) -> None:
    pytest.importorskip("sacrebleu")
    task = make(when="end", splits=["test"], examples=3, max_target=24)
    bundle.model.train()
    middle = task.evaluate(bundle.model, CPU, 16)
    assert set(middle) == {"loss", "nll", "perplexity"}
    assert middle["perplexity"] == pytest.approx(np.exp(middle["nll"]))
    calls: list[tuple[int, int]] = []
    final = task.evaluate_at_end(
        bundle.model, CPU, 16, lambda done, total: calls.append((done, total)), tmp_path
    )
    assert bundle.model.training
    assert {name: final[name] for name in middle} == pytest.approx(middle)
    assert final["generated_test"] == 3
    assert {"bleu_test", "rougeL_test", "nll_test"} <= set(final)
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().split("\n")[1:-1]]
    assert final["unended_test"] == sum(not row["ended"] for row in rows)
    assert calls[-1] == (48 + 48 + 3, 48 + 48 + 3)
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 4
    with torch.no_grad():  # the loss by hand
        losses = torch.cat([task.losses(bundle.model, task.collate([x])) for x in task.dev])
    assert middle["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


def test_predictions_are_kept_whatever_ends_a_line_in_them(
    bundle: ModelBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = np.array([3, 4, 5], np.int32)
    contexts = [Context(f"a\u2028b\x85{i}", ["c\u2028d", "é\nf"], prompt) for i in range(3)]
    said = [Written("one\u2029two\x0c", True), Written("", False), Written("\r\nthree", True)]
    path, settings = tmp_path / "dev.jsonl", GenerationConfig(num_beams=2)
    monkeypatch.setattr(decoding, "continued", lambda *args: said[: len(args[3])])
    first = decode(bundle.model, CPU, bundle.tokenizer, contexts, settings, 6, path)
    assert first == said
    monkeypatch.setattr(decoding, "continued", lambda *args: pytest.fail("made again"))
    assert decode(bundle.model, CPU, bundle.tokenizer, contexts, settings, 6, path) == said


def test_an_end_in_time_is_told_from_a_text_cut_short(bundle: ModelBundle) -> None:
    """The output bias of one token decides: the end at once, or never."""
    end = bundle.tokenizer.eos_token_id

    class Biased(torch.nn.Module):
        def __init__(self, bias: float) -> None:
            super().__init__()
            self.bias = bias

        def forward(self, logits: torch.Tensor) -> torch.Tensor:
            moved = torch.zeros(logits.shape[-1])
            moved[end] = self.bias
            return logits + moved

    model = bundle.model.eval()
    head = model.get_output_embeddings()
    prompts = [np.array([3, 4, 5], np.int32), np.array([6], np.int32)]
    for bias, ended in ((1e4, True), (-1e4, False)):
        handle = head.register_forward_hook(lambda module, args, out, b=bias: Biased(b)(out))
        with torch.no_grad():
            found = continued(
                model, CPU, bundle.tokenizer, prompts, GenerationConfig(max_target=4, num_beams=2)
            )
        handle.remove()
        assert [written.ended for written in found] == [ended, ended]
        assert all(bool(written.text) != ended for written in found)


def test_a_missing_metric_library_fails_before_anything_is_read_by_the_model(
    make: Callable[..., Generation], bundle: ModelBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpexp.metrics import text

    task = make(when="end", splits=["test"], examples=2)

    def gone(*_: Any) -> None:
        raise UserError("text metrics need sacrebleu")

    monkeypatch.setattr(text, "check", gone)
    monkeypatch.setattr(generation, "token_losses", lambda *_: pytest.fail("the model was asked"))
    with pytest.raises(UserError, match="need sacrebleu"):
        task.evaluate_at_end(bundle.model, CPU, 4)
    with pytest.raises(UserError, match="need sacrebleu"):
        make(when="end", splits=["test"])
    make(when="never")


def test_prompts_that_are_cut_for_generation_alone_are_counted(make: Callable[..., Generation]) -> None:
    """Room is kept for the longest target, which most pairs don't need."""
    pytest.importorskip("sacrebleu")
    whole = make(when="end", splits=["test"])
    assert not [note for note in whole.data.notes if "prompts" in note]
    task = make(when="end", splits=["test"], max_length=52, max_target=36)
    full = [len(context.prompt) for context in whole.contexts("test")]
    cut = sum(length > 52 - 36 for length in full)
    assert cut > 0
    expected = f"test: {cut} of {len(full)} prompts that text is generated from were cut at their end"
    assert any(note.startswith(expected) for note in task.data.notes)


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        ("dart", "bleurt=gone", "bleurt: no model in gone: give a folder"),
        ("dart", "bleu=gone", "no metric named bleu uses a model: bertscore and bleurt do"),
        (
            "e2e",
            "bleurt=gone",
            "a model is named for bleurt, which is not among the metrics of the suite e2e",
        ),
    ],
)
def test_a_named_model_of_a_metric_must_be_there_before_any_training(
    bundle: ModelBundle, data: Callable[..., DataConfig], task: str, model: str, message: str
) -> None:
    pytest.importorskip("sacrebleu")
    run = compose([f"task={task}", "clip=flat", "scale=demo", f"task.generation.metric_models.{model}"])
    with pytest.raises(UserError, match=message):
        build_task(run.task, data(), "demo", bundle.tokenizer, 0)


@pytest.mark.parametrize("name", ["e2e", "webnlg", "samsum"])
def test_forty_real_rows(
    real_data: Path, data: Callable[..., DataConfig], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows of the real files with the real vocabulary of GPT-2: the papers' prompts, and nothing cut."""
    from transformers import GPT2TokenizerFast

    def first_rows(*args: Any) -> Found:
        found = find_pairs(*args)
        assert len(found.splits["train"]) == {"e2e": 42061, "webnlg": 18102, "samsum": 14732}[name]
        return replace(found, splits={split: table.rows(0, 40) for split, table in found.splits.items()})

    monkeypatch.setattr(generation, "find_pairs", first_rows)
    tokenizer = GPT2TokenizerFast.from_pretrained(real_data / "tokenizers/gpt2")
    tokenizer.pad_token, tokenizer.model_max_length = tokenizer.eos_token, 1024
    run = compose([f"task={name}", "clip=flat", "scale=paper"])
    run.task.generation.when = "never"
    task = build_task(run.task, data(root=str(real_data), num_examples=40), "paper", tokenizer, 0)
    assert isinstance(task, Generation)
    batch = task.collate([task.train[i] for i in range(40)])
    for i in range(40):
        prompt, target = task.train[i]
        assert batch["targets"][i, : len(target)].tolist() == target.tolist()
        assert target[-1] == tokenizer.eos_token_id
        assert len(prompt) + len(target) <= run.task.max_length
    texts = {
        "e2e": (" name : The Vaults | Type : pub | price : more than £30 |", "<|endoftext|>"),
        "webnlg": (" Aarhus Airport : city served :", "<|endoftext|>"),
        "samsum": ("Summarize the following dialogue\nAmanda: I baked  cookies.", "\nTL;DR"),
    }
    words = tokenizer.decode(task.train[0].prompt)
    assert words.startswith(texts[name][0])
    assert words.endswith(texts[name][1])
    assert not [note for note in task.data.notes if " cut " in note]


def test_a_sampled_text_depends_on_its_number_alone(
    make: Callable[..., Generation], bundle: ModelBundle, tmp_path: Path
) -> None:
    task, model = make(), bundle.model.eval()
    contexts = task.contexts("dev")[:4]
    sampled, greedy = GenerationConfig(max_target=8, top_p=0.9), GenerationConfig(max_target=8, num_beams=1)

    def found(settings: GenerationConfig, path: Path | None = None) -> list[Written]:
        state = torch.get_rng_state()
        with torch.no_grad():
            texts = decode(model, CPU, bundle.tokenizer, contexts, settings, 8, path)
        assert torch.equal(torch.get_rng_state(), state)
        return texts

    first = found(sampled, tmp_path / "dev.jsonl")
    assert first == found(sampled)
    assert first != found(greedy)
    # next to nothing of the distribution is left: the most likely words, as in greedy search
    assert found(GenerationConfig(max_target=8, top_p=1e-9)) == found(greedy)
