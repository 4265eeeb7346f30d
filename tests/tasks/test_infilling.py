"""Text infilling: templates and words, tokens, the loss at the mask, and its gradients under every engine."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import ModelBundle
from dpexp.models.tokenizer import demo_tokenizer
from dpexp.schemas import DataConfig, TaskConfig
from dpexp.tasks import build_task
from dpexp.tasks.infilling import (
    MASK,
    Piece,
    TextInfilling,
    label_word_tokens,
    parse_template,
    tokenize_template,
)

Data = Callable[..., DataConfig]
Tiny = Callable[..., ModelBundle]
ARCHITECTURES = ["bert", "roberta", "distilbert"]
TABLE_10 = {  # Li et al.
    "sst2": ("<S1> It was [MASK] .", False, ["terrible", "great"]),
    "mnli": ("<S1> ? [MASK] , <S2>", True, ["Yes", "Maybe", "No"]),
    "qnli": ("<S1> ? [MASK] , <S2>", True, ["Yes", "No"]),
    "qqp": ("<S1> [MASK] , <S2>", True, ["No", "Yes"]),
}
WORDS = {"0": "terrible", "1": "great"}
ROWS = [
    ("the film is superb .", "1"),
    ("the plot is dull and it makes the ending tedious .", "0"),
    ("a witty comedy", "1"),
    ("awful", "0"),
]
DEMO = demo_tokenizer()


@pytest.fixture
def infill(own: TaskConfig) -> TaskConfig:
    return dataclasses.replace(
        own, name="text_infilling", kind="text_infilling", template=TABLE_10["sst2"][0], label_words=WORDS
    )


@pytest.fixture
def task(infill: TaskConfig, own_data: Data) -> TextInfilling:
    built = build_task(infill, own_data(ROWS, ROWS[:3]), "small", demo_tokenizer(), seed=0)
    assert isinstance(built, TextInfilling)
    return built


@pytest.fixture(scope="session")
def roberta(real_data: Path) -> Any:
    from transformers import RobertaTokenizerFast

    return RobertaTokenizerFast.from_pretrained(real_data / "tokenizers" / "roberta")


def words(tokenizer: Any, ids: Any) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens([int(i) for i in ids]))


# Templates and label words


def test_the_pieces_of_a_template_know_their_white_space() -> None:
    assert parse_template("<S1>? [MASK], <S2>", True) == [
        Piece("<S1>", False), Piece("?", False), Piece("[MASK]", True), Piece(",", False), Piece("<S2>", True),
    ]  # fmt: skip
    assert parse_template(" [MASK]:<S1> ", False) == [
        Piece("[MASK]", True), Piece(":", False), Piece("<S1>", False),
    ]  # fmt: skip
    assert parse_template("<S1> [MASK]", False)[1] == Piece("[MASK]", True)
    assert parse_template("<S1:cut:7> [MASK] <S2:9>", True) == [
        Piece("<S1>", False, "cut", 7), Piece("[MASK]", True), Piece("<S2>", True, "", 9),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "pairs", "message"),
    [
        ("<S1> It was <mask> .", False, r"must hold <S1> and \[MASK\] once each, and holds <S1>$"),
        ("It was [MASK] .", False, r"once each, and holds \[MASK\]$"),
        (
            "<S1> [MASK] , <S2>",
            False,
            r"must hold <S1> and \[MASK\] once each, and holds <S1>, \[MASK\], <S2>",
        ),
        ("<S1> [MASK]", True, r"must hold <S1>, <S2> and \[MASK\] once each"),
        ("<S1> [MASK] [MASK]", False, "once each"),
        ("nothing", False, "holds none of them"),
        ("<S1:upper> [MASK]", False, "can't be changed by 'upper'; choose one of raw, cut, lower"),
        ("<S1:raw:0> [MASK]", False, "can't be changed by 'raw:0'; .* or a number of tokens above 0"),
    ],
)
def test_templates_that_can_not_be(template: str, pairs: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_template(template, pairs)


@pytest.mark.parametrize("name", TABLE_10)
def test_the_words_of_table_10_are_single_tokens(name: str, roberta: Any) -> None:
    _, _, chosen = TABLE_10[name]
    mapping = {str(i): word for i, word in enumerate(chosen)}
    for tokenizer, form in ((DEMO, str.lower), (roberta, lambda word: f"Ġ{word}")):
        tokens = label_word_tokens(tokenizer, mapping, list(mapping), spaced=True)
        assert tokenizer.convert_ids_to_tokens(tokens) == [form(word) for word in chosen]


def test_words_that_can_not_stand_at_the_mask(roberta: Any) -> None:
    def check(mapping: dict[str, str], tokenizer: Any = DEMO, spaced: bool = True) -> list[int]:
        return label_word_tokens(tokenizer, mapping, ["0", "1"], spaced)

    with pytest.raises(
        UserError, match=r"label_words\.1=greatest is not a single token .* \(great, ##e, ##s, ##t\)"
    ):
        check({"0": "terrible", "1": "greatest"})
    with pytest.raises(UserError, match=r"label_words\.0=☂ is not a single token .* \(\[UNK\]\)"):
        check({"0": "☂", "1": "great"})
    with pytest.raises(UserError, match=r"label_words\.0= is not a single token .* \(nothing\)"):
        check({"0": "", "1": "great"}, spaced=False)
    with pytest.raises(UserError, match=r"label_words\.0=\[MASK\] is not a single token"):
        check({"0": "[MASK]", "1": "great"})
    with pytest.raises(UserError, match="Great stands for 0 and for 1"):
        check({"0": "great", "1": "Great"})
    with pytest.raises(UserError, match="words for 0, 2, and the classes are 0, 1"):
        check({"0": "great", "2": "terrible"})
    assert check({"0": " great ", "1": "no"}) == check({"0": "great", "1": "no"})
    # in a byte-level vocabulary the space before a word is a part of its token
    spaced = check({"0": "terrible", "1": "great"}, roberta, True)
    assert spaced != check({"0": "Yes", "1": "great"}, roberta, False)
    with pytest.raises(UserError, match=r"terrible is not a single token .* \(ter, rible\)"):
        check({"0": "terrible", "1": "great"}, roberta, False)


def test_what_the_configuration_must_give(infill: TaskConfig, data: Data, own_data: Data) -> None:
    def build(**values: Any) -> None:
        build_task(dataclasses.replace(infill, **values), data(), "demo", demo_tokenizer(), 0)

    with pytest.raises(UserError, match=r"needs task\.template"):
        build(template=None)
    with pytest.raises(UserError, match="needs a word for every class"):
        build_task(dataclasses.replace(infill, label_words={}), own_data(ROWS), "demo", demo_tokenizer(), 0)
    build(label_words={})  # the embedded data brings its own
    with pytest.raises(UserError, match=r"task\.metric=f1 is of two classes, and there are 3"):
        build(labels=["0", "1", "2"], label_words={"0": "no", "1": "maybe", "2": "yes"}, metric="f1")
    with pytest.raises(UserError, match="words for 0, 1, and the classes are no, yes"):
        build(labels=["no", "yes"])
    maskless = demo_tokenizer()
    maskless.mask_token = None
    with pytest.raises(
        UserError, match="no mask token: take a model of the BERT, RoBERTa or DistilBERT family"
    ):
        build_task(infill, data(), "demo", maskless, 0)


def test_an_over_long_row_is_named_where_cutting_is_not_wanted(infill: TaskConfig, own_data: Data) -> None:
    infill = dataclasses.replace(infill, overlong="error", max_length=12)
    build_task(infill, own_data(ROWS[:1] + ROWS[2:]), "small", demo_tokenizer(), 0)
    with pytest.raises(
        UserError, match=r"train\.csv, line 3: more than the 12 tokens .* here 1 of 4, and counts them"
    ):
        build_task(infill, own_data(ROWS), "small", demo_tokenizer(), 0)


# Tokens


@pytest.mark.parametrize("name", TABLE_10)
@pytest.mark.parametrize("which", ["demo", "roberta"])
def test_a_row_is_the_filled_template(name: str, which: str, request: pytest.FixtureRequest) -> None:
    tokenizer = DEMO if which == "demo" else request.getfixturevalue("roberta")
    template, pairs, _ = TABLE_10[name]
    texts, seconds = [" the film is superb . ", "dull", ""], ["it is so witty", "  the cast ?", "a plot"]
    pieces = parse_template(template, pairs)
    table = tokenize_template(pieces, tokenizer, texts, seconds if pairs else None, 64)
    for row, (text, second) in enumerate(zip(texts, seconds, strict=True)):
        # RoBERTa's own mask token swallows the space before it
        filled = template.replace(f" {MASK}", MASK).replace(MASK, tokenizer.mask_token)
        filled = filled.replace("<S1>", text.strip()).replace("<S2>", second.strip())
        expected = tokenizer(filled)["input_ids"]
        found = table.tokens[table.offsets[row] : table.offsets[row + 1]]
        assert words(tokenizer, found) == words(tokenizer, expected)
    assert table.truncated == 0
    if which == "demo":
        assert table.segments is not None
        assert not table.segments.any()


@pytest.mark.parametrize("name", TABLE_10)
def test_the_recipes_fill_templates_as_the_code_of_the_authors(name: str, roberta: Any) -> None:
    """Their template, in their own notation (private-transformers, run_wrapper.py:74), read by the rules of LM-BFF."""
    notation = {
        "sst2": "*cls**sent_0*_It_was*mask*.*sep+*",
        "mnli": "*cls**sent-_0*?*mask*,*+sentl_1**sep+*",
        "qnli": "*cls**sent-_0*?*mask*,*+sentl_1**sep+*",
        "qqp": "*cls**sent-_0**mask*,*+sentl_1**sep+*",
    }[name]
    words_there = {
        "sst2": ["terrible", "great"],
        "mnli": ["yes", "maybe", "no"],
        "qnli": ["yes", "no"],
        "qqp": ["no", "yes"],
    }
    run = compose([f"task={name}_infilling", f"recipe=li2022_{name}_infilling", "model=roberta_base"])
    task = run.task
    pairs = name != "sst2"
    assert [task.label_words[label] for label in task.labels] == words_there[name]

    def encoded(text: str) -> list[int]:
        return roberta(text, add_special_tokens=False)["input_ids"]

    def small(text: str) -> str:
        return text[:1].lower() + text[1:]

    texts = ["hide new secretions from the parental units ", "Is it so.", "A", "so " * 300]
    seconds = ["How is It ?", "the cast", "A plot ", "It " * 250]
    pieces = parse_template(task.template or "", pairs)
    table = tokenize_template(pieces, roberta, texts, seconds if pairs else None, 512)
    assert table.truncated == 1
    for row, (text, second) in enumerate(zip(texts, seconds, strict=True)):
        wanted: list[int] = []
        for part in filter(None, notation.split("*")):
            wanted += {
                "cls": [roberta.cls_token_id], "mask": [roberta.mask_token_id], "sep+": [roberta.sep_token_id],
                "sent_0": encoded(text)[:200], "sent-_0": encoded(text[:-1])[:200],
                "+sentl_1": encoded(" " + small(second))[:200],
            }.get(part) or (encoded(part.replace("_", " ")) if "sent" not in part else [])  # fmt: skip
        found = table.tokens[table.offsets[row] : table.offsets[row + 1]]
        assert words(roberta, found) == words(roberta, wanted)
    behind_space = next(piece.spaced for piece in pieces if piece.text == MASK)
    tokens = label_word_tokens(roberta, task.label_words, task.labels, behind_space)
    assert tokens == [encoded(f" {word}")[0] for word in words_there[name]]


def test_special_tokens_in_a_text_are_letters(roberta: Any) -> None:
    for tokenizer in (DEMO, roberta):
        special = f"a {tokenizer.mask_token} b {tokenizer.sep_token} c"
        table = tokenize_template(
            parse_template("[MASK] : <S1>", False), tokenizer, [special, "plain"], None, 64
        )
        assert (table.tokens == tokenizer.mask_token_id).sum() == 2
        assert (table.tokens == tokenizer.sep_token_id).sum() == 2


PAIRS = st.tuples(st.integers(0, 30), st.integers(0, 30))


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(PAIRS, min_size=1, max_size=4), max_length=st.integers(9, 30), pairs=st.booleans())
def test_template_and_mask_survive_truncation(
    rows: list[tuple[int, int]], max_length: int, pairs: bool
) -> None:
    template = "so <S1> ? [MASK] , <S2> !" if pairs else "so <S1> ? [MASK] , !"
    fixed = 2 + 5  # special tokens and words of the template
    table = tokenize_template(
        parse_template(template, pairs),
        DEMO,
        ["film " * first for first, _ in rows],
        ["plot " * second for _, second in rows] if pairs else None,
        max_length,
    )
    cut = 0
    for row, (first, there) in enumerate(rows):
        second = there if pairs else 0
        found = words(DEMO, table.tokens[table.offsets[row] : table.offsets[row + 1]]).split()
        films, plots = found.count("film"), found.count("plot")
        assert found == f"[CLS] so {'film ' * films}? [MASK] , {'plot ' * plots}! [SEP]".split()
        assert len(found) == min(max_length, fixed + first + second)
        assert films <= first
        assert plots <= second
        if films < first and plots < second:
            assert abs(films - plots) <= 1
        elif films < first:
            assert films + 1 >= plots, "the longer one loses first"  # of equal ones, either
        elif plots < second:
            assert plots + 1 >= films
        cut += fixed + first + second > max_length
    assert table.truncated == cut


def test_no_room_for_the_text() -> None:
    pieces = parse_template(TABLE_10["sst2"][0], False)
    with pytest.raises(
        UserError, match=r"takes 6 of the 6 tokens .* leaves no room .* raise task\.max_length"
    ):
        tokenize_template(pieces, DEMO, ["film"], None, 6)
    assert len(tokenize_template(pieces, DEMO, ["film film"], None, 7).tokens) == 7
    with pytest.raises(UserError, match="leaves no room"):
        tokenize_template(parse_template(TABLE_10["qqp"][0], True), DEMO, ["film"], ["plot"], 5)


def test_truncation_is_counted_and_another_template_is_other_tokens(
    infill: TaskConfig, own_data: Data
) -> None:
    def build(template: str) -> TextInfilling:
        changed = dataclasses.replace(infill, template=template)
        built = build_task(changed, own_data(ROWS, ROWS, max_length=10), "small", demo_tokenizer(), 0)
        assert isinstance(built, TextInfilling)
        return built

    first, again, other = (
        build(t) for t in ("<S1> It was [MASK] .", "<S1> It was [MASK] .", "<S1> is [MASK] .")
    )
    assert "dev: 2 of 4 rows were cut to 10 tokens" in first.data.notes
    assert any(note.startswith("train: 2 of 4") and "private" in note for note in first.data.notes)
    assert np.array_equal(first.train.tokens.tokens, again.train.tokens.tokens)
    assert words(DEMO, other.train[2].tokens) == "[CLS] a witty comedy is [MASK] . [SEP]"


# Own data


def test_own_data_needs_no_code(infill: TaskConfig, own_data: Data) -> None:
    mine = dataclasses.replace(
        infill, template="this film is [MASK] : <S1>", label_words={"spam": "no", "ham": "yes"}
    )
    rows = [("the plot", "ham"), ("a cast", "spam")]
    built = build_task(mine, own_data(rows, rows), "small", demo_tokenizer(), 0)
    assert isinstance(built, TextInfilling)
    assert built.labels == ["spam", "ham"]
    assert [example.label for example in built.train] == [1, 0]
    assert DEMO.convert_ids_to_tokens(built.words.tolist()) == ["no", "yes"]
    with pytest.raises(
        UserError, match=r"train\.csv, line 2: the label in column label is none of the 2 classes spam, ham"
    ):
        build_task(mine, own_data([("the plot", "eggs")]), "small", demo_tokenizer(), 0)


# Losses


def naive(task: TextInfilling, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """From the logits of all positions and all words."""
    inputs = {
        name: t for name, t in batch.items() if name in ("input_ids", "attention_mask", "token_type_ids")
    }
    logits = model(**inputs).logits
    losses = []
    for i, label in enumerate(batch["labels"].tolist()):
        (place,) = (batch["input_ids"][i] == task.mask_token).nonzero()[:, 0].tolist()
        scores = torch.stack([logits[i, place, word] for word in task.words.tolist()])
        losses.append(torch.logsumexp(scores, 0) - scores[label])
    return torch.stack(losses)


def fitted(task: TextInfilling, bundle: ModelBundle) -> tuple[nn.Module, dict[str, Tensor]]:
    """The network in float64, and the whole training set as one batch that it takes."""
    task.wants_segments = "token_type_ids" in bundle.tokenizer.model_input_names
    return bundle.model.double(), task.collate(list(task.train))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_loss_is_the_cross_entropy_over_the_label_words_at_the_mask(
    architecture: str, task: TextInfilling, tiny: Tiny
) -> None:
    model, batch = fitted(task, tiny(architecture, head="masked_lm"))
    shapes: list[tuple[int, ...]] = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(output.shape))
    )
    losses = task.losses(model, batch)
    handle.remove()
    assert shapes == [(4, 1, len(DEMO))], "the head computes the masked position alone"
    expected = naive(task, model, batch)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-14)
    for got, want in zip(
        torch.autograd.grad(losses.sum(), list(model.parameters())),
        torch.autograd.grad(expected.sum(), list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)
    assert model(batch["input_ids"]).logits.shape[1] > 1, "the model is what it was"


def test_other_words_count_for_nothing(task: TextInfilling, tiny: Tiny) -> None:
    model, batch = fitted(task, tiny(head="masked_lm", tie_word_embeddings=False))
    (gradient,) = torch.autograd.grad(task.losses(model, batch).sum(), [model.get_output_embeddings().weight])
    assert gradient.abs().sum(1).nonzero()[:, 0].tolist() == sorted(task.words.tolist())


class Wrapped(nn.Module):
    """As a data-parallel wrapper holds its model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        return self.module(**inputs)


