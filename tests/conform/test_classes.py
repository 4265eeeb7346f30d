"""Classes of transformers, timm and peft in tiny configurations: that there are enough, and that a few are exact."""

import pytest

from dpexp.conform.adapters import ours, quiet
from dpexp.conform.classes import FAMILIES, class_case, classes
from dpexp.conform.judge import Reference, judge


def test_there_are_more_than_sixty():
    assert len(classes()) >= 100
    assert all(len(family) >= 10 for family in FAMILIES.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "MixtralForCausalLM", "ModernBertForSequenceClassification", "IA3"]
)
def test_a_few_are_exact(name):
    case = class_case(name)
    with quiet():
        verdict = judge(case, Reference(case), ours("auto", "layer"))
    assert verdict.verdict == "exact", verdict.message
