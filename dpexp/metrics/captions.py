"""METEOR, ROUGE-L and CIDEr as coco-caption counts them, which the official evaluation of E2E runs.

The scorers are pycocoevalcap's. Two parts of it are Java programs: Stanford's Penn Treebank tokenizer, which comes
before every score, and METEOR 1.5. Without Java a tokenizer made of nltk's stands in for the first; it differs on a few
texts in a thousand. For METEOR there is nothing that gives the same number, so that nltk's goes by a name of its own.

What is needed: the package pycocoevalcap, whose wheel holds both programs, and for them `java` on the path (version 8 or later).
Without Java a suite leaves `meteor` out, gives `meteor_nltk`, and a note in the record says so; `meteor` asked for by itself
is refused. Every score starts its program anew, which takes a second or two, and METEOR's may use up to 2 GiB.
"""

import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from dpexp.errors import UserError

References = Sequence[Sequence[str]]

_TOKENIZER_JAR = "tokenizer/stanford-corenlp-3.4.1.jar"
_METEOR_JAR = "meteor/meteor-1.5.jar"


def java() -> str | None:
    """The Java program on this machine, or None."""
    return shutil.which("java")


def rouge_l(predictions: Sequence[str], references: References) -> float:
    """The mean over texts of ROUGE-L, between 0 and 1: F with beta = 1.2 of the best precision and the best recall.

    The two may come from different references, which is coco-caption's way and not that of `dpexp.metrics.rouge`.
    """
    from pycocoevalcap.rouge.rouge import Rouge

    return float(Rouge().compute_score(*_numbered(predictions, references))[0])


def cider(predictions: Sequence[str], references: References) -> float:
    """CIDEr-D, between 0 and 10 (Vedantam et al., 2015): similarity of n-grams weighted by their rarity.

    Rarity is counted over the references of this corpus: a single text, or texts that share all n-grams, score 0.
    """
    from pycocoevalcap.cider.cider import Cider

    wanted, given = _numbered(predictions, references)
    if not any(text for texts in wanted.values() for text in texts):
        # references of punctuation alone, on which the library fails
        return 0.0
    return float(Cider().compute_score(wanted, given)[0])


def meteor(predictions: Sequence[str], references: References, pretokenized: bool = True) -> float:
    """METEOR 1.5 for English of a corpus, between 0 and 1 (Denkowski and Lavie, 2014), by its authors' Java program.

    It needs Java. Without it there is no METEOR 1.5, and nothing is put in its place here; `dpexp.metrics.text` then gives
    `nltk_meteor` under its own name.

    Args:
        predictions, references: N texts, and N times one or more.
        pretokenized: coco-caption's order, the Penn Treebank tokenizer first; else METEOR's own tokenizer alone.

    Raises:
        UserError: no Java, or its program failed.
    """
    return _meteor(predictions, references, pretokenized)[0]


def _meteor(
    predictions: Sequence[str], references: References, pretokenized: bool = True
) -> tuple[float, list[float]]:
    """METEOR of the corpus, which is counted over all texts at once, and of each text."""
    if java() is None:
        raise UserError("METEOR 1.5 is a Java program and `java` is not on the path: install a Java runtime")
    clean = _split if pretokenized else _one_line
    given, wanted = clean(tuple(predictions)), _grouped(clean, references)
    # separates the fields of the program's protocol
    bar = "|||"
    try:
        scorer = _meteor_program()
        score: tuple[float, list[float]] = scorer.compute_score(
            {i: [text.replace(bar, " ") for text in texts] for i, texts in enumerate(wanted)},
            {i: [text] for i, text in enumerate(given)},
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"METEOR 1.5: its Java program gave no score ({error}); does `java -version` work?"
        ) from None
    return score


def nltk_meteor(predictions: Sequence[str], references: References) -> float:
    """nltk's METEOR, between 0 and 1 (Lavie and Agarwal, 2007), with the stages of equal words and equal stems alone.

    Its parameters are older than METEOR 1.5's, and synonyms and paraphrases are left out because nltk would download
    WordNet: not comparable with a published METEOR. The mean over texts of the best reference's score.
    """
    from nltk.translate.meteor_score import meteor_score

    class NoSynonyms:
        @staticmethod
        def synsets(_: str) -> list[Any]:
            return []

    given, wanted = _split(tuple(predictions)), _grouped(_split, references)
    scores = [
        meteor_score([text.split() for text in texts], prediction.split(), wordnet=NoSynonyms())
        if prediction
        else 0.0
        for prediction, texts in zip(given, wanted, strict=True)
    ]
    return fmean(scores)


