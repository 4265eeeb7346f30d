"""Model classes that people train: transformers, timm and peft, in tiny random configurations, without the hub."""

from __future__ import annotations

from dpexp.conform.case import Builder, Case, seeded
from dpexp.conform.classes import adapted, pictures, texts
from dpexp.conform.classes.base import EXAMPLES

FAMILIES: dict[str, dict[str, Builder]] = {
    "transformers: decoders": texts.DECODERS,
    "transformers: encoders": texts.ENCODERS,
    "transformers: encoders with decoders": texts.PAIRS,
    "transformers: images and sound": pictures.TRANSFORMERS,
    "timm": pictures.TIMM,
    "peft, on GPT-2 or BERT": adapted.PEFT,
}


def classes() -> dict[str, Builder]:
    """All classes by name."""
    return {name: build for family in FAMILIES.values() for name, build in family.items()}


def class_case(name: str) -> Case:
    """A class, built in float64; always the same one. Its last example, the longest or loudest, is the one left out."""
    case = seeded(name, classes()[name])
    case.left_out = (EXAMPLES - 1,)
    return case
