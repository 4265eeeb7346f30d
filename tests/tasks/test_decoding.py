"""Generated text: left padding, references, an interrupted evaluation, and runs on every task's demo data and real rows."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpexp.config import compose
from dpexp.models import ModelBundle
from dpexp.schemas import DataConfig, GenerationConfig
from dpexp.tasks import build_task, decoding, generation
from dpexp.tasks.decoding import beam_search, decode
from dpexp.tasks.generation import Generation
from dpexp.tasks.lookup import Found
from dpexp.tasks.pairs import find_pairs
from tests.tasks.text_tasks import bundle, make

__all__ = ["bundle", "make"]  # fixtures

TASKS = ("e2e", "dart", "webnlg", "samsum", "personachat", "text_generation")
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
        together = beam_search(model, CPU, bundle.tokenizer, prompts, settings)
        alone = [beam_search(model, CPU, bundle.tokenizer, [prompt], settings)[0] for prompt in prompts]
    assert together == alone
    assert len(set(alone)) > 1, "one text for all would show nothing"


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

    def counted(*args: Any) -> list[str]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(len(args[3]))
        return beam_search(*args)

    def run(**changes: Any) -> list[str]:
        with torch.no_grad():
            return decode(model, CPU, bundle.tokenizer, contexts, settings, 4, path, **changes)

    monkeypatch.setattr(decoding, "beam_search", counted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert asked == [2, 2]
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"index": 5, "predic')  # torn by the interruption
    monkeypatch.setattr(decoding, "beam_search", beam_search)
    seen: list[int] = []
    resumed = run(progress=seen.append)
    assert seen[0] == 4, "the first four are not made again"
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert sorted(line["index"] for line in lines) == list(range(8))
    assert all(line["prediction"] == resumed[line["index"]] for line in lines)
    assert lines[0]["input"] == contexts[lines[0]["index"]].source
    assert lines[0]["references"] == contexts[lines[0]["index"]].references
    path.unlink()
    assert run() == resumed
    with torch.no_grad():
        next(model.parameters()).add_(0.5)  # other weights: nothing of the old file is used
    seen.clear()
    run(progress=seen.append)
    assert seen[0] == 0


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
    assert calls[-1] == (48 + 48 + 3, 48 + 48 + 3)
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 4
    with torch.no_grad():  # the loss by hand
        losses = torch.cat([task.losses(bundle.model, task.collate([x])) for x in task.dev])
    assert middle["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.parametrize("name", ["e2e", "webnlg", "samsum"])
def test_forty_real_rows(
    real_data: Path, data: Callable[..., DataConfig], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows of the real files with the real vocabulary of GPT-2: the papers' prompts, and nothing cut."""
    from transformers import GPT2TokenizerFast

    def first_rows(*args: Any) -> Found:
        found = find_pairs(*args)
        assert len(found.tables["train"]) == {"e2e": 42061, "webnlg": 18102, "samsum": 14732}[name]
        return replace(found, tables={split: table.rows(0, 40) for split, table in found.tables.items()})

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


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_on_demo_data_offline(
    task: str, runs_dir: Path, capsys: Any, monkeypatch: Any
) -> None:
    from dpexp import train

    pytest.importorskip("sacrebleu")
    monkeypatch.setenv("DPEXP_DATA", "")
    monkeypatch.setattr(sys, "argv", [
        "dpexp.train", f"task={task}", "scale=demo", "model=gpt2_tiny", "data.root=null", "optim.epochs=null", "optim.steps=2",
        "optim.batch_size=16", "data.num_examples=200", f"runtime.runs_dir={runs_dir}", "runtime.threads=1",
        "model.config.n_embd=16",
        "runtime.physical_batch_size=16", "task.generation.examples=2", "privacy.noise_seed=1", "task.generation.max_target=24",
    ])  # fmt: skip
    train.main()
    (path,) = runs_dir.glob("*/*/seed0/summary.json")
    summary = json.loads(path.read_text())
    assert summary["task"] == task
    assert summary["status"] == "finished"
    assert summary["data"]["source"] == "demo"
    assert summary["data"]["rows"]["train"] == 200
    assert summary["metrics"]["nll"] > 0
    generated = next(value for name, value in summary["metrics"].items() if name.startswith("generated"))
    assert generated == 2
    (predictions,) = path.parent.glob("predictions/*.jsonl")
    assert len(predictions.read_text().splitlines()) == 3
    assert (path.parent / "model" / "model.safetensors").is_file()
    capsys.readouterr()
