"""BERTScore and BLEURT with small random models: the arithmetic around the model, and where models are looked for."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

from dpexp.errors import UserError
from dpexp.metrics import learned, text
from dpexp.metrics.learned import bert_score, bleurt, locate

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "near", "river", "mill", "cheap"]
PREDICTIONS = ["the cat sat on the mat", "a dog ran", ""]
REFERENCES = [["a cat sat", "the dog ran near the river"], ["dog", "the cheap mill"], ["a cat"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder with an encoder, one with a classifier of one output."""
    torch.manual_seed(0)
    vocabulary = tmp_path_factory.mktemp("words") / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = BertTokenizer(str(vocabulary), model_max_length=32)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        initializer_range=1.0,
        num_labels=1,
    )
    made = []
    for model in (BertModel(config), BertForSequenceClassification(config)):
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made.append(folder)
    return made


@torch.no_grad()
def naive_f1(folder, prediction, reference):
    """One pair, token by token."""
    tokenizer, model = BertTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()

    def vectors(words):
        ids = torch.tensor([tokenizer(words)["input_ids"]])
        return list(model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0])

    left, right = vectors(prediction), vectors(reference)
    cosine = torch.nn.functional.cosine_similarity
    precision = [max(float(cosine(a, b, dim=0)) for b in right) for a in left[1:-1]]
    recall = [max(float(cosine(a, b, dim=0)) for a in left) for b in right[1:-1]]
    p, r = sum(precision) / len(precision), sum(recall) / len(recall)
    return 2 * p * r / (p + r)


def test_bert_score_equals_a_naive_twin(folders):
    best = [
        max(naive_f1(folders[0], prediction, text) for text in texts)
        for prediction, texts in zip(PREDICTIONS[:2], REFERENCES[:2], strict=True)
    ]
    assert bert_score(PREDICTIONS, REFERENCES, folders[0]) == pytest.approx(
        (best[0] + best[1] + 0) / 3, abs=1e-5
    )
    assert bert_score(PREDICTIONS, REFERENCES, folders[0], batch_size=2) == pytest.approx(
        sum(best) / 3, abs=1e-5
    )


def test_equal_texts_have_bert_score_one(folders):
    assert bert_score(["the cat sat"], [["a dog", "the cat sat"]], folders[0]) == pytest.approx(1.0, abs=1e-6)


@torch.no_grad()
def test_bleurt_rates_pairs_of_reference_and_prediction(folders):
    tokenizer = BertTokenizer.from_pretrained(folders[1])
    model = BertForSequenceClassification.from_pretrained(folders[1]).eval()
    best = []
    for prediction, texts in zip(PREDICTIONS, REFERENCES, strict=True):
        ratings = [
            float(model(**tokenizer([one], [prediction], return_tensors="pt")).logits) for one in texts
        ]
        best.append(sum(ratings) / len(ratings))
    assert bleurt(PREDICTIONS, REFERENCES, folders[1], batch_size=2) == pytest.approx(sum(best) / 3, abs=1e-5)


def test_long_texts_are_cut(folders):
    long = " ".join(["cat"] * 100)
    assert bert_score([long], [[long]], folders[0]) == pytest.approx(1.0, abs=1e-6)
    assert isinstance(bleurt([long], [[long]], folders[1]), float)


def test_the_suite_uses_named_models(folders, monkeypatch):
    monkeypatch.setattr(text.captions, "java", lambda: None)
    models = {"bertscore": str(folders[0]), "bleurt": str(folders[1])}
    scores = text.score("dart", PREDICTIONS, REFERENCES, models=models)
    assert scores["bertscore"] == pytest.approx(bert_score(PREDICTIONS, REFERENCES, folders[0]))
    assert scores["bleurt"] == pytest.approx(bleurt(PREDICTIONS, REFERENCES, folders[1]))
    assert set(text.missing("dart", models)) == {"meteor"}
    assert any(
        f"bleurt is computed with the model {folders[1]}" in note for note in text.notes("dart", models)
    )


def test_models_are_looked_for_on_this_machine_alone(folders, monkeypatch, tmp_path):
    assert locate("bertscore", {"bertscore": str(folders[0])}) == folders[0]
    monkeypatch.setattr(learned, "MODELS", {"bertscore": "nobody/no-such-model"})
    assert locate("bertscore") is None
    for wrong in (str(tmp_path), "nobody/no-such-model"):
        with pytest.raises(UserError, match="no model in"):
            locate("bertscore", {"bertscore": wrong})


def test_a_classifier_is_no_bleurt(folders, tmp_path):
    config = BertConfig.from_pretrained(folders[1], num_labels=3)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    BertTokenizer.from_pretrained(folders[1]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="3 outputs"):
        bleurt(["a"], [["a"]], tmp_path)


def test_a_folder_without_weights_is_one_clear_error(folders, tmp_path):
    BertConfig.from_pretrained(folders[0]).save_pretrained(tmp_path)
    BertTokenizer.from_pretrained(folders[0]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"bertscore: the model in .* can't be read"):
        bert_score(["a"], [["a"]], tmp_path)
