"""Persona-Chat with tokens for its speakers: ids, types and labels by hand; in losses, text, ranking, clipping and whole runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dpexp.clipping import attach
from dpexp.config import compose, run_folder
from dpexp.errors import UserError
from dpexp.models import ModelBundle, build_tokenizer
from dpexp.predict import PredictArguments, predict
from dpexp.schemas import DataConfig, GenerationConfig, ModelConfig, PeftConfig, TaskConfig
from dpexp.tasks import build_task
from dpexp.tasks.decoding import continued
from dpexp.tasks.generation import Generation
from dpexp.tasks.ranking import candidates_of, hits_at_1
from dpexp.tasks.sequences import make_frame
from dpexp.tasks.target_loss import IGNORED
from dpexp.train import train
from tests.training.tiny import make_trainer, run_to_end, tiny_run
from tests.training.tiny import train as train_on

CPU = torch.device("cpu")
RECIPE = ["task=personachat", "recipe=li2022_personachat", "scale=demo", "clip=flat"]
SPEAKERS = ["your persona: ", "partner: {speaker2}", "you: {speaker1}"]
DIALOGUES = """1 your persona: i like chess .
2 your persona: i live in brook
3 hello you\tgood , thanks .
4 hello <speaker1>\ti live in brook .
5 do you like hiking ?\tno . i like chess . thanks
6 great\tsee you on monday
1 your persona: i love the river .
2 who are you ?\ti like the river .
3 what do you like ?\tthe river
"""


def network(architecture: str = "gpt2", **values: Any) -> ModelConfig:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
    return ModelConfig(
        **{
            "family": "random_hf", "architecture": architecture, "config": sizes, "tokenizer": "demo_text", "dropout": 0.0,
            "attention_dropout": 0.0, "new_tokens": ["bos", "eos", "speaker1", "speaker2", "pad"], **values,
        }
    )  # fmt: skip


def dialogue(
    folder: Path, model: ModelConfig | None = None, text: str = DIALOGUES, **changes: Any
) -> Generation:
    path = folder / "dialogues.txt"
    path.write_text(text)
    settings: dict[str, Any] = {
        "prefix": "{bos}", "suffix": "{speaker1}", "before_target": "", "speakers": SPEAKERS, "cut": "start",
        "max_target": 16, "num_beams": 2, "when": "never",
    }  # fmt: skip
    task = TaskConfig(
        name="personachat", kind="generation", format="personachat", metric="dialogue", max_length=100,
        generation=GenerationConfig(**settings | changes),
    )  # fmt: skip
    data = DataConfig(train=str(path), cache=None)
    made = build_task(task, data, "own", build_tokenizer(model or network(), scale="demo"), 0)
    assert isinstance(made, Generation)
    # what is measured stands in train too, which nothing here minds
    made.splits["dev"], made.tables["dev"], made.dev = made.train, made.tables["train"], made.train
    return made


def built(task: Generation, model: ModelConfig | None = None, **ways: Any) -> ModelBundle:
    given: dict[str, Any] = {"scale": "demo", "seed": 0, "tokenizer": task.tokenizer}
    bundle = task.build_network(model or network(), PeftConfig(**{"name": "full", **ways}), **given)
    with torch.no_grad():
        # the usual 0.02 makes every distribution nearly uniform
        for parameter in bundle.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.2)
    return bundle


def by_hand(task: Generation, row: int) -> dict[str, Tensor]:
    """One example as the layout says, without padding: `[1, T]` each."""
    prompt, target = task.train[row]
    one, two = task.tokenizer.convert_tokens_to_ids(["<speaker1>", "<speaker2>"])
    types, now = [], one
    for token in [*prompt, *target]:
        now = token if token in (one, two) else now
        types.append(now)
    rows = {
        "input_ids": [*prompt, *target],
        "token_type_ids": types,
        "labels": [IGNORED] * len(prompt) + [*target],
    }
    return {name: torch.tensor([row], dtype=torch.int64) for name, row in rows.items()}


def test_ids_types_and_labels_of_a_small_dialogue(tmp_path: Path) -> None:
    task = dialogue(tmp_path)
    batch = task.collate([task.train[0], task.train[2]])
    read = task.tokenizer.convert_ids_to_tokens
    tokens = [
        "<bos> i like chess . i live in brook <speaker2> hello you <speaker1> good , thanks .",
        # the last five utterances; what spells a token of another is text
        "<bos> i like chess . i live in brook <speaker2> hello you <speaker1> good , thanks . <speaker2> hello < s ##p ##e ##a "
        "##k ##e ##r ##1 > <speaker1> i live in brook . <speaker2> do you like hiking ? <speaker1> no . i like chess . thanks",
    ]
    types = [
        ["<speaker1>"] * 9 + ["<speaker2>"] * 3 + ["<speaker1>"] * 5,
        ["<speaker1>"] * 9 + ["<speaker2>"] * 3 + ["<speaker1>"] * 5 + ["<speaker2>"] * 12 + ["<speaker1>"] * 6
        + ["<speaker2>"] * 6 + ["<speaker1>"] * 8,
    ]  # fmt: skip
    labels = ["good , thanks . <eos>", "no . i like chess . thanks <eos>"]
    for row in range(2):
        length = len(tokens[row].split())
        assert read(batch["input_ids"][row][:length]) == tokens[row].split()
        assert read(batch["token_type_ids"][row][:length]) == types[row]
        learnt = labels[row].split()
        assert read(batch["targets"][row][: len(learnt)]) == learnt
        assert (batch["targets"][row][len(learnt) :] == IGNORED).all()
        first = length - len(learnt)
        assert tokens[row].split()[first] == "<speaker1>", "read, and the first word predicted from it"
        assert batch["positions"][row][: len(learnt)].tolist() == list(range(first, length))
    assert set(task.collate([])) == set(batch)
    plain = dialogue(
        tmp_path, network(new_tokens=[]), prefix="", suffix="\nyou:", before_target=" ", speakers=[]
    )
    assert "token_type_ids" not in plain.collate([plain.train[0]])


def test_five_utterances_are_the_history(tmp_path: Path) -> None:
    task = dialogue(tmp_path)
    words = task.tokenizer.convert_ids_to_tokens(task.train[3].prompt)
    assert [words.count(f"<speaker{who}>") for who in (1, 2)] == [3, 3]
    assert words[9:11] == ["<speaker2>", "hello"]
    assert words[10:12] != ["hello", "you"], "the first exchange is forgotten"
    short = dialogue(tmp_path, text=DIALOGUES.replace("6 great", f"6 {'great ' * 90}"))
    cut, _ = short.train[3]
    assert len(cut) + 5 <= 100
    assert short.collate([short.train[3]])["token_type_ids"][0, : len(cut)].unique().tolist() == sorted(
        short.tokenizer.convert_tokens_to_ids(["<speaker1>", "<speaker2>"])
    )


@pytest.mark.parametrize("architecture", ["gpt2", "openai-gpt"])
def test_losses_see_the_types(architecture: str, tmp_path: Path) -> None:
    """Against Hugging Face's own loss of one example at a time, with types by hand."""
    task = dialogue(tmp_path, network(architecture))
    model = built(task, network(architecture)).model
    losses = task.losses(model, task.collate([task.train[i] for i in range(6)]))
    for row, loss in enumerate(losses):
        inputs = by_hand(task, row)
        torch.testing.assert_close(loss, model(**inputs).loss, rtol=1e-5, atol=1e-6)
        del inputs["token_type_ids"]
        assert (loss - model(**inputs).loss).abs() > 1e-3, "without types it is another model"


