"""F1 of words and perplexity, as ConvAI2 measures replies (Li et al., Table 3)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import numpy.typing as npt

from dpexp.errors import UserError

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> list[str]:
    """The words of a reply as ParlAI compares them: lower case, ASCII punctuation as spaces, no articles."""
    return _ARTICLES.sub(" ", _PUNCTUATION.sub(" ", text.lower())).split()


def f1(prediction: str, reference: str) -> float:
    """The harmonic mean of precision and recall of words, counted with repeats; 0 where none agrees."""
    predicted, wanted = Counter(normalize(prediction)), Counter(normalize(reference))
    common = (predicted & wanted).total()
    return 2 * common / (predicted.total() + wanted.total()) if common else 0.0


def corpus_f1(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean over N replies of F1 with the best of each one's references, between 0 and 1."""
    return fmean(
        max(f1(prediction, reference) for reference in texts)
        for prediction, texts in zip(predictions, references)
    )


def perplexity(nll: npt.ArrayLike, tokens: npt.ArrayLike) -> float:
    """exp of the mean negative log-likelihood of a token; infinite where that overflows, NaN where the sum is NaN.

    Args:
        nll: of each reply, `[N]`, summed over its tokens, in nats.
        tokens: of each reply, `[N]`, how many were predicted.

    Raises:
        UserError: another number of sums than of counts, or no token at all.
    """
    sums, counts = np.asarray(nll, np.float64), np.asarray(tokens, np.float64)
    if sums.shape != counts.shape:
        raise UserError(
            f"perplexity: {sums.shape} sums of negative log-likelihoods for {counts.shape} token counts; give one of "
            "each per text"
        )
    if counts.sum() <= 0:
        raise UserError("perplexity: no token was predicted; give texts with at least one target token")
    with np.errstate(over="ignore"):
        return float(np.exp(sums.sum() / counts.sum()))
