"""The metrics as `evaluate` modules, which need no network and no script from the hub.

`Bleu().compute(predictions=..., references=...)`, `add_batch` and `evaluate.combine([Bleu(), Nist()])` work as with any
metric of that library. Text metrics take N texts and N lists of references; shares are between 0 and 1.
"""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from dpexp.errors import UserError
from dpexp.metrics import captions, classification, dialogue, learned, mteval, rouge

INPUTS = """
Args:
    predictions: N texts.
    references: N lists of one or more texts each; blank ones are left out.
"""
CLASSES = """
Args:
    predictions, references: N numbers of classes.
"""


class LocalMetric(evaluate.Metric):
    """A metric that keeps what it is given in memory: no file, no folder in the user's cache."""

    about = ""
    inputs = INPUTS
    source = ""
    # of a metric with one score: its name, and what computes it
    named = ""
    score: Any = None
    taken = datasets.Features(
        predictions=datasets.Value("string"), references=datasets.List(datasets.Value("string"))
    )

    def __init__(self, *args: Any, keep_in_memory: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, keep_in_memory=keep_in_memory, **kwargs)

    def _build_data_dir(self) -> str:
        return "" if self.keep_in_memory else str(super()._build_data_dir())

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.about, citation=self.source, inputs_description=self.inputs, features=self.taken
        )

    def _compute(
        self, predictions: Sequence[Any], references: Sequence[Any], **options: Any
    ) -> dict[str, float]:
        return self.measure(*checked(predictions, references), **options)

    def measure(self, predictions: Any, references: Any, **options: Any) -> dict[str, float]:
        """The scores by name, of inputs that have been checked."""
        return {self.named: self.score(predictions, references)}


class Bleu(LocalMetric):
    about = "BLEU-4 of a corpus as mteval-v13a counts it, ignoring case (sacrebleu)."
    source = "Papineni et al., ACL 2002; Post, WMT 2018"
    named, score = "bleu", staticmethod(mteval.bleu)


class Nist(LocalMetric):
    about = "NIST-5 of a corpus as mteval-v13a counts it, ignoring case; from 0 upwards."
    source = "Doddington, HLT 2002"
    named, score = "nist", staticmethod(mteval.nist)


class Meteor(LocalMetric):
    about = "METEOR 1.5 of a corpus where Java is on the machine; else nltk's older and smaller one, as meteor_nltk."
    inputs = INPUTS + "    pretokenized: coco-caption's tokens (the default), or METEOR's own.\n"
    source = "Denkowski and Lavie, WMT 2014; Lavie and Agarwal, WMT 2007"

    def measure(
        self, predictions: Any, references: Any, pretokenized: bool = True, **_: Any
    ) -> dict[str, float]:
        if captions.java():
            return {"meteor": captions.meteor(predictions, references, pretokenized)}
        return {"meteor_nltk": captions.nltk_meteor(predictions, references)}


class CocoRougeL(LocalMetric):
    about = "ROUGE-L as coco-caption counts it (pycocoevalcap): beta = 1.2, best precision and best recall."
    source = "Lin, ACL workshop 2004; Chen et al., 2015"
    named, score = "rougeL", staticmethod(captions.rouge_l)


class Cider(LocalMetric):
    about = "CIDEr-D as coco-caption counts it (pycocoevalcap), between 0 and 10."
    source = "Vedantam et al., CVPR 2015"
    named, score = "cider", staticmethod(captions.cider)


class Rouge(LocalMetric):
    about = "ROUGE-1, -2 and -L (rouge-score, with stemming): the mean F1 with the best reference, or leave-one-out."
    inputs = (
        INPUTS
        + "    names: which of rouge1, rouge2, rougeL, rougeLsum.\n"
        + "    leave_one_out: average the bests of all subsets that lack one reference, as GEM-metrics does.\n"
    )
    source = "Lin, ACL workshop 2004"

    def measure(
        self, predictions: Any, references: Any, names: Any = None, leave_one_out: bool = False, **_: Any
    ) -> dict[str, float]:
        return rouge.rouge(predictions, references, names or rouge.NAMES[:3], leave_one_out)


class TokenF1(LocalMetric):
    about = "F1 of words as ConvAI2 counts it: without case, punctuation and articles; the best reference."
    source = "Dinan et al., 2019"
    named, score = "f1", staticmethod(dialogue.corpus_f1)


class _Learned(LocalMetric):
    """A metric that is a model."""

    def measure(
        self, predictions: Any, references: Any, model: Any = None, device: Any = "cpu", **_: Any
    ) -> dict[str, float]:
        return {self.named: self.score(predictions, references, _folder(self.named, model), device)}


class BertScore(_Learned):
    about = "BERTScore's mean F1 with the best reference, by a model on this machine."
    inputs = INPUTS + "    model: folder of the encoder; device: where it runs.\n"
    source = "Zhang et al., ICLR 2020"
    named, score = "bertscore", staticmethod(learned.bert_score)


class Bleurt(_Learned):
    about = "BLEURT's mean rating over texts and their references, by a model on this machine."
    inputs = INPUTS + "    model: folder of the classifier; device: where it runs.\n"
    source = "Sellam et al., ACL 2020"
    named, score = "bleurt", staticmethod(learned.bleurt)


class _ClassMetric(LocalMetric):
    inputs = CLASSES
    taken = datasets.Features(predictions=datasets.Value("int64"), references=datasets.Value("int64"))

    def _compute(
        self, predictions: Sequence[Any], references: Sequence[Any], **options: Any
    ) -> dict[str, float]:
        return self.measure(np.asarray(predictions), np.asarray(references))


class Accuracy(_ClassMetric):
    about = "The share of equal classes."
    named, score = "accuracy", staticmethod(classification.accuracy)


class F1(_ClassMetric):
    about = "F1 of class 1 against class 0."
    named, score = "f1", staticmethod(classification.f1)


def checked(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """The same texts, without the blank references.

    Raises:
        UserError: no text at all, another number of predictions than of groups of references, a text that is none, or
            a prediction without a reference.
    """
    if len(predictions) != len(references):
        raise UserError(
            f"{len(predictions)} predictions for {len(references)} groups of references; give one group per prediction"
        )
    if not len(predictions):
        raise UserError("there is no prediction to score")
    groups: list[list[str]] = []
    for i, (prediction, texts) in enumerate(zip(predictions, references, strict=True)):
        if not isinstance(prediction, str):
            raise UserError(f"prediction {i} is {type(prediction).__name__} and not a text")
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"the references of prediction {i} must be a list of texts, also where there is only one"
            )
        groups.append([text for text in texts if text.strip()])
        if not groups[-1]:
            raise UserError(f"prediction {i} has no reference with any text; leave the row out or give one")
    return list(predictions), groups


def _folder(metric: str, model: Any) -> Any:
    folder = learned.locate(metric, {metric: str(model)} if model else None)
    if folder is None:
        raise UserError(
            f"{metric}: its model {learned.MODELS[metric]} is not on this machine; give model=FOLDER"
        )
    return folder
