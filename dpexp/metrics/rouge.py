"""ROUGE-1, -2, -L and -Lsum by rouge-score with stemming: of several references the best, as in Hugging Face's summarisation
scripts, or the average of leave-one-out bests, as in GEM-metrics (and Lin 2004, section 2.1), with which Li et al. evaluate DART.
"""

from collections.abc import Sequence
from statistics import fmean

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
"""As rouge-score calls them."""

PUNKT = "tokenizers/punkt_tab/english/"


def can_split_sentences() -> bool:
    """Whether nltk's sentence splitter is on this machine: ROUGE-Lsum compares sentence by sentence."""
    import nltk

    try:
        nltk.data.find(PUNKT)
    except LookupError:
        return False
    return True


def rouge(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    names: Sequence[str] = NAMES[:3],
    leave_one_out: bool = False,
) -> dict[str, float]:
    """The mean over texts of F1 with each one's references, between 0 and 1.

    Only a-z and 0-9 count, words of more than three letters are stemmed (Porter). Hugging Face's scripts report the
    middle of bootstrap samples of this mean, which is the same but for chance.

    Args:
        predictions: N texts.
        references: N times one or more texts; their number may differ.
        names: which of `NAMES`; "rougeLsum" needs nltk's sentence splitter.
        leave_one_out: of m > 1 references, leave out each one in turn, take the best of the others, and average the m bests;
            otherwise, the best of all.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(names), use_stemmer=True, split_summaries=True)
    combine = _leave_one_out if leave_one_out else max
    found: dict[str, list[float]] = {name: [] for name in names}
    for prediction, texts in zip(predictions, references, strict=True):
        scores = [scorer.score(text, prediction) for text in texts]
        for name in names:
            found[name].append(combine([score[name].fmeasure for score in scores]))
    return {name: fmean(values) for name, values in found.items()}


def _leave_one_out(values: list[float]) -> float:
    """Every subset that lacks one value has the maximum of all, but for the one that lacks the (first) maximum."""
    if len(values) == 1:
        return values[0]
    second, best = sorted(values)[-2:]
    return (best * (len(values) - 1) + second) / len(values)