class Headless(nn.Module):
    """A model without a base model under a known name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.call = model.forward

    def forward(self, **inputs: Tensor) -> Any:
        return self.call(**inputs)


@pytest.mark.parametrize("wrapper", [Wrapped, Headless])
def test_wrapped_models_have_the_same_losses(wrapper: type, task: TextInfilling, tiny: Tiny) -> None:
    model, batch = fitted(task, tiny(head="masked_lm"))
    torch.testing.assert_close(task.losses(wrapper(model), batch), task.losses(model, batch))


def test_losses_are_float32_at_least_and_an_empty_batch_has_none(task: TextInfilling, tiny: Tiny) -> None:
    model = tiny(head="masked_lm").model.bfloat16()
    assert task.losses(model, task.collate(list(task.train))).dtype == torch.float32
    empty = task.collate([])
    assert empty["mask_positions"].shape == (0,)
    assert task.losses(model, empty).shape == (0,)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_neither_losses_nor_norms(architecture: str, task: TextInfilling, tiny: Tiny) -> None:
    model, together = fitted(task, tiny(architecture, head="masked_lm"))
    assert (together["attention_mask"] == 0).any()
    clipper = attach(model, groups="layer", clip_norm=0.1)
    losses = task.losses(model, together)
    norms = clipper.backward(losses).norms
    for i, example in enumerate(task.train):
        alone = task.losses(model, task.collate([example]))
        torch.testing.assert_close(alone[0], losses[i].detach(), rtol=1e-12, atol=0, check_dtype=True)
        torch.testing.assert_close(clipper.backward(alone).norms[:, 0], norms[:, i], rtol=1e-9, atol=1e-14)
    clipper.detach()


def test_each_loss_depends_on_its_own_example_alone(task: TextInfilling, tiny: Tiny) -> None:
    model, batch = fitted(task, tiny(head="masked_lm"))
    embedded: list[Tensor] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda m, a, out: embedded.append(out) or out)
    losses = task.losses(model, batch)
    handle.remove()
    for i in range(len(losses)):
        (gradient,) = torch.autograd.grad(losses[i], embedded, retain_graph=True)
        assert gradient[i].abs().sum() > 0
        gradient[i] = 0
        assert torch.count_nonzero(gradient) == 0


# Clipping


def clipped_by_hand(
    task: TextInfilling, model: nn.Module, groups: list[list[nn.Parameter]], bounds: list[float]
) -> dict[nn.Parameter, Tensor]:
    """One example and one backward pass at a time, from the naive loss."""
    sums = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
    for example in task.train:
        loss = naive(task, model, task.collate([example]))[0]
        found = torch.autograd.grad(loss, list(sums), allow_unused=True, materialize_grads=True)
        gradients = dict(zip(sums, found, strict=True))
        for group, bound in zip(groups, bounds, strict=True):
            norm = torch.sqrt(sum((gradients[p].square().sum() for p in group), torch.zeros(())))
            for p in group:
                sums[p] += gradients[p] * min(1.0, bound / max(norm.item(), 1e-300))
    return sums


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("groups", ["flat", "layer"])
@pytest.mark.parametrize("engine", ["auto", "onepass", "bk", "mixghost", "fastgrad", "loop", "opacus"])
def test_tied_embeddings_are_clipped_exactly(
    architecture: str, groups: str, engine: str, task: TextInfilling, tiny: Tiny
) -> None:
    model, batch = fitted(task, tiny(architecture, head="masked_lm"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    clipper = attach(model, groups=groups, clip_norm=0.3, engine=engine)
    report = clipper.backward(task.losses(model, batch))
    assert report.clipped.sum() > 0
    found = {p: p.grad for p in model.parameters()}
    members = [list(group.params.values()) for group in clipper.groups]
    bounds = clipper.thresholds.tolist()
    clipper.detach()
    expected = clipped_by_hand(task, model, members, bounds)
    for p, want in expected.items():
        torch.testing.assert_close(found[p], want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_opacus_gives_the_same_where_it_can(
    architecture: str, groups: str, task: TextInfilling, tiny: Tiny
) -> None:
    """Embeddings and head untied, and the bias that is then unused frozen; tied ones are tested above."""

    def run(engine: str) -> tuple[list[Tensor], Tensor]:
        model, batch = fitted(task, tiny(architecture, head="masked_lm", tie_word_embeddings=False))
        for name, p in model.named_parameters():
            p.requires_grad_(name not in ("cls.predictions.bias", "lm_head.bias"))
        clipper = attach(model, groups=groups, clip_norm=0.3, engine=engine)
        norms = clipper.backward(task.losses(model, batch)).norms
        return [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None], norms

    (theirs, their_norms), (ours, our_norms) = run("opacus"), run("auto")
    torch.testing.assert_close(our_norms, their_norms.to(our_norms.dtype), rtol=1e-9, atol=1e-12)
    assert len(ours) == len(theirs) > 20
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-9, atol=1e-12)


# Measuring


def test_evaluation_takes_the_likeliest_word(task: TextInfilling, tiny: Tiny) -> None:
    model, _ = fitted(task, tiny(head="masked_lm"))
    metrics = task.evaluate(model, torch.device("cpu"), 2)
    losses = naive(task, model.eval(), task.collate(list(task.dev)))
    assert metrics["loss"] == pytest.approx(losses.mean().item(), rel=1e-9)
    assert metrics["accuracy"] == np.mean([loss < np.log(2) for loss in losses.tolist()])
