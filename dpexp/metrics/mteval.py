"""BLEU and NIST as NIST's script mteval-v13a counts them, which the official evaluation of E2E runs.

BLEU is sacrebleu's: its default settings are those of the script, only that the script ignores case. NIST is ours: nltk
scores each n-gram order against the one reference that fits it best, while the script merges the references, as BLEU
does. Its average reference has the words of all references divided by the mean number of references of a text: where texts
have different numbers of them, this is not the sum of each text's own average (which the script takes with `-p` alone).
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

NGram = tuple[str, ...]

MAX_ORDER = 5
"""NIST sums n-grams of 1 to 5 words."""

BETA = -math.log(0.5) / math.log(1.5) ** 2
"""Makes the length penalty 1/2 where the output has 2/3 of the words of the average reference."""


def tokenize(text: str) -> list[str]:
    """Words and punctuation marks in lower case, as mteval-v13a splits English; the marks of numbers stay inside them."""
    split: str = _tokenizer()(text)
    return split.lower().split()


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU-4 of a corpus, between 0 and 1 (Papineni et al., 2002).

    N-grams are clipped by the largest count in any one reference; the reference closest in length (of two, the shorter)
    counts for the brevity penalty; an order without a match is smoothed by halves, as in the script. Case is ignored.

    Args:
        predictions: N texts.
        references: N times one or more texts; their number may differ.
    """
    from sacrebleu.metrics import BLEU

    streams = [list(stream) for stream in zip_longest(*references)]
    return float(BLEU(lowercase=True).corpus_score(list(predictions), streams).score) / 100


def nist(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """NIST of a corpus, from 0 upwards (Doddington, 2002, Eq. 3).

    A matched n-gram counts by its information, `log2(count of its first n-1 words / its own count)`, over all
    references of the corpus. Each order is divided by the number of n-grams of the output, the orders are summed, and
    an output shorter than the average reference is penalised.

    Args:
        predictions: N texts.
        references: N times one or more texts; their number may differ.
    """
    outputs = [tokenize(text) for text in predictions]
    wanted = [[tokenize(text) for text in texts] for texts in references]
    occurrences = Counter(gram for texts in wanted for words in texts for gram in ngrams(words, MAX_ORDER))
    occurrences[()] = sum(len(words) for texts in wanted for words in texts)

    gained, found = [0.0] * MAX_ORDER, [0] * MAX_ORDER
    for words, texts in zip(outputs, wanted, strict=True):
        # A gram counts at most as often as in the reference that has it most often.
        allowed: Counter[NGram] = Counter()
        for reference in texts:
            allowed |= Counter(ngrams(reference, MAX_ORDER))
        for gram, count in Counter(ngrams(words, MAX_ORDER)).items():
            found[len(gram) - 1] += count
            if gram in allowed:
                information = math.log2(occurrences[gram[:-1]] / occurrences[gram])
                gained[len(gram) - 1] += min(count, allowed[gram]) * information

    precision = sum(gain / count for gain, count in zip(gained, found, strict=True) if count)
    total = sum(len(reference) for texts in wanted for reference in texts)
    average = total * len(wanted) / sum(map(len, wanted))
    return precision * length_penalty(sum(map(len, outputs)), average)


def length_penalty(output: float, reference: float) -> float:
    """NIST's: 1 where the output is as long as the reference or longer, 1/2 at 2/3 of its length, 0 at none.

    Args:
        output: words in all outputs.
        reference: words in an average reference of the corpus; without any there is nothing to miss.
    """
    if output >= reference:
        return 1.0
    return math.exp(-BETA * math.log(output / reference) ** 2) if output else 0.0


def ngrams(words: Sequence[str], max_order: int) -> Iterator[NGram]:
    """All runs of 1 to `max_order` words."""
    for order in range(1, max_order + 1):
        runs: Iterable[NGram] = zip(*(words[start:] for start in range(order)))
        yield from runs


@cache
def _tokenizer() -> Any:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()