def tokenize(texts: Sequence[str]) -> list[str]:
    """Each text in lower-case Penn Treebank tokens with one space between, without the marks that coco-caption drops."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS

    lines = _one_line(tuple(texts))
    split = _stanford(lines) if java() else [" ".join(treebank(line)) for line in lines]
    # in it brackets are in capitals and match nothing; so they stay
    dropped = frozenset(PUNCTUATIONS)
    return [" ".join(token for token in line.split() if token not in dropped) for line in split]


_ALIKE = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "£": " # ", "€": " $ ", "–": "--", "—": "--"})
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "{": "-lcb-", "}": "-rcb-", "[": "-lsb-", "]": "-rsb-"}
_ENDS_IN_STOP = re.compile(r"(.*[^.])\.([\"')\]]*)")
_ABBREVIATION = re.compile(
    r"[a-z]|(?:[a-z]\.)+[a-z]|mr|mrs|ms|dr|st|jr|sr|prof|rev|gen|gov|sen|lt|col|capt|vs|co|corp|inc|ltd|bros|no|mt|ft"
    r"|jan|feb|aug|sept|oct|nov|dec"
)


def treebank(text: str) -> list[str]:
    """The tokens that Stanford's tokenizer gives for nearly every English text, in lower case.

    nltk's Treebank tokenizer, with what Stanford's does besides: full stops inside a line, signs for currencies (as #
    and $), typographic quotes, brackets by name.
    """
    from nltk.tokenize import TreebankWordTokenizer

    text = re.sub(r"-(?=[£€])", " - ", text).translate(_ALIKE)
    text = " ".join(_part_stop(word) for word in text.split())
    text = re.sub(r"(?<!\w)'(?=\w)", "` ", text)
    text = re.sub(r"(?<=\d)\+", " + ", text)
    # with a word behind it, because nltk would part a stop at the end of the text
    tokens = TreebankWordTokenizer().tokenize(f"{text} end")[:-1]
    return [_BRACKETS.get(token, token.lower()) for token in tokens]


def _part_stop(word: str) -> str:
    """The word with its full stop apart, unless the stop belongs to an abbreviation."""
    found = _ENDS_IN_STOP.fullmatch(word)
    if found is None or _ABBREVIATION.fullmatch(found[1].lower().lstrip("(\"'")):
        return word
    return f"{found[1]} . {found[2]}"


def _stanford(lines: tuple[str, ...]) -> list[str]:
    """Stanford's tokens of each line; an empty line for an empty one."""
    command = [
        *(str(java()), "-Dfile.encoding=UTF-8", "-cp", str(_package() / _TOKENIZER_JAR)),
        *("edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"),
    ]
    text = "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(
            command, input=text.encode("utf-8", "replace"), capture_output=True, check=False
        )
    except OSError as error:
        raise UserError(f"the Java program on this machine can't be started: {error}") from None
    split = done.stdout.decode("utf-8").split("\n")[:-1]
    if done.returncode or len(split) != len(lines):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise UserError(
            f"Stanford's tokenizer gave {len(split)} lines for {len(lines)} texts (exit {done.returncode}: "
            f"{' '.join(said)}); does `java -version` work?"
        )
    return split


def _meteor_program() -> Any:
    """pycocoevalcap's METEOR, which reads and writes UTF-8 whatever the locale says."""
    from pycocoevalcap.meteor.meteor import Meteor

    class Program(Meteor):
        def __init__(self) -> None:
            self.lock = threading.Lock()
            options = ["-", "-", "-stdio", "-l", "en", "-norm"]
            self.meteor_p = subprocess.Popen(
                [
                    str(java()),
                    "-Dfile.encoding=UTF-8",
                    "-Xmx2G",
                    "-jar",
                    str(_package() / _METEOR_JAR),
                    *options,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )

        def __del__(self) -> None:
            if hasattr(self, "meteor_p"):
                self.meteor_p.kill()
                self.meteor_p.communicate()

    return Program()


def _package() -> Path:
    import pycocoevalcap

    return Path(pycocoevalcap.__path__[0])


@lru_cache(maxsize=4)
def _split(texts: tuple[str, ...]) -> tuple[str, ...]:
    """`tokenize`, once for the metrics that follow one another on the same texts."""
    return tuple(tokenize(texts))


def _one_line(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(" ".join(text.split()) for text in texts)


def _grouped(clean: Any, references: References) -> list[list[str]]:
    """References after `clean`, which takes and gives a tuple of texts, in groups as before."""
    flat = iter(clean(tuple(text for texts in references for text in texts)))
    return [[next(flat) for _ in texts] for texts in references]


def _numbered(
    predictions: Sequence[str], references: References
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """(references, predictions) in tokens, as coco-caption takes them."""
    given, wanted = _split(tuple(predictions)), _grouped(_split, references)
    return dict(enumerate(wanted)), {i: [text] for i, text in enumerate(given)}
