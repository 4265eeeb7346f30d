"""ROUGE-1, -2, -L and -Lsum by rouge-score with stemming, as Hugging Face's summarisation scripts and GEM count them."""

import math
from collections.abc import Sequence

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
    predictions: Sequence[str], references: Sequence[Sequence[str]], names: Sequence[str] = NAMES[:3]
) -> dict[str, float]:
    """The mean over texts of F1 with the best of each one's references, between 0 and 1.

    Only a-z and 0-9 count, words of more than three letters are stemmed (Porter). Hugging Face's scripts report the
    middle of bootstrap samples of this mean, which is the same but for chance.

    Args:
        predictions: N texts.
        references: N times one or more texts; their number may differ.
        names: which of `NAMES`; "rougeLsum" needs nltk's sentence splitter.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(names), use_stemmer=True, split_summaries=True)
    best = [
        scorer.score_multi(texts, prediction)
        for prediction, texts in zip(predictions, references, strict=True)
    ]
    return {name: math.fsum(scores[name].fmeasure for scores in best) / len(best) for name in names}
