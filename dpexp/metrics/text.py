"""What the papers measure on generated text, suite by suite.

Each metric is one of `dpexp.metrics.modules`. Names and units are those of the script that a paper used, and a number
that comes from anything else has another name or a note; what can't be had on this machine is left out, with the reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpexp.errors import UserError
from dpexp.metrics import captions, learned, rouge

if TYPE_CHECKING:
    import torch

Models = Mapping[str, str] | None
"""Metric -> folder or id of its model, for "bertscore" and "bleurt"; else the published one, where it is cached."""


@dataclass(frozen=True)
class Part:
    """Metrics of a suite that one module computes.

    module: its class in `dpexp.metrics.modules`.
    names: of its results.
    options: of its `compute`.
    model: whether a model must be found first.
    """

    module: str
    names: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    model: bool = False


SUITES: dict[str, tuple[Part, ...]] = {
    "e2e": (
        Part("Bleu", ("bleu",)),
        Part("Nist", ("nist",)),
        Part("Meteor", ("meteor",)),
        Part("CocoRougeL", ("rougeL",)),
        Part("Cider", ("cider",)),
    ),
    "dart": (
        Part("Meteor", ("meteor",), {"pretokenized": False}),
        Part("Rouge", ("rouge1", "rouge2", "rougeL"), {"leave_one_out": True}),
        Part("Bleu", ("bleu",)),
        Part("BertScore", ("bertscore",), model=True),
        Part("Bleurt", ("bleurt",), model=True),
    ),
    "summarization": (
        Part("Rouge", ("rouge1", "rouge2", "rougeL")),
        Part("Rouge", ("rougeLsum",), {"names": ["rougeLsum"]}),
    ),
    "dialogue": (Part("TokenF1", ("f1",)),),
}
"""e2e: the official evaluation of E2E (Li et al., Tables 2 and 7), whose ROUGE-L is coco-caption's. dart: as GEM-metrics,
which Li et al. use for DART (Table 8): rouge-score's with leave-one-out references, its models for BERTScore and BLEURT; BLEU and
METEOR are those of E2E. summarization: SAMSum (He et al., Table 6). dialogue: Persona-Chat (Li et al., Table 3);
its perplexity is `dialogue.perplexity`."""

PERCENT = frozenset(["bleu", "rouge1", "rouge2", "rougeL", "rougeLsum", "f1"])
"""Shares here, which Li et al. and He et al. print times 100; they print the other metrics as they are."""


def score(
    suite: str,
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    models: Models = None,
    device: str | torch.device = "cpu",
) -> dict[str, float]:
    """The metrics of a suite that can be had on this machine; see `missing` for the others and `notes` for variants.

    BLEU, METEOR, ROUGE, F1 and BERTScore are shares between 0 and 1 (see `PERCENT`), CIDEr is between 0 and 10, NIST
    from 0 upwards, BLEURT about -2 to 1.

    Args:
        suite: a key of `SUITES`.
        predictions: N texts, which may be empty.
        references: for each of them one or more texts; blank ones are left out.
        models: see `Models`.
        device: where the models run.

    Raises:
        UserError: an unknown suite, inputs that don't match, a library or a named model that is missing.
    """
    parts = _suite(suite)
    check(suite, models)
    from dpexp.metrics import modules

    texts, groups = modules.checked(predictions, references)
    left_out = missing(suite, models)
    scores: dict[str, float] = {}
    for part in parts:
        if part.module != "Meteor" and all(name in left_out for name in part.names):
            continue
        options = dict(part.options)
        if part.model:
            options |= {"model": str(learned.locate(part.names[0], models)), "device": device}
        scores |= getattr(modules, part.module)().compute(predictions=texts, references=groups, **options)
    return {name: float(value) for name, value in scores.items()}


def check(suite: str, models: Models = None) -> None:
    """Raise at once what `score` would raise after hours of generation, as far as it is known without the texts.

    Raises:
        UserError: an unknown suite, a library or a named model that is missing.
    """
    names = _names(suite)
    if unknown := set(models or ()) - set(learned.MODELS):
        raise UserError(
            f"no metric named {', '.join(sorted(unknown))} uses a model: {' and '.join(learned.MODELS)} do"
        )
    if unused := set(models or ()) - set(names):
        raise UserError(
            f"a model is named for {', '.join(sorted(unused))}, which is not among the metrics of the suite {suite}: "
            f"{', '.join(names)}"
        )
    absent = [
        library
        for library in ("evaluate", "nltk", "pycocoevalcap", "rouge_score", "sacrebleu")
        if importlib.util.find_spec(library) is None
    ]
    if absent:
        raise UserError(f"text metrics need {', '.join(absent)}: pip install 'dpexp[nlg]'")
    missing(suite, models)


def missing(suite: str, models: Models = None) -> dict[str, str]:
    """The metrics of a suite that this machine can't compute, each with the reason and the way out, for the record."""
    reasons: dict[str, str] = {}
    for name in _names(suite):
        if name == "meteor" and captions.java() is None:
            reasons[name] = (
                "METEOR 1.5 needs Java, which is not on this machine; meteor_nltk is another measure"
            )
        elif name == "rougeLsum" and not (importlib.util.find_spec("nltk") and rouge.can_split_sentences()):
            reasons[name] = (
                "nltk's sentence splitter is not on this machine: python -m nltk.downloader punkt_tab, where there is "
                "a network"
            )
        elif name in learned.MODELS and learned.locate(name, models) is None:
            reasons[name] = (
                f"its model {learned.MODELS[name]} is not on this machine: download it where there is a network, or "
                f"name its folder: task.generation.metric_models.{name}=FOLDER"
            )
    return reasons


def notes(suite: str, models: Models = None) -> list[str]:
    """What a reader of a suite's numbers must know, for the record: what is missing, and what stands in for what."""
    names = _names(suite)
    said = [f"{name} is left out: {why}" for name, why in missing(suite, models).items()]
    if captions.java() is None and "cider" in names:
        said.append(
            "rougeL and cider are counted on tokens of nltk's Treebank tokenizer with additions; the official "
            "script's tokenizer needs Java and differs on a few texts in a thousand"
        )
    if captions.java() is None and "meteor" in names:
        said.append(
            "meteor_nltk is nltk's METEOR without synonyms and paraphrases: not comparable with a published METEOR"
        )
    said += [
        f"{name} is computed with the model {model}"
        for name, model in (models or {}).items()
        if name in names
    ]
    return said


def _names(suite: str) -> list[str]:
    return [name for part in _suite(suite) for name in part.names]


def _suite(name: str) -> tuple[Part, ...]:
    if name not in SUITES:
        raise UserError(f"there is no suite of text metrics named {name}: choose one of {', '.join(SUITES)}")
    return SUITES[name]