@pytest.mark.parametrize("architecture", ["gpt2", "openai-gpt"])
def test_text_is_written_with_the_types_of_who_answers(architecture: str, tmp_path: Path) -> None:
    task = dialogue(tmp_path, network(architecture))
    model = built(task, network(architecture)).model.eval()
    prompts = [task.train.prompt(row) for row in range(6)]
    greedy = replace(task.settings, num_beams=1, max_target=8)
    with torch.no_grad():
        found = continued(model, CPU, task.tokenizer, prompts, greedy)
        for row, written in enumerate(found):
            inputs = {
                name: x[:, : len(prompts[row])] for name, x in by_hand(task, row).items() if name != "labels"
            }
            one, start = inputs["token_type_ids"][:, -1:], len(prompts[row])
            for _ in range(greedy.max_target):
                best = model(**inputs).logits[:, -1:].argmax(-1)
                inputs = {
                    name: torch.cat([x, one if name == "token_type_ids" else best], 1)
                    for name, x in inputs.items()
                }
                if best == task.tokenizer.eos_token_id:
                    break
            wanted = task.tokenizer.decode(inputs["input_ids"][0, start:], skip_special_tokens=True).strip()
            assert written.text == wanted
        beams = replace(task.settings, num_beams=3, max_target=8)
        together = continued(model, CPU, task.tokenizer, prompts, beams)
        assert together == [continued(model, CPU, task.tokenizer, [prompt], beams)[0] for prompt in prompts]
        plain = continued(model, CPU, task.tokenizer, prompts, replace(greedy, speakers=[]))
    assert found != plain, "without types it is another model"


def test_candidates_are_ranked_with_types(tmp_path: Path) -> None:
    task = dialogue(tmp_path)
    model = built(task).model.eval()
    wanted = []
    for row in range(6):
        scores = []
        for text in candidates_of(task.tables["train"], row, 4):
            inputs = by_hand(task, row)
            start = len(task.train.prompt(row))
            ids = [*task.tokenizer(text, add_special_tokens=False)["input_ids"], task.tokenizer.eos_token_id]
            tokens = torch.tensor([[*inputs["input_ids"][0, :start], *ids]])
            types = torch.cat(
                [inputs["token_type_ids"][:, :start], inputs["token_type_ids"][:, -1:].expand(1, len(ids))], 1
            )
            labels = torch.tensor([[IGNORED] * start + ids])
            with torch.no_grad():
                scores.append(-float(model(input_ids=tokens, token_type_ids=types, labels=labels).loss))
        wanted.append(scores[0] > max(scores[1:]))
    for batch_size in (2, 64):
        assert hits_at_1(model, task, "dev", range(6), 4, CPU, batch_size) == sum(wanted) / 6


@pytest.mark.parametrize("untied", [False, True])
def test_clipping_is_exact_where_types_look_the_embedding_up_again(untied: bool, tmp_path: Path) -> None:
    """The tokens, their types and (tied) the head share one matrix: against one backward pass per example, in float64."""
    task, described = dialogue(tmp_path), network(untied=untied)
    model = built(task, described).model.double()
    alone = []
    for row in range(6):
        model.zero_grad()
        inputs = by_hand(task, row)
        labels = inputs.pop("labels")[0, 1:]
        # Hugging Face's own loss is in float32
        torch.nn.functional.cross_entropy(model(**inputs).logits[0, :-1], labels).backward()
        alone.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    norms = torch.stack([torch.cat([g.flatten() for g in one.values()]).norm() for one in alone])
    bound = float(norms.median())
    model.zero_grad()
    clipper = attach(model, groups="flat", clip_norm=bound)
    report = clipper.backward(task.losses(model, task.collate([task.train[i] for i in range(6)])))
    torch.testing.assert_close(report.norms[0], norms, rtol=1e-9, atol=0, check_dtype=False)
    for name, parameter in model.named_parameters():
        summed = sum(
            one[name] * min(1.0, bound / float(norm)) for one, norm in zip(alone, norms, strict=True)
        )
        torch.testing.assert_close(parameter.grad, summed, rtol=1e-8, atol=1e-10)
    clipper.detach()
    added = alone[0]["transformer.wte.weight"][-5:]
    assert added.any(), "the new rows learn"


def test_a_run_that_stops_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    task, run = dialogue(tmp_path), tiny_run(steps=4, batch_size=3)
    run.task.kind, run.runtime.physical_batch_size = "generation", "4"
    whole, first, second = (built(task).model for _ in range(3))
    run_to_end(tmp_path / "whole", run, task=task, model=whole)
    stopped = make_trainer(tmp_path / "halves", run, task=task, model=first)
    stopped.steps = 2
    train_on(stopped)
    run_to_end(tmp_path / "halves", run, task=task, model=second)
    for one, other, begun in zip(whole.parameters(), second.parameters(), first.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, begun)


def test_the_recipe_from_settings_to_predictions(tmp_path: Path) -> None:
    short = [
        "optim.epochs=null", "optim.steps=2", "optim.batch_size=20", "data.num_examples=60", "runtime=cpu", "optim.lr=0.05",
        "engine.choice=rule", "runtime.physical_batch_size=20", "task.generation.max_target=6", "task.generation.candidates=3",
        "task.generation.examples=4",
    ]  # fmt: skip
    run = compose([*RECIPE, *short, f"data.cache={tmp_path}/cache", f"runtime.runs_dir={tmp_path}/runs"])
    folder = run_folder(run)
    folder.mkdir(parents=True)
    summary = train(run, folder, Console(quiet=True))
    assert 0 <= summary["metrics"]["hits1"] <= 1
    saved = json.loads((folder / "model" / "config.json").read_text())
    tokenizer = build_tokenizer(run.model, scale="demo")
    assert saved["vocab_size"] == len(tokenizer)
    assert saved["eos_token_id"] == tokenizer.convert_tokens_to_ids("<eos>")
    kept = [json.loads(line) for line in (folder / "predictions" / "dev.jsonl").read_text().splitlines()]
    on_dev = {line["input"]: line["prediction"] for line in kept if "prediction" in line}
    assert len(on_dev) == 4
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([source] for source in on_dev)])
    out = tmp_path / "out.csv"
    predict(
        PredictArguments(run=str(folder), data=str(tmp_path / "new.csv"), device="cpu", out=str(out)), out
    )
    with out.open(newline="") as file:
        assert {row["text"]: row["prediction"] for row in csv.DictReader(file)} == on_dev
    (tmp_path / "new.csv").write_text("text\nhello\n")
    out = tmp_path / "other.csv"
    asked = PredictArguments(run=str(folder), data=str(tmp_path / "new.csv"), device="cpu", out=str(out))
    with pytest.raises(UserError, match=r"line 1: .* begins with none of task\.generation\.speakers"):
        predict(asked, out)


@pytest.mark.parametrize("scale", ["paper", "small", "demo"])
def test_the_recipe_composes_for_every_scale(scale: str) -> None:
    run = compose([*RECIPE[:2], "clip=flat", f"scale={scale}"])
    assert list(run.task.generation.speakers) == SPEAKERS
    assert (run.task.generation.suffix, run.model.untied, run.task.max_length) == ("{speaker1}", True, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speakers": ["your persona: ", "partner: {speaker3}"]}, r"'partner: \{speaker3\}' must be words and behind"),
        ({"speakers": ["partner: {speaker2} says"]}, "must be words and behind them nothing"),
        ({"suffix": "{bos}"}, r"suffix='\{bos\}' must end with the token of the one who answers"),
        ({"suffix": ""}, "suffix='' must end with"),
        ({"speakers": ["partner: {speaker2}", "you: {speaker1}"]}, "line 3: a line of the source begins with none of"),
    ],
)  # fmt: skip
def test_speakers_that_cannot_be_told(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        dialogue(tmp_path, **changes)


def test_braces_around_what_is_no_token_are_text() -> None:
    vocabulary = {"a": 0, " ": 1, "{": 2, "}": 3, " {": 4}
    backend = Tokenizer(models.BPE(vocabulary, [(" ", "{")]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<e>", extra_special_tokens=["<b>"]
    )
    frame = make_frame(tokenizer, GenerationConfig(prefix="a {a}", suffix=" {b}", max_target=4), 32)
    assert frame.prefix.tolist() == [0, 4, 0, 3], "not cut at the brace"
    assert frame.suffix.tolist() == [1, tokenizer.convert_tokens_to_ids("<b>")]


def test_networks_that_read_no_types_are_refused(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 24, "max_position_embeddings": 128,
    }  # fmt: skip
    described = network("llama", config=sizes, dropout=None)
    task = dialogue(tmp_path, described)
    with pytest.raises(UserError, match="LlamaForCausalLM does not read tokens as types: take model=gpt2"):
        built(task, described)


def test_demonstrations_and_speakers_do_not_go_together() -> None:
    with pytest.raises(UserError, match=r"task\.generation\.shots=2 puts pairs as plain text"):
        compose([*RECIPE, "task.generation.shots=2"])
